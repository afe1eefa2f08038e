"""Random models whose layers have sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tandem_engine.model_loader import pull
from toy_models import VOCABULARY, save_checkpoint
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

WINDOW = 40
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "sliding_window": WINDOW,
}
#: One layer of the first two sees all tokens.
VARIANTS: dict[str, Callable[[], PreTrainedModel]] = {
    "windows beside full layers": lambda: Qwen2ForCausalLM(
        Qwen2Config(**_COMMON, num_hidden_layers=4, use_sliding_window=True, max_window_layers=1)
    ),
    "windows before full layers": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_COMMON,
            num_hidden_layers=4,
            head_dim=16,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        )
    ),
    "windows alone": lambda: MistralForCausalLM(MistralConfig(**_COMMON, num_hidden_layers=2, head_dim=16)),
}


def save_model(name: str, folder: Path) -> tuple[PreTrainedModel, Path]:
    """transformers' model, and the folder of ours."""
    torch.manual_seed(5)
    model = VARIANTS[name]().eval()
    # The second special token is what the tokenizer of Qwen 2 has in any case.
    save_checkpoint(model, folder / "checkpoint", more_special_tokens=["<|endoftext|>"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(folder))
        return model, pull(str(folder / "checkpoint"))
