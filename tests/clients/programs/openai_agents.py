"""The OpenAI Agents SDK, on chat and on responses."""

from __future__ import annotations

from typing import Any

from agents import (
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    function_tool,
    set_tracing_disabled,
)
from harness import BASE_URL, MODEL, feature
from pydantic import BaseModel

set_tracing_disabled(True)
# snippet
from agents import Agent, Runner, set_default_openai_api, set_default_openai_client
from openai import AsyncOpenAI

set_default_openai_client(AsyncOpenAI(base_url=BASE_URL, api_key="none"), use_for_tracing=False)
set_default_openai_api("chat_completions")
agent = Agent(name="helper", instructions="You help.", model=MODEL)
print(Runner.run_sync(agent, "What is 2+2?").final_output)
# end

CLIENT = AsyncOpenAI(base_url=BASE_URL, api_key="none")
CHAT = OpenAIChatCompletionsModel(model=MODEL, openai_client=CLIENT)
RESPONSES = OpenAIResponsesModel(model=MODEL, openai_client=CLIENT)
QUESTION = "Where is my order?"


class Verdict(BaseModel):
    is_late: bool


calls = []


@function_tool
def look_up_order(is_urgent: bool) -> str:
    """Looks up an order."""
    calls.append(is_urgent)
    return "It was sent yesterday."


async def ask(model: Model, **more: Any) -> Any:
    agent = Agent(name="helper", instructions="You help.", model=model, **more)
    return (await Runner.run(agent, QUESTION)).final_output


async def stream(model: Model) -> None:
    streaming = Runner.run_streamed(Agent(name="helper", model=model), QUESTION)
    assert "raw_response_event" in [event.type async for event in streaming.stream_events()]


async def call_tools(model: Model) -> None:
    """The first turn must call; the SDK then sets `tool_choice` back, and the second turn answers."""
    calls.clear()
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    assert isinstance(await ask(model, tools=[look_up_order], model_settings=settings), str)
    assert calls


@feature("chat")
async def _() -> None:
    assert isinstance(await ask(CHAT), str)


@feature("stream")
async def _() -> None:
    await stream(CHAT)


@feature("tools")
async def _() -> None:
    await call_tools(CHAT)


@feature("schema")
async def _() -> None:
    assert isinstance(await ask(CHAT, output_type=Verdict), Verdict)


@feature("responses")
async def _() -> None:
    assert isinstance(await ask(RESPONSES), str)
    await stream(RESPONSES)
    await call_tools(RESPONSES)
    assert isinstance(await ask(RESPONSES, output_type=Verdict), Verdict)
