"""GPT-2 and what followed it: GPT-BigCode, GPT-Neo, GPT-J, GPT-NeoX (Pythia), OPT, BioGPT, Falcon.

Layer norms and MLPs without gates; positions are a learned embedding or a rotation.
"""

from __future__ import annotations

from tandem_core.errors import ModelLoadError
from tandem_core.model.spec import Attention, Branch, Head, Mlp, ModelSpec, Norm, Rope, Sublayer

from tandem_engine.models.families.config import Config, sub
from tandem_engine.models.families.names import Fused, Names
from tandem_engine.models.families.registry import family

_ALL = frozenset("qkvo")
_GPT_2 = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
}  # fmt: skip


def _ungated(c: Config, default: str, *, bias: bool = True, act: str = "activation_function") -> Mlp:
    inner = c.count("intermediate_size", 4 * c.hidden)
    return Mlp(inner, c.act(act, default), gated=False, bias=bias)


def _with_positions(
    c: Config, attentions: list[Attention], mlp: Mlp, norm: Norm, offset: int = 0
) -> ModelSpec:
    """Blocks of two sublayers after a learned embedding of positions."""
    layers = [(sub(attention, norm), sub(mlp, norm)) for attention in attentions]
    return c.model(layers, norm, learned_positions=c.max_len + offset, position_offset=offset)


def _gpt2_names(qkv: Fused, *, transposed: bool) -> Names:
    return Names(
        {
            "attention.pre": "ln_1", "attention.q": qkv, "attention.k": qkv, "attention.v": qkv,
            "attention.o": "attn.c_proj", "mlp.pre": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
        },
        prefix="transformer.", embed="wte", positions="wpe", layer="h.{}.", norm="ln_f",
        transposed=transposed,
    )  # fmt: skip


@family(
    "gpt2", names=_gpt2_names(Fused("attn.c_attn", ("q", "k", "v")), transposed=True), aliases=_GPT_2,
    tie_word_embeddings=True,
)  # fmt: skip
def gpt2(c: Config) -> ModelSpec:
    c.refuse("scale_attn_weights", True, "unscaled attention is not supported")
    c.refuse("scale_attn_by_inverse_layer_idx", False, "attention scaled by layer is not supported")
    attention, norm = c.attention(None, biases=_ALL), c.layer_norm("layer_norm_epsilon")
    return _with_positions(c, [attention] * c.layers, _ungated(c, "gelu_new"), norm)


def _bigcode_names(c: Config) -> Names:
    groups = 1 if c.flag("multi_query", True) else c.heads
    return _gpt2_names(Fused("attn.c_attn", ("q", "k", "v"), groups), transposed=False)


@family("gpt_bigcode", names=_bigcode_names, aliases=_GPT_2, tie_word_embeddings=True)
def gpt_bigcode(c: Config) -> ModelSpec:
    kv_heads = 1 if c.flag("multi_query", True) else c.heads
    attention = c.attention(None, kv_heads=kv_heads, biases=_ALL)
    norm = c.layer_norm("layer_norm_epsilon")
    return _with_positions(c, [attention] * c.layers, _ungated(c, "gelu_pytorch_tanh"), norm)


