"""turbo_attention through the compiled kernel of csrc/attention.cpp: one call, all sequences and heads.

A row's result depends on its own query and keys alone, to the last bit: not on the batch, the chunking of a
prompt, the shape of a draft, or the number of threads. Products are made in float32, or for bfloat16 with its
own instructions and float32 sums where the processor has them.

Not covered (`supports` says so, and torch computes it): float64, head sizes that are not a multiple of 16 or
exceed 256.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from tandem_kernels import native
from tandem_kernels.turbo_attention.cpu_torch_plan import plan_for
from tandem_kernels.turbo_attention.inputs import AttentionInputs, is_per_token

_MAX_HEAD_SIZE = 256
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def supports(inputs: AttentionInputs) -> bool:
    """Whether the compiled kernel is there and covers this call."""
    head_size = inputs.query.shape[2]
    return (
        native.LIBRARY is not None
        and inputs.query.dtype in native.DTYPE
        and head_size % 16 == 0
        and head_size <= _MAX_HEAD_SIZE
    )


def attend(inputs: AttentionInputs, out: torch.Tensor | None, interleaved: bool = False) -> torch.Tensor:
    """Return out [T, Hq, D], or a new tensor when None; see `turbo_attention`."""
    query, cache = inputs.query, inputs.kv_cache
    num_tokens, num_heads, head_size = query.shape
    # The kernel wants heads side by side; in a fused projection's view they are.
    if query.stride(1) != head_size:
        query = query.contiguous()
    result = out
    if result is None or result.stride(1) != head_size:
        result = torch.empty_like(query, memory_format=torch.contiguous_format)
    # What the call points to must live as long as it.
    table = _table(cache.dtype) if cache.dtype in _FLOAT8 else None
    sinks = None if inputs.sinks is None else inputs.sinks.float().contiguous()
    k_scale, v_scale = (
        None
        if scale is None or is_per_token(scale)
        else inputs.scale_per_kv_head(scale, torch.float32).contiguous()
        for scale in (inputs.k_scale, inputs.v_scale)
    )
    call = native.AttentionCall(
        query=query.data_ptr(),
        out=result.data_ptr(),
        cache=cache.data_ptr(),
        table=_pointer(table),
        block_table=inputs.block_table.data_ptr(),
        seq_lens=inputs.seq_lens.data_ptr(),
        query_start_loc=inputs.query_start_loc.data_ptr(),
        ancestor_bits=_pointer(inputs.ancestor_bits),
        sinks=_pointer(sinks),
        k_scale=_pointer(k_scale),
        v_scale=_pointer(v_scale),
        query_stride=query.stride(0),
        out_stride=result.stride(0),
        cache_strides=cache.stride()[:3],
        num_seqs=inputs.seq_lens.shape[0],
        max_blocks=inputs.block_table.shape[1],
        num_blocks=cache.shape[0],
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=inputs.num_kv_heads,
        head_size=head_size,
        block_size=inputs.block_size,
        query_dtype=native.DTYPE[query.dtype],
        cache_dtype=_cache_dtype(cache.dtype),
        window=inputs.window or 0,
        scale=inputs.scale,
        softcap=inputs.softcap or 0.0,
        num_threads=torch.get_num_threads(),
        interleaved=interleaved,
    )
    if is_per_token(inputs.k_scale):
        call.k_token_scale, call.k_token_scale_strides = inputs.k_scale.data_ptr(), inputs.k_scale.stride()
    if is_per_token(inputs.v_scale):
        call.v_token_scale, call.v_token_scale_strides = inputs.v_scale.data_ptr(), inputs.v_scale.stride()
    assert native.LIBRARY is not None
    if not native.LIBRARY.tandem_attention(ctypes.byref(call)):
        plan_for(inputs, torch.float32)  # makes the same checks, and says what is wrong
        raise ValueError("the step's metadata is inconsistent")
    if out is not None and out is not result:
        out.copy_(result)
        return out
    return result


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _cache_dtype(dtype: torch.dtype) -> int:
    if dtype == torch.int8:
        return native.INT8
    return native.BYTE if dtype in _FLOAT8 else native.DTYPE[dtype]


@functools.cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    """[256] float32: the number each byte stands for."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()
