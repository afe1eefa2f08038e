"""What the formats of quantized checkpoints share: a matrix, its checks, and codes in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tandem_core.errors import ModelLoadError, quoted
from torch import Tensor

from tandem_engine.model_loader.stored import Grid, Stored


class Tensors(Protocol):
    """The tensors of the files (SafetensorsSource)."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def file(self, name: str) -> Path: ...

    def get(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Matrix:
    """A quantized weight [N, K], or [E, N, K], of experts."""

    shape: tuple[int, ...]
    grid: Grid
    #: The tensors that it is made of, and further ones of its module that are not needed.
    tensors: tuple[str, ...]
    #: Its rows first .. end - 1, those of all experts counted together, as the grid says.
    read: Callable[[int, int], Stored]


def require(
    tensors: Tensors, name: str, dtypes: Sequence[str], shape: Sequence[int | None]
) -> tuple[int, ...]:
    """The shape of a tensor, if it has one of the dtypes and this shape; None: any size above 0. Raises
    ModelLoadError."""
    if name not in tensors.names():
        raise ModelLoadError(f"the weights lack {name}; the download is incomplete, pull the model again")
    found = tensors.shape(name)
    fits = len(found) == len(shape) and all(
        size > 0 and wanted in (None, size) for size, wanted in zip(found, shape, strict=True)
    )
    if not fits or tensors.dtype(name) not in dtypes:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ModelLoadError(
            f"{tensors.file(name)}: {name} is {tensors.dtype(name)} {list(found)}, wanted "
            f"{' or '.join(dtypes)} [{sizes}]; the file is damaged or of another format, pull the model again"
        )
    return found


def refuse(tensors: Tensors, name: str, problem: str) -> ModelLoadError:
    return ModelLoadError(f"{tensors.file(name)}: {name} {problem}; pull the model again or use another one")


def option(config: Mapping[str, Any], key: str, default: Any, known: Sequence[Any]) -> Any:
    """A value of quantization_config, if it is one of the known ones. Raises ModelLoadError."""
    value = config.get(key, default)
    if not any(value is one or (value == one and type(value) is type(one)) for one in known):
        wanted = ", ".join(str(one) for one in known)
        raise ModelLoadError(
            f"config.json: quantization_config.{key} is {quoted(str(value))}, which cannot be read (only "
            f"{wanted}); use the model's files in another format"
        )
    return value


def codes_of(words: Tensor, bits: int) -> Tensor:
    """[..., W] int32 -> [..., W * 32 / bits] uint8, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


def nibbles_of(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """[..., B] uint8 -> [..., 2 B] uint8."""
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return torch.stack(halves, dim=-1).flatten(-2)
