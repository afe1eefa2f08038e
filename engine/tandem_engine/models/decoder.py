"""The decoder: token ids in, hidden states out, keys and values written to the paged cache.

Per step: the runner builds ModelInputs -> `forward` -> the runner picks the rows that sample -> `logits`.
`forward` walks the spec's sublayers, each a few operators (mixers.py). With packed weights on a CPU `step`
does all of it in one compiled call, and `forward` runs all layers, or one, in such a call
(tandem_kernels.DecoderLayers), with the same bits. The decoder knows no requests and no family.

Not covered: tensor parallelism, LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from tandem_core.errors import InvariantError, ModelLoadError
from tandem_core.model import spec as specs
from tandem_core.model.spec import Activation, Head, ModelSpec, Norm, NormKind, Rope
from tandem_kernels import (
    Attention,
    AttentionMetadata,
    DecoderEnds,
    DecoderLayers,
    LayerWeights,
    NormWeights,
    PackedExperts,
    PackedWeight,
    StateMetadata,
    StepInputs,
    add_norm,
    make_attention,
    norm_rows,
    runs_interleaved,
)
from tandem_kernels.turbo_attention.interface import MAX_HEAD_SIZE
from torch import Tensor

from tandem_engine.models.linear import Linear, PackedLinear
from tandem_engine.models.mixers import (
    AttentionMixer,
    GatedDeltaMixer,
    Mixer,
    MixerInputs,
    MlpMixer,
    MoeMixer,
    StateInputs,
    Weights,
)
from tandem_engine.models.rope import rotation_table


@dataclass(frozen=True)
class GroupInputs:
    """Where a step's keys and values are in the caches of a group of layers."""

    #: [T] int64: block_id * block_size + offset that receives each token's key and value.
    slot_mapping: Tensor
    attention: AttentionMetadata


@dataclass(frozen=True)
class ModelInputs:
    """The tensors of one step: B sequences with T new tokens in total, sequence after sequence."""

    #: [T] int64.
    input_ids: Tensor
    #: [T] int64: each token's position in the text, below max_model_len.
    positions: Tensor
    #: These two of the first group of layers (`ModelSpec.kv_groups`), or of all layers.
    slot_mapping: Tensor
    attention: AttentionMetadata
    #: Of the other groups, if layers have pools and block tables by group.
    more_groups: tuple[GroupInputs, ...] = ()
    #: None: no layer has a recurrent state.
    states: StateInputs | None = None

    @classmethod
    def of(cls, step: StepInputs) -> ModelInputs:
        """As CPU tensors."""
        tables = [table.slot_mapping for table in step.more_tables]
        per_token = np.array([step.token_ids, step.positions, step.slot_mapping, *tables], dtype=np.int64)
        input_ids, positions, slot_mapping, *more = torch.from_numpy(per_token).unbind()
        metadata = step.metadata()
        more_groups = [
            GroupInputs(
                slots,
                replace(
                    metadata,
                    block_table=torch.from_numpy(np.array(table.block_table, dtype=np.int32)).view(
                        len(step.seq_lens), -1
                    ),
                ),
            )
            for slots, table in zip(more, step.more_tables, strict=True)
        ]
        return cls(input_ids, positions, slot_mapping, metadata, tuple(more_groups))

    @property
    def groups(self) -> tuple[GroupInputs, ...]:
        return GroupInputs(self.slot_mapping, self.attention), *self.more_groups


@dataclass(frozen=True)
class DecoderBranch:
    pre_norm: NormWeights | None
    mixer: Mixer
    post_norm: NormWeights | None
    #: Whose cache the mixer uses; None: it keeps nothing.
    layer: int | None


@dataclass(frozen=True)
class DecoderSublayer:
    branches: tuple[DecoderBranch, ...]
    post_norm: NormWeights | None
    residual_scale: float


