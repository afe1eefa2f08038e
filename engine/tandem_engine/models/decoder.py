"""The decoder: token ids in, hidden states out, keys and values written to the paged cache.

Per step: the runner builds ModelInputs -> `forward` -> the runner picks the rows that sample -> `logits`.
With packed weights on a CPU `step` does all of it in one compiled call, and `forward` runs all layers, or
one, in such a call (tandem_kernels.DecoderLayers). Otherwise a layer is a dozen operators, with fused
projections and one operator for each part between the matrix products. The decoder knows no requests.

Not covered: tensor parallelism, LoRA, mixture of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tandem_core.errors import InvariantError
from tandem_kernels import (
    Attention,
    AttentionLayer,
    AttentionMetadata,
    DecoderEnds,
    DecoderLayers,
    LayerWeights,
    NormWeights,
    PackedWeight,
    StepInputs,
    activate,
    add_norm,
    make_attention,
    rope_store,
    runs_interleaved,
)
from torch import Tensor

from tandem_engine.models.config import ModelConfig
from tandem_engine.models.linear import Linear, PackedLinear
from tandem_engine.models.rope import rotation_table


@dataclass(frozen=True)
class ModelInputs:
    """The tensors of one step: B sequences with T new tokens in total, sequence after sequence."""

    #: [T] int64.
    input_ids: Tensor
    #: [T] int64: each token's position in the text, below max_model_len.
    positions: Tensor
    #: [T] int64: block_id * block_size + offset that receives each token's key and value.
    slot_mapping: Tensor
    attention: AttentionMetadata

    @classmethod
    def of(cls, step: StepInputs) -> ModelInputs:
        """As CPU tensors."""
        per_token = np.array([step.token_ids, step.positions, step.slot_mapping], dtype=np.int64)
        input_ids, positions, slot_mapping = torch.from_numpy(per_token).unbind()
        return cls(input_ids, positions, slot_mapping, step.metadata())


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's projections, norms and attention; `q_norm` and `k_norm` are None without QK norm."""

    input_norm: Tensor
    qkv_proj: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention: AttentionLayer
    o_proj: Linear
    post_norm: Tensor
    gate_up_proj: Linear
    down_proj: Linear


