"""Quantised KV: the values in an int8 or float8 cache, and the scales that attention multiplies them by.

stored = round(x / scale), x ~ stored * scale, with |stored| at most LARGEST[dtype]

A scale is one per K/V head, chosen beforehand, or one per token and head, computed as the token is stored:
the largest |x| of the head's D elements over LARGEST, kept in [num_blocks, Hkv, block_size] beside the cache.
"""

from __future__ import annotations

from typing import TypeGuard

import torch

#: The largest magnitude of each quantised dtype; int8's -128 is left out, to be symmetric.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
#: Keeps the division defined for a token of zeros.
SMALLEST_SCALE = 2.0**-100

#: A number or [Hkv]: given. [num_blocks, Hkv, block_size] float32: one per token, written when it is stored.
Scale = float | torch.Tensor | None


def is_per_token(scale: Scale) -> TypeGuard[torch.Tensor]:
    """Whether the scale is [num_blocks, Hkv, block_size]."""
    return isinstance(scale, torch.Tensor) and scale.dim() == 3


def check_scales(keys: torch.Tensor, k_scale: Scale, v_scale: Scale) -> None:
    """Raise ValueError unless both scales are of one kind and fit the cache, whose K is
    [num_blocks, Hkv, block_size, D_k]."""
    num_blocks, num_kv_heads, block_size, _ = keys.shape
    if k_scale is None and v_scale is None:
        return
    if keys.dtype not in LARGEST:
        raise ValueError(f"kv_cache has dtype {keys.dtype}, wanted int8 or float8 to go with scales")
    if is_per_token(k_scale) != is_per_token(v_scale):
        raise ValueError("k_scale and v_scale must both be per token, or neither")
    shapes = ((), (1,), (num_kv_heads,), (num_blocks, num_kv_heads, block_size))
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, torch.Tensor) and (
            scale.shape not in shapes or scale.dtype != torch.float32 or not scale.is_contiguous()
        ):
            raise ValueError(
                f"{name} has shape {list(scale.shape)} and dtype {scale.dtype}, wanted a number, "
                f"[{num_kv_heads}] or [{num_blocks}, {num_kv_heads}, {block_size}], dense and of float32"
            )


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x / scale, rounded to the nearest value of dtype and clamped to its range; scale broadcasts to x."""
    scaled = (x.float() / scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)


def token_scales(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, Hkv, D] -> each token's own scales [T, Hkv] float32."""
    return (x.float().abs().amax(2) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
