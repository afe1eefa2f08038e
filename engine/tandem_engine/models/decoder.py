"""The decoder: token ids in, hidden states out, keys and values left in the paged cache.

Per step: the runner builds AttentionMetadata -> `forward` -> it picks the rows that sample -> `logits`.
Every operator costs 5-10 us in eager mode and there are dozens of layers, so a layer is a dozen calls:
projections are fused, and what lies between the matrix products is one operator each. The decoder never
looks at requests, and attention is the kernels' business.

Not covered: tensor parallelism, LoRA, mixture of experts, quantized activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tandem_kernels import add_rms_norm, rope_store, silu_mul, turbo_attention
from torch import Tensor

from tandem_engine.models.config import ModelConfig
from tandem_engine.models.linear import Linear
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
        # What the layer before contributes; it joins the residual stream with the next norm.
        delta: Tensor | None = None
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
        )
        return layer.o_proj(attended.view(-1, config.q_size))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], rows of forward's result -> [R, vocab] float32."""
        return self._lm_head(hidden).float()
