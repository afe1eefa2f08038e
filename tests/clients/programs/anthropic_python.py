"""The anthropic package."""

from __future__ import annotations

import anthropic
from harness import MODEL, TO_THE_LIMIT, URL, feature
from pydantic import BaseModel

# snippet
from anthropic import Anthropic

client = Anthropic(base_url=URL, api_key="none")
message = client.messages.create(
    model=MODEL, max_tokens=100, messages=[{"role": "user", "content": "What is 2+2?"}]
)
print(message.content[0].text)
# end

MESSAGES = [{"role": "user", "content": "Where is my order?"}]
ASKED = {"model": MODEL, "max_tokens": 8, "messages": MESSAGES}
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}
TOOL = {
    "name": "look_up_order",
    "description": "Looks up an order.",
    "input_schema": {
        "type": "object",
        "properties": {"is_urgent": {"type": "boolean"}},
        "required": ["is_urgent"],
        "additionalProperties": False,
    },
}


def prompt_tokens(message: anthropic.types.Message) -> int:
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


@feature("models")
def _() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


@feature("messages")
def _() -> None:
    message = client.messages.create(**ASKED, system="You help.", extra_body=TO_THE_LIMIT)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)


@feature("stream")
def _() -> None:
    message = client.messages.create(**ASKED, extra_body=TO_THE_LIMIT)
    with client.messages.stream(**ASKED, extra_body=TO_THE_LIMIT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == message.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)


@feature("tools")
def _() -> None:
    asked = {**ASKED, "max_tokens": 200, "tools": [TOOL], "tool_choice": ONE_CALL}
    message = client.messages.create(**asked, extra_body={"seed": 1})
    (use,) = (block for block in message.content if block.type == "tool_use")
    assert isinstance(use.input["is_urgent"], bool)
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "unknown", "is_error": True}]
    answer = client.messages.create(
        **{**ASKED, "tools": [TOOL]},
        extra_body={
            "messages": [
                *MESSAGES,
                {"role": "assistant", "content": [block.to_dict() for block in message.content]},
                {"role": "user", "content": results},
            ]
        },
    )
    assert prompt_tokens(answer) > prompt_tokens(message)


@feature("tool_runner")
def _() -> None:
    called = []

    @anthropic.beta_tool
    def look_up_order(is_urgent: bool) -> str:
        """Looks up an order.

        Args:
            is_urgent: whether it is urgent
        """
        called.append(is_urgent)
        return "It was sent yesterday."

    runner = client.beta.messages.tool_runner(
        **{**ASKED, "max_tokens": 200}, tools=[look_up_order], tool_choice=ONE_CALL, max_iterations=2
    )
    messages = list(runner)
    assert len(messages) == 2
    assert called
    assert all(isinstance(value, bool) for value in called)


class Verdict(BaseModel):
    is_late: bool


@feature("schema")
def _() -> None:
    message = client.messages.parse(**{**ASKED, "max_tokens": 200}, output_format=Verdict)
    assert isinstance(message.parsed_output, Verdict)


@feature("count_tokens")
def _() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert counted.input_tokens == prompt_tokens(client.messages.create(**ASKED))


@feature("thinking")
def _() -> None:
    budget = {"type": "enabled", "budget_tokens": 1024}
    client.messages.create(**{**ASKED, "max_tokens": 1200}, thinking=budget)
    client.messages.create(**ASKED, thinking={"type": "adaptive"}, output_config={"effort": "low"})


@feature("prefill")
def _() -> None:
    """A last message of the assistant is continued: it costs its own tokens, not those of another turn."""
    given = [*MESSAGES, {"role": "assistant", "content": "1, 2, 3"}]
    short, long = (
        prompt_tokens(client.messages.create(**{**ASKED, "messages": messages}))
        for messages in (MESSAGES, given)
    )
    assert long - short <= len("1, 2, 3")


@feature("errors")
def _() -> None:
    try:
        client.messages.create(**ASKED, extra_body={"temperature": 9})
    except anthropic.BadRequestError as refusal:
        assert "temperature" in str(refusal)
    else:
        raise AssertionError("temperature 9 is not refused")
