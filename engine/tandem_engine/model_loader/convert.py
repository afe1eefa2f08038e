"""Converts weights from the source's format to the file that the decoder maps (models/layout.py).

    ensure_weights -> file exists and is whole? done
                   -> lock the folder -> exists now? another process made it
                   -> read, dequantize (or not), fuse, cast one tensor at a time into a temporary file
                   -> rename

The file is streamed, so converting needs memory for one tensor, not for the model.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest
from tandem_kernels import QuantizedWeight, join_rows, pack_quantized, pack_weight, quantize_weight
from torch import Tensor

from tandem_engine.model_loader.files import OnProgress, atomic_write, locked, no_progress
from tandem_engine.model_loader.gguf_source import GgufSource
from tandem_engine.model_loader.safetensors_source import SafetensorsSource
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.layout import (
    FileTensor,
    Quantization,
    StoredTensor,
    TensorPart,
    WeightForm,
    stored_tensors,
)

#: Changes when layout.py does: files of another layout are made again.
LAYOUT_VERSION = "1"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
#: Tensors that some exports hold, computed ones rather than weights.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attention.bias", ".masked_bias")


class WeightSource(Protocol):
    """Tensors by their Hugging Face names."""

    def names(self) -> set[str]: ...

    def get(self, name: str) -> Tensor: ...

    def bits(self, name: str) -> int | None:
        """4 or 8 where `get_quantized` has the tensor in groups of 32, else None."""

    def get_quantized(self, name: str) -> QuantizedWeight | None: ...


def ensure_weights(
    folder: Path,
    dtype: torch.dtype,
    progress: OnProgress = no_progress,
    *,
    packed: bool = False,
    quantization: Quantization = Quantization.NONE,
) -> Path:
    """The path of the weight file of this form (models/layout.py), converted first if it is missing, damaged
    or outdated.

    Any number of processes may call this at once; one converts, the others wait. Raises ModelLoadError.
    """
    if dtype not in _DTYPES:
        raise ModelLoadError(f"weights cannot be kept in {dtype}; use float32, bfloat16 or float16")
    if dtype == torch.float16 and quantization is not Quantization.NONE:
        raise ModelLoadError(
            f"quantization {quantization} does not work with float16; use dtype float32 or bfloat16"
        )
    form = WeightForm(dtype, packed, quantization)
    manifest = ModelManifest.read(folder)
    path = folder / form.file_name
    if _is_current(path, manifest.revision, form):
        return path
    try:
        with locked(folder / ".convert.lock"):
            if not _is_current(path, manifest.revision, form):
                config = ModelConfig.from_folder(folder)
                source = open_source((folder / manifest.weights).resolve())
                write_weights(path, config, source, form, manifest.revision, progress)
    except OSError as error:
        raise ModelLoadError(
            f"the weights could not be written to {path} ({error}); free some disk space or make the folder "
            "writable, then try again"
        ) from error
    return path


def source_bits(folder: Path) -> int:
    """ModelManifest.weight_bits; where it is None, reads the source first. Raises ModelLoadError."""
    manifest = ModelManifest.read(folder)
    if manifest.weight_bits is not None:
        return manifest.weight_bits
    bits = quantized_bits(open_source((folder / manifest.weights).resolve()))
    with contextlib.suppress(OSError):  # a read-only folder is read again next time
        replace(manifest, weight_bits=bits).write(folder)
    return bits


def quantized_bits(source: WeightSource) -> int:
    """4 or 8 if every projection is quantized so (4 if any has 4), else 0."""
    bits = [source.bits(name) for name in source.names() if name.endswith("_proj.weight")]
    known = [b for b in bits if b is not None]
    return min(known) if known and len(known) == len(bits) else 0


def open_source(path: Path) -> WeightSource:
    """A GGUF file, a safetensors file or a folder of them. Raises ModelLoadError."""
    if not path.exists():
        raise ModelLoadError(f"the weights' source {path} is gone; put it back or pull the model again")
    return GgufSource(path) if path.suffix == ".gguf" else SafetensorsSource(path)


def write_weights(
    path: Path,
    config: ModelConfig,
    source: WeightSource,
    form: WeightForm,
    revision: str,
    progress: OnProgress = no_progress,
) -> None:
    """Convert every tensor and replace path in one rename. Raises ModelLoadError before anything is kept."""
    stored = list(stored_tensors(config, form))
    _check_names(config, stored, source)
    bits = {t.name: _bits_of(t, form.quantization, source) for t in stored}
    in_file = {t.name: t.in_file(form, bits[t.name]) for t in stored}
    header, total = _header(in_file, _metadata(revision, form))
    done = 0
    with atomic_write(path) as file:
        file.write(header)
        for tensor in stored:
            if in_file[tensor.name].dtype == torch.uint8:
                parts = [_quantized(tensor, source, bits[tensor.name])]
            else:
                parts = [_read_part(part, source, form.dtype) for part in tensor.parts]
                if in_file[tensor.name].shape != tensor.shape:
                    parts = [pack_weight(torch.cat(parts))]
            for part in parts:
                done += file.write(part.view(torch.uint8).numpy().data)
            progress("converting", done, total)


def _bits_of(tensor: StoredTensor, quantization: Quantization, source: WeightSource) -> int:
    """Bits per weight. In W4A8, the head and sources of 8 bits keep 8: every token depends on the head."""
    if quantization is Quantization.W8A8 or tensor.name == "lm_head.weight":
        return 8
    return 8 if all(source.bits(part.hf_name) == 8 for part in tensor.parts) else 4


def _quantized(tensor: StoredTensor, source: WeightSource, bits: int) -> Tensor:
    """The packed weight; parts whose source already has these bits are copied unchanged."""
    parts = []
    for part in tensor.parts:
        weight = source.get_quantized(part.hf_name) if source.bits(part.hf_name) == bits else None
        if weight is None:
            parts.append(quantize_weight(_read_part(part, source, torch.float32), bits))
        else:
            _check_shape(part, tuple(weight.codes.shape))
            parts.append(weight.rows(part.arrange(torch.arange(part.shape[0]).unsqueeze(1)).flatten()))
    return pack_quantized(join_rows(parts))


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


def _header(tensors: dict[str, FileTensor], metadata: dict[str, str]) -> tuple[bytes, int]:
    """The safetensors header (8 bytes of length, then JSON padded to 64 bytes) and the size of the data."""
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": "U8" if tensor.dtype == torch.uint8 else _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text, offset


def _metadata(revision: str, form: WeightForm) -> dict[str, str]:
    return {"layout": LAYOUT_VERSION + form.suffix, "revision": revision}


def _read_part(part: TensorPart, source: WeightSource, dtype: torch.dtype) -> Tensor:
    tensor = source.get(part.hf_name)
    _check_shape(part, tuple(tensor.shape))
    return part.arrange(tensor).to(dtype).contiguous()


def _check_shape(part: TensorPart, shape: tuple[int, ...]) -> None:
    if shape != part.shape:
        raise ModelLoadError(
            f"{part.hf_name} has shape {shape}, but the config asks for {part.shape}; "
            "the weights and the config are of different models"
        )


def _is_current(path: Path, revision: str, form: WeightForm) -> bool:
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
