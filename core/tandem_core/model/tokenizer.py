"""Text and conversations to token ids and back, over the `tokenizers` library.

One Tokenizer per process, loaded from a model folder; immutable and thread-safe afterwards. The gateway and
the engine's LLM encode with it, so both turn the same input into the same tokens. Streaming text is made by
detokenizer.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from tandem_core.errors import InvalidRequestError, ModelLoadError
from tandem_core.model.chat_template import ChatTemplate, Segment, ToolUse
from tandem_core.model.conversation import DEFAULT_OPTIONS, ChatOptions, Message
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.piece_cache import PieceCache
from tandem_core.model.token_pattern import any_of

_SPIECE_SPACE = "\u2581"
# Batches of one text need no threads of the library's own, which would warn at each fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """A model's tokenizer and chat template, with its manifest."""

    def __init__(self, folder: Path, chat_template: Path | None = None) -> None:
        """Reads tokenizer.json and tandem.json of a model folder. `chat_template`: a file that replaces the
        model's template. Raises ModelLoadError."""
        manifest = ModelManifest.read(folder)
        if chat_template is not None:
            source = ChatTemplate.check_file(chat_template, manifest.bos_token, manifest.eos_token)
            manifest = dataclasses.replace(manifest, chat_template=source)
        self.manifest = manifest
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = RustTokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelLoadError(f"{path} cannot be read ({error}); pull the model again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._is_byte_level = _has_byte_level_decoder(json.loads(text))
        self._added = self._tokenizer.get_added_tokens_decoder()
        bos_id: int | None = self._tokenizer.token_to_id(manifest.bos_token)
        self._bos_id = bos_id if manifest.add_bos else None
        self._newline_ids = self.encode("\n", add_special_tokens=False)
        self._chat_template = None
        if template := manifest.chat_template:
            control = [
                token.content
                for token in self._added.values()
                if token.special or (token.content in template and not token.content.isspace())
            ]
            self._chat_template = ChatTemplate(
                template,
                bos_token=manifest.bos_token,
                eos_token=manifest.eos_token,
                control_tokens=control,
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain text, by default with the special tokens that the model expects around one.

        Special tokens written out in the text ("<|im_end|>") become their ids.
        """
        ids = _encode(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    @property
    def tool_use(self) -> ToolUse | None:
        """How the chat template takes tools; None: it knows none."""
        return None if self._chat_template is None else self._chat_template.tool_use

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables that the chat template reads, such as `enable_thinking`."""
        return frozenset() if self._chat_template is None else self._chat_template.variables

    def added_token_id(self, text: str) -> int | None:
        """The id of the added token with exactly this text; None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._added else None

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves it out by default."""
        return token_id in self._added and bool(self._added[token_id].special)

    def encode_chat(
        self,
        messages: Sequence[Message],
        options: ChatOptions = DEFAULT_OPTIONS,
        *,
        cache: PieceCache | None = None,
        tenant: str = "",
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn unless the options say otherwise.
        `cache` may have those of the tenant's earlier ones.

        Control tokens that the caller wrote are encoded as plain text. Raises InvalidRequestError when
        the model has no chat template, its template refuses the messages, or makes too long a text of them.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "messages",
                f"the model {self.manifest.name} has no chat template; "
                "send a plain prompt (Generate or /v1/completions)",
            )
        segments = self._chat_template.render(messages, options)
        num_chars = sum(len(segment.text) for segment in segments)
        if num_chars > self.max_text_bytes:  # a template may write a short tool at length
            raise InvalidRequestError(
                "messages",
                f"are {num_chars} characters with the tools and the chat template, and so more tokens than "
                f"the model's context of {self.manifest.max_model_len}; send less",
            )
        ids: list[int] = []
        for index, segment in enumerate(segments):
            if index == 0 and cache is not None and self._cuts is not None and not segment.is_quoted:
                for piece in filter(None, self._cuts.split(segment.text)):
                    ids += cache.ids(tenant, piece, self._encode_plain)
            else:
                ids += self._encode_segment(segment, is_first=index == 0)
        return ids

    @functools.cached_property
    def _cuts(self) -> re.Pattern[str] | None:
        """Tokens at which a text can be cut without changing the ids of its pieces; None if there are none.

        The tokenizer itself cuts there before it normalizes, and encodes each piece separately. It searches
        for the leftmost, longest token. Tokenizers with added tokens that absorb neighbouring text, or with
        splitters that depend on the position of a piece, have no such tokens.
        """
        parsed = json.loads(self._tokenizer.to_str())
        tokens = [token for token in parsed["added_tokens"] if not token["normalized"]]
        is_exact = _types(parsed["pre_tokenizer"]) <= {"Sequence", "Split", "ByteLevel", "Digits"}
        if not tokens or not is_exact or any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in tokens):
            return None
        return re.compile(f"({any_of(token['content'] for token in tokens)})")

    def _encode_plain(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def _encode_segment(self, segment: Segment, *, is_first: bool) -> list[int]:
        def encode(text: str) -> list[int]:
            if segment.is_quoted:
                return self._encode_quoted(text)
            return self._encode_plain(text)

        if is_first:
            return encode(segment.text)
        # After a newline, because SentencePiece-like tokenizers put a space before the start of a text.
        ids = encode("\n" + segment.text)
        count = len(self._newline_ids)
        return ids[count:] if ids[:count] == self._newline_ids else encode(segment.text)

    def _encode_quoted(self, text: str) -> list[int]:
        """Encode without matching any added token."""
        return _encode(self._plain_tokenizer, text, add_special_tokens=False)

    def prepare_to_encode(self) -> None:
        """Builds the data for encoding, which takes .2 to 2 s; otherwise the first texts build it."""
        _ = self._plain_tokenizer, self.max_text_bytes, self.tool_use, self._cuts

    @functools.cached_property
    def _plain_tokenizer(self) -> RustTokenizer:
        """A tokenizer without added tokens, which encodes control tokens as text."""
        parsed = json.loads(self._tokenizer.to_str())
        return RustTokenizer.from_str(json.dumps({**parsed, "added_tokens": [], "post_processor": None}))

    @functools.cached_property
    def max_text_bytes(self) -> int:
        """Texts longer than this always exceed the model's context."""
        longest = max(len(self.token_bytes(token_id)) for token_id in range(self.manifest.vocab_size))
        # A normalizer may make a text shorter, for example by composing characters.
        shrinks = 1 if self._tokenizer.normalizer is None else 4
        return self.manifest.max_model_len * longest * shrinks

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int) -> str:
        """The token as the vocabulary writes it ("Ġthe"); "" for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token in the middle of a text; b"" for an unknown id.

        Exact for byte-level BPE (GPT-2, Llama 3, Qwen) and for SentencePiece with byte fallback.
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


def _encode(tokenizer: RustTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Unlike `encode`, a batch leaves the GIL to other threads: measured, 13 s without it for 8 MiB."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _types(part: Any) -> set[str]:
    """The types of a part of a parsed tokenizer.json, and of all parts in it."""
    inside = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    own = {part["type"]} if isinstance(part, dict) and isinstance(part.get("type"), str) else set()
    return own.union(*map(_types, inside))


def _has_byte_level_decoder(parsed: dict[str, Any]) -> bool:
    """Whether a parsed tokenizer.json has a ByteLevel decoder, alone or in a sequence."""
    decoder = parsed.get("decoder") or {}
    return any(d.get("type") == "ByteLevel" for d in [decoder, *decoder.get("decoders", [])])


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-in of each byte: itself where printable, else from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): bytes([b]) for b in printable}
    return alphabet | {chr(0x100 + i): bytes([b]) for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
