"""gather_blocks and scatter_blocks in Triton: one launch, whatever the strides between blocks and heads.

program (i, p)   piece p = K or V of one head, [block_size, D] and dense, of the i-th block listed
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.gpu import check_dense

CHUNK_BYTES = 8192


def gather_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return [n, 2, Hkv, block_size, D], contiguous; an id outside the cache leaves its part undefined."""
    payload = torch.empty(
        block_ids.shape[0], *kv_cache.shape[1:], dtype=kv_cache.dtype, device=kv_cache.device
    )
    _copy(kv_cache, block_ids, payload, to_cache=False)
    return payload


def scatter_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor, payload: torch.Tensor) -> None:
    """Overwrite blocks with payload [n, 2, Hkv, block_size, D]; an id outside the cache is left out."""
    _copy(kv_cache, block_ids, payload.contiguous(), to_cache=True)


def _copy(kv_cache: torch.Tensor, block_ids: torch.Tensor, payload: torch.Tensor, to_cache: bool) -> None:
    check_dense(block_ids=block_ids)
    if not payload.numel():
        return
    num_blocks, _, num_kv_heads, block_size, head_size = kv_cache.shape
    # Bits are moved, not numbers.
    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kv_cache.element_size()]
    copy_blocks_kernel[(block_ids.shape[0], 2 * num_kv_heads)](
        kv_cache.view(as_bits), payload.view(as_bits), block_ids, num_blocks, num_kv_heads,
        kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2),
        PIECE=block_size * head_size, CHUNK=CHUNK_BYTES // kv_cache.element_size(), TO_CACHE=to_cache,
    )  # fmt: skip


@triton.jit
def copy_blocks_kernel(
    cache_ptr, payload_ptr, block_ids_ptr, num_blocks, num_kv_heads,
    block_stride, kv_stride, head_stride,
    PIECE: tl.constexpr, CHUNK: tl.constexpr, TO_CACHE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    block_id = tl.load(block_ids_ptr + i).to(tl.int64)
    if (block_id < 0) | (block_id >= num_blocks):
        return
    cache_ptr += block_id * block_stride
    cache_ptr += (piece // num_kv_heads).to(tl.int64) * kv_stride
    cache_ptr += (piece % num_kv_heads).to(tl.int64) * head_stride
    payload_ptr += (i * 2 * num_kv_heads + piece) * PIECE
    for first in range(0, PIECE, CHUNK):
        offsets = first + tl.arange(0, CHUNK)
        inside = offsets < PIECE
        if TO_CACHE:
            tl.store(cache_ptr + offsets, tl.load(payload_ptr + offsets, mask=inside), mask=inside)
        else:
            tl.store(payload_ptr + offsets, tl.load(cache_ptr + offsets, mask=inside), mask=inside)
