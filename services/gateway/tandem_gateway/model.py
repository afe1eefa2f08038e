"""The served model as the gateway needs it: names and limits, chat template, tokenizer. No weights.

Reads `tandem.json` and `tokenizer.json` of a model folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from tokenizers import Tokenizer

from tandem_gateway.chat import ChatTemplate, Segment
from tandem_gateway.errors import InvalidRequestError
from tandem_gateway.request import Message


class ModelFolderError(Exception):
    """The model folder is missing, incomplete or damaged."""


class Manifest(BaseModel):
    """The fields of tandem.json that the gateway uses."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    name: str
    revision: str
    max_model_len: int
    vocab_size: int
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str = ""
    add_bos: bool = False


class ServedModel:
    """Turns messages and texts into prompt tokens. Safe to call from several threads."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer) -> None:
        self.manifest = manifest
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder().values()
        template = manifest.chat_template
        control = [
            token.content
            for token in added
            if token.special or (token.content in template and not token.content.isspace())
        ]
        self._chat = (
            ChatTemplate(
                template,
                bos_token=manifest.bos_token,
                eos_token=manifest.eos_token,
                control_tokens=control,
            )
            if template
            else None
        )
        self._bos_id: int | None = tokenizer.token_to_id(manifest.bos_token) if manifest.add_bos else None
        self._newline_ids: list[int] = tokenizer.encode("\n", add_special_tokens=False).ids

    @classmethod
    def load(cls, folder: Path) -> ServedModel:
        """Raises ModelFolderError with the remedy."""
        remedy = "make the folder with `tandem model pull`"
        try:
            manifest = Manifest.model_validate_json((folder / "tandem.json").read_bytes())
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except OSError as error:
            raise ModelFolderError(f"{folder} is no model folder ({error}); {remedy}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ModelFolderError(f"{folder}/tandem.json: {where}: {first['msg']}; {remedy}") from error
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelFolderError(f"{folder}/tokenizer.json: {error}; {remedy}") from error
        return cls(manifest, tokenizer)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Prompt tokens of a chat, the assistant's turn opened. Raises InvalidRequestError."""
        if self._chat is None:
            raise InvalidRequestError(
                "messages",
                f"the model {self.manifest.name} has no chat template; use Generate or /v1/completions",
            )
        ids: list[int] = []
        for index, segment in enumerate(self._chat.render(messages)):
            ids += self._encode_segment(segment, is_first=index == 0)
        return tuple(ids)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Prompt tokens of a plain text, with the special tokens the model expects around one."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return tuple(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The text of one token alone, as bytes; b"" for an id that is none."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def _encode_segment(self, segment: Segment, *, is_first: bool) -> list[int]:
        encode = self._encode_as_text if segment.is_quoted else self._encode
        if is_first:
            return encode(segment.text)
        # Behind a newline, because SentencePiece-like tokenizers put a space before the start of a string.
        ids = encode("\n" + segment.text)
        count = len(self._newline_ids)
        return ids[count:] if ids[:count] == self._newline_ids else encode(segment.text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_as_text(self, text: str) -> list[int]:
        """Encode without matching any added token."""
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        pieces = [text]
        if tokenizer.pre_tokenizer is not None:
            pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for piece in pieces for token in tokenizer.model.tokenize(piece)]
