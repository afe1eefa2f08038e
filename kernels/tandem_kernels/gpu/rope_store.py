"""rope_store in Triton: norm, rotation, quantisation and store, in one pass over the projection.

    program (t, g)   BLOCK_HEADS heads of token t, queries, keys and values alike, as rows of a tile
      queries        rotated in place
      keys, values   to the token's slot, in the cache's dtype; quantised from float32, not from a rounded key

A token whose slot lies outside the cache is stored nowhere.
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.gpu import check_dense
from tandem_kernels.quantize import LARGEST, SMALLEST_SCALE, Scale, is_per_token

#: Elements of one program's tile, 8 to 16 a thread.
TILE = 1024


def rope_store(
    qkv: torch.Tensor, positions: torch.Tensor, rotations: torch.Tensor, kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor, *, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None,
    eps: float = 1e-6, k_scale: Scale = None, v_scale: Scale = None,
) -> torch.Tensor:  # fmt: skip
    """Return the queries [T, Hq, D], a view of qkv; arguments as the public operator has checked them."""
    check_dense(qkv=qkv, positions=positions, rotations=rotations, slot_mapping=slot_mapping)
    check_dense(q_norm=q_norm, k_norm=k_norm)
    if kv_cache.dtype == torch.float8_e4m3fn and qkv.is_cuda and torch.cuda.get_device_capability() < (8, 9):
        raise ValueError(
            "kv_cache has dtype float8_e4m3fn, which this GPU cannot convert: use float8_e5m2 or int8"
        )
    num_blocks, _, num_kv_heads, block_size, head_size = kv_cache.shape
    num_tokens, total_heads, _ = qkv.shape
    num_heads = total_heads - 2 * num_kv_heads
    queries = qkv[:, :num_heads]
    if num_tokens == 0:
        return queries
    has_scales = k_scale is not None or v_scale is not None
    block_dim = triton.next_power_of_2(head_size)
    block_heads, num_warps = choose_tile(total_heads, block_dim)
    # Pointers a launch does not use still need a tensor to point to.
    rope_store_kernel[(num_tokens, triton.cdiv(total_heads, block_heads))](
        qkv, positions, torch.view_as_real(rotations), slot_mapping, kv_cache,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        _scale_tensor(k_scale, kv_cache) if has_scales else positions,
        _scale_tensor(v_scale, kv_cache) if has_scales else positions,
        eps, rotations.shape[0], num_blocks, kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim,
        HAS_Q_NORM=q_norm is not None, HAS_K_NORM=k_norm is not None,
        HAS_SCALES=has_scales, PER_TOKEN=is_per_token(k_scale),
        LARGEST_STORED=LARGEST.get(kv_cache.dtype, 0.0), MIN_SCALE=SMALLEST_SCALE,
        num_warps=num_warps,
    )  # fmt: skip
    return queries


def choose_tile(total_heads: int, block_dim: int) -> tuple[int, int]:
    """Heads per program and its warps."""
    block_heads = min(max(TILE // block_dim, 1), triton.next_power_of_2(total_heads))
    return block_heads, 4 if block_heads * block_dim >= TILE else 2


def _scale_tensor(scale: Scale, kv_cache: torch.Tensor) -> torch.Tensor:
    """[Hkv] float32, or the tensor of scales per token itself."""
    if is_per_token(scale):
        return scale
    if isinstance(scale, torch.Tensor):
        return scale.expand(kv_cache.shape[2]).contiguous()
    return torch.full(
        (kv_cache.shape[2],), 1.0 if scale is None else scale, dtype=torch.float32, device=kv_cache.device
    )


@triton.jit
def to_cache_dtype(x, dtype: tl.constexpr):
    """x float32 within dtype's range, to the nearest number of dtype."""
    if dtype == tl.int8:
        # Adding 1.5 * 2^23 leaves no bits for fractions; it rounds halves to even, as torch does.
        x = (x + 12582912.0) - 12582912.0
    return x.to(dtype)


