"""Attention through the Triton kernel, on CUDA tensors: what it covers, and one launch per layer.

Not covered: float64, head sizes above 256. `make_attention` imports this module on demand, because it needs
Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tandem_kernels.checks import KVCache
from tandem_kernels.quantize import Scale, is_per_token
from tandem_kernels.turbo_attention.interface import (
    MAX_GPU_HEAD_SIZE,
    MAX_TREE_NODES,
    Attention,
    AttentionLayer,
    AttentionMetadata,
    scale_per_kv_head,
)
from tandem_kernels.turbo_attention.triton_kernel import (
    HEAD_SCALE,
    NO_SCALE,
    TOKEN_SCALE,
    turbo_attention_kernel,
)
from tandem_kernels.turbo_attention.triton_plan import AttentionPlan


class TritonAttention(Attention):
    """Holds one plan per sliding window.

    Args:
        plans: kept from step to step, as a CUDA graph needs them; they must cover all windows and steps.
            None: each step makes its own, as large as the step, when the first layer of a window runs.
    """

    def __init__(self, plans: Iterable[AttentionPlan] | None = None) -> None:
        self._keeps_plans = plans is not None
        self._plans = {plan.window: plan for plan in plans or ()}

    @classmethod
    def for_steps(
        cls, windows: Iterable[int | None], *, beside: TritonAttention | None = None, **sizes: Any
    ) -> TritonAttention:
        """Plans for these windows and sizes (AttentionPlan's arguments), with one memory of partial results.

        beside: an attention, of steps at least as large, whose memory serves this one too.
        """
        shared = next(iter(beside._plans.values())) if beside is not None else None
        plans: list[AttentionPlan] = []
        for window in windows:
            plans.append(AttentionPlan(window=window, beside=shared, **sizes))
            shared = shared or plans[0]
        return cls(plans)

    def prepare(self, metadata: AttentionMetadata) -> None:
        super().prepare(metadata)
        if not self._keeps_plans:
            self._plans.clear()
        for plan in self._plans.values():
            plan.update(metadata.seq_lens, metadata.query_start_loc)

    def _run(
        self, query: torch.Tensor, kv_cache: KVCache, layer: AttentionLayer, out: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(kv_cache, tuple):
            raise ValueError('kv_cache has keys and values of two sizes, wanted one for backend "triton"')
        _check_covered(query, kv_cache)
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        metadata = self.metadata
        if len(query) == 0 or len(metadata.seq_lens) == 0:
            return out
        plan = self._plan(query, kv_cache, layer.window)
        tiles = plan.tiles
        _, _, num_kv_heads, block_size, head_size = kv_cache.shape
        k_scale, k_kind, k_strides = _scale(layer.k_scale, query, num_kv_heads)
        v_scale, v_kind, v_strides = _scale(layer.v_scale, query, num_kv_heads)
        # Pointers a launch does not use still need a tensor to point to: the query's.
        turbo_attention_kernel[(plan.num_programs,)](
            query, kv_cache, metadata.block_table, metadata.seq_lens, metadata.query_start_loc,
            query if metadata.ancestor_bits is None else metadata.ancestor_bits,
            query if layer.sinks is None else layer.sinks,
            k_scale, v_scale, out,
            plan.items, plan.num_items, plan.schedule, plan.counters, plan.partials, plan.maxima, plan.sums,
            layer.scale, layer.softcap or 0.0, layer.window or 0, plan.num_partial_rows,
            query.stride(0), query.stride(1), out.stride(0), out.stride(1), metadata.block_table.stride(0),
            kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), *k_strides, *v_strides,
            NUM_KV_HEADS=num_kv_heads, GROUP_SIZE=plan.group_size, HEAD_SIZE=head_size,
            BLOCK_SIZE=block_size, BLOCK_ROWS=tiles.block_rows, BLOCK_KEYS=tiles.block_keys,
            BLOCK_DIM=tiles.block_dim, MAX_NODES=MAX_TREE_NODES,
            HAS_BITS=metadata.ancestor_bits is not None, HAS_WINDOW=layer.window is not None,
            HAS_SOFTCAP=layer.softcap is not None, HAS_SINKS=layer.sinks is not None,
            K_SCALE=k_kind, V_SCALE=v_kind, KEY_STAGES=tiles.key_stages,
            num_warps=tiles.num_warps, maxnreg=tiles.max_registers,
        )  # fmt: skip
        return out

    def _plan(self, query: torch.Tensor, kv_cache: torch.Tensor, window: int | None) -> AttentionPlan:
        """The plan of layers with this window; ValueError if it is for another model or a smaller step."""
        num_tokens, num_heads, head_size = query.shape
        _, _, num_kv_heads, block_size, _ = kv_cache.shape
        metadata = self.metadata
        if window not in self._plans:
            if self._keeps_plans:
                raise ValueError(f"plans are for windows {[*self._plans]}, wanted this layer's {window}")
            self._plans[window] = AttentionPlan(
                max_tokens=num_tokens,
                max_seqs=metadata.seq_lens.shape[0],
                max_seq_len=metadata.block_table.shape[1] * block_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                dtype=query.dtype,
                cache_dtype=kv_cache.dtype,
                device=query.device,
                window=window,
            )
            self._plans[window].update(metadata.seq_lens, metadata.query_start_loc)
        plan = self._plans[window]
        for name, planned, given in (
            ("num_kv_heads", plan.num_kv_heads, num_kv_heads),
            ("group_size", plan.group_size, num_heads // num_kv_heads),
            ("head_size", plan.head_size, head_size),
            ("dtype", plan.dtype, query.dtype),
            ("cache_dtype", plan.cache_dtype, kv_cache.dtype),
        ):
            if planned != given:
                raise ValueError(f"plan is for {name} {planned}, wanted this call's {given}")
        if num_tokens > plan.max_tokens:
            raise ValueError(
                f"plan is for {plan.max_tokens} new tokens at most, wanted at least {num_tokens}"
            )
        return plan


def _scale(
    factor: Scale, query: torch.Tensor, num_kv_heads: int
) -> tuple[torch.Tensor, int, tuple[int, int, int]]:
    """A factor as the kernel takes it: a tensor, its kind, and the strides of one per token."""
    if factor is None:
        return query, NO_SCALE, (0, 0, 0)
    if is_per_token(factor):
        return factor, TOKEN_SCALE, (factor.stride(0), factor.stride(1), factor.stride(2))
    if isinstance(factor, torch.Tensor):
        per_head = scale_per_kv_head(factor, num_kv_heads, torch.float32, query.device).contiguous()
    else:
        # Written by the device: a CUDA graph cannot capture a copy from the host's pageable memory.
        per_head = torch.full((num_kv_heads,), factor, dtype=torch.float32, device=query.device)
    return per_head, HEAD_SCALE, (0, 0, 0)


def _check_covered(query: torch.Tensor, kv_cache: torch.Tensor) -> None:
    if query.dtype == torch.float64:
        raise ValueError('query has dtype float64, wanted float32, float16 or bfloat16 for backend "triton"')
    if query.shape[2] > MAX_GPU_HEAD_SIZE:
        raise ValueError(
            f'query has head size {query.shape[2]}, wanted at most {MAX_GPU_HEAD_SIZE} for backend "triton"'
        )
    if (
        kv_cache.dtype == torch.float8_e4m3fn
        and query.is_cuda
        and torch.cuda.get_device_capability(query.device) < (8, 9)
    ):
        raise ValueError(
            "kv_cache has dtype float8_e4m3fn, which this GPU cannot convert: use float8_e5m2 or int8"
        )
