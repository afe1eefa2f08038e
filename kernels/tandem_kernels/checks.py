"""The checks that the operators share; an error names the argument, what it is and what is wanted."""

from __future__ import annotations

from typing import TypeAlias

import torch

INDEX_DTYPES = (torch.int32, torch.int64)

#: One layer's cache: [num_blocks, 2, Hkv, block_size, D], or K [num_blocks, Hkv, block_size, D_k] and V
#: [num_blocks, Hkv, block_size, D_v] as two views of one memory, in which a block's V follows its K.
KVCache: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def keys_and_values(kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K [num_blocks, Hkv, block_size, D_k] and V [num_blocks, Hkv, block_size, D_v]."""
    return kv_cache if isinstance(kv_cache, tuple) else (kv_cache[:, 0], kv_cache[:, 1])


def split_cache(
    blocks: torch.Tensor, num_kv_heads: int, block_size: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's blocks [num_blocks, Hkv * block_size * (D_k + D_v)], dense, as K and V."""
    keys, values = torch.split(blocks, [num_kv_heads * block_size * dim for dim in (k_dim, v_dim)], 1)
    shape = len(blocks), num_kv_heads, block_size
    return keys.view(*shape, k_dim), values.view(*shape, v_dim)


def is_dense_cache(kv_cache: KVCache) -> bool:
    """Whether the blocks are one contiguous piece of memory, each with K of all heads before V of all."""
    if isinstance(kv_cache, torch.Tensor):
        return kv_cache.is_contiguous()
    keys, values = kv_cache
    size = keys[0].numel() + values[0].numel() if len(keys) else 0
    return (
        keys.stride(0) == values.stride(0) == size
        and keys[:1].is_contiguous()
        and values[:1].is_contiguous()
        and values.data_ptr() - keys.data_ptr() == keys[0].numel() * keys.element_size()
    )


def check_kv_cache(kv_cache: KVCache) -> None:
    """Raise ValueError unless kv_cache is a KVCache that kernels can address.

    On a CPU: dense. On CUDA the dimensions of blocks, of K and V and of heads may have any strides; the last
    two are dense.
    """
    if isinstance(kv_cache, torch.Tensor) and (kv_cache.dim() != 5 or kv_cache.shape[1] != 2):
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}, wanted [num_blocks, 2, Hkv, block_size, D]"
        )
    keys, values = keys_and_values(kv_cache)
    if keys.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
        raise ValueError(
            f"kv_cache has K {list(keys.shape)} of {keys.dtype} and V {list(values.shape)} of "
            f"{values.dtype}, wanted [num_blocks, Hkv, block_size, D] of one dtype"
        )
    heads_are_dense = all(part.stride()[2:] == (part.shape[3], 1) for part in (keys, values))
    if not (heads_are_dense if keys.is_cuda else is_dense_cache(kv_cache)):
        raise ValueError(
            f"kv_cache has strides {list(keys.stride())} and {list(values.stride())} of K and V, wanted one "
            f"contiguous tensor per layer"
        )


def check_indices(name: str, indices: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless indices is a one-dimensional int32 or int64 tensor on device."""
    if indices.dim() != 1 or indices.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"{name} has shape {list(indices.shape)} and dtype {indices.dtype}, wanted one dimension of int64"
        )
    if indices.device != device:
        raise ValueError(f"{name} is on {indices.device}, wanted the cache's device {device}")
