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
from tandem_kernels.checks import KVCache, keys_and_values, split_cache


def runs_interleaved(dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    """Whether the compiled attention here reads such a cache: its own dtype, blocks of whole tiles."""
    if native.LIBRARY is None or block_size % 64:
        return False
    return (dtype == torch.bfloat16 and head_size % 32 == 0) or (
        dtype == torch.float32 and head_size % 16 == 0
    )


def interleave(kv_cache: KVCache) -> KVCache:
    """A plain cache, as one tensor or as K and V -> the same shapes, interleaved; a copy."""
    keys, values = keys_and_values(kv_cache)
    per = _per_lane(keys)
    num_blocks, num_kv_heads, block_size, k_dim = keys.shape
    new_keys = keys.reshape(num_blocks, num_kv_heads, block_size, k_dim // per, per).transpose(2, 3)
    new_values = values.reshape(num_blocks, num_kv_heads, block_size // per, per, -1).transpose(3, 4)
    return _joined(kv_cache, new_keys, new_values)


def deinterleave(kv_cache: KVCache) -> KVCache:
    """The inverse; a copy."""
    keys, values = keys_and_values(kv_cache)
    per = _per_lane(keys)
    num_blocks, num_kv_heads, block_size, k_dim = keys.shape
    new_keys = keys.reshape(num_blocks, num_kv_heads, k_dim // per, block_size, per).transpose(2, 3)
    new_values = values.reshape(num_blocks, num_kv_heads, block_size // per, -1, per).transpose(3, 4)
    return _joined(kv_cache, new_keys, new_values)


def _joined(like: KVCache, keys: torch.Tensor, values: torch.Tensor) -> KVCache:
    """A cache in the form of `like` whose blocks hold these numbers in their order."""
    blocks = torch.cat([keys.flatten(1), values.flatten(1)], 1)
    if isinstance(like, torch.Tensor):
        return blocks.view(like.shape)
    _, num_kv_heads, block_size, k_dim = like[0].shape
    return split_cache(blocks, num_kv_heads, block_size, k_dim, like[1].shape[3])


def _per_lane(keys: torch.Tensor) -> int:
    return 4 // keys.element_size()
