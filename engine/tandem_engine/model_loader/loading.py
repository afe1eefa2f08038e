"""Loads a decoder from a model folder, and picks the dtype and the quantization to compute it in.

The weight file is mapped, not read: its pages are in the page cache, all processes that map the file share
them, and the kernel evicts them first under memory pressure. `ensure_weights` makes the file on the first
demand for a dtype; later loads only check names and shapes.

`--dtype auto --quantization auto` takes quantized weights as they are and never quantizes others. On
customer-service dialogues 8-bit activations cost the default model, whose weights have 4 bits already,
0.2 % of perplexity, and halve the time of a decode step (docs/decisions/quantised-weights.md). With an
explicit dtype nothing is quantized.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from tandem_core.errors import ModelLoadError
from tandem_core.model.json_file import read_object
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.spec import ModelSpec
from tandem_kernels import PackedExperts, PackedWeight, packing_of, runs_packed
from torch import Tensor

from tandem_engine.model_loader.convert import ensure_weights, source_bits
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.decoder import Decoder, supports
from tandem_engine.models.executors import Executor, executor_of, module_types, text_type
from tandem_engine.models.layout import (
    FileTensor,
    Quantization,
    WeightForm,
    piece_name,
    share_read,
    stored_tensors,
)
from tandem_engine.models.linear import linear_policy, pick_dtype

if TYPE_CHECKING:
    from tandem_engine.models.modules import ModulesDecoder

log = logging.getLogger(__name__)


def load_decoder(
    folder: Path,
    dtype: torch.dtype,
    device: str = "cpu",
    quantization: Quantization = Quantization.NONE,
    max_model_len: int = 0,
) -> Decoder | ModulesDecoder:
    """The model of `folder` in `dtype`, for texts of `max_model_len` tokens; 0: the model's own limit. Raises
    ModelLoadError."""
    path = folder / "config.json"
    if path.is_file() and executor_of(read_object(path), path) is Executor.TRANSFORMERS:
        return _load_modules(folder, dtype, device, quantization, max_model_len)
    config, target = ModelConfig.from_folder(folder), torch.device(device)
    # The rotation tables and attention's states are as long.
    spec = config.spec.limited_to(max_model_len or config.spec.max_len)
    if why := supports(spec, target):
        if text_type(read_object(path)) in module_types() and not ModelManifest.read(folder).weights.endswith(
            ".gguf"
        ):
            log.warning("%s: %s; transformers' modules compute it instead", folder.name, why)
            return _load_modules(folder, dtype, device, quantization, max_model_len)
        raise ModelLoadError(f"{folder.name}: {why}")
    form = WeightForm(dtype, runs_packed(dtype, target), quantization)
    path = ensure_weights(folder, dtype, packed=form.packed, quantization=quantization)
    tensors, packed, formats = _map_tensors(path, config, form, target)
    _log_numerics(folder.name, formats, spec, tensors, packed)
    largest = max(t.numel() for t in tensors.values() if t.dim() < 3)
    return Decoder(spec, tensors, linear_policy(dtype, target, largest), packed)


def _load_modules(
    folder: Path, dtype: torch.dtype, device: str, quantization: Quantization, max_model_len: int
) -> ModulesDecoder:
    # Imported on demand: transformers takes seconds.
    from tandem_engine.model_loader.modules_loading import load_modules

    return load_modules(folder, dtype, device, quantization, max_model_len)


def _map_tensors(
    path: Path, config: ModelConfig, form: WeightForm, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, PackedWeight | PackedExperts], str]:
    """Tensors that the kernels take as they are, packed projections, each from one piece or several, and the
    source's formats."""
    tensors: dict[str, Tensor] = {}
    packed: dict[str, PackedWeight | PackedExperts] = {}
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            names, formats = set(file.keys()), (file.metadata() or {}).get("formats", "")
            for stored in stored_tensors(config.spec, config.names, form):
                numbered = (piece_name(stored.name, n) for n in range(len(stored.parts)))
                pieces = [file.get_tensor(name) for name in takewhile(names.__contains__, numbered)]
                plain = stored.in_file(form, None)
                if stored.is_projection and pieces and pieces[0].dim() > len(stored.shape):
                    *stack, columns, depth = stored.shape
                    with contextlib.suppress(ValueError, IndexError):
                        constants: list[Tensor | None] = [
                            file.get_tensor(name) if name in names else None
                            for name in (f"{stored.name}.order", f"{stored.name}.table")
                        ]
                        weight = packed[stored.name] = (
                            PackedExperts(tuple(pieces), columns)
                            if stack
                            else PackedWeight(tuple(pieces), columns, *constants)
                        )
                        if weight.depth == depth and (not stack or len(pieces[0]) == stack[0]):
                            continue
                elif len(pieces) == 1 and FileTensor(tuple(pieces[0].shape), pieces[0].dtype) == plain:
                    tensors[stored.name] = pieces[0]
                    continue
                raise ModelLoadError(
                    f"{path} holds {stored.name} as {[(*p.shape, p.dtype) for p in pieces]}, which does not "
                    "fit config.json; delete the file to have it made again"
                )
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}); delete it to have it made again") from error
    return tensors, packed, formats


def _log_numerics(
    name: str,
    formats: str,
    spec: ModelSpec,
    tensors: dict[str, Tensor],
    packed: dict[str, PackedWeight | PackedExperts],
) -> None:
    """One line: what the source holds, what it is computed in, and how much a step of one token reads."""
    sizes: Counter[str] = Counter()
    read = 0.0
    for key, part in ((key, part) for key, weight in packed.items() for part in weight.parts):
        matrix = part[0] if part.dim() == 4 else part  # of the first expert
        kind = packing_of(matrix).name if part.dtype == torch.uint8 else str(part.dtype)
        sizes[kind.removeprefix("torch.")] += part.nbytes
        read += part.nbytes * share_read(spec, key)
    for key, tensor in tensors.items():
        # A step reads one row of the embedding, unless it is the head too.
        if key != "embed_tokens.weight" or "lm_head.weight" not in tensors.keys() | packed.keys():
            sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
            read += tensor.nbytes * share_read(spec, key)
    listed = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in sizes.most_common())
    log.info("%s: weights in %s are computed in %s; one token reads %.1f MB of them", name, formats, listed,
             read / 1e6)  # fmt: skip


@dataclass(frozen=True)
class Numerics:
    dtype: torch.dtype
    quantization: Quantization


def pick_numerics(
    folder: Path, dtype: str = "auto", quantization: str = "auto", device: str = "cpu"
) -> Numerics:
    """The dtype and quantization for the model of `folder`. Raises ModelLoadError if they do not fit."""
    picked = pick_dtype(dtype, device)
    if quantization != "auto":
        names = [q.value for q in Quantization]
        if quantization not in names:
            raise ModelLoadError(f"quantization {quantization!r} is unknown; use auto, {', '.join(names)}")
        wanted = Quantization(quantization)
        if wanted is not Quantization.NONE and torch.device(device).type != "cpu":
            raise ModelLoadError(
                f"quantization {wanted} runs on CPUs only; use quantization none on {device}"
            )
        return Numerics(picked, wanted)
    if dtype != "auto" or not runs_packed(torch.uint8, torch.device(device)):
        return Numerics(picked, Quantization.NONE)
    by_bits = {0: Quantization.NONE, 8: Quantization.W8A8}
    return Numerics(picked, by_bits.get(source_bits(folder), Quantization.W4A8))
