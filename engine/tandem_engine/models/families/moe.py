"""Mixtures of experts: Mixtral, Qwen 2 and 3 MoE, OLMoE, GLM-4.5, MiniMax M2, Ernie 4.5, Granite MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem_core.errors import ModelLoadError
from tandem_core.model.spec import Head, Mlp, ModelSpec, Moe, Router

from tandem_engine.models.families.config import Config, sub
from tandem_engine.models.families.names import Fused, Names
from tandem_engine.models.families.registry import family

#: Mixtral's names of an expert's projections.
_MIXTRAL: Mapping[str, str | Fused] = {
    "moe.router": "block_sparse_moe.gate",
    "moe.correction": "block_sparse_moe.e_score_correction_bias",
    "moe.gate": "block_sparse_moe.experts.{}.w1",
    "moe.up": "block_sparse_moe.experts.{}.w3",
    "moe.down": "block_sparse_moe.experts.{}.w2",
}
#: Qwen's names of the shared MLP's projections.
QWEN_SHARED: Mapping[str, str | Fused] = {
    f"moe.shared_{r}": f"mlp.shared_expert.{r}_proj" for r in ("gate", "up", "down")
}
#: In all layers; the largest of today's models have 24,000.
_MOST_EXPERTS = 1 << 17


def moe_model(
    c: Config, moe: Moe, *, dense: Mlp | None = None, is_sparse: Any = None, **attention: Any
) -> ModelSpec:
    """Blocks of attention and `moe`, or `dense` in layers where is_sparse(layer) is not true."""
    norm, attends = c.rms(), c.attention(c.rope(), **attention)
    return c.model(
        [
            (sub(attends, norm), sub(moe if dense is None or is_sparse(n) else dense, norm))
            for n in range(c.layers)
        ],
        norm,
    )


def qwen_sparse(c: Config) -> Any:
    dense_layers, step = set(c.get("mlp_only_layers", ())), c.count("decoder_sparse_step", 1)
    return lambda n: n not in dense_layers and (n + 1) % step == 0


def experts_of(c: Config, count: str, inner: str, router: Router, **changes: Any) -> Moe:
    experts = c.count(count, limit=1 << 12)
    if experts * c.layers > _MOST_EXPERTS:
        raise ModelLoadError(
            f"config.json: {count} and num_hidden_layers come to {experts * c.layers} experts in all layers, "
            f"of which {_MOST_EXPERTS} are supported; the model's config.json is damaged, pull it again"
        )
    if router.top_k > experts // router.groups * router.top_groups:
        c.refuse("num_experts_per_tok", None, f"there are {experts} experts to choose from")
    return Moe(experts, Mlp(c.count(inner), c.act()), router, **changes)


def _top_k(c: Config, name: str = "num_experts_per_tok") -> int:
    return c.count(name)


@family(
    "mixtral", names=Names(_MIXTRAL), num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6,
    num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072,
)  # fmt: skip
def mixtral(c: Config) -> ModelSpec:
    router = Router("softmax", _top_k(c), renorm=True)
    moe = experts_of(c, "num_local_experts", "intermediate_size", router)
    window = c.count("sliding_window") if c.get("sliding_window") else None
    return moe_model(c, moe, window=window)


@family("minimax_m2", names=Names(_MIXTRAL), rope_theta=5e6, head_dim=128, rms_norm_eps=1e-6)
def minimax_m2(c: Config) -> ModelSpec:
    router = Router("sigmoid", _top_k(c), renorm=True, correction=True)
    moe = experts_of(c, "num_local_experts", "intermediate_size", router)
    norm = c.rms()
    share = c.count("rotary_dim") / c.head_dim if c.get("rotary_dim") else None
    attends = c.attention(c.rope(partial=share), qk_norm=norm, norm_whole=True)
    return c.model([(sub(attends, norm), sub(moe, norm)) for _ in range(c.layers)], norm)


@family("qwen3_moe", num_experts_per_tok=8, decoder_sparse_step=1, rms_norm_eps=1e-6)
def qwen3_moe(c: Config) -> ModelSpec:
    c.refuse("use_sliding_window", False, "windows of this family are not supported")
    router = Router("softmax", _top_k(c), renorm=c.flag("norm_topk_prob"))
    count = "num_experts" if c.get("num_experts") else "num_local_experts"
    moe = experts_of(c, count, "moe_intermediate_size", router)
    biases = frozenset("qkvo" if c.flag("attention_bias") else "")
    return moe_model(c, moe, dense=c.mlp(), is_sparse=qwen_sparse(c), qk_norm=c.rms(), biases=biases)


@family(
    "qwen2_moe",
    names=Names(QWEN_SHARED),
    num_experts_per_tok=4, decoder_sparse_step=1, rms_norm_eps=1e-6, qkv_bias=True,
)  # fmt: skip
def qwen2_moe(c: Config) -> ModelSpec:
    c.refuse("use_sliding_window", False, "windows of this family are not supported")
    router = Router("softmax", _top_k(c), renorm=c.flag("norm_topk_prob"))
    shared = Mlp(c.count("shared_expert_intermediate_size"), c.act())
    moe = experts_of(c, "num_experts", "moe_intermediate_size", router, shared=shared, shared_gate=True)
    biases = frozenset("qkv" if c.flag("qkv_bias") else "")
    return moe_model(c, moe, dense=c.mlp(), is_sparse=qwen_sparse(c), biases=biases)


@family("olmoe", num_experts_per_tok=8, num_experts=64, rms_norm_eps=1e-5, max_position_embeddings=4096)
def olmoe(c: Config) -> ModelSpec:
    c.refuse("clip_qkv", None, "clipped queries, keys and values are not supported")
    router = Router("softmax", _top_k(c), renorm=c.flag("norm_topk_prob"))
    moe = experts_of(c, "num_experts", "intermediate_size", router)
    biases = frozenset("qkvo" if c.flag("attention_bias") else "")
    return moe_model(c, moe, qk_norm=c.rms(), norm_whole=True, biases=biases)


def _glm_names(c: Config) -> Names:
    """Layers after the last one hold heads that predict further tokens."""
    return Names(ignored=(f"model.layers.{c.layers}.",))


@family(
    "glm4_moe", names=_glm_names, partial_rotary_factor=0.5, n_shared_experts=1, norm_topk_prob=True,
    first_k_dense_replace=1, rms_norm_eps=1e-5, num_experts_per_tok=8,
)  # fmt: skip
def glm4_moe(c: Config) -> ModelSpec:
    router = Router(
        "sigmoid",
        _top_k(c),
        renorm=c.flag("norm_topk_prob"),
        scale=c.number("routed_scaling_factor", 1.0),
        groups=c.count("n_group", 1),
        top_groups=c.count("topk_group", 1),
        correction=True,
    )
    inner = c.count("moe_intermediate_size")
    shared = Mlp(inner * c.count("n_shared_experts"), c.act())
    count = "n_routed_experts" if c.get("n_routed_experts") else "num_local_experts"
    moe = experts_of(c, count, "moe_intermediate_size", router, shared=shared)
    first = int(c.get("first_k_dense_replace"))
    return moe_model(
        c,
        moe,
        dense=c.mlp(),
        is_sparse=lambda n: n >= first,
        qk_norm=c.rms() if c.flag("use_qk_norm") else None,
        biases=frozenset("qkv" if c.flag("attention_bias") else ""),
    )


@family(
    "ernie4_5_moe",
    names=Names(
        {"moe.correction": "mlp.moe_statics.e_score_correction_bias"}, paired=True, ignored=("model.mtp_",)
    ),
    rope_theta=5e5, tie_word_embeddings=True, rms_norm_eps=1e-5, moe_k=6, moe_num_experts=64,
    moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1,
)  # fmt: skip
def ernie4_5_moe(c: Config) -> ModelSpec:
    c.refuse("use_bias", False, "biases of this family are not supported")
    router = Router("softmax", _top_k(c, "moe_k"), renorm=True, correction=True)
    number = int(c.get("moe_num_shared_experts"))
    shared = Mlp(number * c.count("moe_intermediate_size"), c.act()) if number else None
    moe = experts_of(c, "moe_num_experts", "moe_intermediate_size", router, shared=shared)
    first, last, step = (int(c.get(f"moe_layer_{n}")) for n in ("start_index", "end_index", "interval"))
    last = c.layers - 1 if last == -1 else last
    return moe_model(
        c, moe, dense=c.mlp(), is_sparse=lambda n: first <= n <= last and (n + 1) % max(step, 1) == 0
    )


@family(
    "granitemoe",
    names=Names(
        {
            "moe.router": "block_sparse_moe.router.layer",
            "moe.gate": Fused("block_sparse_moe.input_linear.weight", ("gate", "up")),
            "moe.up": Fused("block_sparse_moe.input_linear.weight", ("gate", "up")),
            "moe.down": "block_sparse_moe.output_linear.weight",
        }
    ),
    num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-6, max_position_embeddings=2048,
)  # fmt: skip
def granitemoe(c: Config) -> ModelSpec:
    norm, scale = c.rms(), c.number("residual_multiplier", 1.0)
    moe = experts_of(c, "num_local_experts", "intermediate_size", Router("top_softmax", _top_k(c)))
    biases = frozenset("qkvo" if c.flag("attention_bias") else "")
    attends = c.attention(c.rope(), scale=c.number("attention_multiplier", 1.0), biases=biases)
    layer = (sub(attends, norm, residual_scale=scale), sub(moe, norm, residual_scale=scale))
    return c.model(
        [layer] * c.layers,
        norm,
        Head(c.flag("tie_word_embeddings"), scale=1 / c.number("logits_scaling", 1.0)),
        embed_scale=c.number("embedding_multiplier", 1.0),
    )
