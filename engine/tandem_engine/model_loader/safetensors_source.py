"""A folder or file of Hugging Face safetensors as a source of weights."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tandem_core.errors import ModelLoadError
from torch import Tensor

from tandem_engine.model_loader.safetensors_files import weight_files
from tandem_engine.model_loader.stored import Dense, Stored


class SafetensorsSource:
    """Tensors by Hugging Face name, mapped, in the dtype of the file."""

    def __init__(self, path: Path) -> None:
        self._files: dict[str, Path] = {}
        for file in weight_files(path):
            try:
                with safe_open(file, framework="pt") as opened:
                    self._files.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{file} is damaged ({error}); download it again") from error

    def formats(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for name, path in self._files.items():
            with safe_open(path, framework="pt") as opened:
                stored = opened.get_slice(name)
                if len(stored.get_shape()) > 1:
                    counts[stored.get_dtype()] += prod(stored.get_shape())
        return counts

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._files[name], framework="pt") as opened:
            return tuple(opened.get_slice(name).get_shape())

    def release(self) -> None:
        """Nothing to do: a file is mapped for one tensor at a time."""

    def get(self, name: str, rows: slice = slice(None)) -> Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)[rows]
            return tensor

    def grid(self, name: str) -> None:
        """Nothing here is quantized."""

    def stored(self, name: str, rows: slice = slice(None)) -> Stored:
        return Dense(self.get(name, rows))
