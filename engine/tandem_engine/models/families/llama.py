"""Llama and models with its block: Mistral, SmolLM2 and 3, Yi, TinyLlama, Arcee, Seed-OSS, Ministral, Helium,
Ernie 4.5, CWM, Hunyuan, Granite 3, OLMo 1 to 3, EXAONE 4."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tandem_core.model.spec import Head, ModelSpec, Norm, NormKind, QueryGrowth, Rope

from tandem_engine.models.families.config import Config, sub
from tandem_engine.models.families.names import Names
from tandem_engine.models.families.registry import family


def llama_model(
    c: Config,
    *,
    biases: Iterable[str] = "",
    windows: Iterable[int | None] | None = None,
    mlp_bias: bool = False,
    rope: Rope | None = None,
    **attention: Any,
) -> ModelSpec:
    """biases: of attention's projections; attention: other differences from llama's."""
    norm, rope, mlp = c.rms(), rope or c.rope(), c.mlp(bias=mlp_bias)
    common = {"biases": frozenset(biases), "cap": c.cap("attn_logit_softcapping")} | attention
    layers = [c.attention(rope, window=w, **common) for w in windows or (None,) * c.layers]
    return c.model([(sub(attention, norm), sub(mlp, norm)) for attention in layers], norm)


@family("llama")
def llama(c: Config) -> ModelSpec:
    return llama_model(c, biases="qkvo" if c.flag("attention_bias") else "", mlp_bias=c.flag("mlp_bias"))


@family("mistral")
def mistral(c: Config) -> ModelSpec:
    kind = "sliding_attention" if c.get("sliding_window") else "full_attention"
    return llama_model(c, windows=c.windows([kind] * c.layers))


@family("arcee")
def arcee(c: Config) -> ModelSpec:
    """relu squared, without a gate."""
    biases = frozenset("qkvo" if c.flag("attention_bias") else "")
    norm, mlp = c.rms(), c.mlp(act=c.act(default="relu2"), gated=False, bias=c.flag("mlp_bias"))
    return c.model([(sub(c.attention(c.rope(), biases=biases), norm), sub(mlp, norm))] * c.layers, norm)


@family("seed_oss", attention_bias=True)
def seed_oss(c: Config) -> ModelSpec:
    biases = ("qkv" if c.flag("attention_bias") else "") + ("o" if c.flag("attention_out_bias") else "")
    return llama_model(c, biases=biases, mlp_bias=c.flag("mlp_bias"))


@family("ministral", sliding_window=4096)
def ministral(c: Config) -> ModelSpec:
    return llama_model(c, windows=c.windows(["sliding_attention"] * c.layers))


@family("ministral3")
def ministral3(c: Config) -> ModelSpec:
    """Queries grow with their position's logarithm."""
    kind = "sliding_attention" if c.get("sliding_window") else "full_attention"
    scaling = c.get("rope_parameters") or {}
    growth = None
    if beta := scaling.get("llama_4_scaling_beta"):
        growth = QueryGrowth(float(beta), int(scaling["original_max_position_embeddings"]))
    return llama_model(c, windows=c.windows([kind] * c.layers), query_growth=growth)


@family("helium", names=Names(paired=True))
def helium(c: Config) -> ModelSpec:
    return llama_model(c, biases="qkv" if c.flag("attention_bias") else "", mlp_bias=c.flag("mlp_bias"))


@family("ernie4_5", names=Names(paired=True), tie_word_embeddings=True, head_dim=128, rope_theta=5e5)
def ernie4_5(c: Config) -> ModelSpec:
    return llama_model(c, biases="qkvo" if c.flag("use_bias") else "", mlp_bias=c.flag("use_bias"))


@family("cwm", sliding_window=8192)
def cwm(c: Config) -> ModelSpec:
    kinds = ["full_attention" if n % 4 == 0 else "sliding_attention" for n in range(c.layers)]
    return llama_model(c, windows=c.windows(kinds))


_HUNYUAN = Names(
    {"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"}
)


@family("hunyuan_v1_dense", names=_HUNYUAN)
def hunyuan(c: Config) -> ModelSpec:
    """Heads are normed after the rotation; `alpha` widens its base once and for all."""
    scaling = c.get("rope_parameters") or c.get("rope_scaling") or {}
    rope = c.rope()
    if scaling.get("alpha"):
        rope = replace(rope, theta=rope.theta * float(scaling["alpha"]) ** (rope.dims / (rope.dims - 2)))
    biases = "qkvo" if c.flag("attention_bias") else ""
    return llama_model(c, rope=rope, biases=biases, qk_norm=c.rms(), norm_after_rope=True)


