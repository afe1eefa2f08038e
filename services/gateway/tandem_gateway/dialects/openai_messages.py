"""Converts the messages and tools of OpenAI's chat bodies for the chat template.

Older forms are supported: `functions` with `function_call` are tools, the role "function" is "tool".
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from pydantic import ConfigDict, JsonValue
from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.model.conversation import Message, Tool, ToolCall

from tandem_gateway.dialects.fields import Ignored
from tandem_gateway.dialects.json_body import JsonBody
from tandem_gateway.errors import UnsupportedFieldError
from tandem_gateway.tools.choice import Mode, ToolChoice, check_tools

_ROLES = MappingProxyType(
    {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
     "function": "tool"}
)  # fmt: skip
#: The name of the single argument of custom tools.
CUSTOM_INPUT = "input"
_MODES: Mapping[JsonValue, Mode] = MappingProxyType({"auto": Mode.AUTO, "required": Mode.REQUIRED})
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
#: Types of content parts with a text in `text`, as in the Responses API too.
_TEXT_PARTS = ("text", "input_text", "output_text")


class Body(JsonBody):
    """A JSON object of the caller; undeclared fields are in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    #: Fields without effect, see fields.py.
    without_effect: ClassVar[frozenset[str]] = frozenset()


class ContentPart(Body):
    without_effect = frozenset({"cache_control", "annotations", "logprobs", "prompt_cache_breakpoint"})

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str | None = None


class CustomCall(Body):
    name: str
    input: str | None = None


class ToolCallBody(Body):
    without_effect = frozenset({"index", "provider_specific_fields", "extra_content", "cache_control"})

    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ChatTurn(Body):
    #: Fields of earlier answers that clients send again.
    without_effect = frozenset(
        {"id", "object", "created_at", "timestamp", "model", "status", "metadata", "cache_control"}
        | {"refusal", "annotations", "audio", "provider_specific_fields", "thinking_blocks"}
        | {"reasoning_details"}
    )

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
    ignored: Ignored,
    *,
    is_parallel: bool,
    functions: Sequence[Mapping[str, JsonValue]] | None = None,
    function_call: JsonValue = None,
) -> ToolChoice:
    """`choice` is `tool_choice`: "none", "auto", "required", or an object that names a tool or allowed tools.

    Tools of other types than "function" are left out, as ignored fields are. Raises InvalidRequestError
    naming the field.
    """
    field = "tool_choice"
    if functions:
        if tools:
            raise InvalidRequestError("functions", "cannot be sent together with tools; send tools alone")
        tools = [{"type": "function", "function": dict(function)} for function in functions]
        choice, is_parallel, field = function_call, False, "function_call"
    offered = [_offered(f"tools[{index}]", tool, ignored) for index, tool in enumerate(tools or [])]
    found = _choice(field, check_tools(offered), choice, is_parallel=is_parallel)
    return dataclasses.replace(found, as_function_call=bool(functions))


def _offered(where: str, tool: Mapping[str, JsonValue], ignored: Ignored) -> Mapping[str, JsonValue] | None:
    """The tool as templates show it; None: not offered."""
    kind, function = tool.get("type"), tool.get("function")
    if isinstance(kind, str) and kind != "function":
        ignored.add(f"{where}.{kind}")
        return None
    if not isinstance(function, Mapping):
        return tool
    ignored.unknown(where, tool, ("type", "function", "cache_control"))
    ignored.unknown(f"{where}.function", function, (*_FUNCTION_FIELDS, "cache_control"))
    kept = {name: function[name] for name in function if name in _FUNCTION_FIELDS}
    return {**({"type": kind} if "type" in tool else {}), "function": kept}


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
    if (allowed_tools := _allowed(choice)) is not None:
        mode, names = allowed_tools
        unknown = next((name for name in names if name not in {tool.name for tool in checked}), None)
        if unknown is not None:
            raise InvalidRequestError(field, f"allows {quoted(unknown)}, which is not in tools; leave it out")
        return ToolChoice.of([tool for tool in checked if tool.name in names], mode, is_parallel=is_parallel)
    name = _named(choice)
    if name is None:
        raise InvalidRequestError(
            field,
            "is not a choice of this API; use none, auto, required, or "
            '{"type": "function", "function": {"name": ...}} with the name of a tool',
        )
    return ToolChoice.of(checked, Mode.REQUIRED, name=name)


def _allowed(choice: JsonValue) -> tuple[Mode, set[str]] | None:
    """The mode and the names in {"type": "allowed_tools", "mode": ..., "tools": [...]}, which may be an
    object in a field of that name."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    inner = choice.get("allowed_tools", choice)
    tools = inner.get("tools") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(tools, list) or inner.get("mode") not in _MODES:
        raise InvalidRequestError(
            "tool_choice", 'needs "mode", which is auto or required, and "tools", a list of tools'
        )
    names = {name for name in map(_named, tools) if name is not None}
    return _MODES[inner["mode"]], names


def _named(choice: JsonValue) -> str | None:
    """The name in {"type": "function", "function": {"name": ...}}, or in {"name": ...} of function_call and
    of the Responses API."""
    if not isinstance(choice, Mapping) or choice.get("type", "function") not in ("function", "custom"):
        return None
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def _message(where: str, turn: ChatTurn) -> Message:
    if turn.role not in _ROLES:
        raise InvalidRequestError(f"{where}.role", f"is {quoted(turn.role)}; use one of {', '.join(_ROLES)}")
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
        text = part.text if part.type in _TEXT_PARTS else part.refusal if part.type == "refusal" else None
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
        if call.type == "custom" and call.custom is not None:
            given = json.dumps({CUSTOM_INPUT: call.custom.input or ""}, ensure_ascii=False)
            calls.append(ToolCall(call.id or "", call.custom.name, given))
            continue
        if call.function is None or call.type not in (None, "function"):
            raise UnsupportedFieldError(
                f"{where}.tool_calls[{index}]", "is neither a function call nor one of a custom tool"
            )
        calls.append(ToolCall(call.id or "", call.function.name, call.function.arguments or ""))
    return tuple(calls)
