"""rope_store in Triton: norm, rotation, quantisation and store, in one pass over the projection.

    program (t, g)   BLOCK_HEADS heads of token t, queries, keys and values alike, as rows of a tile
      queries        rotated in place
      keys, values   to the token's slot, in the cache's dtype; quantised from float32, not from a rounded key

QK norms over all heads together run before, in a launch of their own each.

A token whose slot lies outside the cache is stored nowhere.
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.checks import KVCache, keys_and_values
from tandem_kernels.elementwise import NORM_KINDS, NormWeights
from tandem_kernels.gpu import check_dense
from tandem_kernels.gpu.elementwise import norm_rows_in_place, normalized
from tandem_kernels.quantize import LARGEST, SMALLEST_SCALE, Scale, is_per_token

#: Elements of one program's tile, 8 to 16 a thread.
TILE = 1024


def rope_store(
    qkv: torch.Tensor, positions: torch.Tensor, rotations: torch.Tensor | None, kv_cache: KVCache,
    slot_mapping: torch.Tensor, *, q_norm: NormWeights | None = None, k_norm: NormWeights | None = None,
    v_norm: NormWeights | None = None, norm_whole: bool = False, norm_after_rope: bool = False,
    k_scale: Scale = None, v_scale: Scale = None,
) -> torch.Tensor:  # fmt: skip
    """Return the queries [T, Hq, D_k], a view of qkv; arguments as the public operator has checked them."""
    key_cache, value_cache = keys_and_values(kv_cache)
    if norm_whole and norm_after_rope:
        raise ValueError("norm_whole and norm_after_rope are both set, wanted one of them on a GPU")
    check_dense(qkv=qkv, positions=positions, rotations=rotations, slot_mapping=slot_mapping)
    for norm in (q_norm, k_norm, v_norm):
        if norm is not None:
            check_dense(weight=norm.weight, bias=norm.bias)
    if key_cache.dtype == torch.float8_e4m3fn and qkv.is_cuda and torch.cuda.get_device_capability() < (8, 9):
        raise ValueError(
            "kv_cache has dtype float8_e4m3fn, which this GPU cannot convert: use float8_e5m2 or int8"
        )
    num_blocks, num_kv_heads, block_size, k_dim = key_cache.shape
    v_dim = value_cache.shape[3]
    num_tokens, num_heads = len(qkv), (qkv.shape[1] - num_kv_heads * (k_dim + v_dim)) // k_dim
    query_size, key_size = num_heads * k_dim, num_kv_heads * k_dim
    queries = qkv[:, :query_size].view(num_tokens, num_heads, k_dim)
    if num_tokens == 0:
        return queries
    if norm_whole:
        for norm, begin, size in ((q_norm, 0, query_size), (k_norm, query_size, key_size)):
            if norm is not None:
                norm_rows_in_place(qkv[:, begin : begin + size], norm)
        q_norm = k_norm = None
    has_scales = k_scale is not None or v_scale is not None
    total_heads = num_heads + 2 * num_kv_heads
    block_dim = triton.next_power_of_2(max(k_dim, v_dim))
    block_heads, num_warps = choose_tile(total_heads, block_dim)
    norms = {"Q": q_norm, "K": k_norm, "V": v_norm}
    # Pointers a launch does not use still need a tensor to point to.
    unused = qkv
    rope_store_kernel[(num_tokens, triton.cdiv(total_heads, block_heads))](
        qkv, positions, unused if rotations is None else torch.view_as_real(rotations), slot_mapping,
        key_cache, value_cache,
        *(
            unused if norm is None or part is None else part
            for norm in norms.values()
            for part in ((None, None) if norm is None else (norm.weight, norm.bias))
        ),
        _scale_tensor(k_scale, key_cache) if has_scales else positions,
        _scale_tensor(v_scale, key_cache) if has_scales else positions,
        *(0.0 if norm is None else norm.eps for norm in norms.values()),
        # No position is too large for a model without a table of them.
        2**31 - 1 if rotations is None else rotations.shape[0], num_blocks,
        key_cache.stride(0), key_cache.stride(1), value_cache.stride(0), value_cache.stride(1),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, K_DIM=k_dim, V_DIM=v_dim, BLOCK_SIZE=block_size,
        ROPE_DIMS=0 if rotations is None else 2 * rotations.shape[1],
        BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim,
        **{f"{name}_NORM": 0 if norm is None else NORM_KINDS[norm.kind] for name, norm in norms.items()},
        WEIGHTS=_mask(norms, "weight"), BIASES=_mask(norms, "bias"), NORM_AFTER_ROPE=norm_after_rope,
        HAS_SCALES=has_scales, PER_TOKEN=is_per_token(k_scale),
        LARGEST_STORED=LARGEST.get(key_cache.dtype, 0.0), MIN_SCALE=SMALLEST_SCALE,
        num_warps=num_warps,
    )  # fmt: skip
    return queries


def _mask(norms: dict[str, NormWeights | None], part: str) -> int:
    """Which of the norms of Q, K and V have this part: bits 0, 1 and 2."""
    return sum(
        1 << n
        for n, norm in enumerate(norms.values())
        if norm is not None and getattr(norm, part) is not None
    )


def choose_tile(total_heads: int, block_dim: int) -> tuple[int, int]:
    """Heads per program and its warps."""
    block_heads = min(max(TILE // block_dim, 1), triton.next_power_of_2(total_heads))
    return block_heads, 4 if block_heads * block_dim >= TILE else 2


def _scale_tensor(scale: Scale, key_cache: torch.Tensor) -> torch.Tensor:
    """[Hkv] float32, or the tensor of scales per token itself."""
    if is_per_token(scale):
        return scale
    if isinstance(scale, torch.Tensor):
        return scale.expand(key_cache.shape[1]).contiguous()
    return torch.full(
        (key_cache.shape[1],), 1.0 if scale is None else scale, dtype=torch.float32, device=key_cache.device
    )


@triton.jit
def to_cache_dtype(x, dtype: tl.constexpr):
    """x float32 within dtype's range, to the nearest number of dtype."""
    if dtype == tl.int8:
        # Adding 1.5 * 2^23 leaves no bits for fractions; it rounds halves to even, as torch does.
        x = (x + 12582912.0) - 12582912.0
    return x.to(dtype)


