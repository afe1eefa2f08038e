"""Converts the messages, tools and options of a gRPC ChatRequest for the chat template."""

from __future__ import annotations

import json

from pydantic import JsonValue
from pydantic_core import from_json
from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.model.conversation import ChatOptions, Message, ToolCall
from tandem_proto.v1 import gateway_pb2

from tandem_gateway.tools.choice import Mode, ToolChoice, check_levels, check_tools


def to_messages(request: gateway_pb2.ChatRequest) -> tuple[Message, ...]:
    return tuple(
        Message(
            message.role,
            None if message.tool_calls and not message.content else message.content,
            tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
            tool_call_id=message.tool_call_id,
            name=message.name,
            reasoning=message.reasoning,
        )
        for message in request.messages
    )


def to_tool_choice(request: gateway_pb2.ChatRequest) -> ToolChoice:
    """Raises InvalidRequestError naming the field."""
    tools = check_tools([_definition(index, tool) for index, tool in enumerate(request.tools)])
    try:
        mode = Mode(request.tool_choice or "auto")
    except ValueError:
        allowed = ", ".join(mode.value for mode in Mode)
        raise InvalidRequestError(
            "tool_choice", f"is {quoted(request.tool_choice)}; use {allowed}, or name a required_tool"
        ) from None
    if request.required_tool:
        mode = Mode.REQUIRED
    return ToolChoice.of(
        tools, mode, name=request.required_tool or None, is_parallel=not request.single_tool_call
    )


def to_options(request: gateway_pb2.ChatRequest) -> ChatOptions:
    """The options apart from tools. Raises InvalidRequestError naming the field."""
    arguments = _object("template_arguments", request.template_arguments)
    check_levels("template_arguments", arguments)
    return ChatOptions(
        template_arguments=arguments, turn="continued" if request.continue_final_message else "new"
    )


def _definition(index: int, tool: gateway_pb2.Tool) -> dict[str, JsonValue]:
    """The tool in OpenAI's form."""
    function: dict[str, JsonValue] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = _object(f"tools[{index}].function.parameters", tool.parameters)
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _object(field: str, text: str) -> dict[str, JsonValue]:
    """Parses a JSON object; an empty text means {}. Raises InvalidRequestError."""
    try:
        value = from_json(text or "{}", allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(field, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(field, f"is {json.dumps(value)[:32]}; send a JSON object")
    return value
