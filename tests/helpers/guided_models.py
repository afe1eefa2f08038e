"""Random models whose tokenizers write any JSON, with tokens of several characters and of parts of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import toy_tokenizers
from tandem_engine import model_loader
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

#: Unknown token, beginning and end, with the first ids.
SPECIAL = ("<unk>", "<s>", "</s>")
TEXTS = (
    json.dumps(
        {"id": 12, "name": "Zoë Ünal", "tags": ["new", "größer"], "ok": True, "price": 10.25},
        ensure_ascii=False,
    ),
    json.dumps([{"kind": "card", "value": None}, {"created_at": "2024-02-29T10:00:00Z"}, [False, -1]]),
    '{"status": "in progress", "user": {"email": "a@b.example"}, "日本": "数量 🙂"}',
)


def byte_level() -> Tokenizer:
    """A tokenizer as in GPT-2, Llama 3 and Qwen."""
    return toy_tokenizers.trained(TEXTS * 3, 384, SPECIAL)


def byte_fallback() -> Tokenizer:
    """A tokenizer as in Llama 2 and Mistral: characters, pieces of text, and <0x00> ... for bytes of other
    characters."""
    trained = Tokenizer(models.BPE())
    marked = [text.replace(" ", "▁") for text in TEXTS * 3]
    trained.train_from_iterator(marked, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate(words)},
            merges=[tuple(merge) for merge in learnt["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save_model(folder: Path, tokenizer: Tokenizer, *, seed: int, spread: float = 0.2) -> Path:
    """A llama of two layers with it, as a checkpoint and pulled. Returns the model's folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1,
        eos_token_id=2, initializer_range=spread,
    )  # fmt: skip
    checkpoint = folder / "checkpoint"
    LlamaForCausalLM(config).save_pretrained(checkpoint)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(folder / "home"))
        return model_loader.pull(str(checkpoint))
