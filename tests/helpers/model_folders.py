"""Model folders without weights, for the parts that read only tandem.json and tokenizer.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tandem_core.model.manifest import ModelManifest
from tokenizers import Tokenizer

MANIFEST = ModelManifest(
    name="tiny", revision="ab" * 32, source="test", license="unknown", architecture="llama",
    max_model_len=256, vocab_size=400, eos_token_ids=(2,), bos_token="", eos_token="", chat_template="",
    tokenizer_hash="cd" * 32, add_bos=False, weights="",
)  # fmt: skip


def make_folder(folder: Path, tokenizer: Tokenizer | None = None, **fields: object) -> Path:
    """Writes tandem.json with these fields, and tokenizer.json if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(MANIFEST, **fields).write(folder)  # type: ignore[arg-type]
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder
