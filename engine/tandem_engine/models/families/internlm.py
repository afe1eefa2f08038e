"""InternLM 2 and 3 and Baichuan (7B): llamas under other names; their repositories hold their classes."""

from __future__ import annotations

from tandem_core.errors import ModelLoadError
from tandem_core.model.spec import ModelSpec

from tandem_engine.models.families.config import Config
from tandem_engine.models.families.llama import llama_model
from tandem_engine.models.families.names import Fused, Names
from tandem_engine.models.families.registry import family


def _internlm2_names(c: Config) -> Names:
    qkv = Fused("attention.wqkv", ("q", "k", "v"), groups=c.kv_heads)
    return Names(
        {
            "attention.pre": "attention_norm", "attention.q": qkv, "attention.k": qkv, "attention.v": qkv,
            "attention.o": "attention.wo", "mlp.pre": "ffn_norm", "mlp.gate": "feed_forward.w1",
            "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2",
        },
        embed="tok_embeddings", head="output",
    )  # fmt: skip


@family("internlm2", names=_internlm2_names)
def internlm2(c: Config) -> ModelSpec:
    return llama_model(c, biases="qkvo" if c.flag("bias") else "")


@family("internlm3", aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"})
def internlm3(c: Config) -> ModelSpec:
    bias = c.flag("mlp_bias")
    biases = ("qkv" if c.flag("attention_bias") else "") + ("o" if bias else "")
    return llama_model(c, biases=biases, mlp_bias=bias)


_PACK = Fused("self_attn.W_pack", ("q", "k", "v"))


def _baichuan_names(c: Config) -> Names:
    # Baichuan 2 has a larger vocabulary, and a head that divides its rows by their length.
    return Names(
        {"attention.q": _PACK, "attention.k": _PACK, "attention.v": _PACK},
        head_normalized=c.count("vocab_size") == 125_696,
    )


@family("baichuan", names=_baichuan_names, aliases={"max_position_embeddings": "model_max_length"})
def baichuan(c: Config) -> ModelSpec:
    if c.hidden == 5120:
        raise ModelLoadError("Baichuan models of 13B use ALiBi, which is not supported; use one of 7B")
    return llama_model(c)
