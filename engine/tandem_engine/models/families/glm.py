"""GLM-4 9B (glm), GLM-4 0414 (glm4) and ChatGLM 2 and 3: half of each head rotates, in neighbouring pairs."""

from __future__ import annotations

from typing import Any

from tandem_core.model.spec import ModelSpec, Rope

from tandem_engine.models.families.config import Config, sub
from tandem_engine.models.families.names import Fused, Names
from tandem_engine.models.families.registry import family

_GATE_UP = Fused("mlp.gate_up_proj", ("gate", "up"))
_GLM = {"mlp.gate": _GATE_UP, "mlp.up": _GATE_UP}
_GLM_4 = _GLM | {"attention.post": "post_self_attn_layernorm", "mlp.post": "post_mlp_layernorm"}
_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "num_key_value_heads": 2,
}


def _glm(c: Config, *, sandwich: bool) -> ModelSpec:
    norm, rope = c.rms(), c.rope(partial=0.5)
    post = norm if sandwich else None
    attention = c.attention(rope, biases=frozenset("qkv" if c.flag("attention_bias") else ""))
    return c.model([(sub(attention, norm, post), sub(c.mlp(), norm, post))] * c.layers, norm)


@family("glm", names=Names(_GLM, paired=True), **_DEFAULTS)
def glm(c: Config) -> ModelSpec:
    return _glm(c, sandwich=False)


@family("glm4", names=Names(_GLM_4, paired=True), **_DEFAULTS)
def glm4(c: Config) -> ModelSpec:
    return _glm(c, sandwich=True)


_QKV = Fused("self_attention.query_key_value", ("q", "k", "v"))
_H_TO_4H = Fused("mlp.dense_h_to_4h", ("gate", "up"))
_CHATGLM = Names(
    {
        "attention.q": _QKV, "attention.k": _QKV, "attention.v": _QKV,
        "attention.o": "self_attention.dense", "mlp.gate": _H_TO_4H, "mlp.up": _H_TO_4H,
        "mlp.down": "mlp.dense_4h_to_h",
    },
    prefix="transformer.", embed="embedding.word_embeddings", layer="encoder.layers.{}.",
    norm="encoder.final_layernorm", head="transformer.output_layer", paired=True,
)  # fmt: skip


@family(
    "chatglm", names=_CHATGLM,
    aliases={
        "num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size", "head_dim": "kv_channels",
        "rms_norm_eps": "layernorm_epsilon", "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length", "num_key_value_heads": "multi_query_group_num",
    },
)  # fmt: skip
def chatglm(c: Config) -> ModelSpec:
    """Written for the code that its repositories carry; transformers has no class of its own."""
    c.refuse("rmsnorm", True, "only RMSNorm is supported")
    c.refuse("apply_residual_connection_post_layernorm", False, "only pre-norm blocks are supported")
    c.refuse("multi_query_attention", True, "ChatGLM 1 is not supported")
    norm = c.rms()
    rope = Rope(c.head_dim // 2, theta=10_000.0 * c.number("rope_ratio", 1.0))
    biases = "qkv" if c.flag("add_qkv_bias") or c.flag("add_bias_linear") else ""
    biases += "o" if c.flag("add_bias_linear") else ""
    mlp = c.mlp(bias=c.flag("add_bias_linear"))
    return c.model(
        [(sub(c.attention(rope, biases=frozenset(biases)), norm), sub(mlp, norm))] * c.layers, norm
    )
