"""The mixers of a decoder, each as operators called one by one: normed rows [T, H] in, their result out.

This is the definition of each mixer, what GPUs run, and what the compiled call (tandem_kernels.DecoderLayers)
equals to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from tandem_core.errors import InvariantError
from tandem_core.model import spec
from tandem_kernels import (
    Attention,
    AttentionLayer,
    AttentionWeights,
    ExpertProjection,
    GatedDeltaWeights,
    MlpWeights,
    MoeWeights,
    NormWeights,
    PackedExperts,
    PackedProjection,
    PackedWeight,
    RouterScore,
    Routing,
    SharedMlp,
    StateMetadata,
    activate,
    gated_delta,
    moe,
    rope_store,
    sigmoid_gate,
)
from torch import Tensor

from tandem_engine.models.linear import Linear, PackedLinear


@dataclass(frozen=True)
class StateInputs:
    """The recurrent states that a step reads and writes."""

    metadata: StateMetadata
    #: For each layer with a state its parts, [slots, ...] each (`StatePool.layers`).
    layers: Sequence[tuple[Tensor, ...]]
    #: For each of these layers the projections [T, width], from the step on; only where `keeps`.
    kept: list[Tensor] = field(default_factory=list)
    keeps: bool = False


@dataclass(frozen=True)
class MixerInputs:
    """What a step gives every mixer."""

    #: [T] int64.
    positions: Tensor
    #: For each layer with attention, those of its group.
    slot_mapping: Sequence[Tensor]
    #: Per layer with attention [num_blocks, 2, Hkv, block_size, D].
    kv_caches: Sequence[Tensor]
    #: One for each layer with attention, prepared for the step.
    attention: Sequence[Attention]
    #: None: no layer has a recurrent state.
    states: StateInputs | None = None


class Mixer(Protocol):
    def __call__(self, x: Tensor, inputs: MixerInputs) -> Tensor: ...

    def compiled(self) -> AttentionWeights | MlpWeights | MoeWeights | None:
        """Its weights for the compiled call; None where that does not cover them."""


@dataclass(frozen=True)
class Weights:
    """The tensors whose names begin with prefix, by the rest of their names."""

    prefix: str
    tensors: Mapping[str, Tensor]
    packed: Mapping[str, PackedWeight | PackedExperts]
    make_linear: Callable[[Tensor | PackedWeight, Tensor | None], Linear]

    def within(self, prefix: str) -> Weights:
        return replace(self, prefix=self.prefix + prefix)

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(self.prefix + name)

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}.weight" in self.tensors.keys() | self.packed.keys()

    def weight(self, name: str) -> Tensor | PackedWeight:
        name = f"{self.prefix}{name}.weight"
        weight = self.packed.get(name)
        return weight if isinstance(weight, PackedWeight) else self.tensors[name]

    def experts(self, name: str) -> Tensor | PackedExperts:
        name = f"{self.prefix}{name}.weight"
        weight = self.packed.get(name)
        return weight if isinstance(weight, PackedExperts) else self.tensors[name]

    def linear(self, name: str) -> Linear:
        return self.make_linear(self.weight(name), self.get(f"{name}.bias"))

    def norm(self, norm: spec.Norm | None, name: str) -> NormWeights | None:
        if norm is None:
            return None
        name = self.prefix + name
        weight = self.tensors[f"{name}.weight"] if norm.weight else None
        bias = self.tensors[f"{name}.bias"] if norm.bias else None
        return NormWeights(norm.kind, norm.eps, weight, bias)


class AttentionMixer:
    """Projections, norms and rotation of heads, storing of keys and values, attention, output gate."""

    def __init__(
        self, a: spec.Attention, weights: Weights, rotations: Tensor | None, layer: int, group: int
    ) -> None:
        """rotations: of models.rope, None without RoPE; layer: whose cache it uses; group: of that layer."""
        self.spec, self.rotations = a, rotations
        self._cache, self._group = layer, group
        self.qkv, self.o = weights.linear("qkv_proj"), weights.linear("o_proj")
        self._gate = weights.linear("gate_proj") if a.gate else None
        self.q_norm, self.k_norm = weights.norm(a.qk_norm, "q_norm"), weights.norm(a.qk_norm, "k_norm")
        self._v_norm = weights.norm(a.v_norm, "v_norm")
        self.layer = AttentionLayer(
            scale=a.scale,
            window=a.window,
            softcap=a.cap,
            sinks=weights.get("sinks"),
            k_scale=_kv_scale(weights.get("k_scale"), a.kv_heads),
            v_scale=_kv_scale(weights.get("v_scale"), a.kv_heads),
        )

    def __call__(self, x: Tensor, inputs: MixerInputs) -> Tensor:
        a, cache = self.spec, inputs.kv_caches[self._cache]
        query = rope_store(
            self.qkv(x),
            inputs.positions,
            self.rotations,
            cache,
            inputs.slot_mapping[self._cache],
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            v_norm=self._v_norm,
            norm_whole=a.norm_whole,
            norm_after_rope=a.norm_after_rope,
            k_scale=self.layer.k_scale,
            v_scale=self.layer.v_scale,
        )
        if growth := a.query_growth:
            steps = torch.floor(inputs.positions / growth.original_max_len)
            factors = 1 + growth.beta * torch.log1p(steps)
            query.mul_(factors.view(-1, 1, 1).to(query.dtype))
        attended = inputs.attention[self._cache].run(query, cache, self.layer)
        if self._gate is not None:
            attended = sigmoid_gate(attended, self._gate(x))
        return self.o(attended.view(-1, a.heads * a.v_dim))

    def compiled(self) -> AttentionWeights | None:
        a, layer = self.spec, self.layer
        qkv, o, gate = (None if p is None else _projection(p) for p in (self.qkv, self.o, self._gate))
        if qkv is None or o is None or (gate is None) != (self._gate is None):
            return None
        if layer.k_scale is not None or layer.v_scale is not None or a.query_growth is not None:
            return None
        return AttentionWeights(
            qkv,
            o,
            a.heads,
            a.kv_heads,
            a.k_dim,
            a.v_dim,
            a.scale,
            self.rotations,
            window=a.window,
            softcap=a.cap,
            sinks=None if layer.sinks is None else layer.sinks.float(),
            gate=gate,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            v_norm=self._v_norm,
            norm_whole=a.norm_whole,
            norm_after_rope=a.norm_after_rope,
            group=self._group,
        )


class GatedDeltaMixer:
    """Projections, convolution, gated delta rule, gated norm, and the projection of its output.

    A draft changes no state (tandem_kernels.gated_delta). The step keeps its projections, and `replay`
    advances the state over the rows of the accepted path, with the bits that single tokens would have given.
    """

    def __init__(self, d: spec.GatedDelta, weights: Weights, layer: int) -> None:
        """layer: counts the layers that have a state."""
        self.spec, self._layer = d, layer
        self._in, self._o = weights.linear("in_proj"), weights.linear("o_proj")
        conv, a_log, dt_bias = (weights.tensors[weights.prefix + n] for n in ("conv", "a_log", "dt_bias"))
        norm = weights.norm(d.norm, "norm")
        assert norm is not None and norm.weight is not None
        self._own = GatedDeltaWeights(
            conv=conv.float().flatten(1).t().contiguous(),
            decay_rate=a_log.exp(),
            decay_bias=dt_bias,
            norm=norm.weight,
            eps=norm.eps,
        )
        values = d.v_heads * d.v_dim
        #: Widths in the projection: queries, keys and values; z; b; a.
        self._widths = [2 * d.k_heads * d.k_dim + values, values, d.v_heads, d.v_heads]

    def __call__(self, x: Tensor, inputs: MixerInputs) -> Tensor:
        if inputs.states is None:
            raise InvariantError("a step of a model with recurrent layers has no states")
        projected = self._in(x)
        if inputs.states.keeps:
            inputs.states.kept.append(projected)
        return self._o(self._mix(projected, inputs.states, inputs.states.metadata))

    def compiled(self) -> None:
        """The compiled call has no recurrent layers."""

    def replay(self, rows: Tensor, states: StateInputs, metadata: StateMetadata) -> None:
        """Advances the state over rows [n] of a step, in the sequences of metadata."""
        self._mix(states.kept[self._layer].index_select(0, rows), states, metadata)

    def _mix(self, projected: Tensor, states: StateInputs, metadata: StateMetadata) -> Tensor:
        qkv, z, b, a = torch.split(projected, self._widths, 1)
        conv, recurrent = states.layers[self._layer]
        return gated_delta(qkv, z, b, a, self._own, conv, recurrent, metadata)


class MlpMixer:
    def __init__(self, mlp: spec.Mlp, weights: Weights) -> None:
        self.spec = mlp
        self.up = weights.linear("gate_up_proj" if mlp.gated else "up_proj")
        self.down = weights.linear("down_proj")

    def __call__(self, x: Tensor, inputs: MixerInputs) -> Tensor:
        mlp = self.spec
        return self.down(activate(self.up(x), mlp.act, mlp.gated, mlp.limit))

    def compiled(self) -> MlpWeights | None:
        mlp, up, down = self.spec, _projection(self.up), _projection(self.down)
        if up is None or down is None:
            return None
        return MlpWeights(up, down, mlp.act, mlp.gated, mlp.limit)


def _projection(linear: Linear) -> PackedProjection | None:
    """The compiled kernels' form of its weights, where it has one."""
    return linear.projection if isinstance(linear, PackedLinear) else None


