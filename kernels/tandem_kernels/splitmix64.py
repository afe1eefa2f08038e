"""SplitMix64 (Steele, Lea, Flood 2014), read at chosen places: a uniform number per row and token.

Output number n of the generator with state `key` is mix(key + n * GAMMA).
"""

from __future__ import annotations

import torch

GAMMA = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def uniforms(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """keys [R] int64 -> [R, num_tokens] float64 in (0, 1): 52 bits of output number t + 1 for token t."""

    def signed(bits: int) -> int:
        return bits - (1 << 64)

    # int64 wraps as uint64 does, but shifts repeat the sign.
    z = torch.arange(1, num_tokens + 1, device=keys.device) * signed(GAMMA) + keys[:, None]
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * signed(factor)
    z = z ^ (z >> 31 & (1 << 33) - 1)
    return ((z >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52
