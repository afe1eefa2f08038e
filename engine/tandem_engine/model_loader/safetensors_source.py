"""A folder or file of Hugging Face safetensors as a source of weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tandem_core.errors import ModelLoadError
from tandem_core.model.json_file import read_object
from tandem_kernels import Packing, QuantizedWeight
from torch import Tensor

from tandem_engine.model_loader.files import OnProgress, no_progress, sha256_of


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights: the index's, or the single one. Raises ModelLoadError."""
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
        if not names or any(name != Path(name).name or "\0" in name for name in names):
            raise ModelLoadError(
                f"{index}: its weight_map names no files of this folder; download the model again"
            )
        files = [path / name for name in sorted(names)]
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        what = missing[0] if missing else "*.safetensors"
        raise ModelLoadError(f"{path} lacks {what}; download the whole model (safetensors or GGUF)")
    return files


def revision_of(path: Path, progress: OnProgress = no_progress) -> str:
    """digest_of all weight files."""
    return digest_of(weight_files(path), progress)


def digest_of(files: list[Path], progress: OnProgress = no_progress) -> str:
    """One SHA-256 over the names and digests of all files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{sha256_of(file, progress)}\n".encode())
    return digest.hexdigest()


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

    def packing(self, name: str) -> None:
        """Nothing here is quantized."""

    def get_quantized(self, name: str, packing: Packing, rows: slice = slice(None)) -> QuantizedWeight:
        raise ValueError(f"{name} is not quantized")
