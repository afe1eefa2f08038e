"""Random models with recurrent layers, of transformers' classes."""

from __future__ import annotations

import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip

EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip

VARIANTS = {
    "qwen3_5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES)),
    "qwen3_5-multimodal-tied": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=SIZES | {"layer_types": ["full_attention", "linear_attention"] * 2},
            vision_config=VISION,
            tie_word_embeddings=True,
        )
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SIZES, **EXPERTS)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **EXPERTS, mlp_only_layers=[1])),
}


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Products of about their inputs' size, and gates and decays that differ."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.2 / parameter[0].numel() ** 0.5)
            elif "norm" in name:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise)
    return model.eval()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
