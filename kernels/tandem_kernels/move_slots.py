"""Move cached tokens to other slots: the compaction of a verified draft's accepted nodes.

    before   | context | 0  1  2  3  4  5 |     new tokens, one slot per draft node
    accepted path 0 -> 2 -> 5:   move_slots(src = slots of 2, 5; dst = slots of 1, 2)
    after    | context | 0  2  5 | ...    |     consecutive again, as causal attention wants

Source and destination overlap, so every source is read before any destination is written.
"""

from __future__ import annotations

import torch

from tandem_kernels.checks import check_indices, check_kv_cache


def move_slots(kv_cache: torch.Tensor, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
    """Copy K and V of src_slots[i] to dst_slots[i] in place, as if all at once.

    Args:
        kv_cache: [num_blocks, 2, Hkv, block_size, D], contiguous; changed.
        src_slots, dst_slots: [m] int64, slots in [0, num_blocks * block_size); destinations distinct.

    Raises:
        ValueError: a shape, stride, dtype or device does not fit.
        IndexError: a slot lies outside the cache (CPU only; on CUDA a device assertion).
    """
    check_kv_cache(kv_cache)
    check_indices("src_slots", src_slots, kv_cache.device)
    check_indices("dst_slots", dst_slots, kv_cache.device)
    if src_slots.shape != dst_slots.shape:
        raise ValueError(
            f"src_slots has {src_slots.shape[0]} slots and dst_slots {dst_slots.shape[0]}, wanted as many"
        )
    block_size = kv_cache.shape[3]
    slots_first = kv_cache.permute(0, 3, 1, 2, 4)
    # Indexing copies, so all sources are read here.
    moved = slots_first[src_slots // block_size, src_slots % block_size]
    slots_first.index_put_((dst_slots // block_size, dst_slots % block_size), moved)