class Decoder:
    """A llama-family decoder over the tensors of layout.py.

    make_linear(weight, bias) chooses how each projection is computed (linear.py); packed: those that the
    weight file holds for the compiled kernels.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        make_linear: Callable[[Tensor | PackedWeight, Tensor | None], Linear],
        packed: Mapping[str, PackedWeight] | None = None,
    ) -> None:
        self.config = config
        self.embed_tokens = tensors["embed_tokens.weight"]
        self.dtype, self.device = self.embed_tokens.dtype, self.embed_tokens.device

        weights: dict[str, Tensor | PackedWeight] = {**tensors, **(packed or {})}

        def linear(name: str) -> Linear:
            return make_linear(weights[f"{name}.weight"], tensors.get(f"{name}.bias"))

        #: Bytes of all weights and norms, mapped or not.
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.num_bytes += sum(part.nbytes for weight in (packed or {}).values() for part in weight.parts)
        self._layers = tuple(
            DecoderLayer(
                input_norm=tensors[f"{layer}.input_norm.weight"],
                qkv_proj=linear(f"{layer}.qkv_proj"),
                q_norm=tensors.get(f"{layer}.q_norm.weight"),
                k_norm=tensors.get(f"{layer}.k_norm.weight"),
                attention=AttentionLayer(
                    scale=config.head_dim**-0.5,
                    window=window,
                    softcap=config.attn_logit_softcapping,
                    sinks=tensors.get(f"{layer}.sinks"),
                    k_scale=_kv_scale(tensors.get(f"{layer}.k_scale"), config.num_kv_heads),
                    v_scale=_kv_scale(tensors.get(f"{layer}.v_scale"), config.num_kv_heads),
                ),
                o_proj=linear(f"{layer}.o_proj"),
                post_norm=tensors[f"{layer}.post_norm.weight"],
                gate_up_proj=linear(f"{layer}.gate_up_proj"),
                down_proj=linear(f"{layer}.down_proj"),
            )
            for layer, window in ((f"layers.{n}", window) for n, window in enumerate(config.windows))
        )
        self._norm = tensors["norm.weight"]
        self._lm_head = make_linear(weights.get("lm_head.weight", self.embed_tokens), None)
        self._rotations = rotation_table(config.rope, config.head_dim, config.max_model_len).to(self.device)
        self._attention = make_attention(self.dtype, config.head_dim, self.device)
        self._compiled = self._compile()

    def _compile(self) -> DecoderLayers | None:
        """All layers as one call, where the kernels cover these weights."""
        config = self.config
        layers = [_packed_layer(layer) for layer in self._layers]
        packed = [layer for layer in layers if layer is not None]
        if len(packed) < len(layers) or not DecoderLayers.supports(packed, self.dtype, config.head_dim):
            return None
        return DecoderLayers(
            packed,
            self.dtype,
            head_size=config.head_dim,
            eps=config.rms_norm_eps,
            scale=self._layers[0].attention.scale,
            softcap=config.attn_logit_softcapping,
            ends=DecoderEnds(self.embed_tokens, self._norm, self._lm_head.projection)
            if isinstance(self._lm_head, PackedLinear)
            else None,
        )

    @property
    def is_compiled(self) -> bool:
        """Whether all layers are one compiled call."""
        return self._compiled is not None

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
        inputs: ModelInputs,
        kv_caches: Sequence[Tensor],
        on_layer_done: Callable[[int], None] | None = None,
        *,
        attention: Attention | None = None,
        interleaved: bool = False,
    ) -> Tensor:
        """Run T new tokens through every layer; returns normed hidden states [T, H] of the weights' dtype.

        Args:
            kv_caches: per layer [num_blocks, 2, Hkv, block_size, D], written at inputs.slot_mapping.
            on_layer_done: called with n once layer n's keys and values are in the cache and attention has
                read them, so that they can be sent while the next layer runs.
            attention: a backend other than the default for this dtype and device.
            interleaved: how the caches lie (`reads_interleaved`).
        """
        hidden = F.embedding(inputs.input_ids, self.embed_tokens).float()
        if interleaved and self._compiled is None:
            raise InvariantError("only compiled layers read an interleaved cache")
        delta: Tensor | None
        if self._compiled is not None:
            delta = torch.empty_like(hidden, dtype=self.dtype)
            # Layer by layer only for a listener.
            step = len(self._layers) if on_layer_done is None else 1
            for first in range(0, len(self._layers), step):
                self._compiled.run(
                    first,
                    first + step,
                    hidden,
                    delta,
                    inputs.positions,
                    self._rotations,
                    kv_caches,
                    inputs.slot_mapping,
                    inputs.attention,
                    interleaved=interleaved,
                )
                if on_layer_done is not None:
                    on_layer_done(first)
            return add_norm(hidden, delta, self._rms(self._norm), self.dtype)
        attention = attention or self._attention
        attention.prepare(inputs.attention)
        # The previous layer's contribution; it joins the residual stream with the next norm.
        delta = None
        for n, layer in enumerate(self._layers):
            normed = add_norm(hidden, delta, self._rms(layer.input_norm), self.dtype)
            query = self._store_kv(layer, normed, inputs, kv_caches[n])
            attended = attention.run(query, kv_caches[n], layer.attention)
            delta = layer.o_proj(attended.view(-1, self.config.q_size))
            normed = add_norm(hidden, delta, self._rms(layer.post_norm), self.dtype)
            delta = layer.down_proj(activate(layer.gate_up_proj(normed), "silu", gated=True))
            if on_layer_done is not None:
                on_layer_done(n)
        return add_norm(hidden, delta, self._rms(self._norm), self.dtype)

    def _store_kv(self, layer: DecoderLayer, normed: Tensor, inputs: ModelInputs, kv_cache: Tensor) -> Tensor:
        """normed [T, H] -> queries [T, Hq, D]; keys and values go into the cache."""
        return rope_store(
            layer.qkv_proj(normed),
            inputs.positions,
            self._rotations,
            kv_cache,
            inputs.slot_mapping,
            q_norm=None if layer.q_norm is None else self._rms(layer.q_norm),
            k_norm=None if layer.k_norm is None else self._rms(layer.k_norm),
            k_scale=layer.attention.k_scale,
            v_scale=layer.attention.v_scale,
        )

    def _rms(self, weight: Tensor) -> NormWeights:
        return NormWeights("rms", self.config.rms_norm_eps, weight)

    def step(
        self,
        inputs: StepInputs,
        rows: Sequence[int],
        kv_caches: Sequence[Tensor],
        *,
        interleaved: bool = False,
    ) -> tuple[Tensor, list[int]]:
        """Only if `is_batch_invariant`: the bits of `logits` for these rows of `forward`, and of each row the
        most likely token, the lowest of equals, or -1 if the row holds NaN or +inf. The logits are valid
        until the next call.
        """
        if self._compiled is None:
            raise InvariantError("only compiled layers compute a step in one call")
        return self._compiled.step(inputs, self._rotations, kv_caches, rows, interleaved=interleaved)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], rows of forward's result -> [R, vocab] float32."""
        return self._lm_head(hidden, torch.float32)


def _kv_scale(scale: Tensor | None, num_kv_heads: int) -> Tensor | None:
    """A scale per K/V head as GPU kernels take it, so that no step converts it; one per token as it is."""
    if scale is None or scale.dim() == 3:
        return scale
    return scale.float().expand(num_kv_heads).contiguous()


def _packed_layer(layer: DecoderLayer) -> LayerWeights | None:
    """The layer's weights for the compiled call; None if that does not cover the layer."""
    qkv, o, gate_up, down = layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj
    attention = layer.attention
    if not (
        isinstance(qkv, PackedLinear)
        and isinstance(o, PackedLinear)
        and isinstance(gate_up, PackedLinear)
        and isinstance(down, PackedLinear)
        and attention.sinks is attention.k_scale is attention.v_scale is None
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
        window=attention.window,
    )
