"""Loads a decoder from a model folder, and picks the dtype and the quantization to compute it in.

The weight file is mapped, not read: its pages are in the page cache, all processes that map the file share
them, and the kernel evicts them first under memory pressure. `ensure_weights` makes the file on the first
demand for a dtype; later loads only check names and shapes.

`--dtype auto --quantization auto` takes quantized weights as they are and never quantizes others. On
customer-service dialogues (benchmarks/results/quality-*.md) 8-bit activations cost the default model 0.2 % of
perplexity, whose weights have 4 bits already, and halve the time of a decode step. With an explicit dtype
nothing is quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tandem_core.errors import ModelLoadError
from tandem_kernels import runs_packed
from torch import Tensor

from tandem_engine.model_loader.convert import ensure_weights, source_bits
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.decoder import Decoder
from tandem_engine.models.layout import FileTensor, Quantization, WeightForm, stored_tensors
from tandem_engine.models.linear import linear_policy, pick_dtype


def load_decoder(
    folder: Path,
    dtype: torch.dtype,
    device: str = "cpu",
    quantization: Quantization = Quantization.NONE,
) -> Decoder:
    """The model of `folder` in `dtype`. Raises ModelLoadError."""
    config = ModelConfig.from_folder(folder)
    target = torch.device(device)
    form = WeightForm(dtype, runs_packed(dtype, target), quantization)
    path = ensure_weights(folder, dtype, packed=form.packed, quantization=quantization)
    tensors = _map_tensors(path, config, form, target)
    largest = max(t.numel() for t in tensors.values())
    return Decoder(config, tensors, linear_policy(dtype, target, largest))


def _map_tensors(
    path: Path, config: ModelConfig, form: WeightForm, device: torch.device
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            for stored in stored_tensors(config, form):
                tensor = file.get_tensor(stored.name)
                # The converter chose the bits of each weight.
                allowed = [stored.in_file(form, bits) for bits in (4, 8)]
                if FileTensor(tuple(tensor.shape), tensor.dtype) not in allowed:
                    raise ModelLoadError(
                        f"{path} holds {stored.name} as {tuple(tensor.shape)} {tensor.dtype}, but "
                        f"config.json asks for {allowed[0].shape} {allowed[0].dtype}; delete the file to "
                        "have it made again"
                    )
                tensors[stored.name] = tensor
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}); delete it to have it made again") from error
    return tensors


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
    by_bits = {4: Quantization.W4A8, 8: Quantization.W8A8}
    return Numerics(picked, by_bits.get(source_bits(folder), Quantization.NONE))
