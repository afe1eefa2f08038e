"""Bodies of Anthropic's Messages API, read as chats.

    system, messages with blocks of text, thinking, tool_use and tool_result -> messages
    max_tokens, stop_sequences, tools with input_schema, tool_choice -> those of a chat
    output_config.format -> response_format      thinking, output_config.effort -> hints of a chat
    a last message of the assistant is continued

Tools that Anthropic runs are left out, and so are blocks of their calls and results.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import JsonValue
from tandem_core.errors import InvalidRequestError, quoted
from tandem_proto.v1 import answers_pb2

from tandem_gateway.dialects.chat_dialect import ChatDialectBody, JsonObject, part_text, text_of
from tandem_gateway.dialects.fields import MESSAGES, Ignored
from tandem_gateway.errors import UnsupportedFieldError

#: A chat's `tool_choice` by the type of this API's.
_CHOICES: dict[JsonValue, str] = {"auto": "auto", "any": "required", "none": "none"}
#: Blocks that are left out because they have no text for the model, and suffixes of further such types.
_SILENT = ("redacted_thinking", "fallback", "compaction", "mcp_tool_listing")
_LEFT_OUT = ("server_tool_use", "mcp_tool_use", "tool_result", "tool_addition", "tool_removal")
_TURN_FIELDS = frozenset(
    {"role", "content", "id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage"}
    | {"container", "context_management", "cache_control"}
)
_BLOCK_FIELDS = frozenset(
    {"type", "text", "cache_control", "citations", "id", "name", "input", "caller", "tool_use_id", "content"}
    | {"is_error", "thinking", "signature", "data", "source", "title", "context", "tool_name", "from", "to"}
    | {"trigger"}
)
_TOOL_FIELDS = {
    "name": "name",
    "description": "description",
    "strict": "strict",
    "input_schema": "parameters",
}
_TOOLS_WITHOUT_EFFECT = ("type", "cache_control", "eager_input_streaming", "defer_loading", "allowed_callers")


class MessagesBody(ChatDialectBody):
    field_names: ClassVar = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        r"response_format(\.json_schema)?": "output_config.format",
        "continue_final_message": "messages",
        r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
        r"(tools\[\d+\])\.function": r"\1",
    }
    field_table = MESSAGES

    messages: list[JsonObject]
    """User and assistant messages, with blocks of text, tool_use and tool_result."""
    max_tokens: int
    """Most tokens to generate, clamped to what the context leaves."""
    system: str | list[JsonValue] | None = None
    """The system prompt."""
    stop_sequences: list[str] | None = None
    """The text ends before the first of these strings; at most 16."""
    tools: list[JsonObject] | None = None
    """Functions that the model may call, with an input_schema each; at most 128."""
    tool_choice: JsonObject | None = None
    """auto, any, none, or a tool that must be called."""
    output_config: JsonObject | None = None
    """format: a JSON schema that the answer matches."""
    output_format: JsonObject | None = None
    """The older place of output_config.format."""

    def _chat_fields(self, ignored: Ignored) -> dict[str, Any]:
        choice, config = self.tool_choice or {}, self.output_config or {}
        ignored.unknown("output_config", config, ("format", "effort"))
        continues = bool(self.messages) and self.messages[-1].get("role") == "assistant"
        return {
            "messages": self._messages(ignored),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tools": [_tool(f"tools[{i}]", tool, ignored) for i, tool in enumerate(self.tools or [])] or None,
            "tool_choice": _tool_choice(choice) if choice else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": _format(config.get("format") or self.output_format),
            "reasoning_effort": config.get("effort"),
            "continue_final_message": continues or None,
        }

    def shown(self) -> answers_pb2.ShownAs:
        thinking = (self.model_extra or {}).get("thinking")
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        return answers_pb2.ShownAs(reasoning=kind not in (None, "disabled"))

    def _messages(self, ignored: Ignored) -> list[JsonObject]:
        messages: list[JsonObject] = []
        if self.system:
            messages.append({"role": "system", "content": text_of("system", self.system)})
        for index, message in enumerate(self.messages):
            where = f"messages[{index}]"
            ignored.unknown(where, message, _TURN_FIELDS)
            _add_message(messages, where, message, ignored)
            if index == len(self.messages) - 1 and message.get("role") == "assistant":
                _check_continued(where, messages[-1:])
        return messages


class CountBody(MessagesBody):
    """The body of /v1/messages/count_tokens."""

    max_tokens: int = 1


def _check_continued(where: str, last: list[JsonObject]) -> None:
    """Raises InvalidRequestError for a last message that cannot be continued."""
    turn: JsonObject = last[0] if last else {}
    if turn.get("tool_calls"):
        raise InvalidRequestError(where, "calls tools; send their results in a message of the user")
    content = turn.get("content")
    if turn.get("role") != "assistant" or not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content", "has no text to continue; leave the message out")
    if content != content.rstrip():
        raise InvalidRequestError(
            f"{where}.content", "ends with white space, but the answer continues it; remove the white space"
        )


def _add_message(messages: list[JsonObject], where: str, message: JsonObject, ignored: Ignored) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequestError(f"{where}.role", f"is {quoted(str(role))}; use user, assistant or system")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}.content", "is missing; send a text or a list of blocks")
    if not content:
        raise InvalidRequestError(f"{where}.content", "is empty; send a text or at least one block")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonValue] = []
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        if not isinstance(block, dict):
            raise InvalidRequestError(at, "is not a block; send an object with a type")
        kind = block.get("type")
        if isinstance(kind, str) and kind.endswith(_LEFT_OUT) and kind != "tool_result":
            ignored.add(f"{at}.{kind}")
            continue
        ignored.unknown(at, block, _BLOCK_FIELDS)
        if kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise InvalidRequestError(f"{at}.name", "is missing; send the tool's name")
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function: JsonValue = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = _texts(f"{at}.content", block.get("content") or "")
            if block.get("is_error") and not result.lower().startswith("error"):
                result = f"Error: {result}"
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind == "thinking":
            if isinstance(thought := block.get("thinking"), str):
                thoughts.append(thought)
        elif kind == "compaction" and isinstance(block.get("content"), str):
            texts.append(str(block["content"]))
        elif kind not in _SILENT:
            texts.append(_text(at, block))
    if texts or calls:
        turn: JsonObject = {"role": role, "content": "\n".join(texts) if texts else None}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        messages.append(turn)


def _texts(where: str, content: JsonValue) -> str:
    """The text of a list of blocks, or a text."""
    if not isinstance(content, list):
        return text_of(where, content)
    return "\n".join(_text(f"{where}[{index}]", block) for index, block in enumerate(content))


def _text(where: str, block: JsonValue) -> str:
    """The text of a block, of a document or of a search result. Raises UnsupportedFieldError."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or kind not in ("document", "search_result", "tool_reference"):
        return part_text(where, block)
    if kind == "tool_reference":
        return f"tool {block.get('tool_name')}"
    source, head = block.get("source"), [block.get("title"), block.get("context")]
    if kind == "search_result":
        head, body = [block.get("title"), source], _texts(f"{where}.content", block.get("content"))
    elif isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        body = str(source["data"])
    elif isinstance(source, dict) and source.get("type") == "content":
        body = _texts(f"{where}.source.content", source.get("content"))
    else:
        raise UnsupportedFieldError(f"{where}.source", "is not a text; only documents of text are supported")
    return "\n".join([*(text for text in head if isinstance(text, str) and text), body])


def _format(wanted: JsonValue) -> JsonValue:
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


def _tool(where: str, tool: JsonObject, ignored: Ignored) -> JsonObject:
    """The tool as in a chat, which leaves out tools of other types."""
    if tool.get("type") not in (None, "custom"):
        return {"type": tool["type"]}
    ignored.unknown(where, tool, (*_TOOL_FIELDS, *_TOOLS_WITHOUT_EFFECT))
    function = {theirs: tool[ours] for ours, theirs in _TOOL_FIELDS.items() if tool.get(ours) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: JsonObject) -> JsonValue:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequestError("tool_choice.type", f"is {quoted(str(kind))}; use auto, any, none or tool")
    return _CHOICES[kind]
