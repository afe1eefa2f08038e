"""Converts weights from the source's format to the file that the decoder maps (models/layout.py).

    ensure_weights -> file exists and is whole? done
                   -> lock the folder -> exists now? another process made it
                   -> read, dequantize (or not), fuse, cast one tensor at a time into a temporary file
                   -> rename

The file is streamed in spans of rows, so converting needs a few megabytes in addition to the mapped source.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from tandem_core.errors import ModelLoadError
from tandem_core.model.json_file import read_object
from tandem_core.model.manifest import ModelManifest
from tandem_kernels import (
    PANEL,
    Packing,
    QuantizedWeight,
    join_rows,
    pack_quantized,
    pack_weight,
    quantize_weight,
)
from torch import Tensor

from tandem_engine.model_loader.checkpoints.source import QuantizedSource
from tandem_engine.model_loader.files import OnProgress, atomic_write, locked, no_progress
from tandem_engine.model_loader.gguf_source import GgufSource
from tandem_engine.model_loader.safetensors_source import SafetensorsSource
from tandem_engine.model_loader.stored import (
    Grid,
    Groups,
    Stored,
    byte_table,
    keeps_codes,
    pack,
    pick_packing,
)
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.families import Names
from tandem_engine.models.layout import (
    FileTensor,
    Quantization,
    StoredTensor,
    TensorPart,
    WeightForm,
    piece_name,
    stored_tensors,
)
from tandem_engine.models.quantization_config import quantization_of

log = logging.getLogger(__name__)

#: Changes when layout.py does: files of another layout are made again, as those of another spec.
LAYOUT_VERSION = "4"
#: Numbers of a weight that are converted at once: their float32 stays in the caches.
_SPAN = 1 << 20
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_INTEGERS = {torch.uint8: "U8", torch.int32: "I32"}


class WeightSource(Protocol):
    """Tensors by their Hugging Face names."""

    def formats(self) -> dict[str, int]:
        """How many weights (norms and biases aside) there are in each format."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str, rows: slice = ...) -> Tensor:
        """Floating-point values; also of quantized tensors."""

    def grid(self, name: str) -> Grid | None:
        """How a matrix is quantized, from headers alone; None: it is not, or is not there."""

    def stored(self, name: str, rows: slice = ...) -> Stored:
        """Some rows of a matrix that has a grid, as it says."""

    def release(self) -> None:
        """Gives back the memory of what has been read."""


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
    manifest, config = ModelManifest.read(folder), ModelConfig.from_folder(folder)
    path, wanted = folder / form.file_name, _metadata(config, manifest.revision, form)
    if _is_current(path, wanted):
        return path
    try:
        with locked(folder / ".convert.lock"):
            if not _is_current(path, wanted):
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
    # Earlier versions wrote 0 for GGUF formats that are taken as quantized now.
    if manifest.weight_bits or (manifest.weight_bits == 0 and not manifest.weights.endswith(".gguf")):
        return manifest.weight_bits
    config = ModelConfig.from_folder(folder)
    bits = quantized_bits(config, open_source((folder / manifest.weights).resolve()))
    with contextlib.suppress(OSError):  # a read-only folder is read again next time
        replace(manifest, weight_bits=bits).write(folder)
    return bits


def quantized_bits(config: ModelConfig, source: WeightSource) -> int:
    """The least bits of a quantized projection's packing, the head aside; 0 if none is quantized."""
    stored = stored_tensors(config.spec, config.names.found_in(source.names()), WeightForm(torch.float32))
    parts = [p for t in stored if t.is_projection and t.name != "lm_head.weight" for p in t.parts]
    grids = [_grid_of(part, source) for part in parts]
    return min((pick_packing(grid).bits for grid in grids if grid), default=0)


def open_source(path: Path) -> WeightSource:
    """A GGUF file, a safetensors file or a folder of them. Raises ModelLoadError."""
    if not path.exists():
        raise ModelLoadError(f"the weights' source {path} is gone; put it back or pull the model again")
    if path.suffix == ".gguf":
        return GgufSource(path)
    config = (path if path.is_dir() else path.parent) / "config.json"
    quantization = quantization_of(read_object(config)) if config.is_file() else None
    return QuantizedSource(path, quantization) if quantization else SafetensorsSource(path)


def write_weights(
    path: Path,
    config: ModelConfig,
    source: WeightSource,
    form: WeightForm,
    revision: str,
    progress: OnProgress = no_progress,
) -> None:
    """Convert every tensor and replace path in one rename. Raises ModelLoadError before anything is kept."""
    pieces = _all_pieces(config, source, form)
    header, total = _header(
        {p.name: p.in_file for p in pieces}, _metadata(config, revision, form) | {"formats": _listed(source)}
    )
    _log_packings(path, pieces, source)
    done = 0
    with atomic_write(path) as file, _one_thread():
        file.write(header)
        for piece in pieces:
            for rows in [piece.constant] if piece.constant is not None else _rows_of(piece, source):
                done += file.write(rows.contiguous().view(torch.uint8).numpy().data)
            source.release()
            progress("converting", done, total)


