"""Which tensors of a checkpoint hold the weights of a spec's roles.

A role is a mixer and what it needs: attention.q, mlp.down, mlp.pre (the norm before the MLP). `ROLES` has
llama's names, which most families share; a family lists its differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from tandem_core.model.spec import Attention, GatedDelta, Mixer, Mlp, Moe

#: Prefixes of the text model's tensors in checkpoints that hold other modalities too.
_NESTED = ("model.language_model.", "language_model.model.", "model.text_model.", "text_model.model.")
#: What no family computes with: heads that predict further tokens, numbers that follow from the config.
_IGNORED_PREFIXES = ("mtp.", "model.mtp.")
_IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq", ".attention.bias", ".attn.bias", ".masked_bias",
)  # fmt: skip


@dataclass(frozen=True)
class Fused:
    """Rows of several roles in one tensor, in `groups` equal groups: in each, all roles have their share."""

    name: str
    #: Roles of one mixer, without its name.
    roles: tuple[str, ...]
    groups: int = 1


ROLES: Mapping[str, str | Fused] = {
    "attention.pre": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.pre": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "moe.pre": "post_attention_layernorm",
    "moe.router": "mlp.gate",
    "moe.correction": "mlp.gate.e_score_correction_bias",
    # {} is the expert's number. Names without it, which are whole, hold all experts.
    "moe.gate": "mlp.experts.{}.gate_proj",
    "moe.up": "mlp.experts.{}.up_proj",
    "moe.down": "mlp.experts.{}.down_proj",
    "moe.shared_gate": "mlp.shared_experts.gate_proj",
    "moe.shared_up": "mlp.shared_experts.up_proj",
    "moe.shared_down": "mlp.shared_experts.down_proj",
    "moe.shared_share": "mlp.shared_expert_gate",
}
#: How files may hold all experts of a layer in one tensor: gate above up, or apart.
_STACKED: Mapping[str, Mapping[str, str | Fused]] = {
    "gate_up_proj": {
        "moe.router": "mlp.gate",
        "moe.gate": Fused("mlp.experts.gate_up_proj", ("gate", "up")),
        "moe.up": Fused("mlp.experts.gate_up_proj", ("gate", "up")),
        "moe.down": "mlp.experts.down_proj",
    },
    "up_proj": {
        "moe.router": "mlp.gate",
        "moe.gate": "mlp.experts.gate_proj",
        "moe.up": "mlp.experts.up_proj",
        "moe.down": "mlp.experts.down_proj",
    },
}
#: Roles of post norms in blocks that have norms before and after each mixer.
SANDWICH: Mapping[str, str | Fused] = {
    "attention.post": "post_attention_layernorm",
    "mlp.pre": "pre_feedforward_layernorm",
    "mlp.post": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Names:
    #: Differences from ROLES.
    roles: Mapping[str, str | Fused] = field(default_factory=dict)
    #: Before all names but the head's.
    prefix: str = "model."
    embed: str = "embed_tokens"
    #: Name of the learned embedding of positions.
    positions: str = ""
    layer: str = "layers.{}."
    norm: str = "norm"
    head: str = "lm_head"
    #: Sublayers that share a number in names.
    sublayers_per_layer: int = 2
    #: Norms hold w for 1 + w.
    one_plus: bool = False
    #: Heads hold the two elements of a rotated pair as neighbours; otherwise they are half a head apart.
    paired: bool = False
    #: Projections are [in, out].
    transposed: bool = False
    #: The head divides its rows by their lengths.
    head_normalized: bool = False
    #: Whether the checkpoint holds other modalities, of which no tensor is read.
    nested: bool = False
    #: Tensors that have no use here, by the begin of their names.
    ignored: tuple[str, ...] = ()

    def of(self, sublayer: int, role: str) -> str | Fused:
        """The tensor of a role without .weight or .bias."""
        name = self.roles.get(role) or ROLES[role]
        before = self.prefix + self.layer.format(sublayer // self.sublayers_per_layer)
        return before + name if isinstance(name, str) else replace(name, name=before + name.name)

    def found_in(self, names: Iterable[str]) -> Names:
        """With the prefix that a checkpoint with these tensors has, and experts as it holds them."""
        present = set(names)
        for stacked, roles in _STACKED.items():
            if any(name.endswith(f".mlp.experts.{stacked}") for name in present):
                return replace(self, roles={**self.roles, **roles})._nested_in(present)
        return self._nested_in(present)

    def _nested_in(self, present: Set[str]) -> Names:
        for prefix in (self.prefix, *(_NESTED if self.nested else ()), ""):
            if f"{prefix}{self.embed}.weight" in present:
                heads = (self.head, f"{prefix.split('.')[0]}.{self.head}")
                head = next((head for head in heads if f"{head}.weight" in present), self.head)
                return replace(self, prefix=prefix, head=head)
        return self

    def uses(self, name: str) -> bool:
        """Whether a tensor of the checkpoint has to have a role."""
        if name.endswith(_IGNORED_SUFFIXES) or name.startswith((*_IGNORED_PREFIXES, *self.ignored)):
            return False
        return not self.nested or name.startswith((self.prefix, self.head))


LLAMA = Names()


def kind_of(mixer: Mixer) -> str:
    """The part of a role before its dot."""
    match mixer:
        case Attention():
            return "attention"
        case Mlp():
            return "mlp"
        case Moe():
            return "moe"
        case GatedDelta():
            return "delta"
