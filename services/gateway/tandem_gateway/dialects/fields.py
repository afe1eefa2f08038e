"""Handles fields of a body that its model does not declare. Each API has a table below.

without effect   the answer is the same without it (caller, billing, caching): dropped
refused          it changes the answer, but is not supported, such as an image; refused unless its value means
                 "off" or the default
ignored          all others, such as hints and misspelled names: the header x-tandem-ignored names them.
                 With --strict-fields they are refused
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from pydantic import BaseModel
from tandem_core.errors import InvalidRequestError

from tandem_gateway.errors import UnsupportedFieldError

#: Limits of the header.
MAX_NAMES, MAX_NAME_CHARS = 16, 64
#: Maximum undeclared fields of a body.
MAX_FIELDS = 256
_OFF: tuple[object, ...] = (None, False, "", "none", [], {})
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.$\[\]-]")
_MAX_SHOWN_CHARS = 64


@dataclass(frozen=True)
class FieldTable:
    without_effect: frozenset[str]
    #: Refused fields and the remedy.
    refused: Mapping[str, str]
    #: Values of refused fields that match the behaviour here.
    defaults: Mapping[str, Sequence[object]] = field(default_factory=lambda: MappingProxyType({}))

    def check(self, fields: Mapping[str, object]) -> None:
        """Raises UnsupportedFieldError for a refused field, and InvalidRequestError for too many fields."""
        if len(fields) > MAX_FIELDS:
            raise InvalidRequestError(
                "body",
                f"has {len(fields)} fields that are not used here, at most {MAX_FIELDS} may be ignored",
            )
        for name, remedy in self.refused.items():
            value = fields.get(name)
            if value not in _OFF and value not in self.defaults.get(name, ()):
                raise UnsupportedFieldError(name, f"{shown(value)} is not supported here; {remedy}")

    def __contains__(self, name: object) -> bool:
        return name in self.without_effect or name in self.refused

    def __len__(self) -> int:
        return len(self.without_effect) + len(self.refused)


class Ignored:
    """Collects the names of a request's ignored fields. `names`: how the request's API calls the fields of a
    chat, see `renamed`."""

    def __init__(self, *, is_strict: bool = False, names: Mapping[str, str] | None = None) -> None:
        self._is_strict = is_strict
        self._names = names or {}
        #: Ordered, with [] for any index.
        self._found: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Raises UnsupportedFieldError with --strict-fields."""
        name = renamed(name, self._names)
        if self._is_strict:
            raise UnsupportedFieldError(
                name, "is not a field of this API; remove it or check its spelling (--strict-fields is set)"
            )
        if len(self._found) <= MAX_NAMES:
            self._found[re.sub(r"\[\d+\]", "[]", name)] = None

    def unknown(
        self, where: str, fields: Mapping[str, object] | None, known: Collection[str] | FieldTable = ()
    ) -> None:
        """Adds unknown fields whose value is not "off". The number 0 may belong to a misspelled name.
        Examines only as many as the header can name."""
        off = (None,) if self._is_strict else _OFF
        for name, value in islice((fields or {}).items(), MAX_NAMES + len(known)):
            if name not in known and (value not in off or type(value) in (int, float)):
                self.add(f"{where}.{name}" if where else name)

    def within(self, where: str, body: BaseModel) -> None:
        """Adds the unknown fields of the objects in a body."""
        for name in type(body).model_fields:
            value = getattr(body, name)
            at = f"{where}.{name}" if where else name
            if isinstance(value, BaseModel):
                self._in_part(at, value)
            elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
                for index, part in enumerate(value):
                    self._in_part(f"{at}[{index}]", part)

    def _in_part(self, at: str, part: BaseModel) -> None:
        self.unknown(at, part.model_extra, getattr(part, "without_effect", ()))
        self.within(at, part)

    def header(self) -> str:
        """The value of x-tandem-ignored; "" if nothing is ignored."""
        names = [_UNPRINTABLE.sub("?", name[:MAX_NAME_CHARS]) or "?" for name in self._found]
        return ", ".join(names[:MAX_NAMES] + ["..."] * (len(names) > MAX_NAMES))


