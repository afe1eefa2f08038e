"""Write the K and V of newly computed tokens into their slots of the paged cache.

kv_cache[slot // block_size, 0, h, slot % block_size] = key[t, h]      for slot = slot_mapping[t]
kv_cache[slot // block_size, 1, h, slot % block_size] = value[t, h]
"""

from __future__ import annotations

import torch

from tandem_kernels.checks import check_indices, check_kv_cache


def store_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store T tokens in place; a token's slot must be its own, or which one wins is undefined.

    Args:
        key, value: [T, Hkv, D], the cache's dtype (or one it is cast to), any strides.
        kv_cache: [num_blocks, 2, Hkv, block_size, D], contiguous; changed.
        slot_mapping: [T] int64, slots in [0, num_blocks * block_size).

    Raises:
        ValueError: a shape, stride, dtype or device does not fit.
        IndexError: a slot lies outside the cache (CPU only; on CUDA a device assertion).
    """
    check_kv_cache(kv_cache)
    check_indices("slot_mapping", slot_mapping, kv_cache.device)
    _, _, num_kv_heads, block_size, head_size = kv_cache.shape
    wanted = (slot_mapping.shape[0], num_kv_heads, head_size)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != wanted:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, wanted [T, Hkv, D] = {list(wanted)}")
    tokens = torch.stack((key, value), 1)
    if tokens.dtype != kv_cache.dtype:
        tokens = tokens.to(kv_cache.dtype)
    block_ids = slot_mapping // block_size
    offsets = slot_mapping % block_size
    # Indexed dimensions first: the result is [T, 2, Hkv, D], a token's two rows per head.
    kv_cache.permute(0, 3, 1, 2, 4).index_put_((block_ids, offsets), tokens)