class MoeMixer:
    def __init__(self, m: spec.Moe, weights: Weights) -> None:
        router, first = m.router, "gate_up_proj" if m.expert.gated else "up_proj"
        shared = None
        if m.shared is not None:
            gate_up, down = (weights.weight(f"shared.{name}") for name in (first, "down_proj"))
            shared = SharedMlp(gate_up, down, weights.get("shared.gate"))
        self.weights = MoeWeights(
            Routing(
                RouterScore(router.score), router.top_k, router.renorm, router.scale, router.groups,
                router.top_groups,
            ),
            weights.tensors[f"{weights.prefix}router.weight"],
            ExpertProjection(weights.experts(f"experts.{first}")),
            ExpertProjection(weights.experts("experts.down_proj")),
            router_bias=weights.get("router.bias"),
            correction=weights.get("correction"),
            shared=shared,
            act=m.expert.act,
            gated=m.expert.gated,
            limit=m.expert.limit,
        )  # fmt: skip

    def __call__(self, x: Tensor, inputs: MixerInputs) -> Tensor:
        return moe(x, self.weights)

    def compiled(self) -> MoeWeights:
        return self.weights


def _kv_scale(scale: Tensor | None, num_kv_heads: int) -> Tensor | None:
    """A scale per K/V head as GPU kernels take it, so that no step converts it; one per token as it is."""
    if scale is None or scale.dim() == 3:
        return scale
    return scale.float().expand(num_kv_heads).contiguous()
