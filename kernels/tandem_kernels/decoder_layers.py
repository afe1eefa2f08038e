"""All layers of a decoder in one compiled call, instead of 300 calls from Python per step.

The layers are those of `tandem_engine.models.decoder`: this package's operators in the same order on the same
numbers (csrc/decoder.cpp). The results have the same bits as the operators called one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem_kernels import native
from tandem_kernels.packed_linear import PackedWeight, native_weight
from tandem_kernels.turbo_attention import AttentionMetadata
from tandem_kernels.turbo_attention.cpu_native import NativeAttention, native_step


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


class DecoderLayers:
    """Layers of one dtype, float32 or bfloat16, ready to run.

    Args:
        layers: their weights; widths are multiples of 16.
        dtype: of activations and caches, and of weights that are not quantized.
        head_size: D, a multiple of 16 up to 256.
        eps: of the norms.
        scale, softcap: as of `AttentionLayer`, the same in all layers.
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
        self._intermediate_size = first.down.weight.depth

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
            kv_caches: per layer (of all) [num_blocks, 2, Hkv, block_size, D], contiguous, the weights' dtype.
            metadata: the step's sequences.
            interleaved: the caches lie as `interleave` says; blocks are then multiples of 64 tokens.

        Raises:
            ValueError: a shape or dtype does not fit, or the metadata is inconsistent.
            IndexError: a position or a slot is out of range.
        """
        num_tokens, hidden_size = hidden.shape
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
        if metadata.ancestor_bits is not None and len(metadata.ancestor_bits) != num_tokens:
            raise ValueError(
                f"ancestor_bits has shape {list(metadata.ancestor_bits.shape)}, wanted [{num_tokens}]"
            )
        first = kv_caches[0]
        num_blocks, _, _, block_size, head_size = first.shape
        if first.shape[1] != 2 or head_size != self._head_size or self._num_heads % first.shape[2]:
            raise ValueError(
                f"kv_caches have shape {list(first.shape)}, wanted [num_blocks, 2, Hkv, block_size, "
                f"{self._head_size}] with Hkv a divisor of {self._num_heads}"
            )
        if interleaved and block_size % 64:
            raise ValueError(
                f"kv_caches have blocks of {block_size} tokens, interleaved they want a multiple of 64"
            )
        for n, cache in enumerate(kv_caches):
            if cache.shape != first.shape or cache.dtype != self.dtype or not cache.is_contiguous():
                raise ValueError(
                    f"kv_caches[{n}] has shape {list(cache.shape)}, strides {list(cache.stride())} and dtype "
                    f"{cache.dtype}, wanted a contiguous {list(first.shape)} of {self.dtype}, as all layers"
                )
        for layer, cache in zip(self._array, kv_caches, strict=True):
            layer.cache = cache.data_ptr()
        attention = native_step(metadata, first, num_tokens, self._num_heads, self.dtype)
        attention.scale, attention.softcap = self._scale, self._softcap or 0.0
        attention.interleaved = interleaved
        call = native.LayersCall(
            layers=ctypes.addressof(self._array),
            hidden=hidden.data_ptr(),
            delta=delta.data_ptr(),
            positions=positions.data_ptr(),
            slots=slot_mapping.data_ptr(),
            rotations=rotations.data_ptr(),
            num_positions=rotations.shape[0],
            attention=attention,
            first_layer=first_layer,
            end_layer=end_layer,
            hidden_size=hidden_size,
            intermediate_size=self._intermediate_size,
            eps=self._eps,
        )
        assert native.LIBRARY is not None
        wrong = native.LIBRARY.tandem_decoder_layers(ctypes.byref(call))
        if wrong == -2:
            metadata.check_values(num_tokens, block_size, num_blocks)  # says what is wrong
            raise AssertionError("the compiled kernels refused consistent metadata")
        if wrong >= 0:
            raise IndexError(
                f"token {wrong} has position {positions[wrong]} and slot {slot_mapping[wrong]}, wanted them "
                f"below {rotations.shape[0]} and {num_blocks * block_size}"
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