def renamed(name: str, names: Mapping[str, str]) -> str:
    """The field as the request's API calls it. `names`: by patterns of the beginning."""
    for pattern, other in names.items():
        found, count = re.subn(rf"^{pattern}(?![^.\[])", other, name)
        if count:
            return found
    return name


def rename(error: InvalidRequestError, names: Mapping[str, str]) -> None:
    error.rename(renamed(error.field, names))


#: As JSON writes them, which is what the caller sent.
_JSON_WORDS = {None: "null", True: "true", False: "false"}


def shown(value: object) -> str:
    text = _JSON_WORDS[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


_OPENAI_WITHOUT_EFFECT = frozenset(
    {"user", "store", "metadata", "service_tier", "safety_identifier", "access_programs"}
    | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
)
_MODERATION = "moderate the texts before and after"
_GUIDE = "use response_format or structured_outputs"
#: Refused in chats and completions; llama.cpp, SGLang and TGI have the last seven.
_OF_BOTH = {
    "moderation": _MODERATION,
    "truncation_side": "the last tokens are kept",
    "prompt_embeds": "send texts or token ids",
    "logprob_token_ids": "ask for the most likely tokens",
    **dict.fromkeys(("grammar", "json_schema", "regex", "ebnf"), _GUIDE),
    **dict.fromkeys(("lora", "lora_path", "adapter_id"), "serve a model into which the adapter is merged"),
}
#: /v1/chat/completions. `include_reasoning` is true in vLLM; `spaces_between_special_tokens` has no effect in
#: vLLM with these tokenizers either.
CHAT = FieldTable(
    _OPENAI_WITHOUT_EFFECT | {"include_reasoning", "spaces_between_special_tokens"},
    {
        **_OF_BOTH,
        "modalities": "ask for text alone",
        "audio": "ask for text",
        "web_search_options": "offer a function that searches",
        "images": "only text is supported",
        "echo": "leave it out, or use /v1/completions",
        "suffix": "write the text around the gap into a message",
        "documents": "write them into a message",
        "chat_template": "the model's own is used",
    },
    {"modalities": (["text"],), "truncation_side": ("left",)},
)
#: /v1/completions.
COMPLETION = FieldTable(
    CHAT.without_effect,
    {**_OF_BOTH, "suffix": "write the model's tokens for filling a gap into the prompt"},
    CHAT.defaults,
)
_RENAMED = {"functions": "use tools", "function_call": "use tool_choice", "n": "send one request for each"}
_NO_STATE = "no response is stored, so send its items again"
#: /v1/responses. `max_tool_calls` counts calls of tools that OpenAI runs; `truncation: "auto"` differs from
#: "disabled" only where an input is refused here, because it exceeds the context.
RESPONSES = FieldTable(
    frozenset({"max_tool_calls", "truncation", "image"}),
    {
        "background": "wait for the answer",
        "conversation": _NO_STATE,
        "previous_response_id": _NO_STATE,
        "prompt": "no prompt is stored, so send its text",
        "moderation": _MODERATION,
        "messages": "use input",
        "max_tokens": "use max_output_tokens",
        "max_completion_tokens": "use max_output_tokens",
        "response_format": "use text.format",
        "logprobs": 'use include: ["message.output_text.logprobs"]',
        **_RENAMED,
    },
    {"n": (1,)},
)
#: /v1/messages. Prefixes are cached with or without `cache_control`.
MESSAGES = FieldTable(
    frozenset({"cache_control", "betas", "diagnostics", "billing_policy", "fallback_credit_token"})
    | {"user_profile_id", "workspace_id", "anthropic_version"},
    {
        "container": "there are no containers here",
        "compaction": "ask for a summary in a message",
        "thread": "no conversation is stored, so send all messages again",
        "max_completion_tokens": "use max_tokens",
        "stop": "use stop_sequences",
        "response_format": "use output_config.format",
        "logprobs": "use /v1/chat/completions",
        **_RENAMED,
    },
    {"n": (1,)},
)
