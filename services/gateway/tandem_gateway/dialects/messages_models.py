"""Bodies of Anthropic's Messages API, read as chats.

system, messages with blocks of text, tool_use and tool_result -> messages
max_tokens, stop_sequences, tools with input_schema, tool_choice -> those of a chat
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import JsonValue
from tandem_core.errors import InvalidRequestError, quoted

from tandem_gateway.dialects.chat_dialect import ChatDialectBody, JsonObject, part_text, text_of
from tandem_gateway.errors import UnsupportedFieldError

#: A chat's `tool_choice` by the type of this API's.
_CHOICES: dict[JsonValue, str] = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(ChatDialectBody):
    field_names: ClassVar = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
        r"(tools\[\d+\])\.function": r"\1",
    }
    unserved: ClassVar = {
        "thinking": ({"type": "disabled"},),
        "container": (),
        "mcp_servers": ([],),
        "context_management": (),
    }
    renamed: ClassVar = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "functions": "tools",
        "function_call": "tool_choice",
        "n": "one request for each",
        "logprobs": "/v1/chat/completions",
    }

    messages: list[JsonObject]
    max_tokens: int
    system: str | list[JsonValue] | None = None
    stop_sequences: list[str] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None

    def _chat_fields(self) -> dict[str, Any]:
        choice = self.tool_choice or {}
        return {
            "messages": self._messages(),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tools": [_tool(index, tool) for index, tool in enumerate(self.tools or [])] or None,
            "tool_choice": _tool_choice(choice) if choice else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        }

    def _messages(self) -> list[JsonObject]:
        messages: list[JsonObject] = []
        if self.system:
            messages.append({"role": "system", "content": text_of("system", self.system)})
        for index, message in enumerate(self.messages):
            _add_message(messages, f"messages[{index}]", message)
        return messages


def _add_message(messages: list[JsonObject], where: str, message: JsonObject) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise InvalidRequestError(f"{where}.role", f"is {quoted(str(role))}; use user or assistant")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}.content", "is missing; send a text or a list of blocks")
    texts: list[str] = []
    calls: list[JsonValue] = []
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(block, dict) or kind not in ("text", "tool_use", "tool_result", "thinking"):
            raise UnsupportedFieldError(
                at, f"is a block of type {quoted(str(kind))}; only text and tools are supported"
            )
        if kind == "text":
            texts.append(part_text(at, block))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function: JsonValue = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = text_of(f"{at}.content", block.get("content") or "")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
    if texts or calls:
        turn: JsonObject = {"role": role, "content": "\n".join(texts) if texts else None}
        if calls:
            turn["tool_calls"] = calls
        messages.append(turn)


def _tool(index: int, tool: JsonObject) -> JsonObject:
    if tool.get("type") not in (None, "custom"):
        raise UnsupportedFieldError(
            f"tools[{index}].type",
            f"is {quoted(str(tool.get('type')))}; only tools of the client are supported",
        )
    names = {"name": "name", "description": "description", "strict": "strict", "input_schema": "parameters"}
    function = {theirs: tool[ours] for ours, theirs in names.items() if tool.get(ours) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: JsonObject) -> JsonValue:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequestError("tool_choice.type", f"is {quoted(str(kind))}; use auto, any, none or tool")
    return _CHOICES[kind]