def supports(spec: ModelSpec, device: torch.device) -> str | None:
    """Why `Decoder` does not compute this model here, as a sentence; None: it does."""
    mixers = [branch.mixer for sublayer in spec.sublayers for branch in sublayer.branches]
    known = specs.Attention | specs.GatedDelta | specs.Mlp | specs.Moe
    if odd := next((m for m in mixers if not isinstance(m, known)), None):
        return (
            f"the model has layers of kind {type(odd).__name__}, which are not supported; use another model"
        )
    if device.type != "cpu" and len(spec.attentions) < len(spec.cached):
        return "the model has recurrent layers, which only CPUs compute so far; use --device cpu"
    shapes = {(a.kv_heads, a.k_dim, a.v_dim) for a in spec.attentions}
    if len(shapes) != 1:
        return (
            f"the model's layers have {len(shapes)} shapes of keys and values, of which one is supported; "
            "use another model"
        )
    _, k_dim, v_dim = shapes.pop()
    if k_dim != v_dim:
        return f"the model has values of size {v_dim} and keys of size {k_dim}; use one where they are equal"
    if device.type == "cuda" and k_dim > MAX_HEAD_SIZE:
        return (
            f"head size {k_dim} is more than the {MAX_HEAD_SIZE} that attention on a GPU takes; use "
            "--device cpu, or another model"
        )
    return None


