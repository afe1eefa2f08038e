"""Tools for chat templates that do not support them: text in the messages, in the form of Hermes and Qwen.

    tools             -> the system message: JSON lines in <tools>, and how to call
    a tool call       -> <tool_call>{"name": ..., "arguments": ...}</tool_call> in the assistant's message
    a tool's result   -> <tool_response>...</tool_response> in a message of the user

This form is the one that most open models have seen in training. A model that has not may still follow it;
with tool_choice "required" or a strict tool it has to.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from tandem_core.model.conversation import Message, Tool

_HEAD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TAIL = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def uses_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    return bool(tools) or any(message.tool_calls or message.role == "tool" for message in messages)


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Tool], *, knows_system: bool
) -> list[Message]:
    """Rewrites a conversation without the role "tool", calls and tools. `knows_system`: whether the template
    takes a system message; otherwise the tools are put before the first message of the user."""
    plain: list[Message] = []
    answers_tools = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content or ''}\n</tool_response>"
            if answers_tools:
                plain[-1] = dataclasses.replace(plain[-1], content=f"{plain[-1].content}\n{text}")
            else:
                plain.append(Message("user", text))
            answers_tools = True
            continue
        answers_tools = False
        calls = [
            f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
            for call in (
                {"name": call.name, "arguments": call.parsed_arguments()} for call in message.tool_calls
            )
        ]
        content = "\n".join([message.content, *calls] if message.content else calls)
        plain.append(dataclasses.replace(message, content=content, tool_calls=()))
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
    text = _HEAD + lines + _TAIL
    role = "system" if knows_system else "user"
    if plain and plain[0].role == role:
        plain[0] = dataclasses.replace(plain[0], content=_joined(plain[0].content, text, role))
    else:
        plain.insert(0, Message(role, text))
    return plain


def _joined(content: str | None, text: str, role: str) -> str:
    parts = [content, text] if role == "system" else [text, content]
    return "\n\n".join(part for part in parts if part)