@triton.jit(do_not_specialize=("num_positions", "num_blocks"))
def rope_store_kernel(
    qkv_ptr, positions_ptr, rotations_ptr, slot_mapping_ptr, cache_ptr, q_norm_ptr, k_norm_ptr,
    k_scale_ptr, v_scale_ptr,
    eps, num_positions, num_blocks, block_stride, kv_stride, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr, PER_TOKEN: tl.constexpr, LARGEST_STORED: tl.constexpr, MIN_SCALE: tl.constexpr,
):  # fmt: skip
    FIRST_VALUE: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    TOTAL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    is_query = heads < NUM_HEADS
    is_value = heads >= FIRST_VALUE
    is_dim = dims < HEAD_SIZE
    inside = (heads < TOTAL)[:, None] & is_dim[None, :]
    qkv_ptrs = qkv_ptr + (token * TOTAL + heads[:, None]) * HEAD_SIZE + dims[None, :]
    x = tl.load(qkv_ptrs, mask=inside, other=0.0).to(tl.float32)

    if HAS_Q_NORM or HAS_K_NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / HEAD_SIZE + eps)
        if HAS_Q_NORM:
            weight = tl.load(q_norm_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
            x = tl.where(is_query[:, None], x * scale[:, None] * weight[None, :], x)
        if HAS_K_NORM:
            weight = tl.load(k_norm_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
            x = tl.where((is_query | is_value)[:, None], x, x * scale[:, None] * weight[None, :])

    position = tl.load(positions_ptr + token).to(tl.int64)
    known = (position >= 0) & (position < num_positions)
    rotation = tl.load(rotations_ptr + position * HEAD_SIZE + dims, mask=is_dim & known, other=0.0)
    cos, sin = tl.split(tl.reshape(rotation, [BLOCK_DIM // 2, 2]))
    real, imag = tl.split(tl.reshape(x, [BLOCK_HEADS, BLOCK_DIM // 2, 2]))
    rotated = tl.join(real * cos[None, :] - imag * sin[None, :], real * sin[None, :] + imag * cos[None, :])
    x = tl.where(is_value[:, None], x, tl.reshape(rotated, [BLOCK_HEADS, BLOCK_DIM]))
    tl.store(qkv_ptrs, x.to(qkv_ptr.dtype.element_ty), mask=inside & is_query[:, None])

    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    stored = (slot >= 0) & (block_id < num_blocks) & (heads >= NUM_HEADS) & (heads < TOTAL)
    kv_heads = tl.where(is_value, heads - FIRST_VALUE, heads - NUM_HEADS)
    if LARGEST_STORED > 0.0:
        if PER_TOKEN:
            scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), LARGEST_STORED), MIN_SCALE)
            scale_at = (block_id * NUM_KV_HEADS + kv_heads) * BLOCK_SIZE + offset
            tl.store(k_scale_ptr + scale_at, scale, mask=stored & ~is_value)
            tl.store(v_scale_ptr + scale_at, scale, mask=stored & is_value)
            x = tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCK_HEADS, BLOCK_DIM]))
        elif HAS_SCALES:
            scale = tl.load(k_scale_ptr + kv_heads, mask=stored & ~is_value, other=1.0)
            v_scale = tl.load(v_scale_ptr + kv_heads, mask=stored & is_value, other=1.0)
            scale = tl.where(is_value, v_scale, scale)
            x = tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCK_HEADS, BLOCK_DIM]))
        x = tl.minimum(tl.maximum(x, -LARGEST_STORED), LARGEST_STORED)
    head_at = (
        block_id * block_stride + is_value.to(tl.int64) * kv_stride + kv_heads.to(tl.int64) * head_stride
    )
    tl.store(
        cache_ptr + head_at[:, None] + offset * HEAD_SIZE + dims[None, :],
        to_cache_dtype(x, cache_ptr.dtype.element_ty),
        mask=stored[:, None] & is_dim[None, :],
    )
