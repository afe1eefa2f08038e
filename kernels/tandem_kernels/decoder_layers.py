"""A decoder's step in one compiled call, instead of 300 calls from Python.

    run     some or all layers, on a residual stream that the caller keeps
    step    token ids -> logits: embedding, all layers, and norm, head and argmax of the rows that sample

The layers are those of `tandem_engine.models.decoder`: this package's operators in the same order on the same
numbers (csrc/decoder.cpp). The results have the same bits as the operators called one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem_kernels import native
from tandem_kernels.packed_linear import PackedWeight, native_weight
from tandem_kernels.turbo_attention import AttentionMetadata
from tandem_kernels.turbo_attention.cpu_native import NativeAttention, native_cache, point_to


@dataclass(frozen=True)
class PackedProjection:
    """A weight and its bias [N] float32, or None."""

    weight: PackedWeight
    bias: torch.Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer: norms [H], or [D] over each head and None without QK norm, all float32; window in tokens, or
    None."""

    input_norm: torch.Tensor
    qkv: PackedProjection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PackedProjection
    post_norm: torch.Tensor
    gate_up: PackedProjection
    down: PackedProjection
    window: int | None


@dataclass(frozen=True)
class DecoderEnds:
    """What comes before and after the layers: the embedding [V, H] of the weights' dtype, dense; the final
    norm [H] float32; the LM head, with V columns and no bias or one."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: PackedProjection


@dataclass(frozen=True)
class StepTable:
    """Where the keys and values of a step are, in the caches of one group of layers."""

    #: [T]
    slot_mapping: list[int]
    #: As in `AttentionMetadata`, but row after row: [B * max_blocks].
    block_table: list[int]


@dataclass(frozen=True)
class StepInputs:
    """The B sequences of a step, with T new tokens in total; lists, which cost less than small tensors."""

    #: [T], as are positions, slots and bits.
    token_ids: list[int]
    positions: list[int]
    #: These two of the first group of layers, as in `StepTable`.
    slot_mapping: list[int]
    block_table: list[int]
    seq_lens: list[int]
    query_start_loc: list[int]
    ancestor_bits: list[int] | None
    #: Of the other groups.
    more_tables: tuple[StepTable, ...] = ()

    def metadata(self) -> AttentionMetadata:
        """With the first group's table."""

        def int32(values: list[int]) -> torch.Tensor:
            return torch.from_numpy(np.array(values, dtype=np.int32))

        bits = self.ancestor_bits
        return AttentionMetadata(
            int32(self.block_table).view(len(self.seq_lens), -1),
            int32(self.seq_lens),
            int32(self.query_start_loc),
            None if bits is None else torch.from_numpy(np.array(bits, dtype=np.int64)),
        )


