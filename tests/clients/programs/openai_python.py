"""The openai package."""

from __future__ import annotations

import json
from typing import Literal

import openai
from harness import BASE_URL, MODEL, TO_THE_LIMIT, feature
from pydantic import BaseModel, ConfigDict

# snippet
from openai import OpenAI

client = OpenAI(base_url=BASE_URL, api_key="none")
chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "What is 2+2?"}])
print(chat.choices[0].message.content)
# end

MESSAGES = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Where is my order?"}]


class Report(BaseModel):
    """Files a report."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["broken", "late"]
    urgent: bool


TOOLS = [openai.pydantic_function_tool(Report)]


@feature("models")
def _() -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "tandem")
    assert client.models.retrieve(model.id).model_extra["max_model_len"] > 0


@feature("chat")
def _() -> None:
    answers = [
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, extra_body=TO_THE_LIMIT)
        for _ in range(2)
    ]
    assert answers[0].choices[0].finish_reason == "length"
    assert answers[0].usage.completion_tokens == 8
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


@feature("stream")
def _() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "extra_body": TO_THE_LIMIT}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens == 8


@feature("logprobs")
def _() -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=4, extra_body=TO_THE_LIMIT
    )
    content = chat.choices[0].logprobs.content
    assert [len(position.top_logprobs) for position in content] == [4, 4, 4]
    assert all(position.logprob <= 0 for position in content)


@feature("completions")
def _() -> None:
    for prompt in ("Once upon", [5, 6, 7]):
        done = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=4, logprobs=2, extra_body=TO_THE_LIMIT
        )
        assert done.usage.completion_tokens == 4
        assert len(done.choices[0].logprobs.tokens) == 4
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=4, stream=True, extra_body=TO_THE_LIMIT
    )
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"


@feature("responses")
def _() -> None:
    asked = {"model": MODEL, "instructions": "You help.", "input": "Where?", "max_output_tokens": 16}
    response = client.responses.create(**asked, extra_body=TO_THE_LIMIT)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 16
    with client.responses.stream(**asked, extra_body=TO_THE_LIMIT) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text
    assert events[-1].type == "response.incomplete"


@feature("schema")
def _() -> None:
    chat = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Report, max_tokens=200, seed=1
    )
    assert isinstance(chat.choices[0].message.parsed, Report)
    response = client.responses.parse(
        model=MODEL, input="Is it late?", text_format=Report, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Report)


@feature("tools")
def _() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "Report"}}):
        asked = {
            "model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 3,
            "parallel_tool_calls": False, "max_tokens": 150,
        }  # fmt: skip
        whole = client.chat.completions.parse(**asked).choices[0]
        assert whole.finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Report)
        with client.chat.completions.stream(**asked) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)


@feature("errors")
def _() -> None:
    for error, words, asked in (
        (openai.BadRequestError, "temperature", {"model": MODEL, "temperature": 9}),
        (openai.NotFoundError, "gpt-4", {"model": "gpt-4"}),
    ):
        try:
            client.chat.completions.create(messages=MESSAGES, **asked)
        except error as refusal:
            assert words in str(refusal)
        else:
            raise AssertionError(f"{asked} is not refused")


@feature("request id")
def _() -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id.endswith("mine-1")