def _log_packings(path: Path, pieces: list[_Piece], source: WeightSource) -> None:
    """One line: what becomes of each format."""
    done: Counter[str] = Counter()
    for piece in pieces:
        for grid in filter(None, (_grid_of(part, source) for part in piece.parts)):
            if piece.in_file.dtype != torch.uint8 or piece.packing is None:
                becomes = f"dequantized to {str(piece.in_file.dtype).removeprefix('torch.')}"
            else:
                is_kept = piece.packing is pick_packing(grid) and keeps_codes(grid)
                becomes = f"{'kept as' if is_kept else 'rounded to'} {piece.packing.name}"
            done[f"{grid.name} {becomes}"] += 1
    if done:
        log.info("%s: %s", path, ", ".join(f"{count} weights of {what}" for what, count in done.items()))


def file_tensors(config: ModelConfig, source: WeightSource, form: WeightForm) -> dict[str, FileTensor]:
    """What `write_weights` will write, from headers alone. Raises ModelLoadError."""
    return {piece.name: piece.in_file for piece in _all_pieces(config, source, form)}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Spans are too small to share: on a busy machine torch's threads spend most of the time on waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Piece(NamedTuple):
    """One tensor of the file: some parts of a stored tensor that have the same packing, or a constant."""

    name: str
    parts: tuple[TensorPart, ...]
    packing: Packing | None
    in_file: FileTensor
    experts: int = 0
    #: Whether quantized parts keep the order of inputs that the source has them in.
    ordered: bool = False
    #: The order or the table of a quantized tensor's parts (tandem_kernels.PackedWeight).
    constant: Tensor | None = None


def _all_pieces(config: ModelConfig, source: WeightSource, form: WeightForm) -> list[_Piece]:
    names = config.names.found_in(source.names())
    stored = list(stored_tensors(config.spec, names, form))
    _check_names(config, names, stored, source)
    _check_shapes(stored, source)
    is_quantized = quantized_bits(config, source) > 0
    return [piece for tensor in stored for piece in _pieces(tensor, form, source, is_quantized)]


def _pieces(tensor: StoredTensor, form: WeightForm, source: WeightSource, is_quantized: bool) -> list[_Piece]:
    packings = [
        _packing_of(tensor, _grid_of(part, source), form.quantization, is_quantized) for part in tensor.parts
    ]
    constants = _constants(tensor, packings, source)
    if constants is None or (constants and tensor.experts):
        packings, constants = [packing and Packing.INT8 for packing in packings], {}
    pieces = [
        _Piece(
            piece_name(tensor.name, n),
            parts,
            packing,
            tensor.in_file(form, packing, parts),
            tensor.experts,
            "order" in constants,
        )
        for n, (packing, parts) in enumerate(tensor.by_packing(packings))
    ]
    if not any(piece.in_file.dtype == torch.uint8 for piece in pieces):
        return pieces
    return pieces + [
        _Piece(f"{tensor.name}.{name}", (), None, FileTensor(tuple(value.shape), value.dtype), constant=value)
        for name, value in constants.items()
    ]


def _constants(
    tensor: StoredTensor, packings: Sequence[Packing | None], source: WeightSource
) -> dict[str, Tensor] | None:
    """What a quantized product needs beside the parts, by its name in PackedWeight; None: the parts differ in
    it. They multiply the same activations, in one order."""
    orders: list[Tensor | None] = []
    tables: list[Tensor] = []
    for part, packing in zip(tensor.parts, packings, strict=True):
        grid = _grid_of(part, source)
        if packing is None or len(part.shape) < 2:
            continue
        if not (grid and packing is pick_packing(grid)):
            orders.append(None)
            continue
        stored = source.stored(part.hf_name, slice(0, 0)) if grid.has_order else None
        orders.append(stored.order if isinstance(stored, Groups) else None)
        if packing is Packing.LUT4 and grid.table:
            tables.append(byte_table(grid.table)[0])
    for found in (orders, tables):
        if any(not _is_same(found[0], other) for other in found[1:]):
            return None
    constants = {"order": orders[0].int()} if orders and orders[0] is not None else {}
    return constants | ({"table": tables[0]} if tables else {})


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _grid_of(part: TensorPart, source: WeightSource) -> Grid | None:
    """How the source has a part quantized by rows of ours."""
    return None if part.transposed else source.grid(part.hf_name)


def _packing_of(
    tensor: StoredTensor, grid: Grid | None, quantization: Quantization, is_quantized: bool
) -> Packing | None:
    """The packing of a part that the source stores in this grid; None: the form's dtype.

    In a quantized source floats stay floats. In W4A8, quantized parts keep their packing, and a head of
    floats gets 8 bits: every token depends on it.
    """
    if quantization is Quantization.NONE or (grid is None and is_quantized):
        return None
    if quantization is Quantization.W8A8:
        return Packing.INT8
    if grid:
        return pick_packing(grid)
    return Packing.INT8 if tensor.name == "lm_head.weight" else Packing.INT4


