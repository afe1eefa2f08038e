"""Cache blocks to one contiguous payload and back, for KV transfers between pods.

gather_blocks    payload[i] = kv_cache[block_ids[i]]
scatter_blocks   kv_cache[block_ids[i]] = payload[i]
"""

from __future__ import annotations

import torch

from tandem_kernels.checks import check_indices, check_kv_cache


def gather_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return the blocks' contents in the order of block_ids; an id may occur more than once.

    Args:
        kv_cache: [num_blocks, 2, Hkv, block_size, D], as check_kv_cache wants it.
        block_ids: [n] int64, each in [0, num_blocks).

    Returns:
        [n, 2, Hkv, block_size, D], contiguous, the cache's dtype, memory of its own.

    Raises:
        ValueError: a shape, stride, dtype or device does not fit.
        IndexError: an id lies outside the cache (CPU only; on CUDA its part is left undefined).
    """
    check_kv_cache(kv_cache)
    check_indices("block_ids", block_ids, kv_cache.device)
    if kv_cache.is_cuda:
        from tandem_kernels.gpu import copy_blocks

        return copy_blocks.gather_blocks(kv_cache, block_ids)
    return kv_cache.index_select(0, block_ids)


def scatter_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor, payload: torch.Tensor) -> None:
    """Overwrite the blocks in place; ids must be distinct, or which payload wins is undefined.

    Args:
        kv_cache: [num_blocks, 2, Hkv, block_size, D], as check_kv_cache wants it; changed.
        block_ids: [n] int64, each in [0, num_blocks).
        payload: [n, 2, Hkv, block_size, D], the cache's dtype and device.

    Raises:
        ValueError: a shape, stride, dtype or device does not fit.
        IndexError: an id lies outside the cache (CPU only; on CUDA it is left out).
    """
    check_kv_cache(kv_cache)
    check_indices("block_ids", block_ids, kv_cache.device)
    wanted = (block_ids.shape[0], *kv_cache.shape[1:])
    if payload.shape != wanted or payload.dtype != kv_cache.dtype:
        raise ValueError(
            f"payload has shape {list(payload.shape)} and dtype {payload.dtype}, "
            f"wanted [n, 2, Hkv, block_size, D] = {list(wanted)} of {kv_cache.dtype}"
        )
    if kv_cache.is_cuda:
        from tandem_kernels.gpu import copy_blocks

        copy_blocks.scatter_blocks(kv_cache, block_ids, payload)
        return
    kv_cache.index_copy_(0, block_ids.long(), payload)
