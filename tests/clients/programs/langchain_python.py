"""langchain-openai, and LangChain's agent on it."""

from __future__ import annotations

from typing import Literal

import openai
from harness import BASE_URL, MODEL, feature
from langchain.agents import create_agent
from langchain_openai import OpenAI
from pydantic import BaseModel, ConfigDict

# snippet
from langchain_openai import ChatOpenAI

llm = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key="none", max_tokens=100)
print(llm.invoke("What is 2+2?").content)
# end

QUESTION = "Where is my order?"


class Report(BaseModel):
    """Files a report."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["broken", "late"]
    urgent: bool


def look_up_order(urgent: bool) -> str:
    """Looks up an order."""
    return "It was sent yesterday."


@feature("chat")
def _() -> None:
    assert llm.invoke(QUESTION).usage_metadata["output_tokens"] > 0
    assert len(llm.batch([QUESTION, QUESTION])) == 2


@feature("stream")
def _() -> None:
    chunks = list(llm.stream(QUESTION, stream_usage=True))
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


@feature("schema")
def _() -> None:
    for method in ("function_calling", "json_schema"):
        structured = llm.with_structured_output(Report, method=method, strict=True)
        assert isinstance(structured.invoke(QUESTION, max_tokens=200), Report)


@feature("tools")
def _() -> None:
    bound = llm.bind_tools([look_up_order], tool_choice="any", strict=True, parallel_tool_calls=False)
    answer = bound.invoke(QUESTION, max_tokens=200)
    (call,) = answer.tool_calls
    assert isinstance(call["args"]["urgent"], bool)


@feature("agent")
def _() -> None:
    agent = create_agent(llm, tools=[look_up_order])
    call = {"name": "look_up_order", "arguments": '{"urgent": true}'}
    messages = [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "It was sent yesterday."},
    ]
    assert agent.invoke({"messages": messages})["messages"][-1].type == "ai"


@feature("responses")
def _() -> None:
    responses = ChatOpenAI(
        model=MODEL, base_url=BASE_URL, api_key="none", max_tokens=100, use_responses_api=True
    )
    assert responses.invoke(QUESTION).usage_metadata["output_tokens"] > 0
    assert list(responses.stream(QUESTION))


@feature("reasoning_effort")
def _() -> None:
    llm.invoke(QUESTION, reasoning_effort="low", verbosity="low")


@feature("completions")
def _() -> None:
    OpenAI(model=MODEL, base_url=BASE_URL, api_key="none", max_tokens=4).invoke("Once upon")


@feature("errors")
def _() -> None:
    try:
        llm.invoke(QUESTION, temperature=9)
    except openai.BadRequestError as refusal:
        assert "temperature" in str(refusal)
    else:
        raise AssertionError("temperature 9 is not refused")