class DecoderLayers:
    """Layers of one dtype, float32 or bfloat16, ready to run.

    Caches and rotations are checked once: do not change a list of caches in place.

    Args:
        layers: their weights; widths are multiples of 16.
        dtype: of activations and caches, and of weights that are not quantized.
        head_size: D, a multiple of 16 up to 256.
        eps: of the norms.
        scale, softcap: as of `AttentionLayer`, the same in all layers.
        ends: what `step` needs besides.

    Raises:
        ValueError: the shape or dtype of a part of ends does not fit.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        dtype: torch.dtype,
        *,
        head_size: int,
        eps: float,
        scale: float,
        softcap: float | None = None,
        ends: DecoderEnds | None = None,
    ) -> None:
        self._weights = tuple(layers)  # the arrays below hold bare pointers
        self._pieces = [
            [native_weight(p.weight, p.bias) for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
            for layer in layers
        ]
        self._array = (native.Layer * len(layers))(*map(_native_layer, layers, self._pieces))
        self._head_size, self._eps, self._scale, self._softcap = head_size, eps, scale, softcap
        first = layers[0]
        self.dtype = dtype
        self._num_heads = first.o.weight.depth // head_size
        self._hidden_size = first.qkv.weight.depth
        self._intermediate_size = first.down.weight.depth
        #: The caches and rotations of the last call, and what it was.
        self._caches: Sequence[torch.Tensor] = ()
        self._rotations = torch.empty(0)
        self._call = native.LayersCall()
        self._ends = ends
        if ends is not None:
            self._vocab_size = ends.head.weight.columns
            _check("embedding", ends.embedding, dtype, (self._vocab_size, self._hidden_size))
            _check("norm", ends.norm, torch.float32, (self._hidden_size,))
            if ends.head.weight.depth != self._hidden_size:
                raise ValueError(f"head has depth {ends.head.weight.depth}, wanted {self._hidden_size}")
            self._head = native_weight(ends.head.weight, ends.head.bias)
            self._logits = self._used_logits = torch.empty(0, self._vocab_size)
            self._native_ends = native.Ends(
                embedding=ends.embedding.data_ptr(),
                norm=ends.norm.data_ptr(),
                head=self._head,
                vocab_size=self._vocab_size,
            )

    @staticmethod
    def supports(layers: Sequence[LayerWeights], dtype: torch.dtype, head_size: int) -> bool:
        """Whether the compiled call covers these weights here."""
        hidden_size, intermediate_size = layers[0].input_norm.shape[0], layers[0].down.weight.depth
        return (
            dtype in (torch.float32, torch.bfloat16)
            and not (hidden_size % 16 or intermediate_size % 16)
            and NativeAttention.covers(dtype, head_size)
        )

    def run(
        self,
        first_layer: int,
        end_layer: int,
        hidden: torch.Tensor,
        delta: torch.Tensor,
        positions: torch.Tensor,
        rotations: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        slot_mapping: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        interleaved: bool = False,
    ) -> None:
        """Run T new tokens through layers first_layer to end_layer - 1.

        Args:
            hidden: [T, H] float32, dense: the residual stream; changed.
            delta: [T, H] of the weights' dtype, dense: the last layer's contribution, which the next norm
                adds to hidden; read unless first_layer is 0, and written.
            positions, rotations, slot_mapping: as of `rope_store`.
            kv_caches: per layer (of all) [num_blocks, 2, Hkv, block_size, D], contiguous, the weights' dtype;
                those of first_layer to end_layer - 1 with one number of blocks, which slot_mapping and
                metadata are for.
            metadata: the step's sequences.
            interleaved: the caches lie as `interleave` says; blocks are then multiples of 64 tokens.

        Raises:
            ValueError: a shape or dtype does not fit, or the metadata is inconsistent.
            IndexError: a position or a slot is out of range.
        """
        num_tokens = len(hidden)
        _check("hidden", hidden, torch.float32, (num_tokens, self._hidden_size))
        _check("delta", delta, self.dtype, (num_tokens, self._hidden_size))
        _check("positions", positions, torch.int64, (num_tokens,))
        _check("slot_mapping", slot_mapping, torch.int64, (num_tokens,))
        if metadata.ancestor_bits is not None and len(metadata.ancestor_bits) != num_tokens:
            raise ValueError(
                f"ancestor_bits has shape {list(metadata.ancestor_bits.shape)}, wanted [{num_tokens}]"
            )
        call = self._bind(kv_caches, rotations, interleaved=interleaved)
        call.attention.num_blocks = kv_caches[first_layer].shape[0]
        call.ends = None
        call.hidden, call.delta = hidden.data_ptr(), delta.data_ptr()
        call.positions, call.slots = positions.data_ptr(), slot_mapping.data_ptr()
        call.first_layer, call.end_layer = first_layer, end_layer
        point_to(call.attention, metadata, num_tokens)
        if (wrong := self._run_call(lambda: metadata)) >= 0:
            raise IndexError(
                f"token {wrong} has position {positions[wrong]} and slot {slot_mapping[wrong]}, wanted them "
                f"below {call.num_positions} and {self._num_slots}"
            )

    def step(
        self,
        inputs: StepInputs,
        rotations: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        rows: Sequence[int],
        *,
        interleaved: bool = False,
    ) -> tuple[torch.Tensor, list[int]]:
        """Run T new tokens from their ids to logits; needs `ends`.

        Args:
            rotations, kv_caches, interleaved: as of `run`.
            rows: of the T tokens those whose logits are wanted, each once.

        Returns:
            logits [len(rows), V] float32, valid until the next call, and of each row the token with the
            largest one: the lowest of equals, the first NaN if there is one.

        Raises:
            ValueError, IndexError: as `run`; a token id or a row is out of range.
        """
        token_ids, positions, slots, bits = (
            inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.ancestor_bits
        )  # fmt: skip
        num_tokens, num_rows, num_seqs = len(token_ids), len(rows), len(inputs.seq_lens)
        per_token = len(positions), len(slots), num_tokens if bits is None else len(bits)
        if per_token != (num_tokens,) * 3 or len(inputs.query_start_loc) != num_seqs + 1:
            raise ValueError(
                f"there are {num_tokens} token ids, {per_token} positions, slots and bits, {num_seqs} "
                f"sequence lengths and {len(inputs.query_start_loc)} starts"
            )
        if num_rows and not 0 <= min(rows) <= max(rows) < num_tokens:
            raise IndexError(f"rows are {list(rows)}, wanted rows of {num_tokens} tokens")
        # A row's last product is added to the residual stream in place, once for each mention.
        if len(set(rows)) != num_rows:
            raise ValueError(f"rows are {list(rows)}, wanted each row once")
        ends = self._native_ends
        if num_rows > len(self._logits):
            self._logits = self._used_logits = torch.empty(num_rows, self._vocab_size)
            ends.logits = self._logits.data_ptr()
        # The call points into these.
        wide = (ctypes.c_int64 * (4 * num_tokens + 2 * num_rows))(
            *token_ids, *positions, *slots, *(bits or [0] * num_tokens), *rows
        )
        narrow = (ctypes.c_int32 * (len(inputs.block_table) + 2 * num_seqs + 1))(
            *inputs.block_table, *inputs.seq_lens, *inputs.query_start_loc
        )
        at, at_narrow, bytes_per_token = ctypes.addressof(wide), ctypes.addressof(narrow), 8 * num_tokens
        call = self._bind(kv_caches, rotations, interleaved=interleaved)
        call.positions, call.slots = at + bytes_per_token, at + 2 * bytes_per_token
        call.first_layer, call.end_layer = 0, len(self._array)
        attention = call.attention
        attention.ancestor_bits = None if bits is None else at + 3 * bytes_per_token
        attention.block_table = at_narrow
        attention.seq_lens = at_narrow + 4 * len(inputs.block_table)
        attention.query_start_loc = at_narrow + 4 * (len(inputs.block_table) + num_seqs)
        attention.num_seqs, attention.max_blocks = num_seqs, len(inputs.block_table) // num_seqs
        attention.num_tokens, attention.num_threads = num_tokens, torch.get_num_threads()
        ends.token_ids, ends.rows, ends.num_rows = at, at + 4 * bytes_per_token, num_rows
        ends.likeliest = at + 4 * bytes_per_token + 8 * num_rows
        call.ends = ctypes.addressof(ends)
        if (wrong := self._run_call(inputs.metadata)) >= 0:
            raise IndexError(
                f"token {wrong} has position {positions[wrong]}, slot {slots[wrong]} and id "
                f"{token_ids[wrong]}, wanted them below {call.num_positions}, {self._num_slots} and "
                f"{self._vocab_size}"
            )
        if len(self._used_logits) != num_rows:
            # Not in each step: with torch's code evicted from the caches, a view takes 0.07 ms.
            self._used_logits = self._logits[:num_rows]
        return self._used_logits, wide[4 * num_tokens + num_rows :]

    def _bind(
        self, kv_caches: Sequence[torch.Tensor], rotations: torch.Tensor, *, interleaved: bool
    ) -> native.LayersCall:
        """The call, with all that does not change from step to step."""
        if kv_caches is not self._caches or rotations is not self._rotations:
            self._caches = ()
            self._check_caches(kv_caches)
            _check("rotations", rotations, torch.complex64, (len(rotations), self._head_size // 2))
            for layer, cache in zip(self._array, kv_caches, strict=True):
                layer.cache = cache.data_ptr()
            attention = native_cache(kv_caches[0], self._num_heads, self.dtype)
            attention.scale, attention.softcap = self._scale, self._softcap or 0.0
            self._call = native.LayersCall(
                layers=ctypes.addressof(self._array),
                rotations=rotations.data_ptr(),
                num_positions=len(rotations),
                attention=attention,
                hidden_size=self._hidden_size,
                intermediate_size=self._intermediate_size,
                eps=self._eps,
            )
            self._caches, self._rotations = kv_caches, rotations
        block_size = self._call.attention.block_size
        if interleaved and block_size % 64:
            raise ValueError(
                f"kv_caches have blocks of {block_size} tokens, interleaved they want a multiple of 64"
            )
        self._call.attention.interleaved = interleaved
        return self._call

    def _check_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        first = kv_caches[0]
        if first.shape[1] != 2 or first.shape[4] != self._head_size or self._num_heads % first.shape[2]:
            raise ValueError(
                f"kv_caches have shape {list(first.shape)}, wanted [num_blocks, 2, Hkv, block_size, "
                f"{self._head_size}] with Hkv a divisor of {self._num_heads}"
            )
        for n, cache in enumerate(kv_caches):
            if cache.shape[1:] != first.shape[1:] or cache.dtype != self.dtype or not cache.is_contiguous():
                raise ValueError(
                    f"kv_caches[{n}] has shape {list(cache.shape)}, strides {list(cache.stride())} and dtype "
                    f"{cache.dtype}, wanted a contiguous {list(first.shape)} of {self.dtype}, as all layers"
                )

    @property
    def _num_slots(self) -> int:
        return int(self._call.attention.num_blocks * self._call.attention.block_size)

    def _run_call(self, metadata: Callable[[], AttentionMetadata]) -> int:
        """Runs the call: -1, or the first token that is out of range. Raises ValueError for the metadata."""
        assert native.LIBRARY is not None
        wrong: int = native.LIBRARY.tandem_decoder_layers(ctypes.byref(self._call))
        if wrong == -2:
            attention = self._call.attention
            # Says what is wrong.
            metadata().check_values(attention.num_tokens, attention.block_size, attention.num_blocks)
            raise AssertionError("the compiled kernels refused consistent metadata")
        return wrong


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, wanted a dense "
            f"{list(shape)} of {dtype}"
        )


def _native_layer(layer: LayerWeights, pieces: Sequence[ctypes.Array[native.LinearWeight]]) -> native.Layer:
    def pointer(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    qkv, o, gate_up, down = (ctypes.cast(array, ctypes.POINTER(native.LinearWeight)) for array in pieces)
    return native.Layer(
        input_norm=pointer(layer.input_norm),
        post_norm=pointer(layer.post_norm),
        q_norm=pointer(layer.q_norm),
        k_norm=pointer(layer.k_norm),
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        window=layer.window or 0,
    )
