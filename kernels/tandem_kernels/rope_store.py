"""From a fused QKV projection to attention's inputs: norm and rotate heads, put K and V into the cache.

A head's neighbouring elements (2i, 2i + 1) are the real and imaginary part of a complex number, and rotary
position embedding is one complex product (RoFormer: Su et al., 2021):

    queries   norm (where the model has one), times exp(i * position * frequency), in place
    keys      the same, into the cache at the token's slot
    values    norm (where the model has one), into the cache at the token's slot

Some models rotate the first elements of a head alone, or none; in some the norm follows the rotation, or
spans all heads. A quantised cache holds keys and values divided by scales (tandem_kernels.quantize).
"""

from __future__ import annotations

import ctypes

import torch

from tandem_kernels import native
from tandem_kernels.checks import KVCache, check_indices, check_kv_cache, is_dense_cache, keys_and_values
from tandem_kernels.elementwise import NormWeights, native_norm
from tandem_kernels.quantize import Scale, check_scales
from tandem_kernels.store_kv import store_kv


def rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotations: torch.Tensor | None,
    kv_cache: KVCache,
    slot_mapping: torch.Tensor,
    *,
    q_norm: NormWeights | None = None,
    k_norm: NormWeights | None = None,
    v_norm: NormWeights | None = None,
    norm_whole: bool = False,
    norm_after_rope: bool = False,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> torch.Tensor:
    """Return the queries [T, Hq, D_k], a view of qkv.

    Args:
        qkv: [T, Hq * D_k + Hkv * (D_k + D_v)], dense: queries, keys, values; changed in place.
        positions: [T] int64, each in [0, P).
        rotations: [P, R / 2] complex64, dense: exp(i * position * frequency), times RoPE's attention factor,
            for the first R <= D_k elements of each head. None: nothing is rotated.
        kv_cache: a KVCache as check_kv_cache wants it, of qkv's dtype, int8 or float8 (or one it is cast to);
            changed.
        slot_mapping: [T] int64, slots in [0, num_blocks * block_size), each token's its own.
        q_norm, k_norm, v_norm: over each head, with weights [D]; q_norm and k_norm, if norm_whole, over all
            heads together, with weights [Hq * D_k] and [Hkv * D_k].
        norm_after_rope: q_norm and k_norm follow the rotation.
        k_scale, v_scale: for an int8 or float8 cache, a number or [Hkv] float32; or, per token,
            [num_blocks, Hkv, block_size] float32, written here. None is 1.

    Raises:
        ValueError: a shape, stride, dtype or device does not fit.
        IndexError: a position or a slot is out of range (CPU only; on CUDA such a token is not stored).
    """
    check_kv_cache(kv_cache)
    key_cache, value_cache = keys_and_values(kv_cache)
    check_scales(key_cache, k_scale, v_scale)
    check_indices("slot_mapping", slot_mapping, key_cache.device)
    check_indices("positions", positions, key_cache.device)
    num_blocks, num_kv_heads, block_size, k_dim = key_cache.shape
    v_dim = value_cache.shape[3]
    num_tokens = len(qkv)
    num_heads, rest = divmod(qkv.shape[-1] - num_kv_heads * (k_dim + v_dim), k_dim)
    if qkv.dim() != 2 or num_heads < 1 or rest or not qkv.is_contiguous():
        raise ValueError(
            f"qkv has shape {list(qkv.shape)} and strides {list(qkv.stride())}, wanted a dense "
            f"[T, Hq * {k_dim} + {num_kv_heads} * ({k_dim} + {v_dim})]"
        )
    if slot_mapping.shape[0] != num_tokens or positions.shape[0] != num_tokens:
        raise ValueError(
            f"positions and slot_mapping have {positions.shape[0]} and {slot_mapping.shape[0]} entries, "
            f"wanted {num_tokens}, one per token"
        )
    if rotations is not None and (
        rotations.dtype != torch.complex64 or rotations.dim() != 2 or not 0 < rotations.shape[1] <= k_dim // 2
    ):
        raise ValueError(
            f"rotations has shape {list(rotations.shape)} and dtype {rotations.dtype}, "
            f"wanted [P, {k_dim // 2}] complex64, or fewer columns"
        )
    for name, norm, width in (
        ("q_norm", q_norm, k_dim * (num_heads if norm_whole else 1)),
        ("k_norm", k_norm, k_dim * (num_kv_heads if norm_whole else 1)),
        ("v_norm", v_norm, v_dim),
    ):
        if norm is not None:
            norm.check(name, width)
    if qkv.is_cuda:
        from tandem_kernels.gpu import rope_store as gpu

        return gpu.rope_store(
            qkv, positions, rotations, kv_cache, slot_mapping, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm,
            norm_whole=norm_whole, norm_after_rope=norm_after_rope, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    queries, keys, values = _heads(qkv, num_heads, num_kv_heads, k_dim, v_dim)
    if (
        native.covers(k_dim, qkv)
        and native.covers(v_dim, qkv)
        and qkv.dtype == key_cache.dtype
        and is_dense_cache(kv_cache)
        and (rotations is None or rotations.is_contiguous())
    ):
        assert native.LIBRARY is not None
        positions, slot_mapping = positions.long().contiguous(), slot_mapping.long().contiguous()
        norms = [None if norm is None else norm.float() for norm in (q_norm, k_norm, v_norm)]
        heads = native_heads(
            norms, rotations, (num_heads, num_kv_heads, k_dim, v_dim), norm_whole, norm_after_rope
        )
        wrong = native.LIBRARY.tandem_rope_store(
            ctypes.byref(heads), qkv.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(),
            key_cache.data_ptr(), num_tokens, num_blocks * block_size, block_size, native.DTYPE[qkv.dtype],
            torch.get_num_threads(),
        )  # fmt: skip
        if wrong >= 0:
            raise IndexError(
                f"token {wrong} has position {positions[wrong]} and slot {slot_mapping[wrong]}, "
                f"wanted them below {heads.num_positions} and {num_blocks * block_size}"
            )
        return queries
    for given, norm in ((queries, q_norm), (keys, k_norm)):
        if not norm_after_rope:
            _norm_(given, norm, whole=norm_whole)
        if rotations is not None:
            _rotate_(given, rotations[positions].unsqueeze(1))
        if norm_after_rope:
            _norm_(given, norm, whole=norm_whole)
    _norm_(values, v_norm, whole=False)
    store_kv(keys, values, kv_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return queries


def native_heads(
    norms: list[NormWeights | None],
    rotations: torch.Tensor | None,
    shape: tuple[int, int, int, int],
    norm_whole: bool,
    norm_after_rope: bool,
) -> native.Heads:
    """The kernels' description; holds no reference to the tensors. norms of q, k, v, float32; shape: Hq, Hkv,
    D_k, D_v."""
    return native.Heads(
        *map(native_norm, norms),
        None if rotations is None else rotations.data_ptr(),
        # No position is too large for a model without a table of them.
        2**63 - 1 if rotations is None else len(rotations),
        0 if rotations is None else 2 * rotations.shape[1],
        *shape,
        norm_whole,
        norm_after_rope,
    )


def _heads(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views: queries [T, Hq, D_k], keys [T, Hkv, D_k], values [T, Hkv, D_v]."""
    sizes = [num_heads * k_dim, num_kv_heads * k_dim, num_kv_heads * v_dim]
    queries, keys, values = torch.split(qkv, sizes, 1)
    return (
        queries.view(-1, num_heads, k_dim),
        keys.view(-1, num_kv_heads, k_dim),
        values.view(-1, num_kv_heads, v_dim),
    )


def _norm_(heads: torch.Tensor, norm: NormWeights | None, *, whole: bool) -> None:
    """Norm heads [T, H, D] in place."""
    if norm is not None:
        heads.copy_(norm(heads.flatten(1)).view(heads.shape) if whole else norm(heads))


def _rotate_(heads: torch.Tensor, rotation: torch.Tensor) -> None:
    """Rotate the first R elements of heads [T, H, D] in place by rotation [T, 1, R / 2] complex64, in
    float32."""
    num_pairs = rotation.shape[2]
    rotated = heads[..., : 2 * num_pairs]
    pairs = rotated.float().contiguous().view(*heads.shape[:2], num_pairs, 2)
    rotated.copy_(torch.view_as_real(torch.view_as_complex(pairs).mul_(rotation)).flatten(2))
