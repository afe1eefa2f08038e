"""Copy cache blocks into one contiguous payload, for the KV transfer out of a pod.

payload[i] = kv_cache[block_ids[i]]
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
