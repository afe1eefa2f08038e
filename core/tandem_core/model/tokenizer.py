"""Text to token ids and back, over the `tokenizers` library alone.

Loaded once per process from a model folder; immutable and thread-safe afterwards. Streaming text is the
detokenizer's work (detokenizer.py): it needs the exact bytes of single tokens, which `token_bytes` gives for
the two families in use, byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece with byte fallback.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer

from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest

_SPIECE_SPACE = "\u2581"


class Tokenizer:
    """A model's tokenizer with the ids that matter to serving."""

    def __init__(self, folder: Path) -> None:
        """Read tokenizer.json and tandem.json of a model folder. Raises ModelLoadError."""
        manifest = ModelManifest.read(folder)
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = RustTokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelLoadError(f"{path} cannot be read ({error}); pull the model again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._is_byte_level = _uses(json.loads(text), "ByteLevel")
        self._added = self._tokenizer.get_added_tokens_decoder()
        self.eos_token_ids = frozenset(manifest.eos_token_ids)
        self.bos_token_id: int | None = self._tokenizer.token_to_id(manifest.bos_token)
        self._add_bos = manifest.add_bos

    @property
    def vocab_size(self) -> int:
        """Ids this tokenizer knows; the model's vocabulary may be padded beyond it."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, is_rendered_chat: bool = False) -> list[int]:
        """Token ids. A raw prompt gets the model's own BOS; a rendered chat template wrote it already.

        Special tokens written out in the text ("<|im_end|>") become their ids.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._add_bos and not is_rendered_chat and self.bos_token_id is not None:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, which decode skips."""
        added = self._added.get(token_id)
        return added is not None and bool(added.special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, in the middle of a text; b"" for an unknown id.

        SentencePiece's leading space at the start of a text is the detokenizer's business.
        """
        if (added := self._added.get(token_id)) is not None:
            return str(added.content).encode()
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return b"".join(_BYTE_OF.get(c, c.encode()) for c in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPIECE_SPACE, " ").encode()


def _uses(node: object, kind: str) -> bool:
    """Whether a decoder of this type occurs in a parsed tokenizer.json, alone or within a sequence."""
    if not isinstance(node, dict):
        return False
    decoder = node.get("decoder") or {}
    return decoder.get("type") == kind or any(d.get("type") == kind for d in decoder.get("decoders", []))


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-in of each byte: itself where printable, else from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): bytes([b]) for b in printable}
    return alphabet | {chr(0x100 + i): bytes([b]) for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
