"""Bodies of OpenAI's Responses API, read as chats.

    instructions, input items -> messages      text.format -> response_format
    max_output_tokens -> max_completion_tokens      tools, tool_choice -> those of a chat

A tool of type "custom" is offered as a function with one text, `input`; other tools that OpenAI runs are left
out. Nothing is stored here, so fields and items that refer to stored state are refused.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import ConfigDict, JsonValue
from tandem_core.errors import InvalidRequestError, quoted
from tandem_proto.v1 import answers_pb2

from tandem_gateway.dialects.chat_dialect import ChatDialectBody, JsonObject, text_of
from tandem_gateway.dialects.fields import RESPONSES, Ignored
from tandem_gateway.dialects.json_body import JsonBody
from tandem_gateway.dialects.openai_messages import CUSTOM_INPUT
from tandem_gateway.errors import UnsupportedFieldError

_LOGPROBS = "message.output_text.logprobs"
#: Values of `include`: log probabilities, and parts of items that no answer here has.
_INCLUDED = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
#: Items of calls that the client executes, with the field that has the arguments, and of their outputs.
_CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
}
_OUTPUTS = tuple(f"{kind}_output" for kind in _CALLS)
#: Items of tools that OpenAI runs, or about tools. Answers that they led to are messages of their own.
_LEFT_OUT = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("tool_search_call", "tool_search_output", "program", "program_output", "configuration_update"),
)
_ITEM_FIELDS = frozenset(
    {"type", "role", "content", "id", "status", "phase", "call_id", "name", "namespace", "output", "summary"}
    | {"encrypted_content", "tools", "caller", "execution", "max_output_length", "environment"}
    | set(_CALLS.values())
)
_CUSTOM_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
#: Separates the names of a namespace and its tool.
IN_NAMESPACE = "__"
#: Fields of the request that the response repeats, and the limit on their size as JSON.
_SHOWN_FIELDS = ("instructions", "metadata", "tools", "tool_choice", "parallel_tool_calls", "user")
MAX_SHOWN_BYTES = 64 * 1024


class _Text(JsonBody):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    format: JsonObject | None = None


class ResponsesBody(ChatDialectBody):
    field_names: ClassVar = {
        "messages": "input",
        "max_(completion_)?tokens": "max_output_tokens",
        r"response_format(\.json_schema)?": "text.format",
        r"(tools\[\d+\])\.function": r"\1",
    }
    field_table = RESPONSES

    input: str | list[JsonObject]
    """A text, or items: messages, function calls and their outputs."""
    instructions: str | None = None
    """The system prompt."""
    max_output_tokens: int | None = None
    """Most tokens to generate, clamped to what the context leaves."""
    stream_options: JsonObject | None = None
    """Without effect: each stream has the usage."""
    store: bool | None = None
    """true is OpenAI's default, so it is accepted; nothing is stored."""
    text: _Text | None = None
    """format: text, json_object, or json_schema with a schema that the answer matches."""
    tools: list[JsonObject] | None = None
    """Functions that the model may call; at most 128."""
    tool_choice: JsonValue = None
    """auto, none, required, or a function that must be called."""
    include: list[str] | None = None
    """message.output_text.logprobs: the log probability of each token."""
    top_logprobs: int | None = None
    """With them: those of this many most likely tokens too, 0 to 20."""

    def _chat_fields(self, ignored: Ignored) -> dict[str, Any]:
        if self.text is not None:
            ignored.unknown("text", self.text.model_extra)
        ignored.unknown("stream_options", self.stream_options, ("include_obfuscation", "include_usage"))
        wants_logprobs = self._wants_logprobs(ignored)
        return {
            "messages": self._messages(ignored),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "tools": [_tool(tool) for tool in self._all_tools()] or None,
            "tool_choice": self.tool_choice,
            "logprobs": wants_logprobs or None,
            "top_logprobs": self.top_logprobs if wants_logprobs else None,
        }

    def shown(self) -> answers_pb2.ShownAs:
        given = {**(self.model_extra or {}), "instructions": self.instructions, "tools": self.tools,
                 "tool_choice": self.tool_choice}  # fmt: skip
        given = {name: given[name] for name in _SHOWN_FIELDS if given.get(name) is not None}
        text = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
        tools = self._all_tools()
        return answers_pb2.ShownAs(
            response_fields=text if len(text.encode(errors="replace")) <= MAX_SHOWN_BYTES else "",
            custom_tools=[str(tool.get("name")) for tool in tools if tool.get("type") == "custom"],
            namespaces={
                str(tool.get("name")): namespace
                for tool in tools
                if isinstance(namespace := tool.get("namespace"), str)
            },
        )

    def _all_tools(self) -> list[JsonObject]:
        """Includes tools of items, and tools of namespaces under both names."""
        items = self.input if isinstance(self.input, list) else []
        added = [item.get("tools") for item in items if item.get("type") == "additional_tools"]
        listed = [tool for tools in (self.tools, *added) if isinstance(tools, list) for tool in tools]
        found: list[JsonObject] = []
        for tool in listed:
            if not isinstance(tool, dict):
                continue
            inner = tool.get("tools") if tool.get("type") == "namespace" else None
            if isinstance(inner, list):
                found += [_within(tool.get("name"), one) for one in inner if isinstance(one, dict)]
            else:
                found.append(tool)
        return found

    def _wants_logprobs(self, ignored: Ignored) -> bool:
        for name in self.include or ():
            if name not in _INCLUDED:
                ignored.add(f"include.{name}")
        if self.top_logprobs and _LOGPROBS not in (self.include or ()):
            raise InvalidRequestError("top_logprobs", f'is only allowed with include: ["{_LOGPROBS}"]')
        return _LOGPROBS in (self.include or ())

    def _format(self) -> JsonObject | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None or wanted.get("type") != "json_schema":
            return wanted
        schema = {name: value for name, value in wanted.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}

    def _messages(self, ignored: Ignored) -> list[JsonObject]:
        messages: list[JsonObject] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
            return messages
        if not self.input:
            raise InvalidRequestError("input", "is empty; send a text or at least one item")
        for index, item in enumerate(self.input):
            _add_item(messages, f"input[{index}]", item, ignored)
        return [turn for turn in messages if turn["content"] is not None or "tool_calls" in turn]


