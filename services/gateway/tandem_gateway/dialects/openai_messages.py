"""Converts the messages and tools of OpenAI's chat bodies for the chat template.

Older forms are supported: `functions` with `function_call` are tools, the role "function" is "tool".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pydantic import ConfigDict, JsonValue
from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.model.conversation import Message, Tool, ToolCall

from tandem_gateway.dialects.json_body import JsonBody
from tandem_gateway.errors import UnsupportedFieldError
from tandem_gateway.tools.choice import Mode, ToolChoice, check_tools

_ROLES = MappingProxyType(
    {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
     "function": "tool"}
)  # fmt: skip
#: Fields of a message that the chat template does not use.
_IGNORED_IN_MESSAGE = frozenset({"refusal", "annotations", "audio"})


class Body(JsonBody):
    """A JSON object of the caller; undeclared fields are in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class ContentPart(Body):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str | None = None


class ToolCallBody(Body):
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


class ChatTurn(Body):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def to_messages(turns: Sequence[ChatTurn]) -> tuple[Message, ...]:
    """Raises InvalidRequestError naming the message and its field."""
    return tuple(_message(f"messages[{index}]", turn) for index, turn in enumerate(turns))


def to_tool_choice(
    tools: Sequence[Mapping[str, JsonValue]] | None,
    choice: JsonValue,
    *,
    is_parallel: bool,
    functions: Sequence[Mapping[str, JsonValue]] | None = None,
    function_call: JsonValue = None,
) -> ToolChoice:
    """`choice` is `tool_choice`: "none", "auto", "required", or an object that names a tool.

    Raises InvalidRequestError naming the field.
    """
    field = "tool_choice"
    if functions:
        if tools:
            raise InvalidRequestError("functions", "cannot be sent together with tools; send tools alone")
        tools = [{"type": "function", "function": dict(function)} for function in functions]
        choice, is_parallel, field = function_call, False, "function_call"
    found = _choice(field, check_tools(tools or []), choice, is_parallel=is_parallel)
    return dataclasses.replace(found, as_function_call=bool(functions))


def _choice(field: str, checked: Sequence[Tool], choice: JsonValue, *, is_parallel: bool) -> ToolChoice:
    if choice is None:
        return ToolChoice.of(checked, Mode.AUTO, is_parallel=is_parallel)
    if isinstance(choice, str):
        allowed = [mode.value for mode in Mode]
        if choice not in allowed:
            raise InvalidRequestError(
                field, f"is {quoted(choice)}; use {', '.join(allowed)}, or an object that names a tool"
            )
        return ToolChoice.of(checked, Mode(choice), is_parallel=is_parallel)
    name = _named(choice)
    if name is None:
        raise InvalidRequestError(
            field,
            "is not a choice of this API; use none, auto, required, or "
            '{"type": "function", "function": {"name": ...}} with the name of a tool',
        )
    return ToolChoice.of(checked, Mode.REQUIRED, name=name)


def _named(choice: JsonValue) -> str | None:
    """The name in {"type": "function", "function": {"name": ...}}, or in {"name": ...} of function_call."""
    if not isinstance(choice, Mapping) or choice.get("type", "function") != "function":
        return None
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def _message(where: str, turn: ChatTurn) -> Message:
    if turn.role not in _ROLES:
        raise InvalidRequestError(f"{where}.role", f"is {quoted(turn.role)}; use one of {', '.join(_ROLES)}")
    for name, value in (turn.model_extra or {}).items():
        if value not in (None, []) and name not in _IGNORED_IN_MESSAGE:
            raise UnsupportedFieldError(f"{where}.{name}", "is not supported here; leave it out")
    calls = _calls(where, turn)
    if calls and turn.role != "assistant":
        raise InvalidRequestError(f"{where}.tool_calls", "are only allowed in messages of the assistant")
    content = _content(where, turn)
    if content is None and not calls:
        if turn.role != "assistant":
            raise InvalidRequestError(f"{where}.content", "is missing; send a text")
        content = ""
    return Message(
        _ROLES[turn.role],
        content,
        calls,
        tool_call_id=turn.tool_call_id or "",
        name=turn.name or "",
        reasoning=turn.reasoning_content or turn.reasoning or "",
    )


def _content(where: str, turn: ChatTurn) -> str | None:
    if turn.content is None or isinstance(turn.content, str):
        return turn.content
    texts = []
    for index, part in enumerate(turn.content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise UnsupportedFieldError(
                f"{where}.content[{index}]", f"is a part of type {quoted(part.type)}; only text is supported"
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(where: str, turn: ChatTurn) -> tuple[ToolCall, ...]:
    if turn.function_call is not None:
        return (ToolCall("", turn.function_call.name, turn.function_call.arguments or ""),)
    calls = []
    for index, call in enumerate(turn.tool_calls or ()):
        if call.function is None or call.type not in (None, "function"):
            raise UnsupportedFieldError(
                f"{where}.tool_calls[{index}]", "is not a function call; only function calls are supported"
            )
        calls.append(ToolCall(call.id or "", call.function.name, call.function.arguments or ""))
    return tuple(calls)
