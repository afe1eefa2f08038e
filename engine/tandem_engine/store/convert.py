"""Weights from the source's format to the file the decoder maps (models/layout.py).

    ensure_weights -> there and whole? done
                   -> lock the folder -> there now? another process made it
                   -> read, dequantize, fuse, cast one tensor at a time into a temporary file -> rename

The file is streamed, so converting needs memory for one tensor, not for the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import torch
from tandem_kernels import pack_weight
from torch import Tensor

from tandem_engine.errors import ModelLoadError
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.layout import StoredTensor, TensorPart, stored_tensors
from tandem_engine.store.files import Progress, atomic_write, locked, no_progress
from tandem_engine.store.gguf_source import GgufSource
from tandem_engine.store.manifest import ModelManifest
from tandem_engine.store.safetensors_source import SafetensorsSource

#: Changes when layout.py does: files of another layout are made again.
LAYOUT_VERSION = "1"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
#: Tensors some exports carry that are computed, not learnt.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attention.bias", ".masked_bias")


class WeightSource(Protocol):
    """Tensors by their Hugging Face names."""

    def names(self) -> set[str]: ...

    def get(self, name: str) -> Tensor: ...


def ensure_weights(
    folder: Path, dtype: torch.dtype, progress: Progress = no_progress, *, packed: bool = False
) -> Path:
    """The path of `model-<dtype>.safetensors`, or of its packed form (models/layout.py), converted first if
    it is missing, damaged or outdated.

    Any number of processes may call this at once; one converts, the others wait. Raises ModelLoadError.
    """
    if dtype not in _DTYPES:
        raise ModelLoadError(f"weights cannot be kept in {dtype}; use float32, bfloat16 or float16")
    manifest = ModelManifest.read(folder)
    form = "-packed" if packed else ""
    path = folder / f"model-{str(dtype).removeprefix('torch.')}{form}.safetensors"
    if _is_current(path, manifest.revision, form):
        return path
    try:
        with locked(folder / ".convert.lock"):
            if not _is_current(path, manifest.revision, form):
                config = ModelConfig.from_folder(folder)
                source = open_source((folder / manifest.weights).resolve())
                write_weights(path, config, source, dtype, manifest.revision, progress, packed=packed)
    except OSError as error:
        raise ModelLoadError(
            f"the weights could not be written to {path} ({error}); free some disk space or make the folder "
            "writable, then try again"
        ) from error
    return path


def open_source(path: Path) -> WeightSource:
    """A GGUF file, a safetensors file or a folder of them. Raises ModelLoadError."""
    if not path.exists():
        raise ModelLoadError(f"the weights' source {path} is gone; put it back or pull the model again")
    return GgufSource(path) if path.suffix == ".gguf" else SafetensorsSource(path)


def write_weights(
    path: Path,
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    revision: str,
    progress: Progress = no_progress,
    *,
    packed: bool,
) -> None:
    """Convert every tensor and replace path in one rename. Raises ModelLoadError before anything is kept."""
    stored = list(stored_tensors(config, packed=packed))
    _check_names(config, stored, source)
    shapes = {t.name: t.shape_in_file(dtype, packed=packed) for t in stored}
    header, total = _header(shapes, dtype, revision, "-packed" if packed else "")
    done = 0
    with atomic_write(path) as file:
        file.write(header)
        for tensor in stored:
            parts = [_read_part(part, source, dtype) for part in tensor.parts]
            if shapes[tensor.name] != tensor.shape:
                parts = [pack_weight(torch.cat(parts))]
            for part in parts:
                done += file.write(part.view(torch.uint8).numpy().data)
            progress("converting", done, total)


def _check_names(config: ModelConfig, stored: list[StoredTensor], source: WeightSource) -> None:
    wanted = {part.hf_name for tensor in stored for part in tensor.parts}
    offered = {n for n in source.names() if not n.endswith(_IGNORED_SUFFIXES)}
    if config.tie_word_embeddings:
        offered.discard("lm_head.weight")
    if missing := sorted(wanted - offered):
        raise ModelLoadError(
            f"the weights lack {missing[0]} ({len(missing)} of {len(wanted)} tensors are missing); "
            "the download is incomplete or the config is another model's, pull it again"
        )
    if extra := sorted(offered - wanted):
        raise ModelLoadError(
            f"the weights hold {extra[0]}, which a {config.architecture} model with this config has no use "
            "for; this variant is not supported"
        )


def _header(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, revision: str, form: str
) -> tuple[bytes, int]:
    """The safetensors header (8 bytes of length, then JSON padded to 64 bytes) and the size of the data."""
    entries: dict[str, object] = {"__metadata__": _metadata(revision, form)}
    offset = 0
    for name, shape in shapes.items():
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text, offset


def _metadata(revision: str, form: str) -> dict[str, str]:
    return {"layout": LAYOUT_VERSION + form, "revision": revision}


def _read_part(part: TensorPart, source: WeightSource, dtype: torch.dtype) -> Tensor:
    tensor = source.get(part.hf_name)
    if tuple(tensor.shape) != part.shape:
        raise ModelLoadError(
            f"{part.hf_name} has shape {tuple(tensor.shape)}, but the config asks for {part.shape}; "
            "the weights and the config are of different models"
        )
    return part.arrange(tensor).to(dtype).contiguous()


def _is_current(path: Path, revision: str, form: str) -> bool:
    """Whether path is whole, of this layout and of these weights; reads only the header."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 1 << 28:
                return False
            header = json.loads(file.read(length))
        size = max(e["data_offsets"][1] for n, e in header.items() if n != "__metadata__")
        return (
            bool(header["__metadata__"] == _metadata(revision, form))
            and path.stat().st_size == 8 + length + size
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