def _rows_of(piece: _Piece, source: WeightSource) -> Iterator[Tensor]:
    """The tensor in pieces of some rows, as the file has them; one at a time is in memory."""
    packed = len(piece.in_file.shape) > len(piece.parts[0].shape) + (piece.experts > 0)
    rows_of_each = sum(p.shape[0] for p in piece.parts) // (piece.experts or 1)
    packing = piece.packing if piece.in_file.dtype == torch.uint8 else None
    held: list[Any] = []
    count = 0
    spans = [(part, span) for part in piece.parts for span in _spans(part)]
    for part, span in spans:
        rows: Any
        grid = _grid_of(part, source)
        if grid and packing is pick_packing(grid) and (piece.ordered or not grid.has_order):
            rows = _packed(source, part.hf_name, part.in_rows(span), packing)
            order = part.order()
            rows = rows if order is None else rows.rows(order)
        else:
            rows = part.arrange(source.get(part.hf_name, part.in_rows(span)))
            rows = quantize_weight(rows, packing) if packing else rows.to(piece.in_file.dtype)
        if not packed:
            yield rows
            continue
        held.append(rows)
        count += span.stop - span.start
        # Panels are whole wherever a packing is cut.
        if count % PANEL == 0 or count == rows_of_each:
            yield pack_quantized(join_rows(held)) if packing else pack_weight(torch.cat(held))
            held = []
        count %= rows_of_each


def _packed(source: WeightSource, name: str, rows: slice, packing: Packing) -> QuantizedWeight:
    try:
        return pack(source.stored(name, rows), packing)
    except ValueError as error:
        raise ModelLoadError(f"{name} cannot be packed ({error}); use another file of the model") from error


def _spans(part: TensorPart) -> list[slice]:
    """All rows of the part, in spans of whole panels; rows that will be arranged stay together."""
    rows = part.shape[0]
    if not part.is_in_order or len(part.shape) == 1:
        return [slice(0, rows)]
    most = max(_SPAN // part.shape[1] // PANEL, 1) * PANEL
    return [slice(first, min(first + most, rows)) for first in range(0, rows, most)]


def _check_names(config: ModelConfig, names: Names, stored: list[StoredTensor], source: WeightSource) -> None:
    wanted = {part.hf_name for tensor in stored for part in tensor.parts}
    offered = {name for name in source.names() if names.uses(name)}
    if config.spec.head.tied:
        offered.discard(f"{names.head}.weight")
    if missing := sorted(wanted - offered):
        raise ModelLoadError(
            f"the weights lack {missing[0]} ({len(missing)} of {len(wanted)} tensors are missing); "
            "the download is incomplete or the config is another model's, pull it again"
        )
    # AutoGPTQ writes zeros for biases that a model does not have.
    zeros = {n for n in offered - wanted if n.endswith("_proj.bias") and not source.get(n).any()}
    if extra := sorted(offered - wanted - zeros):
        raise ModelLoadError(
            f"the weights hold {extra[0]}, which a {config.model_type} model with this config has no use "
            "for; this variant is not supported"
        )


def _header(tensors: dict[str, FileTensor], metadata: dict[str, str]) -> tuple[bytes, int]:
    """The safetensors header (8 bytes of length, then JSON padded to 64 bytes) and the size of the data."""
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": (_DTYPES | _INTEGERS)[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text, offset


def _listed(source: WeightSource) -> str:
    formats = sorted(source.formats().items(), key=lambda item: -item[1])
    total = sum(count for _, count in formats)
    return ", ".join(f"{name} {count / total:.0%}" for name, count in formats)


def _metadata(config: ModelConfig, revision: str, form: WeightForm) -> dict[str, str]:
    layout = f"{LAYOUT_VERSION}{form.suffix} {config.spec.hash}"
    return {"layout": layout, "revision": revision}


def _check_shapes(stored: list[StoredTensor], source: WeightSource) -> None:
    for part in (part for tensor in stored for part in tensor.parts):
        shape = source.shape(part.hf_name)
        if len(part.in_source) == 1 and shape[:1] == (1,):
            shape = shape[1:]  # a row vector
        if shape != part.in_source:
            raise ModelLoadError(
                f"{part.hf_name} has shape {shape}, but the config asks for {part.in_source}; "
                "the weights and the config are of different models"
            )


def _is_current(path: Path, wanted: dict[str, str]) -> bool:
    """Whether path is whole, of this layout and of these weights; reads only the header."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 1 << 28:
                return False
            header = json.loads(file.read(length))
        size = max(e["data_offsets"][1] for n, e in header.items() if n != "__metadata__")
        return (
            bool(wanted.items() <= header["__metadata__"].items())
            and path.stat().st_size == 8 + length + size
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
