"""The attention interface: a step's metadata, a layer's constants, and the backend that joins them.

    attention.prepare(metadata)                 once per step
    attention.run(query, kv_cache, layer)       once per layer

Each argument is checked once: metadata when it is made, the rest in `run`, before any backend reads it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from tandem_kernels.checks import KVCache, keys_and_values
from tandem_kernels.quantize import LARGEST, Scale, is_per_token

#: A longer sequence of new tokens is a prefill chunk: causal, whatever its bits.
MAX_TREE_NODES = 64
#: Largest heads, of keys and of values: of the compiled kernel, and of the Triton kernel.
MAX_HEAD_SIZE = 576
MAX_GPU_HEAD_SIZE = 256

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """The B sequences of one step; all tensors are contiguous and on one device.

        sequence b   |<------------- seq_lens[b] ------------->|
                     |<- context ->|<- n_b new tokens: rows  ->|
                                   query_start_loc[b] : query_start_loc[b + 1] of the query

    A sequence is a tree if it has at most 64 new tokens and its first row has bits other than 0 (the root's
    bits are 1). All others are causal, whatever else their bits say; give them bits 0.
    """

    #: [B, max_blocks] int32. Entry i of a row holds logical slots [i * block_size, (i + 1) * block_size).
    #: Entries beyond the sequence's length are not read.
    block_table: torch.Tensor
    #: [B] int32: tokens in the cache, the new ones included.
    seq_lens: torch.Tensor
    #: [B + 1] int32: rows of sequence b are [query_start_loc[b], query_start_loc[b + 1]).
    query_start_loc: torch.Tensor
    #: [T] int64, None when all sequences are causal. Bit j of row i is set when node j of the same sequence
    #: is i itself or an ancestor of it; bit 63 is the sign bit. Node i sees itself.
    ancestor_bits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._check("block_table", self.block_table, 2, torch.int32)
        num_seqs = self.block_table.shape[0]
        self._check("seq_lens", self.seq_lens, 1, torch.int32, num_seqs)
        self._check("query_start_loc", self.query_start_loc, 1, torch.int32, num_seqs + 1)
        if self.ancestor_bits is not None:
            self._check("ancestor_bits", self.ancestor_bits, 1, torch.int64)

    def _check(
        self, name: str, tensor: torch.Tensor, dim: int, dtype: torch.dtype, size: int | None = None
    ) -> None:
        if tensor.dim() != dim or (size is not None and tensor.shape[0] != size):
            wanted = f"{dim} dimensions" if size is None else f"[{size}]"
            raise ValueError(f"{name} has shape {list(tensor.shape)}, wanted {wanted}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, wanted {dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}, wanted a contiguous tensor")
        if tensor.device != self.seq_lens.device:
            raise ValueError(f"{name} is on {tensor.device}, wanted the device {self.seq_lens.device}")

    def check_values(self, num_tokens: int, block_size: int, num_blocks: int) -> None:
        """Raise ValueError unless the values fit each other, T query rows and the cache; CPU tensors only."""
        starts, table = self.query_start_loc.tolist(), self.block_table
        if starts[0] != 0 or starts[-1] > num_tokens or any(a > b for a, b in itertools.pairwise(starts)):
            raise ValueError(
                f"query_start_loc is {starts}, wanted non-decreasing from 0 to T = {num_tokens} at most"
            )
        for b, seq_len in enumerate(self.seq_lens.tolist()):
            num_new = starts[b + 1] - starts[b]
            if num_new > seq_len:
                raise ValueError(f"seq_lens[{b}] is {seq_len}, wanted at least its {num_new} new tokens")
            if num_new == 0:
                continue
            if seq_len > table.shape[1] * block_size:
                raise ValueError(
                    f"block_table has {table.shape[1]} blocks a sequence, "
                    f"wanted enough for the {seq_len} tokens of sequence {b}"
                )
            blocks = table[b, : -(-seq_len // block_size)].tolist()
            if not all(0 <= block < num_blocks for block in blocks):
                raise ValueError(f"block_table[{b}] names blocks {blocks}, wanted ids in [0, {num_blocks})")
            for node, bits in enumerate(self.tree_bits(starts[b], starts[b + 1]) or ()):
                if not bits >> node & 1:
                    raise ValueError(
                        f"ancestor_bits[{starts[b] + node}] is {bits:#x}, "
                        f"wanted bit {node} set: a node of a tree sees itself"
                    )

    def tree_bits(self, start: int, stop: int) -> list[int] | None:
        """The ancestor bits of the sequence with these rows, None when it is causal."""
        if self.ancestor_bits is None or not 0 < stop - start <= MAX_TREE_NODES:
            return None
        bits: list[int] = self.ancestor_bits[start:stop].tolist()
        return bits if bits[0] else None


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """What attention computes in one layer of a model; constant from step to step."""

    #: Factor of the dot products, usually D ** -0.5.
    scale: float
    #: Sliding window in tokens, the row's own included: position p sees positions > p - window. Distances are
    #: in positions, not slots: a tree node's position is the root's plus its depth, the number of its bits
    #: less one.
    window: int | None = None
    #: Logits become softcap * tanh(logits / softcap), before the mask and the sinks.
    softcap: float | None = None
    #: [Hq]: per head one more logit in the softmax's denominator, with no value; not scaled, not capped.
    sinks: torch.Tensor | None = None
    #: Dequantization factors of K and V: a number, one per K/V head [Hkv], or one per token and K/V head,
    #: float32 [num_blocks, Hkv, block_size] with any strides.
    k_scale: Scale = None
    v_scale: Scale = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}, wanted None or at least 1")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}, wanted None or a positive number")


class Attention(ABC):
    """One way to compute attention; see `make_attention` for the choice."""

    metadata: AttentionMetadata

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Begin a step: every `run` until the next `prepare` attends to these sequences."""
        self.metadata = metadata

    def run(
        self,
        query: torch.Tensor,
        kv_cache: KVCache,
        layer: AttentionLayer,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with the step's T new tokens to the cached K and V of one layer.

        Args:
            query: [T, Hq, D_k] float32, float16, bfloat16 or float64; last dimension dense. RoPE applied.
            kv_cache: a KVCache with heads of D_k and D_v, the last two dimensions dense, the query's dtype,
                int8 or float8; Hq is a multiple of Hkv, and query head h reads K/V head h // (Hq // Hkv).
            layer: the layer's constants.
            out: [T, Hq, D_v] of the query's dtype to write to; a new tensor when None.

        Returns:
            [T, Hq, D_v] of the query's dtype: out, or a new tensor. Rows past query_start_loc[B] are
            undefined.

        Raises:
            ValueError: a shape, stride, dtype, device or value does not fit; the message names the argument.
        """
        self._check(query, kv_cache, layer)
        shape = (*query.shape[:2], keys_and_values(kv_cache)[1].shape[3])
        if out is not None and (out.shape != shape or out.dtype != query.dtype or out.stride(2) != 1):
            raise ValueError(
                f"out has shape {list(out.shape)}, strides {list(out.stride())} and dtype {out.dtype}, "
                f"wanted {list(shape)} of {query.dtype}, dense in the last dimension"
            )
        return self._run(query, kv_cache, layer, out)

    @abstractmethod
    def _run(
        self, query: torch.Tensor, kv_cache: KVCache, layer: AttentionLayer, out: torch.Tensor | None
    ) -> torch.Tensor:
        """`run` with checked arguments."""

    def _check(self, query: torch.Tensor, kv_cache: KVCache, layer: AttentionLayer) -> None:
        if isinstance(kv_cache, torch.Tensor) and (kv_cache.dim() != 5 or kv_cache.shape[1] != 2):
            raise ValueError(
                f"kv_cache has shape {list(kv_cache.shape)}, wanted [num_blocks, 2, Hkv, block_size, D]"
            )
        keys, values = keys_and_values(kv_cache)
        if keys.dim() != 4 or values.shape[:3] != keys.shape[:3] or values.dtype != keys.dtype:
            raise ValueError(
                f"kv_cache has K {list(keys.shape)} of {keys.dtype} and V {list(values.shape)} of "
                f"{values.dtype}, wanted [num_blocks, Hkv, block_size, D] of one dtype"
            )
        num_blocks, num_kv_heads, block_size, head_size = keys.shape
        for part in (keys, values):
            if part.stride(3) != 1 or part.stride(2) != part.shape[3]:
                raise ValueError(
                    f"kv_cache has strides {list(part.stride())}, wanted the last two dimensions dense"
                )
        if query.dim() != 3:
            raise ValueError(f"query has shape {list(query.shape)}, wanted [T, Hq, D]")
        if query.dtype not in QUERY_DTYPES:
            raise ValueError(f"query has dtype {query.dtype}, wanted float32, float16, bfloat16 or float64")
        if query.stride(2) != 1:
            raise ValueError(f"query has strides {list(query.stride())}, wanted 1 in the last dimension")
        num_tokens, num_heads, _ = query.shape
        if query.shape[2] != head_size:
            raise ValueError(f"query has head size {query.shape[2]}, wanted the cache's {head_size}")
        if num_heads % num_kv_heads:
            raise ValueError(f"query has {num_heads} heads, wanted a multiple of Hkv = {num_kv_heads}")
        if keys.dtype != query.dtype and keys.dtype not in LARGEST:
            raise ValueError(
                f"kv_cache has dtype {keys.dtype}, wanted the query's {query.dtype}, int8 or float8"
            )
        metadata = self.metadata
        if metadata.seq_lens.device != query.device:
            raise ValueError(f"query is on {query.device}, wanted the metadata's {metadata.seq_lens.device}")
        if metadata.ancestor_bits is not None and metadata.ancestor_bits.shape[0] != num_tokens:
            raise ValueError(
                f"ancestor_bits has shape {list(metadata.ancestor_bits.shape)}, wanted [{num_tokens}]"
            )
        if layer.sinks is not None and layer.sinks.shape != (num_heads,):
            raise ValueError(f"sinks has shape {list(layer.sinks.shape)}, wanted [Hq] = [{num_heads}]")
        per_token = (num_blocks, num_kv_heads, block_size)
        for name, factor in (("k_scale", layer.k_scale), ("v_scale", layer.v_scale)):
            if not isinstance(factor, torch.Tensor):
                continue
            if factor.shape not in ((), (1,), (num_kv_heads,), per_token):
                raise ValueError(
                    f"{name} has shape {list(factor.shape)}, wanted a number, [Hkv] = [{num_kv_heads}] "
                    f"or [num_blocks, Hkv, block_size] = {list(per_token)}"
                )
            if is_per_token(factor) and factor.dtype != torch.float32:
                raise ValueError(f"{name} has dtype {factor.dtype}, wanted float32")
            if is_per_token(factor) and factor.device != query.device:
                raise ValueError(f"{name} is on {factor.device}, wanted the query's device {query.device}")


def scale_per_kv_head(
    factor: Scale, num_kv_heads: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """k_scale or v_scale as a [Hkv] tensor of dtype; not for factors per token."""
    given = torch.as_tensor(1.0 if factor is None else factor, dtype=dtype, device=device)
    return given.expand(num_kv_heads)
