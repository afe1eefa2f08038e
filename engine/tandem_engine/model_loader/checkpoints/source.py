"""A quantized checkpoint as a source of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from tandem_core.errors import ModelLoadError
from torch import Tensor

from tandem_engine.model_loader.checkpoints.matrix import Matrix
from tandem_engine.model_loader.safetensors_source import SafetensorsSource
from tandem_engine.model_loader.stored import Grid, Stored, numbers_of, values_of
from tandem_engine.models.quantization_config import METHODS

#: Scales of activations and of KV, which are chosen here when they are needed.
_UNUSED = (".input_scale", ".input_zero_point", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale",
           ".output_scale")  # fmt: skip


class QuantizedSource:
    """Weights by their names in the unquantized model. Raises ModelLoadError."""

    def __init__(self, path: Path, quantization: Mapping[str, Any]) -> None:
        """quantization: quantization_of the config."""
        self._tensors = SafetensorsSource(path)
        method = METHODS[quantization["quant_method"]]
        reader = import_module(f"tandem_engine.model_loader.checkpoints.{method}")
        self._matrices: dict[str, Matrix] = reader.read(quantization, self._tensors)
        if not self._matrices:
            raise ModelLoadError(
                f"{path} holds no weights in {quantization['quant_method']}, which config.json names; the "
                "weights and the config are of different models"
            )
        used = {name for matrix in self._matrices.values() for name in matrix.tensors}
        plain = {name for name in self._tensors.names() - used if not name.endswith(_UNUSED)}
        if clash := sorted(plain & self._matrices.keys()):
            raise ModelLoadError(f"{path} holds {clash[0]} twice, quantized and not; pull the model again")
        self._plain = plain

    def formats(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for matrix in self._matrices.values():
            counts[matrix.grid.name] += prod(matrix.shape)
        for name in self._plain:
            if len(self._tensors.shape(name)) > 1:
                counts[self._tensors.dtype(name)] += prod(self._tensors.shape(name))
        return counts

    @property
    def formats_of(self) -> dict[str, str]:
        """The format of the weight that a tensor of the files belongs to."""
        return {name: m.grid.name for m in self._matrices.values() for name in m.tensors}

    def names(self) -> set[str]:
        return self._plain | self._matrices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._matrices[name].shape if name in self._matrices else self._tensors.shape(name)

    def release(self) -> None:
        self._tensors.release()

    def get(self, name: str, rows: slice = slice(None)) -> Tensor:
        if name in self._plain:
            return self._tensors.get(name, rows)
        return values_of(self.stored(name, rows))

    def grid(self, name: str) -> Grid | None:
        return self._matrices[name].grid if name in self._matrices else None

    def stored(self, name: str, rows: slice = slice(None)) -> Stored:
        matrix = self._matrices[name]
        first, end, _ = rows.indices(prod(matrix.shape[:-1]))
        found = matrix.read(first, end)
        if not all(numbers.isfinite().all() for numbers in numbers_of(found)):
            file = self._tensors.file(matrix.tensors[0])
            raise ModelLoadError(
                f"{file} holds numbers for {name} that are infinite or no numbers; pull the model again"
            )
        return found
