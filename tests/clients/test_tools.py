"""Tools with unmodified clients against a running system: a random model that must call them does so rightly.

The format of calls in the text is tested in tests/gateway; here the grammar and the engine hold the model to
it, on the openai and langchain-openai packages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

MESSAGES = [{"role": "user", "content": "My order broke."}]


class Report(BaseModel):
    """Files a report."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["broken", "late"]
    urgent: bool


TOOLS = [openai.pydantic_function_tool(Report)]


@pytest.fixture
def client(system) -> Iterator[openai.OpenAI]:
    http_client = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=system.base_url, api_key="none", http_client=http_client) as client:
        yield client


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Report"}}])
def test_a_call_that_is_required_is_made_and_a_stream_brings_the_same(client, system, choice):
    options = {
        "model": system.model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 3,
        "parallel_tool_calls": False, "max_tokens": 150,
    }  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert call.function.name == "Report"
    Report.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)


def test_parse_gives_the_arguments_as_an_object(client, system):
    answer = client.chat.completions.parse(
        model=system.model, messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        max_tokens=150,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Report)


def test_structured_output_of_langchain(system):
    model = ChatOpenAI(
        model=system.model, base_url=system.base_url, api_key="none", max_retries=0, max_tokens=150,
        http_client=httpx.Client(trust_env=False),
    )  # fmt: skip
    structured = model.with_structured_output(Report, method="function_calling", strict=True)
    assert isinstance(structured.invoke("My order broke."), Report)
