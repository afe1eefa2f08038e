"""Llama and the models that share its block: Mistral, SmolLM2, Yi, TinyLlama, DeepSeek-LLM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem_core.model.spec import ModelSpec

from tandem_engine.models.families.config import Config, sub
from tandem_engine.models.families.registry import family


def llama_model(
    c: Config,
    *,
    biases: Iterable[str] = "",
    windows: Iterable[int | None] | None = None,
    mlp_bias: bool = False,
    **attention: Any,
) -> ModelSpec:
    """biases: of attention's projections; attention: other differences from llama's."""
    norm, rope, mlp = c.rms(), c.rope(), c.mlp(bias=mlp_bias)
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
