"""Move cached tokens to other slots: the compaction of a verified draft's accepted nodes.

    before   | context | 0  1  2  3  4  5 |     new tokens, one slot per draft node
    accepted path 0 -> 2 -> 5:   move_slots(src = slots of 2, 5; dst = slots of 1, 2)
    after    | context | 0  2  5 | ...    |     consecutive, as causal attention requires

Source and destination overlap, so every source is read before any destination is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tandem_kernels import native
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
    _check_moves(src_slots, dst_slots, kv_cache.device)
    block_size = kv_cache.shape[3]
    slots_first = kv_cache.permute(0, 3, 1, 2, 4)
    # Indexing copies, so all sources are read here.
    moved = slots_first[src_slots // block_size, src_slots % block_size]
    slots_first.index_put_((dst_slots // block_size, dst_slots % block_size), moved)


def move_slots_in_layers(
    kv_caches: Sequence[torch.Tensor] | torch.Tensor,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """move_slots in every layer's cache, all of one shape and dtype; one compiled call where available.

    No destination may be the source of a later move: those of an accepted path ascend, and lead backwards.

    Args:
        kv_caches: one tensor per layer; on CUDA one tensor [L, num_blocks, 2, Hkv, block_size, D], dense.
        interleaved: layout of the caches (interleaved_cache.py); needs compiled kernels.

    Raises:
        ValueError, IndexError: as move_slots; on CUDA a move from or to a slot outside is left out.
    """
    first = kv_caches[0]
    if first.is_cuda:
        if not isinstance(kv_caches, torch.Tensor) or kv_caches.dim() != 6:
            raise ValueError("kv_caches on CUDA: wanted one tensor [L, num_blocks, 2, Hkv, block_size, D]")
        check_kv_cache(first)
        _check_moves(src_slots, dst_slots, first.device)
        from tandem_kernels.gpu import move_slots as gpu

        gpu.move_slots(kv_caches, src_slots, dst_slots)
        return
    if native.LIBRARY is None or first.dtype not in native.DTYPE:
        if interleaved:
            raise ValueError(
                f"interleaved caches of {first.dtype} on {first.device} cannot be moved, for want of "
                "compiled kernels"
            )
        for kv_cache in kv_caches:
            move_slots(kv_cache, src_slots, dst_slots)
        return
    for kv_cache in kv_caches:
        check_kv_cache(kv_cache)
        if kv_cache.shape != first.shape or kv_cache.dtype != first.dtype:
            raise ValueError(
                f"kv_caches differ: {list(kv_cache.shape)} of {kv_cache.dtype} beside {list(first.shape)} of "
                f"{first.dtype}, wanted layers of one model"
            )
    _check_moves(src_slots, dst_slots, first.device)
    num_blocks, _, num_kv_heads, block_size, head_size = first.shape
    src_slots, dst_slots = src_slots.long().contiguous(), dst_slots.long().contiguous()
    pointers = (ctypes.c_void_p * len(kv_caches))(*(cache.data_ptr() for cache in kv_caches))
    wrong = native.LIBRARY.tandem_move_slots(
        pointers, len(kv_caches), src_slots.data_ptr(), dst_slots.data_ptr(), src_slots.shape[0],
        num_blocks * block_size, num_kv_heads, head_size, block_size, native.DTYPE[first.dtype], interleaved,
    )  # fmt: skip
    if wrong >= 0:
        raise IndexError(
            f"move {wrong} is from slot {src_slots[wrong]} to {dst_slots[wrong]}, wanted both in "
            f"[0, {num_blocks * block_size})"
        )


def _check_moves(src_slots: torch.Tensor, dst_slots: torch.Tensor, device: torch.device) -> None:
    check_indices("src_slots", src_slots, device)
    check_indices("dst_slots", dst_slots, device)
    if src_slots.shape != dst_slots.shape:
        raise ValueError(
            f"src_slots has {src_slots.shape[0]} slots and dst_slots {dst_slots.shape[0]}, wanted as many"
        )
