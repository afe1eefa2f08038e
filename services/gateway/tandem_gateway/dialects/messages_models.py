"""Bodies of Anthropic's Messages API, read as the chat that they mean.

    system, messages with blocks of text, tool_use and tool_result -> messages
    max_tokens, stop_sequences, tools with input_schema, tool_choice -> those of a chat

Fields that both APIs have, and those of Tandem (seed, slo_class, ...), are those of a chat.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ConfigDict, JsonValue, ValidationError
from tandem_core.errors import InvalidRequestError, quoted

from tandem_gateway.dialects.json_body import JsonBody
from tandem_gateway.dialects.openai_models import ChatBody, invalid_body, parse_json
from tandem_gateway.errors import UnsupportedFieldError

_Object = dict[str, JsonValue]

#: Fields with an effect that no answer here has, and their values without.
_UNSERVED: dict[str, tuple[JsonValue, ...]] = {
    "thinking": ({"type": "disabled"},),
    "container": (),
    "mcp_servers": ([],),
    "context_management": (),
}
#: Fields of a chat that have another name here.
_OF_CHATS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "functions": "tools",
    "function_call": "tool_choice",
    "n": "one request for each",
    "logprobs": "/v1/chat/completions",
}
#: As errors name a chat's fields, by patterns of their beginnings.
FIELD_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function": r"\1",
}
_CHOICES: dict[JsonValue, str] = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(JsonBody):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    model: str | None = None
    messages: list[_Object]
    max_tokens: int
    system: str | list[JsonValue] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[_Object] | None = None
    tool_choice: _Object | None = None

    def to_chat(self) -> ChatBody:
        """Raises InvalidRequestError naming the field as it is called here."""
        extra: dict[str, Any] = dict(self.model_extra or {})
        for name, off in _UNSERVED.items():
            value = extra.pop(name, None)
            if value is not None and value not in off:
                raise UnsupportedFieldError(name, "is not supported here; leave it out")
        for name, other in _OF_CHATS.items():
            if extra.get(name) is not None:
                raise UnsupportedFieldError(name, f"is no field of this API; use {other}")
        choice = self.tool_choice or {}
        fields = {
            **extra,
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
            "tools": [_tool(index, tool) for index, tool in enumerate(self.tools or [])] or None,
            "tool_choice": _tool_choice(choice) if choice else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        }
        try:
            body = ChatBody.model_validate({k: v for k, v in fields.items() if v is not None})
        except ValidationError as error:
            raise invalid_body(error) from error
        body.refuse_unserved()
        return body

    def _messages(self) -> list[_Object]:
        messages: list[_Object] = []
        if self.system:
            messages.append({"role": "system", "content": _text("system", self.system)})
        for index, message in enumerate(self.messages):
            _add_message(messages, f"messages[{index}]", message)
        return messages


def parse_messages(payload: bytes) -> ChatBody:
    """Raises InvalidRequestError."""
    return parse_json(MessagesBody, payload).to_chat()


def _add_message(messages: list[_Object], where: str, message: _Object) -> None:
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
                at, f"is a block of type {quoted(str(kind))}; only text and tools are"
            )
        if kind == "text":
            texts.append(_text(at, [block]))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function: JsonValue = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = _text(f"{at}.content", block.get("content") or "")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
    if texts or calls:
        turn: _Object = {"role": role, "content": "\n".join(texts) if texts else None}
        if calls:
            turn["tool_calls"] = calls
        messages.append(turn)


def _text(where: str, content: JsonValue) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content if isinstance(content, list) else [content]):
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise UnsupportedFieldError(f"{where}[{index}]", "is no block of text; only text is supported")
        texts.append(text)
    return "\n".join(texts)


def _tool(index: int, tool: _Object) -> _Object:
    if tool.get("type") not in (None, "custom"):
        raise UnsupportedFieldError(
            f"tools[{index}].type",
            f"is {quoted(str(tool.get('type')))}; only tools of the client are supported",
        )
    names = {"name": "name", "description": "description", "strict": "strict", "input_schema": "parameters"}
    function = {theirs: tool[ours] for ours, theirs in names.items() if tool.get(ours) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: _Object) -> JsonValue:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequestError("tool_choice.type", f"is {quoted(str(kind))}; use auto, any, none or tool")
    return _CHOICES[kind]