class Decoder:
    """A decoder of `spec` over the tensors of layout.py, for texts of up to spec.max_len tokens.

    make_linear(weight, bias) chooses how each projection is computed (linear.py); packed: those that the
    weight file holds for the compiled kernels. Raises ModelLoadError for a spec that is not supported.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        make_linear: Callable[[Tensor | PackedWeight, Tensor | None], Linear],
        packed: Mapping[str, PackedWeight | PackedExperts] | None = None,
    ) -> None:
        self.spec = spec
        self.embed_tokens = tensors["embed_tokens.weight"]
        self.dtype, self.device = self.embed_tokens.dtype, self.embed_tokens.device
        if why := supports(spec, self.device):
            raise ModelLoadError(why)
        weights = Weights("", tensors, packed or {}, make_linear)
        #: Bytes of all weights and norms, mapped or not.
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.num_bytes += sum(part.nbytes for weight in weights.packed.values() for part in weight.parts)
        self._positions = weights.get("positions.weight")
        self._sublayers = tuple(self._build(weights))
        self._norm = weights.norm(spec.norm, "norm")
        self._lm_head = make_linear(
            weights.weight("lm_head") if weights.has("lm_head") else self.embed_tokens,
            tensors.get("lm_head.bias"),
        )
        groups = spec.kv_groups()
        self._group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        # One for each group and head size, since each keeps a step's plan.
        keys = {(self._group_of[n], a.k_dim) for n, a in enumerate(spec.attentions)}
        self._attention = {key: make_attention(self.dtype, key[1], self.device) for key in keys}
        self._compiled = self._compile()

    def _build(self, weights: Weights) -> Iterator[DecoderSublayer]:
        rotations: dict[Rope | None, Tensor | None] = {None: None}
        layer = num_attentions = 0
        for s, sublayer in enumerate(self.spec.sublayers):
            branches = []
            for b, branch in enumerate(sublayer.branches):
                own, mixer = weights.within(f"sublayers.{s}.{b}."), branch.mixer
                built: Mixer
                match mixer:
                    case specs.Attention(rope=rope):
                        if rope is not None and rope not in rotations:
                            rotations[rope] = rotation_table(rope, self.spec.max_len).to(self.device)
                        built = AttentionMixer(mixer, own, rotations[rope], num_attentions)
                    case specs.GatedDelta():
                        built = GatedDeltaMixer(mixer, own, layer - num_attentions)
                    case specs.Mlp():
                        built = MlpMixer(mixer, own)
                    case specs.Moe():
                        built = MoeMixer(mixer, own)
                    case _:
                        raise InvariantError(f"supports() let {type(mixer).__name__} pass")
                caches = isinstance(mixer, specs.Attention | specs.GatedDelta)
                pre, post = own.norm(branch.pre, "pre_norm"), own.norm(branch.post, "post_norm")
                branches.append(DecoderBranch(pre, built, post, layer if caches else None))
                layer += caches
                num_attentions += isinstance(mixer, specs.Attention)
            post = weights.norm(sublayer.post, f"sublayers.{s}.post_norm")
            yield DecoderSublayer(tuple(branches), post, sublayer.residual_scale)

    def _compile(self) -> DecoderLayers | None:
        """All layers as one call, where the kernels cover these weights."""
        pairs = zip(self._sublayers[::2], self._sublayers[1::2], strict=False)
        packed = [layer for pair in pairs if (layer := _packed_layer(*pair)) is not None]
        first, norm = self.spec.attentions[0], None if self._norm is None else self._norm.weight
        if (
            not _is_plain(self.spec)
            or 2 * len(packed) < len(self._sublayers)
            or norm is None
            or not DecoderLayers.supports(packed, self.dtype, first.k_dim)
        ):
            return None
        return DecoderLayers(
            packed,
            self.dtype,
            head_size=first.k_dim,
            eps=self.spec.norm.eps,
            scale=first.scale,
            softcap=first.cap,
            ends=DecoderEnds(self.embed_tokens, norm, self._lm_head.projection)
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
        return self._compiled is not None and runs_interleaved(
            self.dtype, self.spec.attentions[0].k_dim, block_size
        )

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
        if interleaved and self._compiled is None:
            raise InvariantError("only compiled layers read an interleaved cache")
        hidden = self._embed(inputs)
        if self._compiled is not None:
            delta = torch.empty_like(hidden, dtype=self.dtype)
            # Layer by layer only for a listener, or for block tables by group.
            num_layers = len(self.spec.cached)
            step = num_layers if on_layer_done is None and not inputs.more_groups else 1
            groups = self._groups_of_layers(inputs)
            for first in range(0, num_layers, step):
                self._compiled.run(
                    first,
                    first + step,
                    hidden,
                    delta,
                    inputs.positions,
                    self._rotations,
                    kv_caches,
                    groups[first].slot_mapping,
                    groups[first].attention,
                    interleaved=interleaved,
                )
                if on_layer_done is not None:
                    on_layer_done(first)
            return add_norm(hidden, delta, self._norm, self.dtype)
        groups = self._groups_of_layers(inputs)
        if attention is not None and inputs.more_groups:
            raise InvariantError("a backend of the caller's plans for one group of layers")
        backends = self._attention if attention is None else dict.fromkeys(self._attention, attention)
        for (g, _), backend in backends.items():
            backend.prepare(inputs.groups[g].attention if inputs.more_groups else inputs.attention)
        mixer_inputs = MixerInputs(
            inputs.positions,
            [group.slot_mapping for group in groups],
            kv_caches,
            [backends[self._group_of[n], a.k_dim] for n, a in enumerate(self.spec.attentions)],
            inputs.states,
        )
        return self._interpret(hidden, mixer_inputs, on_layer_done)

    def _groups_of_layers(self, inputs: ModelInputs) -> list[GroupInputs]:
        """Of each layer with attention."""
        groups = inputs.groups
        return [groups[self._group_of[n] if inputs.more_groups else 0] for n in sorted(self._group_of)]

    def _embed(self, inputs: ModelInputs) -> Tensor:
        """[T, H] float32"""
        hidden = F.embedding(inputs.input_ids, self.embed_tokens).float()
        if self.spec.embed_scale != 1:
            hidden *= self.spec.embed_scale
        if self._positions is not None:
            hidden += F.embedding(inputs.positions + self.spec.position_offset, self._positions)
        return hidden

    def _interpret(
        self, hidden: Tensor, inputs: MixerInputs, on_layer_done: Callable[[int], None] | None
    ) -> Tensor:
        # The previous sublayer's contribution; it joins the residual stream with the next norm.
        delta: Tensor | None = None
        scale = 1.0
        for sublayer in self._sublayers:
            results = []
            for branch in sublayer.branches:
                normed = add_norm(hidden, delta, branch.pre_norm, self.dtype, scale=scale)
                delta = None
                result = branch.mixer(normed, inputs)
                if on_layer_done is not None and branch.layer is not None:
                    on_layer_done(branch.layer)
                results.append(result if branch.post_norm is None else norm_rows(result, branch.post_norm))
            delta, scale = results[0], sublayer.residual_scale
            for result in results[1:]:
                delta = (delta.float() + result).to(self.dtype)
            if sublayer.post_norm is not None:
                delta = norm_rows(delta, sublayer.post_norm)
        return add_norm(hidden, delta, self._norm, self.dtype, scale=scale)

    @property
    def _rotations(self) -> Tensor:
        """Of the compiled layers."""
        mixer = self._sublayers[0].branches[0].mixer
        assert isinstance(mixer, AttentionMixer) and mixer.rotations is not None
        return mixer.rotations

    @torch.inference_mode()
    def replay(self, states: StateInputs, rows: Tensor, metadata: StateMetadata) -> None:
        """Advances the recurrent states over rows [n] of the last step, which kept what that needs."""
        for sublayer in self._sublayers:
            for branch in sublayer.branches:
                if isinstance(branch.mixer, GatedDeltaMixer):
                    branch.mixer.replay(rows, states, metadata)

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
        logits, head = self._lm_head(hidden, torch.float32), self.spec.head
        if head.scale != 1:
            logits *= head.scale
        return logits if head.cap is None else torch.tanh(logits / head.cap) * head.cap


def _is_plain(spec: ModelSpec) -> bool:
    """Whether the model is a llama with equal layers, which are what the compiled call computes."""
    norm, first = Norm(NormKind.RMS, spec.norm.eps), spec.attentions[0]
    if first.rope is None or first.rope.dims != first.k_dim:
        return False
    if spec.norm != norm or spec.embed_scale != 1 or spec.learned_positions:
        return False
    if replace(spec.head, tied=True) != Head(tied=True):
        return False
    for s, sublayer in enumerate(spec.sublayers):
        if len(sublayer.branches) > 1 or sublayer.post or sublayer.residual_scale != 1:
            return False
        branch = sublayer.branches[0]
        mixer = branch.mixer
        if branch.pre != norm or branch.post:
            return False
        if s % 2:
            if not isinstance(mixer, specs.Mlp) or not mixer.gated or mixer.act is not Activation.SILU:
                return False
            if mixer.limit is not None:
                return False
        elif not isinstance(mixer, specs.Attention) or mixer != specs.Attention(
            first.heads, first.kv_heads, first.k_dim, first.k_dim, first.scale, first.rope, mixer.window,
            first.cap, qk_norm=norm if first.qk_norm else None, biases=mixer.biases,
        ):  # fmt: skip
            return False
    return True


def _packed_layer(attention: DecoderSublayer, mlp: DecoderSublayer) -> LayerWeights | None:
    """The layer's weights for the compiled call; None if that does not cover the layer."""
    first, second = attention.branches[0], mlp.branches[0]
    mixer, after = first.mixer, second.mixer
    if not (isinstance(mixer, AttentionMixer) and isinstance(after, MlpMixer)):
        return None
    qkv, o, gate_up, down = mixer.qkv, mixer.o, after.up, after.down
    pre, post, layer = first.pre_norm, second.pre_norm, mixer.layer
    if not (
        isinstance(qkv, PackedLinear)
        and isinstance(o, PackedLinear)
        and isinstance(gate_up, PackedLinear)
        and isinstance(down, PackedLinear)
        and pre is not None
        and pre.weight is not None
        and post is not None
        and post.weight is not None
        and layer.sinks is layer.k_scale is layer.v_scale is None
    ):
        return None
    return LayerWeights(
        input_norm=pre.weight,
        qkv=qkv.projection,
        q_norm=None if mixer.q_norm is None else mixer.q_norm.weight,
        k_norm=None if mixer.k_norm is None else mixer.k_norm.weight,
        o=o.projection,
        post_norm=post.weight,
        gate_up=gate_up.projection,
        down=down.projection,
        window=layer.window,
    )
