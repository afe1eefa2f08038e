"""Phi-1.5 and 2, Phi-3, 3.5 and 4."""

from __future__ import annotations

from tandem_core.model.spec import Branch, Head, ModelSpec, Sublayer

from tandem_engine.models.families.config import Config
from tandem_engine.models.families.llama import llama_model
from tandem_engine.models.families.names import Fused, Names
from tandem_engine.models.families.registry import family

_QKV = Fused("self_attn.qkv_proj", ("q", "k", "v"))
_GATE_UP = Fused("mlp.gate_up_proj", ("gate", "up"))
_FUSED = Names(
    {"attention.q": _QKV, "attention.k": _QKV, "attention.v": _QKV, "mlp.gate": _GATE_UP, "mlp.up": _GATE_UP}
)


@family("phi3", names=_FUSED)
def phi3(c: Config) -> ModelSpec:
    kind = "sliding_attention" if c.get("sliding_window") else "full_attention"
    return llama_model(c, windows=c.windows([kind] * c.layers))


_PHI = Names(
    {
        "attention.o": "self_attn.dense", "mlp.pre": "input_layernorm", "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
    norm="final_layernorm",
    sublayers_per_layer=1,
)  # fmt: skip


@family("phi", names=_PHI, partial_rotary_factor=0.5)
def phi(c: Config) -> ModelSpec:
    """Attention and MLP beside each other, over one norm."""
    c.refuse("qk_layernorm", False, "its norms of heads are not supported")
    norm = c.layer_norm()
    attention = c.attention(c.rope(), biases=frozenset("qkvo"))
    mlp = c.mlp(act=c.act(default="gelu_new"), gated=False, bias=True)
    layer = Sublayer((Branch(attention, norm), Branch(mlp, norm)))
    return c.model([[layer]] * c.layers, norm, Head(c.flag("tie_word_embeddings"), bias=True))