def _add_item(messages: list[JsonObject], where: str, item: JsonObject, ignored: Ignored) -> None:
    kind = item.get("type") or "message"
    if kind in _LEFT_OUT:
        ignored.add(f"{where}.{kind}")
        return
    ignored.unknown(where, item, _ITEM_FIELDS)
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise InvalidRequestError(
                f"{where}.role", "is missing; send user, assistant, system or developer"
            )
        content = text_of(f"{where}.content", item.get("content"), _TEXT_PARTS)
        if role == "assistant" and (turn := _open_turn(messages))["content"] is None:
            turn["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind in _CALLS:
        given = item.get(_CALLS[kind])
        name: JsonValue = kind.removesuffix("_call")
        if isinstance(namespace := item.get("namespace"), str) and namespace:
            item = _within(namespace, item)
        if kind == "function_call":
            name = item.get("name")
        elif kind == "custom_tool_call":
            name, given = item.get("name"), json.dumps({CUSTOM_INPUT: given}, ensure_ascii=False)
        else:
            given = json.dumps(given, ensure_ascii=False)
        for field, value in (("name", name), (_CALLS[kind], given)):
            if not isinstance(value, str):
                raise InvalidRequestError(f"{where}.{field}", "is missing; send a text")
        calls = _open_turn(messages).setdefault("tool_calls", [])
        assert isinstance(calls, list)
        function: JsonValue = {"name": name, "arguments": given}
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind in _OUTPUTS:
        output = item.get("output")
        if kind == "shell_call_output":
            output = json.dumps(output, ensure_ascii=False)
        content = text_of(f"{where}.output", "" if output is None else output, _TEXT_PARTS)
        call_id = item.get("call_id") or item.get("id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "reasoning":
        thought = text_of(f"{where}.content", item.get("content") or item.get("summary") or [], _TEXT_PARTS)
        if thought:
            messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
    elif kind != "additional_tools":
        raise UnsupportedFieldError(
            f"{where}.type",
            f"is {quoted(str(kind))}; use message, reasoning, function_call, function_call_output, or the "
            "same of custom tools and shells",
        )


def _within(namespace: JsonValue, tool: JsonObject) -> JsonObject:
    """A tool, or a call of it, under the name that the model sees."""
    return {**tool, "name": f"{namespace}{IN_NAMESPACE}{tool.get('name')}", "namespace": namespace}


def _open_turn(messages: list[JsonObject]) -> JsonObject:
    """The last turn if it is the assistant's, else a new one. Reasoning, text and calls of a turn are
    consecutive."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _tool(tool: JsonObject) -> JsonObject:
    """The tool as in a chat, which leaves out other tools than functions."""
    kind = tool.get("type")
    if kind == "custom":
        texts = [tool.get("description")]
        if isinstance(form := tool.get("format"), dict) and form.get("type") == "grammar":
            texts.append(f"The input matches this {form.get('syntax')} grammar:\n{form.get('definition')}")
        description = "\n\n".join(text for text in texts if isinstance(text, str))
        function: JsonObject = {"name": tool.get("name"), "description": description or None}
        return {"type": "function", "function": {**function, "parameters": _CUSTOM_PARAMETERS}}
    if kind != "function":
        return tool
    function = {name: value for name, value in tool.items() if name not in ("type", "namespace")}
    return {"type": kind, "function": function}
