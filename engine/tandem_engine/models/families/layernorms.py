"""Families with layer norms in llama's block: StarCoder 2, StableLM, Nemotron-4, Persimmon."""

from __future__ import annotations

from tandem_core.model.spec import Branch, ModelSpec, Sublayer

from tandem_engine.models.families.config import Config, sub
from tandem_engine.models.families.names import Fused, Names
from tandem_engine.models.families.registry import family


@family("starcoder2", names=Names({"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}), tie_word_embeddings=True)
def starcoder2(c: Config) -> ModelSpec:
    norm, rope, bias = c.layer_norm("norm_epsilon"), c.rope(), c.flag("use_bias", True)
    mlp = c.mlp(act=c.act(default="gelu_pytorch_tanh"), gated=False, bias=bias)
    kind = "sliding_attention" if c.get("sliding_window") else "full_attention"
    biases = frozenset("qkvo" if bias else "")
    return c.model(
        [
            (sub(c.attention(rope, window=w, biases=biases), norm), sub(mlp, norm))
            for w in c.windows([kind] * c.layers)
        ],
        norm,
    )


@family("nemotron", names=Names(one_plus=True), partial_rotary_factor=0.5)
def nemotron(c: Config) -> ModelSpec:
    norm = c.layer_norm("norm_eps")
    mlp = c.mlp(act=c.act(default="relu2"), gated=False, bias=c.flag("mlp_bias"))
    attention = c.attention(c.rope(), biases=frozenset("qkvo" if c.flag("attention_bias") else ""))
    return c.model([(sub(attention, norm), sub(mlp, norm))] * c.layers, norm)


def _stablelm_names(c: Config) -> Names:
    if c.flag("use_parallel_residual"):
        return Names({"mlp.pre": "input_layernorm"}, sublayers_per_layer=1)
    return Names()


@family("stablelm", names=_stablelm_names, partial_rotary_factor=0.25)
def stablelm(c: Config) -> ModelSpec:
    c.refuse("qk_layernorm", False, "norms with weights of each head are not supported")
    norm, mlp = c.layer_norm(), c.mlp()
    attention = c.attention(c.rope(), biases=frozenset("qkv" if c.flag("use_qkv_bias") else ""))
    if c.flag("use_parallel_residual"):
        return c.model([[Sublayer((Branch(attention, norm), Branch(mlp, norm)))]] * c.layers, norm)
    return c.model([(sub(attention, norm), sub(mlp, norm))] * c.layers, norm)


def _persimmon_names(c: Config) -> Names:
    qkv = Fused("self_attn.query_key_value", ("q", "k", "v"), groups=c.heads)
    return Names(
        {
            "attention.q": qkv, "attention.k": qkv, "attention.v": qkv, "attention.o": "self_attn.dense",
            "attention.q_norm": "self_attn.q_layernorm", "attention.k_norm": "self_attn.k_layernorm",
            "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
        },
        norm="final_layernorm",
    )  # fmt: skip


@family("persimmon", names=_persimmon_names, partial_rotary_factor=0.5)
def persimmon(c: Config) -> ModelSpec:
    norm = c.layer_norm()
    qk_norm = norm if c.flag("qk_layernorm", True) else None
    attention = c.attention(c.rope(), qk_norm=qk_norm, biases=frozenset("qkvo"))
    mlp = c.mlp(act=c.act(default="relu2"), gated=False, bias=True)
    return c.model([(sub(attention, norm), sub(mlp, norm))] * c.layers, norm)
