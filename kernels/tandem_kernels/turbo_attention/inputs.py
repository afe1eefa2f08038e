"""The arguments of one attention call, checked once in the launcher, before any backend reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch

#: A longer sequence of new tokens is a prefill chunk: causal, whatever its bits.
MAX_TREE_NODES = 64

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def is_per_token(factor: float | torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether k_scale or v_scale is [num_blocks, Hkv, block_size]."""
    return isinstance(factor, torch.Tensor) and factor.dim() == 3


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The arguments of `turbo_attention`, with their shapes and dtypes as it documents them."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    ancestor_bits: torch.Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None

    def __post_init__(self) -> None:
        query, kv_cache = self.query, self.kv_cache
        self._check_cache()
        if query.dim() != 3:
            raise ValueError(f"query has shape {list(query.shape)}, wanted [T, Hq, D]")
        if query.dtype not in QUERY_DTYPES:
            raise ValueError(f"query has dtype {query.dtype}, wanted float32, float16, bfloat16 or float64")
        if query.stride(2) != 1:
            raise ValueError(f"query has strides {list(query.stride())}, wanted 1 in the last dimension")
        num_tokens, num_heads, head_size = query.shape
        if head_size != kv_cache.shape[4]:
            raise ValueError(f"query has head size {head_size}, wanted the cache's {kv_cache.shape[4]}")
        if num_heads % kv_cache.shape[2]:
            raise ValueError(f"query has {num_heads} heads, wanted a multiple of Hkv = {kv_cache.shape[2]}")
        if kv_cache.dtype not in (query.dtype, *QUANTIZED_DTYPES):
            raise ValueError(
                f"kv_cache has dtype {kv_cache.dtype}, wanted the query's {query.dtype}, int8 or float8"
            )
        self._check_metadata("block_table", self.block_table, 2, torch.int32)
        num_seqs = self.block_table.shape[0]
        self._check_metadata("seq_lens", self.seq_lens, 1, torch.int32, num_seqs)
        self._check_metadata("query_start_loc", self.query_start_loc, 1, torch.int32, num_seqs + 1)
        if self.ancestor_bits is not None:
            self._check_metadata("ancestor_bits", self.ancestor_bits, 1, torch.int64, num_tokens)
        if self.sinks is not None and self.sinks.shape != (num_heads,):
            raise ValueError(f"sinks has shape {list(self.sinks.shape)}, wanted [Hq] = [{num_heads}]")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}, wanted None or at least 1")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}, wanted None or a positive number")
        for name, factor in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if isinstance(factor, torch.Tensor):
                self._check_scale(name, factor)

    def _check_cache(self) -> None:
        cache = self.kv_cache
        if cache.dim() != 5 or cache.shape[1] != 2:
            raise ValueError(
                f"kv_cache has shape {list(cache.shape)}, wanted [num_blocks, 2, Hkv, block_size, D]"
            )
        if cache.stride(4) != 1 or cache.stride(3) != cache.shape[4]:
            raise ValueError(
                f"kv_cache has strides {list(cache.stride())}, wanted the last two dimensions dense"
            )

    def _check_scale(self, name: str, factor: torch.Tensor) -> None:
        per_token = (self.kv_cache.shape[0], self.num_kv_heads, self.block_size)
        if factor.shape not in ((), (1,), (self.num_kv_heads,), per_token):
            raise ValueError(
                f"{name} has shape {list(factor.shape)}, wanted a number, [Hkv] = [{self.num_kv_heads}] "
                f"or [num_blocks, Hkv, block_size] = {list(per_token)}"
            )
        if factor.shape == per_token and factor.dtype != torch.float32:
            raise ValueError(f"{name} has dtype {factor.dtype}, wanted float32")
        if factor.shape == per_token and factor.device != self.query.device:
            raise ValueError(f"{name} is on {factor.device}, wanted the query's device {self.query.device}")

    def _check_metadata(
        self, name: str, tensor: torch.Tensor, dim: int, dtype: torch.dtype, size: int | None = None
    ) -> None:
        if tensor.dim() != dim or (size is not None and tensor.shape[0] != size):
            wanted = f"{dim} dimensions" if size is None else f"[{size}]"
            raise ValueError(f"{name} has shape {list(tensor.shape)}, wanted {wanted}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, wanted {dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}, wanted a contiguous tensor")
        if tensor.device != self.query.device:
            raise ValueError(f"{name} is on {tensor.device}, wanted the query's device {self.query.device}")

    @property
    def num_kv_heads(self) -> int:
        return self.kv_cache.shape[2]

    @property
    def group_size(self) -> int:
        """Query heads that share one K/V head."""
        return self.query.shape[1] // self.kv_cache.shape[2]

    @property
    def block_size(self) -> int:
        return self.kv_cache.shape[3]

    def has_token_scales(self) -> bool:
        """Whether K's or V's factors are one per token."""
        return is_per_token(self.k_scale) or is_per_token(self.v_scale)

    def scale_per_kv_head(self, factor: float | torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """k_scale or v_scale as a [Hkv] tensor of dtype; not for factors per token."""
        given = torch.as_tensor(1.0 if factor is None else factor, dtype=dtype, device=self.query.device)
        return given.expand(self.num_kv_heads)
