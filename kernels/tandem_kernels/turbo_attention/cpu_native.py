"""turbo_attention through the compiled kernel of csrc/attention.cpp: one call, all sequences and heads.

A row's result depends on its own query and keys alone, to the last bit: not on the batch, the chunking of a
prompt, the shape of a draft, or the number of threads. Products are made in float32, or for bfloat16 with its
own instructions and float32 sums where the processor has them.

Not covered (`supports` says so, and torch computes it): float64, head sizes that are not a multiple of 16 or
exceed 256, a cache that is not contiguous, and factors per token.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from tandem_kernels import native
from tandem_kernels.turbo_attention.cpu_torch_plan import plan_for
from tandem_kernels.turbo_attention.inputs import QUANTIZED_DTYPES, AttentionInputs

_MAX_HEAD_SIZE = 256


def supports(inputs: AttentionInputs) -> bool:
    """Whether the compiled kernel is there and covers this call."""
    head_size = inputs.query.shape[2]
    return (
        native.LIBRARY is not None
        and inputs.query.dtype in native.DTYPE
        and head_size % 16 == 0
        and head_size <= _MAX_HEAD_SIZE
        and inputs.kv_cache.is_contiguous()
        and not inputs.has_token_scales()
    )


def attend(inputs: AttentionInputs, out: torch.Tensor | None) -> torch.Tensor:
    """Return out [T, Hq, D], or a new tensor when None; see `turbo_attention`."""
    query, cache = inputs.query, inputs.kv_cache
    num_tokens, num_heads, head_size = query.shape
    # The kernel wants heads side by side; in a fused projection's view they are.
    if query.stride(1) != head_size:
        query = query.contiguous()
    result = out
    if result is None or result.stride(1) != head_size:
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
    quantized = cache.dtype in QUANTIZED_DTYPES
    table = _table(cache.dtype) if quantized else None
    sinks = None if inputs.sinks is None else inputs.sinks.float().contiguous()
    k_scale = None if inputs.k_scale is None else _per_head(inputs, inputs.k_scale)
    v_scale = None if inputs.v_scale is None else _per_head(inputs, inputs.v_scale)
    bits = inputs.ancestor_bits
    call = native.AttentionCall(
        query.data_ptr(),
        result.data_ptr(),
        cache.data_ptr(),
        None if table is None else table.data_ptr(),
        inputs.block_table.data_ptr(),
        inputs.seq_lens.data_ptr(),
        inputs.query_start_loc.data_ptr(),
        None if bits is None else bits.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        None if k_scale is None else k_scale.data_ptr(),
        None if v_scale is None else v_scale.data_ptr(),
        query.stride(0),
        result.stride(0),
        inputs.seq_lens.shape[0],
        inputs.block_table.shape[1],
        cache.shape[0],
        num_tokens,
        num_heads,
        inputs.num_kv_heads,
        head_size,
        inputs.block_size,
        native.DTYPE[query.dtype],
        native.BYTE if quantized else native.DTYPE[cache.dtype],
        inputs.window or 0,
        inputs.scale,
        inputs.softcap or 0.0,
        torch.get_num_threads(),
    )
    assert native.LIBRARY is not None
    if not native.LIBRARY.tandem_attention(ctypes.byref(call)):
        plan_for(inputs, torch.float32)  # makes the same checks, and says what is wrong
        raise ValueError("the step's metadata is inconsistent")
    if out is not None and out is not result:
        out.copy_(result)
        return out
    return result


def _per_head(inputs: AttentionInputs, factor: float | torch.Tensor) -> torch.Tensor:
    return inputs.scale_per_kv_head(factor, torch.float32).contiguous()


@functools.cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    """[256] float32: the number each byte stands for."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()
