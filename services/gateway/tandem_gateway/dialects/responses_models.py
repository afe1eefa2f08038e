"""Bodies of OpenAI's Responses API, read as the chat that they mean.

    instructions, input items -> messages      text.format -> response_format
    max_output_tokens -> max_completion_tokens      tools, tool_choice -> those of a chat

Nothing is stored here, so what refers to stored state is refused. Fields that both APIs have, and those of
Tandem and vLLM (seed, stop, top_k, slo_class, ...), are those of a chat.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, JsonValue, ValidationError
from tandem_core.errors import InvalidRequestError, quoted

from tandem_gateway.dialects.json_body import JsonBody
from tandem_gateway.dialects.openai_models import ChatBody, invalid_body, parse_json
from tandem_gateway.errors import UnsupportedFieldError

_Object = dict[str, JsonValue]

_LOGPROBS = "message.output_text.logprobs"
#: What may be asked to be included: log probabilities, and what no answer here has.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
#: Fields with an effect only where responses are stored or tools run at the server, and their values without.
_UNSERVED: dict[str, tuple[JsonValue, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None, "summary": None}),
    "truncation": ("disabled",),
}
#: Fields of a chat that have another name here.
_OF_CHATS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": f'include: ["{_LOGPROBS}"]',
    "functions": "tools",
    "function_call": "tool_choice",
    "n": "one request for each",
}
#: As errors name a chat's fields, by patterns of their beginnings.
FIELD_NAMES = {
    "messages": "input",
    "max_(completion_)?tokens": "max_output_tokens",
    r"response_format(\.json_schema)?": "text.format",
    r"(tools\[\d+\])\.function": r"\1",
}
_TEXT_PARTS = ("input_text", "output_text", "text")


class _Text(JsonBody):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: _Object | None = None
    verbosity: str | None = None


class ResponsesBody(JsonBody):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    model: str | None = None
    input: str | list[_Object]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: _Object | None = None
    #: true is OpenAI's default, so it is accepted; the answer says that nothing is stored.
    store: bool | None = None
    text: _Text | None = None
    tools: list[_Object] | None = None
    tool_choice: JsonValue = None
    include: list[str] | None = None
    top_logprobs: int | None = None

    def to_chat(self) -> ChatBody:
        """Raises InvalidRequestError naming the field as it is called here."""
        extra: dict[str, Any] = dict(self.model_extra or {})
        for name, off in _UNSERVED.items():
            value = extra.pop(name, None)
            if value is not None and value not in off:
                raise UnsupportedFieldError(
                    name, "is not supported here: no response is stored; leave it out"
                )
        for name, other in _OF_CHATS.items():
            if extra.get(name) is not None:
                raise UnsupportedFieldError(name, f"is no field of this API; use {other}")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise UnsupportedFieldError("text.verbosity", "is not supported here; leave it out")
        wants_logprobs = self._wants_logprobs()
        fields = {
            **extra,
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
            "response_format": self._format(),
            "tools": [_tool(index, tool) for index, tool in enumerate(self.tools or [])] or None,
            "tool_choice": _tool_choice(self.tool_choice),
            "logprobs": wants_logprobs or None,
            "top_logprobs": self.top_logprobs if wants_logprobs else None,
        }
        try:
            body = ChatBody.model_validate({k: v for k, v in fields.items() if v is not None})
        except ValidationError as error:
            raise invalid_body(error) from error
        body.refuse_unserved()
        return body

    def _wants_logprobs(self) -> bool:
        for name in self.include or ():
            if name not in _INCLUDED:
                raise UnsupportedFieldError("include", f"{quoted(name)} is not supported here; leave it out")
        if self.top_logprobs and _LOGPROBS not in (self.include or ()):
            raise InvalidRequestError("top_logprobs", f'is only allowed with include: ["{_LOGPROBS}"]')
        return _LOGPROBS in (self.include or ())

    def _format(self) -> _Object | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.get("type") != "json_schema":
            return wanted
        schema = {name: value for name, value in wanted.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}

    def _messages(self) -> list[_Object]:
        messages: list[_Object] = []
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


def parse_responses(payload: bytes) -> ChatBody:
    """Raises InvalidRequestError."""
    return parse_json(ResponsesBody, payload).to_chat()


def _add_item(messages: list[_Object], where: str, item: _Object) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise InvalidRequestError(
                f"{where}.role", "is missing; send user, assistant, system or developer"
            )
        messages.append({"role": role, "content": _text(f"{where}.content", item.get("content"))})
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
        output = _text(f"{where}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind != "reasoning":  # what an earlier answer thought is not sent to the model again
        raise UnsupportedFieldError(
            f"{where}.type",
            f"is {quoted(str(kind))}; use message, function_call, function_call_output or reasoning",
        )


def _text(where: str, content: JsonValue) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(where, "is missing; send a text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise UnsupportedFieldError(
                f"{where}[{index}]", f"is a part of type {quoted(str(kind))}; only text is supported"
            )
        texts.append(text)
    return "\n".join(texts)


def _tool(index: int, tool: _Object) -> _Object:
    if tool.get("type") != "function":
        raise UnsupportedFieldError(
            f"tools[{index}].type", f"is {quoted(str(tool.get('type')))}; only functions are supported here"
        )
    return {"type": "function", "function": {name: v for name, v in tool.items() if name != "type"}}


def _tool_choice(choice: JsonValue) -> JsonValue:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
