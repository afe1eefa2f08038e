"""A decoder's layers in one compiled call: Python and the interpreter's lock cost once a step, not 300 times.

The layers are those of `tandem_engine.models.decoder`, made of this package's operators in the same order on
the same numbers (csrc/decoder.cpp); the results are the same bits as theirs, called one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem_kernels import native
from tandem_kernels.packed_linear import native_weight, shape_of_packed
from tandem_kernels.turbo_attention.inputs import AttentionInputs


@dataclass(frozen=True)
class PackedProjection:
    """A weight as packed_linear takes it, and its bias [N] or None."""

    packed: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer: norms [H], or [D] over each head and None without QK norm; window in tokens, or None."""

    input_norm: torch.Tensor
    qkv: PackedProjection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PackedProjection
    post_norm: torch.Tensor
    gate_up: PackedProjection
    down: PackedProjection
    window: int | None


class DecoderLayers:
    """Layers of one dtype, float32 or bfloat16, ready to run.

    Args:
        layers: their weights; widths are multiples of 16.
        head_size: D, a multiple of 16 up to 256.
        eps: of the norms.
        scale: of attention's dot products.
    """

    def __init__(self, layers: Sequence[LayerWeights], *, head_size: int, eps: float, scale: float) -> None:
        self._weights = tuple(layers)  # the array below holds bare pointers
        self._array = (native.Layer * len(layers))(*(_native_layer(layer) for layer in layers))
        self._head_size, self._eps, self._scale = head_size, eps, scale
        first = layers[0]
        self.dtype = first.input_norm.dtype
        self._num_heads = shape_of_packed(first.o.packed)[1] // head_size
        self._intermediate_size = shape_of_packed(first.down.packed)[1]

    @staticmethod
    def supports(layers: Sequence[LayerWeights], head_size: int) -> bool:
        """Whether the compiled call covers these weights here."""
        hidden_size = layers[0].input_norm.shape[0]
        _, intermediate_size = shape_of_packed(layers[0].down.packed)
        return (
            native.LIBRARY is not None
            and layers[0].input_norm.dtype in (torch.float32, torch.bfloat16)
            and not (head_size % 16 or hidden_size % 16 or intermediate_size % 16)
            and head_size <= 256
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
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        ancestor_bits: torch.Tensor | None,
        *,
        interleaved: bool = False,
    ) -> None:
        """Run T new tokens through layers first_layer to end_layer - 1.

        Args:
            hidden: [T, H] float32, dense: the residual stream; changed.
            delta: [T, H] of the weights' dtype, dense: the last layer's contribution, which the next norm
                adds to hidden; read unless first_layer is 0, and written.
            positions, rotations, slot_mapping: as of `rope_store`.
            kv_caches: per layer (of all), as of `turbo_attention`, whose are the others as well.
            interleaved: the caches lie as `interleave` says; blocks are then multiples of 64 tokens.

        Raises:
            ValueError: a shape or dtype does not fit, or the metadata is inconsistent.
            IndexError: a position or a slot is out of range.
        """
        num_tokens, hidden_size = hidden.shape
        query = torch.empty(num_tokens, self._num_heads, self._head_size, dtype=self.dtype)  # for the checks
        inputs = AttentionInputs(
            query, kv_caches[first_layer], block_table, seq_lens, query_start_loc, ancestor_bits,
            self._scale, None, None, None, None, None,
        )  # fmt: skip
        for name, tensor, dtype, shape in (
            ("hidden", hidden, torch.float32, (num_tokens, hidden_size)),
            ("delta", delta, self.dtype, (num_tokens, hidden_size)),
            ("positions", positions, torch.int64, (num_tokens,)),
            ("slot_mapping", slot_mapping, torch.int64, (num_tokens,)),
            ("rotations", rotations, torch.complex64, (rotations.shape[0], self._head_size // 2)),
        ):
            if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, wanted a dense "
                    f"{list(shape)} of {dtype}"
                )
        if interleaved and inputs.block_size % 64:
            raise ValueError(
                f"kv_caches have blocks of {inputs.block_size} tokens, interleaved they want a multiple of 64"
            )
        first = kv_caches[first_layer]
        for n, cache in enumerate(kv_caches):
            if cache.shape != first.shape or cache.dtype != self.dtype or not cache.is_contiguous():
                raise ValueError(
                    f"kv_caches[{n}] has shape {list(cache.shape)}, strides {list(cache.stride())} and dtype "
                    f"{cache.dtype}, wanted a contiguous {list(first.shape)} of {self.dtype}, as all layers"
                )
        for layer, cache in zip(self._array, kv_caches, strict=True):
            layer.cache = cache.data_ptr()
        call = native.LayersCall(
            layers=ctypes.addressof(self._array),
            hidden=hidden.data_ptr(),
            delta=delta.data_ptr(),
            positions=positions.data_ptr(),
            slots=slot_mapping.data_ptr(),
            rotations=rotations.data_ptr(),
            num_positions=rotations.shape[0],
            attention=native.AttentionCall(
                block_table=block_table.data_ptr(),
                seq_lens=seq_lens.data_ptr(),
                query_start_loc=query_start_loc.data_ptr(),
                ancestor_bits=None if ancestor_bits is None else ancestor_bits.data_ptr(),
                cache_strides=kv_caches[first_layer].stride()[:3],
                num_seqs=seq_lens.shape[0],
                max_blocks=block_table.shape[1],
                num_blocks=kv_caches[first_layer].shape[0],
                num_tokens=num_tokens,
                num_heads=self._num_heads,
                num_kv_heads=inputs.num_kv_heads,
                head_size=self._head_size,
                block_size=inputs.block_size,
                query_dtype=native.DTYPE[self.dtype],
                cache_dtype=native.DTYPE[kv_caches[first_layer].dtype],
                scale=self._scale,
                num_threads=torch.get_num_threads(),
                interleaved=interleaved,
            ),
            first_layer=first_layer,
            end_layer=end_layer,
            hidden_size=hidden_size,
            intermediate_size=self._intermediate_size,
            eps=self._eps,
        )
        assert native.LIBRARY is not None
        wrong = native.LIBRARY.tandem_decoder_layers(ctypes.byref(call))
        if wrong == -2:
            raise ValueError(
                "the step's metadata is inconsistent: query_start_loc must rise from 0 to the number of "
                "tokens, no sequence be longer than its blocks, every block be in the cache, every node see "
                "itself"
            )
        if wrong >= 0:
            raise IndexError(
                f"token {wrong} has position {positions[wrong]} and slot {slot_mapping[wrong]}, wanted them "
                f"below {rotations.shape[0]} and {kv_caches[first_layer].shape[0] * inputs.block_size}"
            )


def _native_layer(layer: LayerWeights) -> native.Layer:
    def pointer(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return native.Layer(
        input_norm=pointer(layer.input_norm),
        post_norm=pointer(layer.post_norm),
        q_norm=pointer(layer.q_norm),
        k_norm=pointer(layer.k_norm),
        qkv=native_weight(layer.qkv.packed, layer.qkv.bias),
        o=native_weight(layer.o.packed, layer.o.bias),
        gate_up=native_weight(layer.gate_up.packed, layer.gate_up.bias),
        down=native_weight(layer.down.packed, layer.down.bias),
        window=layer.window or 0,
    )
