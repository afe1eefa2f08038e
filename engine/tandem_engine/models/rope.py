"""Rotary position embedding as one complex multiplication.

The converter stores each head's dimensions so that the two halves of a rotated pair are neighbours
(see layout.py). A head [D] is then D/2 complex numbers and RoPE is `x * exp(i * position * inv_freq)`:
one product for queries and keys together (tandem_kernels.rope_store), where cos/sin halves take six.
Scores q.k do not change, as queries and keys are permuted alike.
"""

from __future__ import annotations

import math

import torch
from tandem_core.model.spec import Rope
from torch import Tensor


def inverse_frequencies(rope: Rope) -> Tensor:
    """Radians per position of each rotated pair: [dims / 2] float32, as transformers computes them."""
    exponents = torch.arange(0, rope.dims, 2, dtype=torch.float32) / rope.dims
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "table":
        return inv_freq / torch.tensor(rope.table) / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq)
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq)
    return inv_freq


def _llama3(rope: Rope, inv_freq: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    turns = rope.original_max_len * inv_freq / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn(rope: Rope, inv_freq: Tensor) -> Tensor:
    """Dimensions that turn less than beta_slow times in the trained context are stretched, those that turn
    more than beta_fast times are kept, with a linear ramp between."""

    def dimension(num_turns: float) -> float:
        wavelengths = rope.original_max_len / (num_turns * 2 * math.pi)
        return rope.dims * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    width = max(high - low, 0.001)
    ramp = ((torch.arange(rope.dims // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def rotation_table(rope: Rope, max_len: int) -> Tensor:
    """exp(i * position * inv_freq), times the attention factor: [max_len, dims / 2] complex64."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(rope))
    return torch.polar(torch.full_like(angles, rope.attention_factor), angles)
