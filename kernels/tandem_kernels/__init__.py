"""Tandem's operators, one per module, each on CPU and CUDA tensors.

On the paged KV cache:

    rope_store        a fused QKV projection -> rotated queries; K and V in their slots (every layer and step)
    store_kv          K and V -> their slots, as they are
    turbo_attention   queries x cached K and V -> attention output                      (every layer and step)
    move_slots        accepted draft nodes -> consecutive slots                         (after verification)
    gather_blocks     cache blocks -> one contiguous payload                            (KV leaves the pod)
    scatter_blocks    payload -> cache blocks                                           (KV enters the pod)

The cache is one tensor per layer, [num_blocks, 2, Hkv, block_size, D] with K at index 0 and V at index 1 of
the second dimension; slot = block_id * block_size + offset within the block. On a CPU it is contiguous. int8
and float8 caches: quantize.
DecoderLayers and move_slots_in_layers also take it interleaved (interleaved_cache.py), the others do not.

A layer's matrix products on a CPU: packed_linear, also of quantized weights; between them: add_rms_norm,
silu_mul.

From logits to tokens, all rows at once: draw_tokens.

On a GPU the work is done in Triton (`gpu`, `turbo_attention`). On a CPU it is done by compiled kernels
(`native`) where they exist, else by torch; with packed weights all layers are one call: DecoderLayers.
"""

from tandem_kernels.copy_blocks import gather_blocks, scatter_blocks
from tandem_kernels.decoder_layers import DecoderLayers, LayerWeights, PackedProjection
from tandem_kernels.draw_tokens import draw_tokens
from tandem_kernels.elementwise import add_rms_norm, silu_mul
from tandem_kernels.interleaved_cache import deinterleave, interleave, runs_interleaved
from tandem_kernels.move_slots import move_slots, move_slots_in_layers
from tandem_kernels.packed_linear import (
    pack_quantized,
    pack_weight,
    packed_linear,
    packed_shape,
    quantized_shape,
    runs_packed,
    unpack_quantized,
)
from tandem_kernels.quantized_weight import QuantizedWeight, join_rows, quantize_weight
from tandem_kernels.rope_store import rope_store
from tandem_kernels.store_kv import store_kv
from tandem_kernels.turbo_attention import (
    Attention,
    AttentionLayer,
    AttentionMetadata,
    make_attention,
    turbo_attention,
)

__all__ = [
    "Attention",
    "AttentionLayer",
    "AttentionMetadata",
    "DecoderLayers",
    "LayerWeights",
    "PackedProjection",
    "QuantizedWeight",
    "add_rms_norm",
    "deinterleave",
    "draw_tokens",
    "gather_blocks",
    "interleave",
    "join_rows",
    "make_attention",
    "move_slots",
    "move_slots_in_layers",
    "pack_quantized",
    "pack_weight",
    "packed_linear",
    "packed_shape",
    "quantize_weight",
    "quantized_shape",
    "rope_store",
    "runs_interleaved",
    "runs_packed",
    "scatter_blocks",
    "silu_mul",
    "store_kv",
    "turbo_attention",
    "unpack_quantized",
]
