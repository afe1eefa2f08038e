"""Gemma 1, 2, 3 (also the text model of multimodal checkpoints) and VaultGemma.

Norms hold w for 1 + w, the embedding is multiplied by the root of its width.
"""

from __future__ import annotations

from typing import Any

from tandem_core.model.spec import Head, ModelSpec, Rope

from tandem_engine.models.families.config import Config, sub
from tandem_engine.models.families.names import SANDWICH, Names
from tandem_engine.models.families.registry import family


def _biases(c: Config) -> frozenset[str]:
    return frozenset("qkvo" if c.flag("attention_bias") else "")


@family("gemma", names=Names(one_plus=True), head_dim=256, tie_word_embeddings=True, rms_norm_eps=1e-6)
def gemma(c: Config) -> ModelSpec:
    norm, rope, biases = c.rms(), c.rope(), _biases(c)
    # Its first configs name the exact gelu, but the models were trained with the approximation.
    mlp = c.mlp(act=c.act("hidden_activation", "gelu_pytorch_tanh"))
    layers = [(sub(c.attention(rope, biases=biases), norm), sub(mlp, norm))] * c.layers
    return c.model(layers, norm, embed_scale=c.hidden**0.5)


def _later(c: Config, pattern: int, ropes: dict[bool, Rope], *, qk_norm: bool, sandwich: bool) -> ModelSpec:
    """pattern: every how many layers one has no window; ropes: by whether the layer has one."""
    norm = c.rms()
    post = norm if sandwich else None
    mlp = c.mlp(act=c.act("hidden_activation", "gelu_pytorch_tanh"))
    kinds = ["sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(c.layers)]
    layers = []
    for window in c.windows(kinds):
        attention = c.attention(
            ropes[window is not None],
            window=window,
            scale=c.number("query_pre_attn_scalar") ** -0.5,
            cap=c.cap("attn_logit_softcapping"),
            qk_norm=norm if qk_norm else None,
            biases=_biases(c),
        )
        layers.append((sub(attention, norm, post), sub(mlp, norm, post)))
    head = Head(c.flag("tie_word_embeddings"), cap=c.cap("final_logit_softcapping"))
    return c.model(layers, norm, head, embed_scale=c.hidden**0.5)


_GEMMA_2: dict[str, Any] = {
    "head_dim": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip


@family("gemma2", names=Names(SANDWICH, one_plus=True), **_GEMMA_2)
def gemma2(c: Config) -> ModelSpec:
    return _later(c, 2, dict.fromkeys((False, True), c.rope()), qk_norm=False, sandwich=True)


_VAULT = {"mlp.pre": "pre_feedforward_layernorm"}


@family("vaultgemma", names=Names(_VAULT, one_plus=True), **_GEMMA_2)
def vaultgemma(c: Config) -> ModelSpec:
    return _later(c, 2, dict.fromkeys((False, True), c.rope()), qk_norm=False, sandwich=False)


@family(
    "gemma3_text", "gemma3", names=Names(SANDWICH, one_plus=True), vocab_size=262_208, hidden_size=2304,
    intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
    max_position_embeddings=131_072, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True,
    query_pre_attn_scalar=256, sliding_window=4096,
)  # fmt: skip
def gemma3(c: Config) -> ModelSpec:
    c.refuse("use_bidirectional_attention", False, "embedding models are not supported")
    local = c.rope("sliding_attention", rope_theta=c.number("rope_local_base_freq", 10_000.0))
    pattern = c.count("sliding_window_pattern", c.get("_sliding_window_pattern", 6))
    return _later(c, pattern, {True: local, False: c.rope("full_attention")}, qk_norm=True, sandwich=True)
