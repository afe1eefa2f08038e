"""From a fused QKV projection to attention's inputs: norm and rotate heads, put K and V into the cache.

A head's neighbouring elements (2i, 2i + 1) are the real and imaginary part of a complex number, and rotary
position embedding is one complex product (RoFormer: Su et al., 2021):

    queries   norm (where the model has one), times exp(i * position * frequency), in place
    keys      the same, into the cache at the token's slot
    values    as they are, into the cache at the token's slot

A quantised cache holds keys and values divided by scales (tandem_kernels.quantize).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem_kernels import native
from tandem_kernels.checks import check_indices, check_kv_cache
from tandem_kernels.quantize import Scale, check_scales
from tandem_kernels.store_kv import store_kv


def rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotations: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> torch.Tensor:
    """Return the queries [T, Hq, D], a view of qkv.

    Args:
        qkv: [T, Hq + 2 * Hkv, D], dense: queries, keys, values; changed in place.
        positions: [T] int64, each in [0, P).
        rotations: [P, D / 2] complex64, dense: exp(i * position * frequency), times RoPE's attention factor.
        kv_cache: [num_blocks, 2, Hkv, block_size, D] as check_kv_cache wants it, of qkv's dtype, int8 or
            float8 (or one it is cast to); changed.
        slot_mapping: [T] int64, slots in [0, num_blocks * block_size), each token's its own.
        q_norm, k_norm: [D] weights of RMSNorm over each head, best float32, or None.
        k_scale, v_scale: for an int8 or float8 cache, a number or [Hkv] float32; or, per token,
            [num_blocks, Hkv, block_size] float32, written here. None is 1.

    Raises:
        ValueError: a shape, stride, dtype or device does not fit.
        IndexError: a position or a slot is out of range (CPU only; on CUDA such a token is not stored).
    """
    check_kv_cache(kv_cache)
    check_scales(kv_cache, k_scale, v_scale)
    check_indices("slot_mapping", slot_mapping, kv_cache.device)
    check_indices("positions", positions, kv_cache.device)
    num_blocks, _, num_kv_heads, block_size, head_size = kv_cache.shape
    num_tokens, total_heads, _ = qkv.shape
    num_heads = total_heads - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[2] != head_size or not qkv.is_contiguous():
        raise ValueError(
            f"qkv has shape {list(qkv.shape)} and strides {list(qkv.stride())}, wanted a dense "
            f"[T, Hq + 2 * {num_kv_heads}, {head_size}]"
        )
    if slot_mapping.shape[0] != num_tokens or positions.shape[0] != num_tokens:
        raise ValueError(
            f"positions and slot_mapping have {positions.shape[0]} and {slot_mapping.shape[0]} entries, "
            f"wanted {num_tokens}, one per token"
        )
    if rotations.dtype != torch.complex64 or rotations.shape[1:] != (head_size // 2,):
        raise ValueError(
            f"rotations has shape {list(rotations.shape)} and dtype {rotations.dtype}, "
            f"wanted [P, {head_size // 2}] complex64"
        )
    if qkv.is_cuda:
        from tandem_kernels.gpu import rope_store as gpu

        return gpu.rope_store(
            qkv, positions, rotations, kv_cache, slot_mapping,
            q_norm=q_norm, k_norm=k_norm, eps=eps, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    queries = qkv[:, :num_heads]
    q_norm, k_norm = (None if norm is None else norm.float() for norm in (q_norm, k_norm))
    if native.covers(head_size, qkv, kv_cache) and rotations.is_contiguous():
        assert native.LIBRARY is not None
        positions, slot_mapping = positions.long().contiguous(), slot_mapping.long().contiguous()
        wrong = native.LIBRARY.tandem_rope_store(
            qkv.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(), rotations.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(),
            kv_cache.data_ptr(), num_tokens, rotations.shape[0], num_blocks * block_size,
            num_heads, num_kv_heads, head_size, block_size, native.DTYPE[qkv.dtype], eps,
            torch.get_num_threads(),
        )  # fmt: skip
        if wrong >= 0:
            raise IndexError(
                f"token {wrong} has position {positions[wrong]} and slot {slot_mapping[wrong]}, "
                f"wanted them below {rotations.shape[0]} and {num_blocks * block_size}"
            )
        return queries
    keys, values = torch.split(qkv[:, num_heads:], num_kv_heads, dim=1)
    for heads, norm in ((queries, q_norm), (keys, k_norm)):
        if norm is not None:
            heads.copy_(F.rms_norm(heads.float(), (head_size,), norm, eps))
    _rotate_(qkv[:, : num_heads + num_kv_heads], rotations[positions].unsqueeze(1))
    store_kv(keys, values, kv_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return queries


def _rotate_(heads: torch.Tensor, rotation: torch.Tensor) -> None:
    """Rotate heads [T, H, D] in place by rotation [T, 1, D / 2] complex64, in float32."""
    pairs = heads.view(*heads.shape[:-1], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        rotated = torch.view_as_complex(pairs.float()).mul_(rotation)
        pairs.copy_(torch.view_as_real(rotated))
