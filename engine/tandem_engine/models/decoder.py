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
from tandem_core.model.spec import ModelSpec, Rope
from tandem_kernels import (
    Attention,
    AttentionMetadata,
    BranchWeights,
    DecoderEnds,
    DecoderLayers,
    NormWeights,
    PackedExperts,
    PackedWeight,
    StateMetadata,
    StepInputs,
    SublayerWeights,
    add_norm,
    finish_logits,
    make_attention,
    norm_rows,
    runs_interleaved,
)
from tandem_kernels.turbo_attention import MAX_GPU_HEAD_SIZE
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
    #: For the other groups, if layers have pools and block tables by group.
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

    @property
    def layers(self) -> list[int]:
        """Whose caches it uses."""
        return [branch.layer for branch in self.branches if branch.layer is not None]


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
    if device.type == "cuda" and k_dim > MAX_GPU_HEAD_SIZE:
        return (
            f"head size {k_dim} is more than the {MAX_GPU_HEAD_SIZE} that attention on a GPU takes; use "
            "--device cpu, or another model"
        )
    return None


class Decoder:
    """A decoder of `spec` over the tensors of layout.py, for texts of up to spec.max_len tokens.

    make_linear(weight, bias) chooses how each projection is computed (linear.py); packed: those that the
    weight file holds for the compiled kernels. Raises ModelLoadError for a spec that is not supported.
    """

    #: For logs, and for the fingerprint of the KV layout.
    executor = "native"
    #: Whether sequences have a state besides their KV, which neither prefix hits nor transfers bring.
    is_recurrent = False
    #: Bytes of that state.
    state_bytes = 0
    #: Whether a step may verify drafts.
    takes_drafts = True

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
        groups = spec.kv_groups()
        self._group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._sublayers = tuple(self._build(weights))
        self._norm = weights.norm(spec.norm, "norm")
        self._lm_head = make_linear(
            weights.weight("lm_head") if weights.has("lm_head") else self.embed_tokens,
            tensors.get("lm_head.bias"),
        )
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
                        group = self._group_of[num_attentions]
                        built = AttentionMixer(mixer, own, rotations[rope], num_attentions, group)
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
        """All sublayers as one call, where the kernels cover these weights."""
        sublayers = [
            SublayerWeights(
                tuple(
                    BranchWeights(mixer, branch.pre_norm, branch.post_norm)
                    for branch in sublayer.branches
                    if (mixer := branch.mixer.compiled()) is not None
                ),
                sublayer.post_norm,
                sublayer.residual_scale,
            )
            for sublayer in self._sublayers
        ]
        complete = all(
            len(s.branches) == len(ours.branches) for s, ours in zip(self._sublayers, sublayers, strict=True)
        )
        if not complete or not DecoderLayers.supports(sublayers, self.dtype):
            return None
        ends = None
        if isinstance(self._lm_head, PackedLinear) and self._norm is not None:
            ends = DecoderEnds(
                self.embed_tokens,
                self._norm,
                self._lm_head.projection,
                embed_scale=self.spec.embed_scale,
                learned_positions=self._positions,
                position_offset=self.spec.position_offset,
                logit_scale=self.spec.head.scale,
                logit_cap=self.spec.head.cap,
            )
        return DecoderLayers(sublayers, self.dtype, ends=ends)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Sublayers first to end - 1, each span with one of those that cache and what follows it."""
        caching = [s for s, sublayer in enumerate(self._sublayers) if sublayer.layers]
        firsts = [0, *caching[1:]]
        return zip(firsts, [*firsts[1:], len(self._sublayers)], strict=True)

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
        dims = {dim for a in self.spec.attentions for dim in (a.k_dim, a.v_dim)}
        return self._compiled is not None and all(
            runs_interleaved(self.dtype, dim, block_size) for dim in dims
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
            # Layer by layer only for a listener.
            spans = self._spans() if on_layer_done is not None else [(0, len(self._sublayers))]
            for first, end in spans:
                self._compiled.run(
                    first,
                    end,
                    hidden,
                    delta,
                    inputs.positions,
                    kv_caches,
                    inputs.slot_mapping,
                    inputs.attention,
                    more_groups=[(group.slot_mapping, group.attention) for group in inputs.more_groups],
                    interleaved=interleaved,
                )
                for layer in (n for sublayer in self._sublayers[first:end] for n in sublayer.layers):
                    if on_layer_done is not None:
                        on_layer_done(layer)
            return add_norm(hidden, delta, self._norm, self.dtype, scale=self._sublayers[-1].residual_scale)
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
        """One for each layer with attention."""
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
        return self._compiled.step(inputs, kv_caches, rows, interleaved=interleaved)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], rows of forward's result -> [R, vocab] float32."""
        return finish_logits(self._lm_head(hidden, torch.float32), self.spec.head.scale, self.spec.head.cap)