@family("granite")
def granite(c: Config) -> ModelSpec:
    norm, mlp = c.rms(), c.mlp(bias=c.flag("mlp_bias"))
    residual = c.number("residual_multiplier", 1.0)
    attention = c.attention(
        c.rope(),
        scale=c.number("attention_multiplier", 1.0),
        biases=frozenset("qkvo" if c.flag("attention_bias") else ""),
    )
    layer = (sub(attention, norm, None, residual), sub(mlp, norm, None, residual))
    head = Head(c.flag("tie_word_embeddings"), scale=1 / c.number("logits_scaling", 1.0))
    return c.model([layer] * c.layers, norm, head, embed_scale=c.number("embedding_multiplier", 1.0))


@family("smollm3", tie_word_embeddings=True)
def smollm3(c: Config) -> ModelSpec:
    """Every fourth layer does not rotate."""
    norm, rope, mlp = c.rms(), c.rope(), c.mlp(bias=c.flag("mlp_bias"))
    interval = c.count("no_rope_layer_interval", 4)
    rotates = c.per_layer("no_rope_layers", [(n + 1) % interval != 0 for n in range(c.layers)])
    biases = frozenset("qkvo" if c.flag("attention_bias") else "")
    windowed = c.flag("use_sliding_window") and c.get("sliding_window")
    kinds = ["sliding_attention" if windowed and not r else "full_attention" for r in rotates]
    return c.model(
        [
            (sub(c.attention(rope if r else None, window=w, biases=biases), norm), sub(mlp, norm))
            for r, w in zip(rotates, c.windows(kinds), strict=True)
        ],
        norm,
    )


_POST = {"attention.post": "post_attention_layernorm", "mlp.post": "post_feedforward_layernorm"}


@family("olmo")
def olmo(c: Config) -> ModelSpec:
    """Layer norms without weights."""
    c.refuse("clip_qkv", None, "clipped projections are not supported")
    norm = Norm(NormKind.LAYER, 1e-5, weight=False)
    biases = frozenset("qkvo" if c.flag("attention_bias") else "")
    return c.model([(sub(c.attention(c.rope(), biases=biases), norm), sub(c.mlp(), norm))] * c.layers, norm)


def _post_normed(
    c: Config, windows: Iterable[int | None], ropes: dict[bool, Rope | None], **attention: Any
) -> ModelSpec:
    """Norms follow the mixers; ropes: by whether the layer has a window."""
    norm, mlp = c.rms(), c.mlp()
    return c.model(
        [
            (
                sub(c.attention(ropes[w is not None], window=w, qk_norm=norm, **attention), None, norm),
                sub(mlp, None, norm),
            )
            for w in windows
        ],
        norm,
    )  # fmt: skip


@family("olmo2", names=Names(_POST))
def olmo2(c: Config) -> ModelSpec:
    biases = frozenset("qkvo" if c.flag("attention_bias") else "")
    return _post_normed(c, (None,) * c.layers, {False: c.rope()}, norm_whole=True, biases=biases)


@family("olmo3", names=Names(_POST), sliding_window=4096)
def olmo3(c: Config) -> ModelSpec:
    """Only layers without a window have a scaled rotation."""
    kinds = ["sliding_attention" if (n + 1) % 4 else "full_attention" for n in range(c.layers)]
    local = c.rope("sliding_attention", rope_theta=c.number("rope_theta", 500_000.0))
    ropes: dict[bool, Rope | None] = {True: local, False: c.rope("full_attention")}
    biases = frozenset("qkvo" if c.flag("attention_bias") else "")
    return _post_normed(c, c.windows(kinds), ropes, norm_whole=True, biases=biases)


@family("exaone4", names=Names(_POST))
def exaone4(c: Config) -> ModelSpec:
    """In models with windows, layers without one do not rotate."""
    rope = c.rope()
    if c.get("sliding_window") is None:
        return _post_normed(c, (None,) * c.layers, {False: rope})
    pattern = c.get("sliding_window_pattern", 4)
    period = len(pattern) if isinstance(pattern, str) else int(pattern)
    kinds = ["sliding_attention" if (n + 1) % period else "full_attention" for n in range(c.layers)]
    return _post_normed(c, c.windows(kinds), {True: rope, False: None})
