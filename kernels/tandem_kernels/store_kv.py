"""Write the K and V of newly computed tokens into their slots of the paged cache.

kv_cache[slot // block_size, 0, h, slot % block_size] = key[t, h]      for slot = slot_mapping[t]
kv_cache[slot // block_size, 1, h, slot % block_size] = value[t, h]

A quantised cache holds key / k_scale and value / v_scale instead (tandem_kernels.quantize).
"""

from __future__ import annotations

import torch

from tandem_kernels.checks import KVCache, check_indices, check_kv_cache, keys_and_values
from tandem_kernels.quantize import LARGEST, Scale, check_scales, is_per_token, quantize, token_scales


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: KVCache,
    slot_mapping: torch.Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Store T tokens in place; a token's slot must be its own, or which one wins is undefined.

    Args:
        key, value: [T, Hkv, D_k] and [T, Hkv, D_v], the cache's dtype (or one it is cast to), any strides.
        kv_cache: as check_kv_cache wants it; changed.
        slot_mapping: [T] int64, slots in [0, num_blocks * block_size).
        k_scale, v_scale: for an int8 or float8 cache, a number or [Hkv] float32; or, per token,
            [num_blocks, Hkv, block_size] float32, written here. None is 1.

    Raises:
        ValueError: a shape, stride, dtype or device does not fit.
        IndexError: a slot lies outside the cache (CPU only; on CUDA a device assertion).
    """
    check_kv_cache(kv_cache)
    parts = keys_and_values(kv_cache)
    check_indices("slot_mapping", slot_mapping, parts[0].device)
    _, num_kv_heads, block_size, _ = parts[0].shape
    for name, tensor, part in (("key", key, parts[0]), ("value", value, parts[1])):
        wanted = (slot_mapping.shape[0], num_kv_heads, part.shape[3])
        if tensor.shape != wanted:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, wanted [T, Hkv, D] = {list(wanted)}")
    check_scales(parts[0], k_scale, v_scale)
    block_ids = slot_mapping // block_size
    offsets = slot_mapping % block_size
    for tensor, scale, part in ((key, k_scale, parts[0]), (value, v_scale, parts[1])):
        if part.dtype in LARGEST:
            tensor = _quantized(tensor, scale, part.dtype, block_ids, offsets)
        # As bits, since torch indexes no float8. The indexed dimensions come first: [T, Hkv, D].
        as_bits = torch.uint8 if part.element_size() == 1 else part.dtype
        slots_first = part.view(as_bits).transpose(1, 2)
        slots_first.index_put_((block_ids, offsets), tensor.to(part.dtype).view(as_bits))


def _quantized(
    x: torch.Tensor, scale: Scale, dtype: torch.dtype, block_ids: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """x [T, Hkv, D] in dtype; scales per token are computed and put into their slots."""
    if is_per_token(scale):
        own = token_scales(x, dtype)
        scale.permute(0, 2, 1).index_put_((block_ids, offsets), own)
        return quantize(x, own[:, :, None], dtype)
    given = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=x.device)
    return quantize(x, given.reshape(-1, 1), dtype)
