"""Renders chat templates as transformers' `apply_chat_template(sanitize_control_tokens=True)` does.

The environment (sandbox, trimming, filters, globals) equals transformers' own, so templates from the hub
give the same text. A control token such as `<|im_end|>` inside a message becomes a quoted segment, which the
tokenizer encodes as plain text. Otherwise a user could close his turn and speak as the system.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.utils
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem_core.errors import InvalidRequestError, ModelLoadError


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Segment:
    """A part of the rendered prompt; `is_quoted` when it is a control token that a message contains."""

    text: str
    is_quoted: bool


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own declaration

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; templates want plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Dict:
    """`dict` for templates, without the attributes through which a template could leave the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Refuses underscore names, which lead into Python's own machinery."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` unnamed, so that namespace(self=...) works
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r} on a namespace")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class ChatTemplate:
    """One compiled template. `control_tokens` are the strings that must not take effect in a message."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, control_tokens: Iterable[str]) -> None:
        """Raises ModelLoadError when the template is not valid Jinja."""
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ModelLoadError(
                f"the model's chat template cannot be compiled ({error}); pull a model with a valid template"
            ) from error
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        longest_first = sorted(set(control_tokens), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def render(self, messages: Sequence[Message]) -> list[Segment]:
        """The prompt in order, the assistant's turn opened. Raises InvalidRequestError when the template
        refuses the messages (roles that do not alternate, for example)."""
        if not any(self._control.search(message.content) for message in messages):
            return [Segment(self._render(messages), is_quoted=False)]
        opening, closing = _unused_characters(messages)
        quoted = [
            Message(message.role, self._control.sub(rf"{opening}\g<0>{closing}", message.content))
            for message in messages
        ]
        # Odd pieces are quoted control tokens. A template may cut between a pair of marks (split, slices).
        # A lone mark is dropped but still separates the text, so the parts cannot join to a control token.
        marks = re.compile(f"{opening}({self._control.pattern}){closing}|[{opening}{closing}]")
        pieces = marks.split(self._render(quoted))
        return [Segment(piece, is_quoted=index % 2 == 1) for index, piece in enumerate(pieces) if piece]

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program, and may fail as any does
            raise InvalidRequestError(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error


def _unused_characters(messages: Sequence[Message]) -> tuple[str, str]:
    """Two private-use characters that no message contains: the marks around quoted control tokens."""
    used = set().union(*(message.content for message in messages))
    free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
    try:
        return next(free), next(free)
    except StopIteration:
        raise InvalidRequestError(
            "messages", "use every private-use character of Unicode's plane 15; remove one"
        ) from None