_GPT_NEO = Names(
    {
        "attention.pre": "ln_1", "attention.q": "attn.attention.q_proj",
        "attention.k": "attn.attention.k_proj", "attention.v": "attn.attention.v_proj",
        "attention.o": "attn.attention.out_proj", "mlp.pre": "ln_2", "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    prefix="transformer.", embed="wte", positions="wpe", layer="h.{}.", norm="ln_f",
)  # fmt: skip


@family(
    "gpt_neo", names=_GPT_NEO, tie_word_embeddings=True,
    aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
)  # fmt: skip
def gpt_neo(c: Config) -> ModelSpec:
    """Attention does not scale; every other layer has a window."""
    kinds = c.get("attention_layers") or [
        kind for types, times in c.get("attention_types", []) for _ in range(times) for kind in types
    ]
    windows = [c.count("window_size", 256) if k == "local" else None for k in c.per_layer("", kinds)]
    attentions = [c.attention(None, scale=1.0, window=w, biases=frozenset("o")) for w in windows]
    return _with_positions(c, attentions, _ungated(c, "gelu_new"), c.layer_norm("layer_norm_epsilon"))


_GPT_J = Names(
    {
        "attention.pre": "ln_1", "attention.q": "attn.q_proj", "attention.k": "attn.k_proj",
        "attention.v": "attn.v_proj", "attention.o": "attn.out_proj", "mlp.pre": "ln_1",
        "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out",
    },
    prefix="transformer.", embed="wte", layer="h.{}.", norm="ln_f", sublayers_per_layer=1, paired=True,
)  # fmt: skip


@family("gptj", names=_GPT_J, aliases=_GPT_2)
def gptj(c: Config) -> ModelSpec:
    attention, norm = c.attention(Rope(c.count("rotary_dim"))), c.layer_norm("layer_norm_epsilon")
    layer = Sublayer((Branch(attention, norm), Branch(_ungated(c, "gelu_new"), norm)))
    return c.model([[layer]] * c.layers, norm, Head(c.flag("tie_word_embeddings"), bias=True))


def _neox_names(c: Config) -> Names:
    qkv = Fused("attention.query_key_value", ("q", "k", "v"), groups=c.heads)
    return Names(
        {
            "attention.q": qkv, "attention.k": qkv, "attention.v": qkv, "attention.o": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
        },
        prefix="gpt_neox.", embed="embed_in", norm="final_layer_norm", head="embed_out",
        sublayers_per_layer=1 if c.flag("use_parallel_residual", True) else 2,
    )  # fmt: skip


@family("gpt_neox", names=_neox_names)
def gpt_neox(c: Config) -> ModelSpec:
    rope = c.rope(partial=c.number("rotary_pct", 0.25), rope_theta=c.number("rotary_emb_base", 10_000.0))
    attention = c.attention(rope, biases=frozenset("qkvo" if c.flag("attention_bias", True) else ""))
    norm, mlp = c.layer_norm(), _ungated(c, "gelu", act="hidden_act")
    if not c.flag("use_parallel_residual", True):
        return c.model([(sub(attention, norm), sub(mlp, norm))] * c.layers, norm)
    return c.model([[Sublayer((Branch(attention, norm), Branch(mlp, norm)))]] * c.layers, norm)


_FAIRSEQ = {
    "attention.pre": "self_attn_layer_norm", "attention.o": "self_attn.out_proj",
    "mlp.pre": "final_layer_norm", "mlp.up": "fc1", "mlp.down": "fc2",
}  # fmt: skip
_OPT = Names(_FAIRSEQ, prefix="model.decoder.", positions="embed_positions", norm="final_layer_norm")


@family("opt", names=_OPT, aliases={"intermediate_size": "ffn_dim"}, tie_word_embeddings=True)
def opt(c: Config) -> ModelSpec:
    c.refuse("do_layer_norm_before", True, "norms after the residual are not supported")
    c.refuse("word_embed_proj_dim", c.hidden, "projected embeddings are not supported")
    c.refuse("layer_norm_elementwise_affine", True, "norms without weights are not supported")
    bias, norm = c.flag("enable_bias", True), c.layer_norm("layer_norm_eps", default=1e-5)
    attention = c.attention(None, biases=_ALL if bias else frozenset())
    return _with_positions(c, [attention] * c.layers, _ungated(c, "relu", bias=bias), norm, offset=2)


_BIOGPT = Names(
    _FAIRSEQ, prefix="biogpt.", positions="embed_positions", norm="layer_norm", head="output_projection"
)


@family("biogpt", names=_BIOGPT, tie_word_embeddings=True)
def biogpt(c: Config) -> ModelSpec:
    attention, norm = c.attention(None, biases=_ALL), c.layer_norm()
    layer = (sub(attention, norm), sub(_ungated(c, "gelu", act="hidden_act"), norm))
    scale = c.hidden**0.5 if c.flag("scale_embedding", True) else 1.0
    return c.model(
        [layer] * c.layers, norm, embed_scale=scale, learned_positions=c.max_len + 2, position_offset=2
    )


def _falcon_kv_heads(c: Config) -> int:
    if c.flag("new_decoder_architecture"):
        return c.count("num_kv_heads", c.heads)
    return 1 if c.flag("multi_query", True) else c.heads


def _falcon_norms(c: Config) -> tuple[str, str]:
    """Before attention and before the MLP."""
    if c.flag("new_decoder_architecture") and c.count("num_ln_in_parallel_attn", 2) == 2:
        return "ln_attn", "ln_mlp"
    parallel = c.flag("new_decoder_architecture") or c.flag("parallel_attn", True)
    return "input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm"


def _falcon_names(c: Config) -> Names:
    kv_heads = _falcon_kv_heads(c)
    qkv = Fused("self_attention.query_key_value", ("q", "k", "v"), groups=kv_heads)
    first, second = _falcon_norms(c)
    return Names(
        {
            "attention.pre": first, "attention.q": qkv, "attention.k": qkv, "attention.v": qkv,
            "attention.o": "self_attention.dense", "mlp.pre": second, "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        prefix="transformer.", embed="word_embeddings", layer="h.{}.", norm="ln_f",
        sublayers_per_layer=2 if second == "post_attention_layernorm" else 1,
    )  # fmt: skip


@family(
    "falcon", names=_falcon_names, tie_word_embeddings=True, max_position_embeddings=2048,
    aliases={"intermediate_size": "ffn_hidden_size"},
)  # fmt: skip
def falcon(c: Config) -> ModelSpec:
    if c.flag("alibi"):
        raise ModelLoadError("config.json: alibi is true, but ALiBi is not supported; use another model")
    norm, bias = c.layer_norm("layer_norm_epsilon"), c.flag("bias")
    biases = _ALL if bias else frozenset()
    attention = c.attention(c.rope(), kv_heads=_falcon_kv_heads(c), biases=biases)
    mlp = _ungated(c, "gelu", bias=bias, act="activation")
    if _falcon_norms(c)[1] == "post_attention_layernorm":
        return c.model([(sub(attention, norm), sub(mlp, norm))] * c.layers, norm)
    return c.model([[Sublayer((Branch(attention, norm), Branch(mlp, norm)))]] * c.layers, norm)
