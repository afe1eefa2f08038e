"""Input of the chat template: messages, tools and options.

Messages and tools have the JSON form that transformers' `apply_chat_template` takes; `Message.to_template`
and `Tool.definition` are that form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, cast

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


#: Levels of a JSON value from a caller; recursion and indented text stay small.
MAX_JSON_LEVELS = 64


def json_levels(value: Any) -> int:
    """How deep a JSON value is nested; 1 for `{}`."""
    levels, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        levels += 1
        level = [part for item in level for part in (item.values() if isinstance(item, dict) else item)]
    return levels


@dataclass(frozen=True)
class ToolCall:
    """A call in the conversation so far."""

    id: str
    name: str
    #: JSON text as the client sent it; models write broken ones, too.
    arguments: str

    def parsed_arguments(self) -> Json:
        """The object, {} for an empty text, or the text itself when it is no JSON object or a very deep
        one."""
        try:
            parsed = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments
        is_good = isinstance(parsed, dict) and json_levels(parsed) <= MAX_JSON_LEVELS
        return cast(Json, parsed) if is_good else self.arguments


@dataclass(frozen=True)
class Message:
    role: str
    #: None: a message of the assistant that only calls tools.
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    #: In the result of a tool: the call that it answers.
    tool_call_id: str = ""
    name: str = ""
    #: What the assistant wrote before its answer, as in `<think>...</think>`.
    reasoning: str = ""

    def texts(self) -> tuple[str, ...]:
        """All texts of the caller in this message."""
        calls = (text for call in self.tool_calls for text in (call.id, call.name, call.arguments))
        return (self.content or "", self.tool_call_id, self.name, self.reasoning, *calls)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    #: {"type": "function", "function": {"name": ..., "description": ..., "parameters": ..., "strict": ...}}
    definition: Mapping[str, Json]

    @property
    def _function(self) -> Mapping[str, Json]:
        return cast("Mapping[str, Json]", self.definition["function"])

    @property
    def name(self) -> str:
        return cast(str, self._function["name"])

    @property
    def parameters(self) -> Mapping[str, Json]:
        """JSON schema of the arguments; a function without parameters takes {}."""
        given = self._function.get("parameters")
        if given is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return cast("Mapping[str, Json]", given)

    @property
    def is_strict(self) -> bool:
        """Whether calls must follow the schema."""
        return self._function.get("strict") is True


#: How a prompt ends. "new": with the opened turn of the assistant; "continued": inside of the last message;
#: "none": after the last message.
Turn = Literal["new", "continued", "none"]


@dataclass(frozen=True)
class ChatOptions:
    """Options of rendering a conversation."""

    tools: tuple[Tool, ...] = ()
    #: Variables of the template, such as `enable_thinking`; vLLM's `chat_template_kwargs`.
    template_arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    turn: Turn = "new"


DEFAULT_OPTIONS = ChatOptions()
