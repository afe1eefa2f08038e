"""turbo_attention through the Triton kernel: what it covers, and one launch with a plan's work list.

Not covered: float64, head sizes above 256. Only `turbo_attention` imports this module, and on demand, for it
needs Triton.
"""

from __future__ import annotations

import torch

from tandem_kernels.turbo_attention.inputs import MAX_TREE_NODES, AttentionInputs, is_per_token
from tandem_kernels.turbo_attention.triton_kernel import (
    HEAD_SCALE,
    NO_SCALE,
    TOKEN_SCALE,
    turbo_attention_kernel,
)
from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

MAX_HEAD_SIZE = 256


def attend(
    inputs: AttentionInputs, out: torch.Tensor | None, plan: AttentionPlan | None = None
) -> torch.Tensor:
    """Return out [T, Hq, D], or a new tensor when None; see `turbo_attention`."""
    query, kv_cache = inputs.query, inputs.kv_cache
    num_tokens, num_heads, head_size = query.shape
    num_seqs = inputs.seq_lens.shape[0]
    _check_covered(inputs)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_tokens == 0 or num_seqs == 0:
        return out
    if plan is None:
        plan = AttentionPlan(
            max_tokens=num_tokens,
            max_seqs=num_seqs,
            max_seq_len=inputs.block_table.shape[1] * inputs.block_size,
            num_heads=num_heads,
            num_kv_heads=inputs.num_kv_heads,
            head_size=head_size,
            dtype=query.dtype,
            cache_dtype=kv_cache.dtype,
            device=query.device,
            window=inputs.window,
        )
        plan.update(inputs.seq_lens, inputs.query_start_loc)
    else:
        _check_plan(inputs, plan)
    tiles = plan.tiles
    k_scale, k_kind, k_strides = _scale(inputs, inputs.k_scale)
    v_scale, v_kind, v_strides = _scale(inputs, inputs.v_scale)
    # Pointers a launch does not use still need a tensor to point to: the query's.
    turbo_attention_kernel[(plan.num_programs,)](
        query, kv_cache, inputs.block_table, inputs.seq_lens, inputs.query_start_loc,
        query if inputs.ancestor_bits is None else inputs.ancestor_bits,
        query if inputs.sinks is None else inputs.sinks,
        k_scale, v_scale, out,
        plan.items, plan.num_items, plan.counters, plan.partials, plan.maxima, plan.sums,
        inputs.scale, inputs.softcap or 0.0, inputs.window or 0, plan.num_partial_rows, head_size,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), inputs.block_table.stride(0),
        kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), *k_strides, *v_strides,
        NUM_KV_HEADS=inputs.num_kv_heads, GROUP_SIZE=inputs.group_size, HEAD_SIZE=head_size,
        BLOCK_SIZE=inputs.block_size, BLOCK_ROWS=tiles.block_rows, BLOCK_KEYS=tiles.block_keys,
        BLOCK_DIM=tiles.block_dim, MAX_NODES=MAX_TREE_NODES,
        HAS_BITS=inputs.ancestor_bits is not None, HAS_WINDOW=inputs.window is not None,
        HAS_SOFTCAP=inputs.softcap is not None, HAS_SINKS=inputs.sinks is not None,
        K_SCALE=k_kind, V_SCALE=v_kind, SWAPPED=tiles.swapped,
        KEY_STAGES=tiles.key_stages, CHUNK_STAGES=tiles.chunk_stages,
        num_warps=tiles.num_warps, maxnreg=tiles.max_registers,
    )  # fmt: skip
    return out


def _scale(
    inputs: AttentionInputs, factor: float | torch.Tensor | None
) -> tuple[torch.Tensor, int, tuple[int, int, int]]:
    """A factor as the kernel takes it: a tensor, its kind, and the strides of one per token."""
    if factor is None:
        return inputs.query, NO_SCALE, (0, 0, 0)
    if is_per_token(factor):
        return factor, TOKEN_SCALE, (factor.stride(0), factor.stride(1), factor.stride(2))
    return inputs.scale_per_kv_head(factor, torch.float32).contiguous(), HEAD_SCALE, (0, 0, 0)


def _check_covered(inputs: AttentionInputs) -> None:
    query, kv_cache = inputs.query, inputs.kv_cache
    if query.dtype == torch.float64:
        raise ValueError('query has dtype float64, wanted float32, float16 or bfloat16 for backend "triton"')
    if query.shape[2] > MAX_HEAD_SIZE:
        raise ValueError(
            f'query has head size {query.shape[2]}, wanted at most {MAX_HEAD_SIZE} for backend "triton"'
        )
    if (
        kv_cache.dtype == torch.float8_e4m3fn
        and query.is_cuda
        and torch.cuda.get_device_capability(query.device) < (8, 9)
    ):
        raise ValueError(
            "kv_cache has dtype float8_e4m3fn, which this GPU cannot convert: use float8_e5m2 or int8"
        )


def _check_plan(inputs: AttentionInputs, plan: AttentionPlan) -> None:
    """Raise ValueError unless the plan was made for layers and steps like this one."""
    num_tokens, _, head_size = inputs.query.shape
    wanted = {
        "num_kv_heads": (plan.num_kv_heads, inputs.num_kv_heads),
        "group_size": (plan.group_size, inputs.group_size),
        "head_size": (plan.head_size, head_size),
        "window": (plan.window, inputs.window),
        "dtype": (plan.dtype, inputs.query.dtype),
        "cache_dtype": (plan.cache_dtype, inputs.kv_cache.dtype),
    }
    for name, (planned, given) in wanted.items():
        if planned != given:
            raise ValueError(f"plan is for {name} {planned}, wanted this call's {given}")
    if num_tokens > plan.max_tokens:
        raise ValueError(f"plan is for {plan.max_tokens} new tokens at most, wanted at least {num_tokens}")
