"""A folder or file of Hugging Face safetensors as a source of weights."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from tandem_core.errors import ModelLoadError
from torch import Tensor

from tandem_engine.model_loader.safetensors_files import weight_files
from tandem_engine.model_loader.stored import Dense, Stored


class _Header(NamedTuple):
    path: Path
    shape: tuple[int, ...]
    #: As safetensors names it, such as BF16.
    dtype: str


class SafetensorsSource:
    """Tensors by Hugging Face name, mapped, in the dtype of the file."""

    def __init__(self, path: Path) -> None:
        self._headers: dict[str, _Header] = {}
        #: The file that was read last; opening one parses its header, which may list 20,000 tensors.
        self._opened: tuple[Path, Any] | None = None
        for file in weight_files(path):
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118
                        found = opened.get_slice(name)
                        self._headers[name] = _Header(file, tuple(found.get_shape()), found.get_dtype())
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{file} is damaged ({error}); download it again") from error

    def formats(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for header in self._headers.values():
            if len(header.shape) > 1:
                counts[header.dtype] += prod(header.shape)
        return counts

    def names(self) -> set[str]:
        return set(self._headers)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._headers[name].shape

    def dtype(self, name: str) -> str:
        return self._headers[name].dtype

    def file(self, name: str) -> Path:
        return self._headers[name].path

    def release(self) -> None:
        """Unmaps the file that was read last."""
        self._opened = None

    def get(self, name: str, rows: slice = slice(None)) -> Tensor:
        path = self._headers[name].path
        try:
            if self._opened is None or self._opened[0] != path:
                self._opened = path, safe_open(path, framework="pt")
            tensor: Tensor = self._opened[1].get_tensor(name)
        except (SafetensorError, OSError, AttributeError) as error:
            raise ModelLoadError(f"{path}: {name} cannot be read ({error}); download it again") from error
        if not tensor.ndim:
            return tensor
        return (tensor.flatten(0, 1) if tensor.ndim == 3 else tensor)[rows]

    def grid(self, name: str) -> None:
        """Nothing here is quantized."""

    def stored(self, name: str, rows: slice = slice(None)) -> Stored:
        return Dense(self.get(name, rows))
