"""Qwen 2, 2.5 and 3, dense, and the text models of their multimodal checkpoints."""

from __future__ import annotations

from tandem_core.model.spec import ModelSpec

from tandem_engine.models.families.config import Config
from tandem_engine.models.families.llama import llama_model
from tandem_engine.models.families.registry import family


def _windows(c: Config) -> tuple[int | None, ...]:
    if not c.flag("use_sliding_window") or c.get("sliding_window") is None:
        return (None,) * c.layers
    first = min(int(c.get("max_window_layers", c.layers)), c.layers)
    return c.windows(["full_attention"] * first + ["sliding_attention"] * (c.layers - first))


@family("qwen2", "qwen2_vl_text", "qwen2_5_vl_text")
def qwen2(c: Config) -> ModelSpec:
    return llama_model(c, biases="qkv", windows=_windows(c))


@family("qwen3", "qwen3_vl_text")
def qwen3(c: Config) -> ModelSpec:
    biases = "qkvo" if c.flag("attention_bias") else ""
    return llama_model(c, biases=biases, windows=_windows(c), qk_norm=c.rms())
