"""The checks that the operators share; an error names the argument, what it is and what is wanted."""

from __future__ import annotations

import torch

INDEX_DTYPES = (torch.int32, torch.int64)


def check_kv_cache(kv_cache: torch.Tensor) -> None:
    """Raise ValueError unless kv_cache is a [num_blocks, 2, Hkv, block_size, D] that kernels can address.

    On a CPU: contiguous. On CUDA its first three dimensions may have any strides; the last two are dense.
    """
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}, wanted [num_blocks, 2, Hkv, block_size, D]"
        )
    heads_are_dense = kv_cache.stride(4) == 1 and kv_cache.stride(3) == kv_cache.shape[4]
    if not (heads_are_dense if kv_cache.is_cuda else kv_cache.is_contiguous()):
        raise ValueError(
            f"kv_cache has strides {list(kv_cache.stride())}, wanted one contiguous tensor per layer"
        )


def check_indices(name: str, indices: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless indices is a one-dimensional int32 or int64 tensor on device."""
    if indices.dim() != 1 or indices.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"{name} has shape {list(indices.shape)} and dtype {indices.dtype}, wanted one dimension of int64"
        )
    if indices.device != device:
        raise ValueError(f"{name} is on {indices.device}, wanted the cache's device {device}")