@triton.jit
def normed_heads(
    x, dims, is_dim, chosen, size, weight_ptr, bias_ptr, eps,
    KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """x [heads, dims] with the norm of the chosen heads, in which `size` dims count."""
    if KIND > 0:
        normed = normalized(
            x, dims[None, :], is_dim, size, weight_ptr, bias_ptr, eps, KIND, HAS_WEIGHT, HAS_BIAS
        )
        x = tl.where(chosen[:, None], normed, x)
    return x


@triton.jit(do_not_specialize=("num_positions", "num_blocks"))
def rope_store_kernel(
    qkv_ptr, positions_ptr, rotations_ptr, slot_mapping_ptr, key_cache_ptr, value_cache_ptr,
    q_weight_ptr, q_bias_ptr, k_weight_ptr, k_bias_ptr, v_weight_ptr, v_bias_ptr, k_scale_ptr, v_scale_ptr,
    q_eps, k_eps, v_eps, num_positions, num_blocks,
    k_block_stride, k_head_stride, v_block_stride, v_head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROPE_DIMS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, V_NORM: tl.constexpr,
    WEIGHTS: tl.constexpr, BIASES: tl.constexpr, NORM_AFTER_ROPE: tl.constexpr,
    HAS_SCALES: tl.constexpr, PER_TOKEN: tl.constexpr, LARGEST_STORED: tl.constexpr, MIN_SCALE: tl.constexpr,
):  # fmt: skip
    FIRST_VALUE: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    TOTAL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    ROW: tl.constexpr = FIRST_VALUE * K_DIM + NUM_KV_HEADS * V_DIM
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    is_query = heads < NUM_HEADS
    is_value = heads >= FIRST_VALUE
    is_key = (heads >= NUM_HEADS) & (heads < FIRST_VALUE)
    is_dim = dims[None, :] < tl.where(is_value, V_DIM, K_DIM)[:, None]
    inside = (heads < TOTAL)[:, None] & is_dim
    first = tl.where(is_value, FIRST_VALUE * K_DIM + (heads - FIRST_VALUE) * V_DIM, heads * K_DIM)
    qkv_ptrs = qkv_ptr + token * ROW + first[:, None] + dims[None, :]
    x = tl.load(qkv_ptrs, mask=inside, other=0.0).to(tl.float32)

    if not NORM_AFTER_ROPE:
        x = normed_heads(x, dims, is_dim, is_query, K_DIM, q_weight_ptr, q_bias_ptr, q_eps,
                         Q_NORM, WEIGHTS % 2 == 1, BIASES % 2 == 1)  # fmt: skip
        x = normed_heads(x, dims, is_dim, is_key, K_DIM, k_weight_ptr, k_bias_ptr, k_eps,
                         K_NORM, WEIGHTS // 2 % 2 == 1, BIASES // 2 % 2 == 1)  # fmt: skip
    position = tl.load(positions_ptr + token).to(tl.int64)
    known = (position >= 0) & (position < num_positions)
    if ROPE_DIMS > 0:
        is_rotated = dims < ROPE_DIMS
        rotation = tl.load(rotations_ptr + position * ROPE_DIMS + dims, mask=is_rotated & known, other=0.0)
        cos, sin = tl.split(tl.reshape(rotation, [BLOCK_DIM // 2, 2]))
        real, imag = tl.split(tl.reshape(x, [BLOCK_HEADS, BLOCK_DIM // 2, 2]))
        rotated = tl.join(
            real * cos[None, :] - imag * sin[None, :], real * sin[None, :] + imag * cos[None, :]
        )
        rotated = tl.reshape(rotated, [BLOCK_HEADS, BLOCK_DIM])
        x = tl.where(is_value[:, None] | ~is_rotated[None, :], x, rotated)
    if NORM_AFTER_ROPE:
        x = normed_heads(x, dims, is_dim, is_query, K_DIM, q_weight_ptr, q_bias_ptr, q_eps,
                         Q_NORM, WEIGHTS % 2 == 1, BIASES % 2 == 1)  # fmt: skip
        x = normed_heads(x, dims, is_dim, is_key, K_DIM, k_weight_ptr, k_bias_ptr, k_eps,
                         K_NORM, WEIGHTS // 2 % 2 == 1, BIASES // 2 % 2 == 1)  # fmt: skip
    x = normed_heads(x, dims, is_dim, is_value, V_DIM, v_weight_ptr, v_bias_ptr, v_eps,
                     V_NORM, WEIGHTS // 4 == 1, BIASES // 4 == 1)  # fmt: skip
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
    x = to_cache_dtype(x, key_cache_ptr.dtype.element_ty)
    key_at = block_id * k_block_stride + kv_heads.to(tl.int64) * k_head_stride + offset * K_DIM
    tl.store(key_cache_ptr + key_at[:, None] + dims[None, :], x, mask=(stored & is_key)[:, None] & is_dim)
    value_at = block_id * v_block_stride + kv_heads.to(tl.int64) * v_head_stride + offset * V_DIM
    tl.store(
        value_cache_ptr + value_at[:, None] + dims[None, :], x, mask=(stored & is_value)[:, None] & is_dim
    )
