"""The KV cache layout that the compiled attention reads without rearranging it at every step.

A K/V head's piece of a block, [block_size, D] elements, holds

    plain         K and V [block_size][D]
    interleaved   K [D / per][block_size][per], V [block_size / per][D][per]

with per = 2 for bfloat16, whose products take pairs of neighbours, and 1 for float32. A block stays one
contiguous piece of the same size and is sent between pods unchanged; both must have the same layout. It is
the same for all instruction sets: those without bfloat16 products widen the pairs in registers.
"""

from __future__ import annotations

import torch

from tandem_kernels import native


def runs_interleaved(dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    """Whether the compiled attention here reads such a cache: its own dtype, blocks of whole tiles."""
    if native.LIBRARY is None or block_size % 64:
        return False
    return (dtype == torch.bfloat16 and head_size % 32 == 0) or (
        dtype == torch.float32 and head_size % 16 == 0
    )


def interleave(kv_cache: torch.Tensor) -> torch.Tensor:
    """A plain cache [num_blocks, 2, Hkv, block_size, D] -> the same shape, interleaved; a copy."""
    per = _per_lane(kv_cache)
    num_blocks, _, num_kv_heads, block_size, head_size = kv_cache.shape
    keys = kv_cache[:, 0].reshape(num_blocks, num_kv_heads, block_size, head_size // per, per).transpose(2, 3)
    values = kv_cache[:, 1].reshape(num_blocks, num_kv_heads, block_size // per, per, head_size)
    values = values.transpose(3, 4)
    return torch.stack([part.reshape(kv_cache[:, 0].shape) for part in (keys, values)], dim=1)


def deinterleave(kv_cache: torch.Tensor) -> torch.Tensor:
    """The inverse; a copy."""
    per = _per_lane(kv_cache)
    num_blocks, _, num_kv_heads, block_size, head_size = kv_cache.shape
    keys = kv_cache[:, 0].reshape(num_blocks, num_kv_heads, head_size // per, block_size, per).transpose(2, 3)
    values = (
        kv_cache[:, 1].reshape(num_blocks, num_kv_heads, block_size // per, head_size, per).transpose(3, 4)
    )
    return torch.stack([part.reshape(kv_cache[:, 0].shape) for part in (keys, values)], dim=1)


def _per_lane(kv_cache: torch.Tensor) -> int:
    return 4 // kv_cache.element_size()
