"""move_slots_in_layers in Triton: one launch for all layers, K and V.

program (l, p)   in layer l, piece p = K or V of one head: all moves, MOVES at a time

A program reads MOVES sources before it writes their destinations. Later sources are still unwritten then,
because no move writes to the source of a later one.
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.gpu import check_dense

#: More than most batches move. With 128 numbers of 16 bits a head, a thread holds 16 of them.
MOVES = 16
NUM_WARPS = 4


def move_slots(kv_caches: torch.Tensor, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
    """kv_caches [L, num_blocks, 2, Hkv, block_size, D], dense; slots [m] int64. One outside is not moved."""
    check_dense(kv_caches=kv_caches, src_slots=src_slots, dst_slots=dst_slots)
    num_moves = src_slots.shape[0]
    if num_moves == 0:
        return
    num_layers, num_blocks, _, num_kv_heads, block_size, head_size = kv_caches.shape
    # Bits are moved, not numbers.
    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kv_caches.element_size()]
    move_slots_kernel[(num_layers, 2 * num_kv_heads)](
        kv_caches.view(as_bits), src_slots, dst_slots, num_moves, num_blocks,
        PIECES=2 * num_kv_heads, BLOCK_SIZE=block_size, HEAD_SIZE=head_size,
        BLOCK_DIM=triton.next_power_of_2(head_size), MOVES=MOVES, num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=("num_moves", "num_blocks"),
    do_not_specialize_on_alignment=("src_slots_ptr", "dst_slots_ptr"),
)
def move_slots_kernel(
    cache_ptr, src_slots_ptr, dst_slots_ptr, num_moves, num_blocks,
    PIECES: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_DIM: tl.constexpr,
    MOVES: tl.constexpr,
):  # fmt: skip
    # Of this piece in the layer's first block; a block of the layer holds PIECES of them.
    first_piece = tl.program_id(0).to(tl.int64) * num_blocks * PIECES + tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    for first in range(0, num_moves, MOVES):
        moves = first + tl.arange(0, MOVES)
        src = tl.load(src_slots_ptr + moves, mask=moves < num_moves, other=-1).to(tl.int64)
        dst = tl.load(dst_slots_ptr + moves, mask=moves < num_moves, other=-1).to(tl.int64)
        num_slots = num_blocks.to(tl.int64) * BLOCK_SIZE
        is_move = (src >= 0) & (src < num_slots) & (dst >= 0) & (dst < num_slots)
        moved = is_move[:, None] & (dims < HEAD_SIZE)[None, :]
        src_at = (first_piece + src // BLOCK_SIZE * PIECES) * BLOCK_SIZE + src % BLOCK_SIZE
        dst_at = (first_piece + dst // BLOCK_SIZE * PIECES) * BLOCK_SIZE + dst % BLOCK_SIZE
        values = tl.load(cache_ptr + src_at[:, None] * HEAD_SIZE + dims[None, :], mask=moved, other=0)
        # All threads have read when the first one writes, and have written when the next moves are read.
        tl.debug_barrier()
        tl.store(cache_ptr + dst_at[:, None] * HEAD_SIZE + dims[None, :], values, mask=moved)
        tl.debug_barrier()
