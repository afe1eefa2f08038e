"""Tiny models of any family with random weights that are wide enough for attention to matter."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Matrices are N(0, 1.44 / depth): transformers' own initialisation hides attention."""
    generator = torch.Generator().manual_seed(1)
    centre = 0.0 if model.config.model_type.startswith(("gemma", "vaultgemma", "nemotron")) else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                is_embedding = parameter.shape[0] > 90
                depth = parameter.shape[0 if "c_" in name and model.config.model_type == "gpt2" else 1]
                parameter.copy_(noise * (0.5 if is_embedding else 1.2 / depth**0.5))
            else:
                is_norm = name.endswith("weight")
                parameter.copy_(centre + 0.3 * noise if is_norm else 0.2 * noise)
    return model.eval()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
