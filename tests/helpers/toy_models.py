"""Random models small enough to compute in milliseconds, as Hugging Face checkpoints on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import toy_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

#: Vocabulary of `save_llama`'s model; most bytes have no token.
VOCABULARY = 96
#: Settings of an engine or a pod for it.
SIZES = {"num_blocks": 64, "block_size": 16, "chunk_size": 64, "threads": 1, "dtype": "float32"}


def save_checkpoint(
    model: PreTrainedModel, folder: Path, *, more_special_tokens: Sequence[str] = (), chat_template: str = ""
) -> None:
    """Weights, config and a tokenizer whose first tokens are <unk>, <s>, </s> and `more_special_tokens`."""
    model.save_pretrained(folder)
    special_tokens = ["<unk>", "<s>", "</s>", *more_special_tokens]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=toy_tokenizers.without_merges(
            model.config.get_text_config().vocab_size, special_tokens
        ),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    if chat_template:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def prompt_of(num_tokens: int, start: int = 0) -> list[int]:
    """Token ids for it; repetitive, so that drafts find something."""
    return [3 + (start + i * i) % 37 for i in range(num_tokens)]


def save_llama(folder: Path, seed: int, *, context: int = 1024) -> Path:
    """Three layers; its greedy texts vary. `context`: longest text in tokens. Returns the checkpoint."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    checkpoint = folder / f"random-llama-{seed}"
    save_checkpoint(LlamaForCausalLM(config), checkpoint)
    return checkpoint
