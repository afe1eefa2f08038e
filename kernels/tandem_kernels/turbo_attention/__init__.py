"""Attention of new tokens over the paged KV cache, one call for any mix of sequences.

A sequence's new tokens are one of
    causal   a prefill chunk or a plain decode step: row i sees the context and new tokens 0..i;
    a tree   a draft to verify: row i sees the context and the new tokens j whose bit j is set in its bits.

The new tokens' own K and V are in the cache already (`store_kv`), row i's at logical slot
seq_lens[b] - n_b + i.

    reference    the definition, slow
    torch        few calls of torch's fused attention, CPU tensors
    cpu          the compiled kernel where it exists and covers the dtype and head size, else torch
    triton       CUDA tensors; needs Triton
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from tandem_kernels.checks import KVCache
from tandem_kernels.turbo_attention.cpu_native import NativeAttention
from tandem_kernels.turbo_attention.cpu_torch import TorchAttention
from tandem_kernels.turbo_attention.interface import (
    MAX_GPU_HEAD_SIZE,
    MAX_HEAD_SIZE,
    MAX_TREE_NODES,
    Attention,
    AttentionLayer,
    AttentionMetadata,
)
from tandem_kernels.turbo_attention.reference import ReferenceAttention

__all__ = [
    "MAX_GPU_HEAD_SIZE",
    "MAX_HEAD_SIZE",
    "MAX_TREE_NODES",
    "Attention",
    "AttentionLayer",
    "AttentionMetadata",
    "make_attention",
    "turbo_attention",
]

Backend = Literal["auto", "reference", "torch", "cpu", "triton"]


def make_attention(
    dtype: torch.dtype,
    head_size: int,
    device: torch.device,
    *,
    backend: Backend = "auto",
    interleaved: bool = False,
) -> Attention:
    """The backend for queries of this dtype and head size on this device.

    Args:
        backend: "auto" is "triton" for CUDA devices and "cpu" for CPUs.
        interleaved: caches lie as `interleave` says; backend "cpu" alone, where `runs_interleaved`.

    Raises:
        ValueError: the backend is unknown or reads no interleaved cache.
        ImportError: backend "triton" where Triton is not installed.
    """
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "cpu"
    if interleaved and backend != "cpu":
        raise ValueError(f'backend {backend!r} reads no interleaved cache, only "cpu" does')
    if backend == "cpu" and (interleaved or NativeAttention.covers(dtype, head_size)):
        return NativeAttention(interleaved=interleaved)
    if backend in ("cpu", "torch"):
        return TorchAttention()
    if backend == "reference":
        return ReferenceAttention()
    if backend == "triton":
        # Imported on demand: Triton is an extra, absent on CPU-only installations.
        if importlib.util.find_spec("triton") is None:
            raise ImportError('backend "triton" needs Triton: install the extra, pip install "tandem[gpu]"')
        from tandem_kernels.turbo_attention.triton_backend import TritonAttention

        return TritonAttention()
    raise ValueError(f'backend is {backend!r}, wanted "auto", "reference", "torch", "cpu" or "triton"')


def turbo_attention(
    query: torch.Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    layer: AttentionLayer,
    *,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
    interleaved: bool = False,
) -> torch.Tensor:
    """One layer of one step: `make_attention`, `prepare` and `run` in a call."""
    attention = make_attention(
        query.dtype, query.shape[-1], query.device, backend=backend, interleaved=interleaved
    )
    attention.prepare(metadata)
    return attention.run(query, kv_cache, layer, out)
