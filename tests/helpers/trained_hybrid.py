"""A small model shaped like Qwen 3.5, trained for minutes, so that its gates and states are not noise.

    python tests/helpers/trained_hybrid.py FOLDER [STEPS]

The text is what every Python brings along: the reference of the language (pydoc_data.topics, under Python's
licence), byte by byte. The loss falls from 5.6 to about 2.2 nats a byte in 60 steps: the model has learned
letters, frequent words and the reference's markup.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from toy_models import save_checkpoint
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

CONTEXT, BATCH, LENGTH = 2048, 6, 160


def new_model(seed: int = 0) -> Qwen3_5ForCausalLM:
    """Random, with 4.1 million parameters."""
    torch.manual_seed(seed)
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=260,  # bytes and special tokens
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=64,
            linear_num_key_heads=3,
            linear_num_value_heads=6,
            linear_key_head_dim=32,
            linear_value_head_dim=64,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def training_text() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def train(folder: Path, steps: int = 60) -> Path:
    """Writes a Hugging Face checkpoint with its tokenizer; returns the folder."""
    model = new_model()
    save_checkpoint(model, folder)  # for the tokenizer
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(training_text(), add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    began = time.monotonic()
    model.train()
    for step in range(steps):
        starts = torch.randint(0, len(ids) - LENGTH, (BATCH,), generator=generator)
        batch = torch.stack([ids[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    model.eval().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
