"""Attention through the compiled kernel of csrc/attention.cpp: one call, all sequences and heads.

A row's result depends on its own query and keys alone, to the last bit: not on the batch, the chunking of a
prompt, the shape of a draft, or the number of threads. Products are made in float32, or for bfloat16 with its
own instructions and float32 sums where the processor is fast at them (AMX, AVX-512 BF16 of AMD, ARM BF16).
"""

from __future__ import annotations

import ctypes
import functools

import torch

from tandem_kernels import native
from tandem_kernels.interleaved_cache import runs_interleaved
from tandem_kernels.quantize import is_per_token
from tandem_kernels.turbo_attention.interface import (
    MAX_HEAD_SIZE,
    Attention,
    AttentionLayer,
    AttentionMetadata,
    scale_per_kv_head,
)

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class NativeAttention(Attention):
    """CPU tensors; interleaved: caches lie as `interleave` says."""

    def __init__(self, *, interleaved: bool = False) -> None:
        self._interleaved = interleaved

    @staticmethod
    def covers(dtype: torch.dtype, head_size: int) -> bool:
        """Whether the compiled kernel is there and takes queries of this dtype and head size."""
        return (
            native.LIBRARY is not None
            and dtype in native.DTYPE
            and head_size % 16 == 0
            and head_size <= MAX_HEAD_SIZE
        )

    def _run(
        self, query: torch.Tensor, kv_cache: torch.Tensor, layer: AttentionLayer, out: torch.Tensor | None
    ) -> torch.Tensor:
        if query.device.type != "cpu":
            raise ValueError(f'query is on {query.device}, wanted a CPU tensor for backend "cpu"')
        num_blocks, _, num_kv_heads, block_size, head_size = kv_cache.shape
        if self._interleaved and not (
            kv_cache.dtype == query.dtype
            and kv_cache.is_contiguous()
            and runs_interleaved(kv_cache.dtype, head_size, block_size)
        ):
            raise ValueError(
                f"kv_cache has dtype {kv_cache.dtype}, shape {list(kv_cache.shape)} and strides "
                f"{list(kv_cache.stride())} and cannot be read interleaved; wanted a contiguous one of "
                f"{query.dtype}, for which runs_interleaved says True"
            )
        # The kernel wants heads side by side; in a fused projection's view they are.
        if query.stride(1) != head_size:
            query = query.contiguous()
        result = out
        if result is None or result.stride(1) != head_size:
            result = torch.empty_like(query, memory_format=torch.contiguous_format)
        # What the call points to must live as long as it.
        table = _table(kv_cache.dtype) if kv_cache.dtype in _FLOAT8 else None
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        k_scale, v_scale = (
            None
            if scale is None or is_per_token(scale)
            else scale_per_kv_head(scale, num_kv_heads, torch.float32, query.device).contiguous()
            for scale in (layer.k_scale, layer.v_scale)
        )
        call = native_cache(kv_cache, query.shape[1], query.dtype)
        point_to(call, self.metadata, len(query))
        call.query, call.query_stride = query.data_ptr(), query.stride(0)
        call.out, call.out_stride = result.data_ptr(), result.stride(0)
        call.cache, call.table = kv_cache.data_ptr(), _pointer(table)
        call.sinks, call.k_scale, call.v_scale = _pointer(sinks), _pointer(k_scale), _pointer(v_scale)
        if is_per_token(layer.k_scale):
            call.k_token_scale, call.k_token_scale_strides = layer.k_scale.data_ptr(), layer.k_scale.stride()
        if is_per_token(layer.v_scale):
            call.v_token_scale, call.v_token_scale_strides = layer.v_scale.data_ptr(), layer.v_scale.stride()
        call.window, call.scale, call.softcap = layer.window or 0, layer.scale, layer.softcap or 0.0
        call.interleaved = self._interleaved
        assert native.LIBRARY is not None
        if not native.LIBRARY.tandem_attention(ctypes.byref(call)):
            self.metadata.check_values(len(query), block_size, num_blocks)  # says what is wrong
            raise AssertionError("the compiled kernel refused consistent metadata")
        if out is not None and out is not result:
            out.copy_(result)
            return out
        return result


def native_cache(kv_cache: torch.Tensor, num_heads: int, dtype: torch.dtype) -> native.AttentionCall:
    """The kernel's arguments that do not change from step to step."""
    num_blocks, _, num_kv_heads, block_size, head_size = kv_cache.shape
    return native.AttentionCall(
        cache_strides=kv_cache.stride()[:3],
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        query_dtype=native.DTYPE[dtype],
        cache_dtype=_cache_dtype(kv_cache.dtype),
    )


def point_to(call: native.AttentionCall, metadata: AttentionMetadata, num_tokens: int) -> None:
    """Sets the arguments that all layers of a step share; they point into metadata's tensors."""
    call.block_table = metadata.block_table.data_ptr()
    call.seq_lens = metadata.seq_lens.data_ptr()
    call.query_start_loc = metadata.query_start_loc.data_ptr()
    call.ancestor_bits = _pointer(metadata.ancestor_bits)
    call.num_seqs, call.max_blocks = metadata.block_table.shape
    call.num_tokens, call.num_threads = num_tokens, torch.get_num_threads()


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
