"""Attention of new tokens over the paged KV cache, one call for any mix of sequences.

    sequence b   |<------------- seq_lens[b] ------------->|
                 |<- context ->|<- n_b new tokens: rows  ->|
                               query_start_loc[b] : query_start_loc[b + 1] of query

A sequence's new tokens are one of
    causal   a prefill chunk or a plain decode step: row i sees the context and new tokens 0..i;
    a tree   a draft to verify: row i sees the context and the new tokens j whose bit j is set in its bits.

The new tokens' own K and V are in the cache already (`store_kv`), row i's at logical slot
seq_lens[b] - n_b + i.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Literal

import torch

from tandem_kernels.turbo_attention import cpu, cpu_torch, reference
from tandem_kernels.turbo_attention.inputs import MAX_TREE_NODES, AttentionInputs

if TYPE_CHECKING:
    from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

__all__ = ["MAX_TREE_NODES", "turbo_attention"]

Backend = Literal["auto", "reference", "torch", "cpu", "triton"]


def turbo_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    ancestor_bits: torch.Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
    plan: AttentionPlan | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Attend with T new tokens of B sequences to their cached K and V.

    Which sequences are trees: those with at most 64 new tokens whose first row has bits other than 0 (the
    root's bits are 1). All others are causal, whatever else their bits say; give them bits 0.

    Args:
        query: [T, Hq, D] float32, float16, bfloat16 or float64; last dimension dense. RoPE applied.
        kv_cache: [num_blocks, 2, Hkv, block_size, D], the last two dimensions dense, the query's dtype, int8
            or float8; Hq is a multiple of Hkv, and query head h reads K/V head h // (Hq // Hkv).
        block_table: [B, max_blocks] int32; entry i of a row holds logical slots
            [i * block_size, (i + 1) * block_size). Entries beyond the sequence's length are not read.
        seq_lens: [B] int32, tokens in the cache, the new ones included.
        query_start_loc: [B + 1] int32, rows of sequence b are [query_start_loc[b], query_start_loc[b + 1]).
        ancestor_bits: [T] int64, None when all sequences are causal. Bit j of row i is set when node j
            of the same sequence is i itself or an ancestor of it; bit 63 is the sign bit. Node i sees itself
            (the CPU backend checks that).
        scale: factor of the dot products, usually D ** -0.5.
        window: sliding window in tokens, the row's own included: position p sees positions > p - window.
            Distances are in positions, not slots: a tree node's position is the root's plus its depth,
            the number of its bits less one.
        softcap: logits become softcap * tanh(logits / softcap), before the mask and the sinks.
        sinks: [Hq], per head one more logit in the softmax's denominator, with no value; not scaled, not
            capped.
        k_scale, v_scale: dequantisation factors of K and V: a number, one per K/V head [Hkv], or one per
            token and K/V head, float32 [num_blocks, Hkv, block_size] with any strides.
        out: [T, Hq, D] of the query's dtype to write to; a new tensor when None.
        backend: "auto" is "triton" for CUDA tensors and "cpu" for CPU tensors. "cpu" is the compiled kernel
            where it exists and covers the call, else "torch": few calls of torch's fused attention.
            "reference" is the definition, slow.
        plan: the step's work list for backend "triton", which the others ignore; None makes one for this call
            alone, with its workspace. Its last `update` must have been for these seq_lens and
            query_start_loc.
        interleaved: kv_cache lies as `interleave` says; backend "cpu" alone, where `runs_interleaved`.

    Returns:
        [T, Hq, D] of the query's dtype: out, or a new tensor. Rows past query_start_loc[B] are undefined.

    Raises:
        ValueError: an argument's shape, strides, dtype, device or value does not fit; the message names it.
        ImportError: backend "triton" where Triton is not installed.
    """
    inputs = AttentionInputs(
        query, kv_cache, block_table, seq_lens, query_start_loc, ancestor_bits,
        scale, window, softcap, sinks, k_scale, v_scale,
    )  # fmt: skip
    if out is not None and (out.shape != query.shape or out.dtype != query.dtype or out.stride(2) != 1):
        raise ValueError(
            f"out has shape {list(out.shape)}, strides {list(out.stride())} and dtype {out.dtype}, "
            f"wanted {list(query.shape)} of {query.dtype}, dense in the last dimension"
        )
    if backend == "auto":
        backend = "triton" if query.is_cuda else "cpu"
    if backend == "cpu":
        return cpu.attend(inputs, out, interleaved)
    if interleaved:
        raise ValueError(f'backend {backend!r} reads no interleaved cache, only "cpu" does')
    if backend == "torch":
        return cpu_torch.attend(inputs, out)
    if backend == "reference":
        return reference.attend(inputs, out)
    if backend == "triton":
        # Imported on demand: Triton is an extra, absent on CPU-only installations.
        if importlib.util.find_spec("triton") is None:
            raise ImportError('backend "triton" needs Triton: install the extra, pip install "tandem[gpu]"')
        from tandem_kernels.turbo_attention.triton_launch import attend

        return attend(inputs, out, plan)
    raise ValueError(f'backend is {backend!r}, wanted "auto", "reference", "torch", "cpu" or "triton"')
