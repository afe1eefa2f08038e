"""Bodies of OpenAI's Responses API, read as chats.

    instructions, input items -> messages      text.format -> response_format
    max_output_tokens -> max_completion_tokens      tools, tool_choice -> those of a chat

Nothing is stored here, so fields that refer to stored state are refused.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ConfigDict, JsonValue
from tandem_core.errors import InvalidRequestError, quoted

from tandem_gateway.dialects.chat_dialect import ChatDialectBody, JsonObject, text_of
from tandem_gateway.dialects.json_body import JsonBody
from tandem_gateway.errors import UnsupportedFieldError

_LOGPROBS = "message.output_text.logprobs"
#: Values of `include`: log probabilities, and one that no answer here has.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
_TEXT_PARTS = ("input_text", "output_text", "text")


class _Text(JsonBody):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: JsonObject | None = None
    verbosity: str | None = None


class ResponsesBody(ChatDialectBody):
    field_names: ClassVar = {
        "messages": "input",
        "max_(completion_)?tokens": "max_output_tokens",
        r"response_format(\.json_schema)?": "text.format",
        r"(tools\[\d+\])\.function": r"\1",
    }
    #: They need stored responses, or tools that run at the server.
    unserved: ClassVar = {
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": ({}, {"effort": None, "summary": None}),
        "truncation": ("disabled",),
    }
    renamed: ClassVar = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "logprobs": f'include: ["{_LOGPROBS}"]',
        "functions": "tools",
        "function_call": "tool_choice",
        "n": "one request for each",
    }
    reason: ClassVar = "is not supported here: no response is stored"

    input: str | list[JsonObject]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream_options: JsonObject | None = None
    #: true is OpenAI's default, so it is accepted; the answer shows `"store": false`.
    store: bool | None = None
    text: _Text | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonValue = None
    include: list[str] | None = None
    top_logprobs: int | None = None

    def _chat_fields(self) -> dict[str, Any]:
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise UnsupportedFieldError("text.verbosity", "is not supported here; leave it out")
        wants_logprobs = self._wants_logprobs()
        return {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "tools": [_tool(index, tool) for index, tool in enumerate(self.tools or [])] or None,
            "tool_choice": _tool_choice(self.tool_choice),
            "logprobs": wants_logprobs or None,
            "top_logprobs": self.top_logprobs if wants_logprobs else None,
        }

    def _wants_logprobs(self) -> bool:
        for name in self.include or ():
            if name not in _INCLUDED:
                raise UnsupportedFieldError("include", f"{quoted(name)} is not supported here; leave it out")
        if self.top_logprobs and _LOGPROBS not in (self.include or ()):
            raise InvalidRequestError("top_logprobs", f'is only allowed with include: ["{_LOGPROBS}"]')
        return _LOGPROBS in (self.include or ())

    def _format(self) -> JsonObject | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.get("type") != "json_schema":
            return wanted
        schema = {name: value for name, value in wanted.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}

    def _messages(self) -> list[JsonObject]:
        messages: list[JsonObject] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
            return messages
        if not self.input:
            raise InvalidRequestError("input", "is empty; send a text or at least one item")
        for index, item in enumerate(self.input):
            _add_item(messages, f"input[{index}]", item)
        return messages


def _add_item(messages: list[JsonObject], where: str, item: JsonObject) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise InvalidRequestError(
                f"{where}.role", "is missing; send user, assistant, system or developer"
            )
        messages.append(
            {"role": role, "content": text_of(f"{where}.content", item.get("content"), _TEXT_PARTS)}
        )
    elif kind == "function_call":
        call: JsonValue = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        last = messages[-1] if messages else {}
        calls = last.get("tool_calls")
        if isinstance(calls, list):  # calls of one turn follow each other
            calls.append(call)
        elif last.get("role") == "assistant":
            last["tool_calls"] = [call]
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = text_of(f"{where}.output", item.get("output"), _TEXT_PARTS)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind != "reasoning":  # earlier reasoning is not sent to the model again
        raise UnsupportedFieldError(
            f"{where}.type",
            f"is {quoted(str(kind))}; use message, function_call, function_call_output or reasoning",
        )


def _tool(index: int, tool: JsonObject) -> JsonObject:
    if tool.get("type") != "function":
        raise UnsupportedFieldError(
            f"tools[{index}].type", f"is {quoted(str(tool.get('type')))}; only functions are supported here"
        )
    return {"type": "function", "function": {name: v for name, v in tool.items() if name != "type"}}


def _tool_choice(choice: JsonValue) -> JsonValue:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
