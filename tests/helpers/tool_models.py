"""A model folder with the chat template of a family, for gateways with fake pods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import chat_templates
import toy_tokenizers
from fake_pods import MODEL, REVISION
from model_folders import make_folder

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tool_folder(path: Path, template: str, special: Sequence[str] = ()) -> Path:
    """`special`: special tokens in addition to ChatML's."""
    tokenizer = toy_tokenizers.trained(["where is the order"] * 20, 400, [*SPECIAL, *special])
    return make_folder(
        path, tokenizer, name=MODEL, revision=REVISION, max_model_len=8192,
        vocab_size=tokenizer.get_vocab_size(), bos_token="<|im_start|>", eos_token="<|im_end|>",
        chat_template=Path(chat_templates.__path__[0], f"{template}.jinja").read_text(),
    )  # fmt: skip
