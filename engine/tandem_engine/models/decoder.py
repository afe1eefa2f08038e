"""The decoder: token ids in, hidden states out, keys and values left in the paged cache.

Per step: the runner builds AttentionMetadata -> `forward` -> it picks the rows that sample -> `logits`.
With packed weights on a CPU all layers are one compiled call (tandem_kernels.DecoderLayers); else a layer is
a dozen operators, its projections fused, and what lies between the matrix products one operator each. The
decoder never looks at requests, and attention is the kernels' business.

Not covered: tensor parallelism, LoRA, mixture of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tandem_core.errors import InvariantError
from tandem_kernels import (
    DecoderLayers,
    LayerWeights,
    add_rms_norm,
    rope_store,
    runs_interleaved,
    silu_mul,
    turbo_attention,
)
from torch import Tensor

from tandem_engine.models.config import ModelConfig
from tandem_engine.models.linear import Linear, PackedLinear
from tandem_engine.models.metadata import AttentionMetadata
from tandem_engine.models.rope import rotation_table


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's projections and norms; `q_norm` and `k_norm` are None without QK norm."""

    input_norm: Tensor
    qkv_proj: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o_proj: Linear
    post_norm: Tensor
    gate_up_proj: Linear
    down_proj: Linear


class Decoder:
    """A llama-family decoder over the tensors of layout.py.

    make_linear(weight, bias) chooses how each projection is computed (linear.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        make_linear: Callable[[Tensor, Tensor | None], Linear],
    ) -> None:
        self.config = config
        self.embed_tokens = tensors["embed_tokens.weight"]
        self.dtype, self.device = self.embed_tokens.dtype, self.embed_tokens.device

        def linear(name: str) -> Linear:
            return make_linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

        self._layers = tuple(
            DecoderLayer(
                input_norm=tensors[f"{layer}.input_norm.weight"],
                qkv_proj=linear(f"{layer}.qkv_proj"),
                q_norm=tensors.get(f"{layer}.q_norm.weight"),
                k_norm=tensors.get(f"{layer}.k_norm.weight"),
                o_proj=linear(f"{layer}.o_proj"),
                post_norm=tensors[f"{layer}.post_norm.weight"],
                gate_up_proj=linear(f"{layer}.gate_up_proj"),
                down_proj=linear(f"{layer}.down_proj"),
            )
            for layer in (f"layers.{n}" for n in range(config.num_layers))
        )
        self._norm = tensors["norm.weight"]
        self._lm_head = make_linear(tensors.get("lm_head.weight", self.embed_tokens), None)
        self._rotations = rotation_table(config.rope, config.head_dim, config.max_model_len).to(self.device)
        self._scale = config.head_dim**-0.5
        self._compiled = self._compile()

    def _compile(self) -> DecoderLayers | None:
        """All layers as one call, where the kernels cover these weights."""
        windows = self.config.windows
        layers = [_packed_layer(*pair) for pair in zip(self._layers, windows, strict=True)]
        packed = [layer for layer in layers if layer is not None]
        if len(packed) < len(layers) or not DecoderLayers.supports(packed, self.config.head_dim):
            return None
        return DecoderLayers(
            packed, head_size=self.config.head_dim, eps=self.config.rms_norm_eps, scale=self._scale
        )

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's result depends on its own sequence alone, to the last bit."""
        return self._compiled is not None and isinstance(self._lm_head, PackedLinear)

    def reads_interleaved(self, block_size: int) -> bool:
        """Whether `forward` takes interleaved caches with blocks of this many tokens."""
        return self._compiled is not None and runs_interleaved(self.dtype, self.config.head_dim, block_size)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        metadata: AttentionMetadata,
        on_layer_done: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run T new tokens through every layer.

        input_ids, positions: [T] int64, positions < max_model_len. kv_caches: per layer
        [num_blocks, 2, Hkv, block_size, D], written at metadata.slot_mapping. on_layer_done(n) is called
        once layer n's keys and values are in the cache and attention has read them, so that they can be
        sent while the next layer runs. Returns normed hidden states [T, hidden] of the weights' dtype.
        """
        eps = self.config.rms_norm_eps
        hidden = F.embedding(input_ids, self.embed_tokens).float()
        delta: Tensor | None
        if metadata.interleaved and self._compiled is None:
            raise InvariantError("only compiled layers read an interleaved cache")
        if self._compiled is not None:
            delta = torch.empty_like(hidden, dtype=self.dtype)
            # Layer by layer only for someone who listens.
            step = len(self._layers) if on_layer_done is None else 1
            for first in range(0, len(self._layers), step):
                self._compiled.run(
                    first,
                    first + step,
                    hidden,
                    delta,
                    positions,
                    self._rotations,
                    kv_caches,
                    metadata.slot_mapping,
                    metadata.block_table,
                    metadata.seq_lens,
                    metadata.query_start_loc,
                    metadata.ancestor_bits,
                    interleaved=metadata.interleaved,
                )
                if on_layer_done is not None:
                    on_layer_done(first)
            return add_rms_norm(hidden, delta, self._norm, eps)
        # What the layer before contributes; it joins the residual stream with the next norm.
        delta = None
        for n, layer in enumerate(self._layers):
            normed = add_rms_norm(hidden, delta, layer.input_norm, eps)
            delta = self._attention(n, layer, normed, positions, kv_caches[n], metadata)
            normed = add_rms_norm(hidden, delta, layer.post_norm, eps)
            delta = layer.down_proj(silu_mul(layer.gate_up_proj(normed)))
            if on_layer_done is not None:
                on_layer_done(n)
        return add_rms_norm(hidden, delta, self._norm, eps)

    def _attention(
        self,
        n: int,
        layer: DecoderLayer,
        normed: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """normed [T, hidden] -> attention's contribution to the residual [T, hidden]."""
        config = self.config
        query = rope_store(
            layer.qkv_proj(normed).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim),
            positions,
            self._rotations,
            kv_cache,
            metadata.slot_mapping,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        attended = turbo_attention(
            query,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.ancestor_bits,
            scale=self._scale,
            window=config.windows[n],
            plan=None if metadata.plans is None else metadata.plans[config.windows[n]],
        )
        return layer.o_proj(attended.view(-1, config.q_size))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], rows of forward's result -> [R, vocab] float32."""
        return self._lm_head(hidden, torch.float32)


def _packed_layer(layer: DecoderLayer, window: int | None) -> LayerWeights | None:
    """The layer's weights for the compiled call, if all its projections are packed."""
    qkv, o, gate_up, down = layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj
    if not (
        isinstance(qkv, PackedLinear)
        and isinstance(o, PackedLinear)
        and isinstance(gate_up, PackedLinear)
        and isinstance(down, PackedLinear)
    ):
        return None
    return LayerWeights(
        input_norm=layer.input_norm,
        qkv=qkv.projection,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=o.projection,
        post_norm=layer.post_norm,
        gate_up=gate_up.projection,
        down=down.projection,
        window=window,
    )
