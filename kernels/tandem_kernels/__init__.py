"""Tandem's operators, one per module, each on CPU and CUDA tensors.

On the paged KV cache:

    rope_store        a fused QKV projection -> rotated queries; K and V in their slots (every layer and step)
    store_kv          K and V -> their slots, as they are
    turbo_attention   queries x cached K and V -> attention output                      (every layer and step)
    move_slots        accepted draft nodes -> consecutive slots                         (after verification)

The cache is one tensor per layer, [num_blocks, 2, Hkv, block_size, D] with K at index 0 and V at index 1 of
the second dimension, or K and V as two views of one (split_cache), where their heads differ in size;
slot = block_id * block_size + offset within the block. On a CPU it is contiguous. int8 and float8 caches:
quantize.
DecoderLayers and move_slots_in_layers also take it interleaved (interleaved_cache.py), the others do not.

gated_delta keeps a state of fixed size per sequence instead of keys and values. moe is a mixture of experts.

packed_linear is a matrix product on a CPU, also with quantized weights; add_norm, norm_rows, activate and
sigmoid_gate run between products. draw_tokens samples all rows of logits at once, draw_token one on the host.

GPU kernels are written in Triton (`gpu`, `turbo_attention`). CPU kernels are compiled (`native`) where
possible, else torch; with packed weights one call runs all layers (DecoderLayers).
"""

from tandem_kernels.checks import KVCache, split_cache
from tandem_kernels.decoder_layers import (
    AttentionWeights,
    BranchWeights,
    DecoderEnds,
    DecoderLayers,
    MlpWeights,
    PackedProjection,
    StepInputs,
    StepTable,
    SublayerWeights,
)
from tandem_kernels.draw_tokens import draw_token, draw_tokens
from tandem_kernels.elementwise import (
    NormWeights,
    activate,
    add_norm,
    finish_logits,
    norm_rows,
    sigmoid_gate,
)
from tandem_kernels.gated_delta import GatedDeltaWeights, StateMetadata, gated_delta
from tandem_kernels.interleaved_cache import deinterleave, interleave, runs_interleaved
from tandem_kernels.moe import (
    ExpertProjection,
    MoeWeights,
    PackedExperts,
    RouterScore,
    Routing,
    SharedMlp,
    moe,
)
from tandem_kernels.move_slots import move_slots, move_slots_in_layers
from tandem_kernels.packed_linear import (
    PANEL,
    PackedWeight,
    dequantize_packed,
    pack_quantized,
    pack_weight,
    packed_linear,
    packed_shape,
    packing_of,
    quantized_shape,
    runs_packed,
    unpack_quantized,
)
from tandem_kernels.quantized_weight import (
    GROUP_SIZE,
    Packing,
    QuantizedWeight,
    join_rows,
    quantize_weight,
    round_to_grid,
)
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
    "GROUP_SIZE",
    "PANEL",
    "Attention",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionWeights",
    "BranchWeights",
    "DecoderEnds",
    "DecoderLayers",
    "ExpertProjection",
    "GatedDeltaWeights",
    "KVCache",
    "MlpWeights",
    "MoeWeights",
    "NormWeights",
    "PackedExperts",
    "PackedProjection",
    "PackedWeight",
    "Packing",
    "QuantizedWeight",
    "RouterScore",
    "Routing",
    "SharedMlp",
    "StateMetadata",
    "StepInputs",
    "StepTable",
    "SublayerWeights",
    "activate",
    "add_norm",
    "deinterleave",
    "dequantize_packed",
    "draw_token",
    "draw_tokens",
    "finish_logits",
    "gated_delta",
    "interleave",
    "join_rows",
    "make_attention",
    "moe",
    "move_slots",
    "move_slots_in_layers",
    "norm_rows",
    "pack_quantized",
    "pack_weight",
    "packed_linear",
    "packed_shape",
    "packing_of",
    "quantize_weight",
    "quantized_shape",
    "rope_store",
    "round_to_grid",
    "runs_interleaved",
    "runs_packed",
    "sigmoid_gate",
    "split_cache",
    "store_kv",
    "turbo_attention",
    "unpack_quantized",
]
