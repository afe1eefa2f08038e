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
from tandem_kernels.checks import KVCache, is_dense_cache, keys_and_values
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
        self, query: torch.Tensor, kv_cache: KVCache, layer: AttentionLayer, out: torch.Tensor | None
    ) -> torch.Tensor:
        if query.device.type != "cpu":
            raise ValueError(f'query is on {query.device}, wanted a CPU tensor for backend "cpu"')
        keys, values = keys_and_values(kv_cache)
        num_blocks, num_kv_heads, block_size, k_dim = keys.shape
        v_dim = values.shape[3]
        if (values.data_ptr() - keys.data_ptr()) % keys.element_size() or values.stride(0) != keys.stride(0):
            raise ValueError("kv_cache has K and V of different memory, wanted two views of one tensor")
        if self._interleaved and not (
            keys.dtype == query.dtype
            and is_dense_cache(kv_cache)
            and all(runs_interleaved(keys.dtype, dim, block_size) for dim in (k_dim, v_dim))
        ):
            raise ValueError(
                f"kv_cache has dtype {keys.dtype}, K {list(keys.shape)} and V {list(values.shape)} with "
                f"strides {list(keys.stride())} and {list(values.stride())} and cannot be read interleaved; "
                f"wanted a contiguous one of {query.dtype}, for which runs_interleaved says True"
            )
        # The kernel wants heads side by side; in a fused projection's view they are.
        if query.stride(1) != k_dim:
            query = query.contiguous()
        result = out
        if result is None or result.stride(1) != v_dim:
            result = query.new_empty(*query.shape[:2], v_dim)
        # What the call points to must live as long as it.
        table = _table(keys.dtype) if keys.dtype in _FLOAT8 else None
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        k_scale, v_scale = (
            None
            if scale is None or is_per_token(scale)
            else scale_per_kv_head(scale, num_kv_heads, torch.float32, query.device).contiguous()
            for scale in (layer.k_scale, layer.v_scale)
        )
        call = native.AttentionCall(
            cache_strides=(
                keys.stride(0),
                (values.data_ptr() - keys.data_ptr()) // keys.element_size(),
                keys.stride(1),
                values.stride(1),
            ),
            num_blocks=num_blocks,
            num_heads=query.shape[1],
            num_kv_heads=num_kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            block_size=block_size,
            query_dtype=native.DTYPE[query.dtype],
            cache_dtype=_cache_dtype(keys.dtype),
        )
        point_to(call, self.metadata, len(query))
        call.query, call.query_stride = query.data_ptr(), query.stride(0)
        call.out, call.out_stride = result.data_ptr(), result.stride(0)
        call.cache, call.table = keys.data_ptr(), _pointer(table)
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
