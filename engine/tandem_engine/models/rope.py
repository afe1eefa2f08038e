"""Rotary position embedding as one complex multiplication.

The converter stores each head's dimensions so that the two halves of a rotated pair are neighbours
(see layout.py). A head [D] is then D/2 complex numbers and RoPE is `x * exp(i * position * inv_freq)`:
one product for queries and keys together (tandem_kernels.rope_store), where cos/sin halves take six.
Scores q.k do not change, as queries and keys are permuted alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem_engine.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair: [head_dim / 2] float32, as transformers computes them."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "table":
        return inv_freq / torch.tensor(rope.table) / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq)
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim)
    return inv_freq


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    turns = rope.original_max_len * inv_freq / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn(rope: RopeConfig, inv_freq: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn less than beta_slow times in the trained context are stretched, those that turn
    more than beta_fast times are kept, with a linear ramp between."""

    def dimension(num_turns: float) -> float:
        wavelengths = rope.original_max_len / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def rotation_table(rope: RopeConfig, head_dim: int, max_model_len: int) -> Tensor:
    """exp(i * position * inv_freq): [max_model_len, head_dim / 2] complex64."""
    angles = torch.outer(
        torch.arange(max_model_len, dtype=torch.float32), inverse_frequencies(rope, head_dim)
    )
    return torch.polar(torch.full_like(angles, rope.attention_factor), angles)
