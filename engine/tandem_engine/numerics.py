"""In what numbers a model is computed here: the choice behind `--dtype auto --quantization auto`.

Measured on customer-service dialogues (benchmarks/results/quality-*.md), quantization costs the default model
0.2 % of perplexity where its weights have 4 bits anyway, and halves a decode step's time. So `auto` takes
weights that come quantized as they are, and never quantizes others; whoever names a dtype gets just that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tandem_core.errors import ModelLoadError
from tandem_kernels import runs_packed

from tandem_engine.model_loader import source_bits
from tandem_engine.models import Quantization, pick_dtype


@dataclass(frozen=True)
class Numerics:
    dtype: torch.dtype
    quantization: Quantization


def pick_numerics(
    folder: Path, dtype: str = "auto", quantization: str = "auto", device: str = "cpu"
) -> Numerics:
    """What to compute the model of `folder` in. Raises ModelLoadError for what does not go together."""
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
