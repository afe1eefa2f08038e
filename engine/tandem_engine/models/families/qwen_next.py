"""Qwen3-Next, and Qwen 3.5 and 3.6, dense and with experts: layers of the gated delta rule between layers of
attention whose output is gated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem_core.errors import ModelLoadError, quoted
from tandem_core.model.spec import GatedDelta, Mixer, ModelSpec, Moe, Router, Sublayer

from tandem_engine.models.families.config import Config, sub
from tandem_engine.models.families.moe import QWEN_SHARED, experts_of, qwen_sparse
from tandem_engine.models.families.names import Fused, Names
from tandem_engine.models.families.registry import family

_ROLES: Mapping[str, str | Fused] = {
    **QWEN_SHARED,
    "delta.pre": "input_layernorm",
    "delta.conv": "linear_attn.conv1d",
    "delta.a_log": "linear_attn.A_log",
    "delta.dt_bias": "linear_attn.dt_bias",
    "delta.norm": "linear_attn.norm",
    "delta.o": "linear_attn.out_proj",
}


def _names(c: Config, delta: dict[str, str | Fused]) -> Names:
    q = Fused("self_attn.q_proj", ("q", "gate"), c.heads)
    return Names(dict(_ROLES) | delta | {"attention.q": q, "attention.gate": q}, one_plus=True)


def _names_of_next(c: Config) -> Names:
    groups = c.count("linear_num_key_heads")
    qkvz = Fused("linear_attn.in_proj_qkvz", ("q", "k", "v", "z"), groups)
    ba = Fused("linear_attn.in_proj_ba", ("b", "a"), groups)
    return _names(c, {f"delta.{role}": part for part in (qkvz, ba) for role in part.roles})


def _names_of_3_5(c: Config) -> Names:
    qkv = Fused("linear_attn.in_proj_qkv", ("q", "k", "v"))
    alone = {f"delta.{role}": f"linear_attn.in_proj_{role}" for role in "zba"}
    return _names(c, dict.fromkeys(("delta.q", "delta.k", "delta.v"), qkv) | alone)


def _model(c: Config, mlps: Sequence[Mixer]) -> ModelSpec:
    """mlps: of each layer."""
    norm = c.rms()
    attention = c.attention(
        c.rope(partial=0.25),
        gate="element",
        qk_norm=norm,
        biases=frozenset("qkvo" if c.flag("attention_bias") else ""),
    )
    delta = GatedDelta(
        k_heads=c.count("linear_num_key_heads"),
        v_heads=c.count("linear_num_value_heads"),
        k_dim=c.count("linear_key_head_dim"),
        v_dim=c.count("linear_value_head_dim"),
        conv=c.count("linear_conv_kernel_dim"),
        norm=norm,
    )
    if delta.v_heads % delta.k_heads:
        raise ModelLoadError(
            f"config.json: {delta.v_heads} value heads of linear attention over {delta.k_heads} key heads, "
            "which does not divide; pull the model again"
        )
    interval = c.count("full_attention_interval", 4)
    usual = ["linear_attention" if (n + 1) % interval else "full_attention" for n in range(c.layers)]
    mixers: dict[str, Mixer] = {"linear_attention": delta, "full_attention": attention}

    def layers() -> Iterator[tuple[Sublayer, ...]]:
        for kind, mlp in zip(c.per_layer("layer_types", usual), mlps, strict=True):
            if kind not in mixers:
                raise ModelLoadError(
                    f"config.json: layer_types has {quoted(str(kind))}, wanted {' or '.join(mixers)}; "
                    "use another model"
                )
            yield sub(mixers[kind], norm), sub(mlp, norm)

    return c.model(layers(), norm)


def _moe(c: Config, *, renorm: bool) -> Moe:
    router = Router("softmax", c.count("num_experts_per_tok"), renorm=renorm)
    shared = c.mlp(inner=c.count("shared_expert_intermediate_size"))
    return experts_of(c, "num_experts", "moe_intermediate_size", router, shared=shared, shared_gate=True)


_SIZES: dict[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
}


@family(
    "qwen3_5", "qwen3_5_text", names=_names_of_3_5,
    **_SIZES, vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
    num_key_value_heads=4,
)  # fmt: skip
def qwen3_5(c: Config) -> ModelSpec:
    return _model(c, [c.mlp()] * c.layers)


@family(
    "qwen3_5_moe", "qwen3_5_moe_text", names=_names_of_3_5,
    **_SIZES, vocab_size=248320, hidden_size=2048, num_hidden_layers=40, num_key_value_heads=2,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts_per_tok=8, num_experts=256,
)  # fmt: skip
def qwen3_5_moe(c: Config) -> ModelSpec:
    return _model(c, [_moe(c, renorm=True)] * c.layers)


@family(
    "qwen3_next", names=_names_of_next,
    **_SIZES, vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=48,
    num_key_value_heads=2, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    num_experts_per_tok=10, num_experts=512, norm_topk_prob=True, decoder_sparse_step=1,
)  # fmt: skip
def qwen3_next(c: Config) -> ModelSpec:
    is_sparse = qwen_sparse(c)
    has_experts = c.get("num_experts", 0) > 0
    mlps = [
        _moe(c, renorm=c.flag("norm_topk_prob")) if has_experts and is_sparse(n) else c.mlp()
        for n in range(c.layers)
    ]
    return _model(c, mlps)
