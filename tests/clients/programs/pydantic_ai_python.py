"""Pydantic AI, on chat and on responses."""

from __future__ import annotations

from harness import BASE_URL, MODEL, feature
from pydantic import BaseModel
from pydantic_ai import NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIResponsesModel

# snippet
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE_URL, api_key="none")
agent = Agent(OpenAIChatModel(MODEL, provider=provider))
print(agent.run_sync("What is 2+2?").output)
# end

QUESTION = "Where is my order?"
SHORT = {"max_tokens": 200}
CHAT = OpenAIChatModel(MODEL, provider=provider)
RESPONSES = OpenAIResponsesModel(MODEL, provider=provider)


class Verdict(BaseModel):
    is_late: bool


async def chat(model: Model) -> None:
    assert (await Agent(model, model_settings=SHORT).run(QUESTION)).usage.output_tokens > 0


async def stream(model: Model) -> None:
    async with Agent(model, model_settings=SHORT).run_stream(QUESTION) as streaming:
        assert [text async for text in streaming.stream_text()]


async def get(model: Model, form: type[NativeOutput] | type[ToolOutput]) -> None:
    agent = Agent(model, model_settings=SHORT, output_type=form(Verdict))
    assert isinstance((await agent.run(QUESTION)).output, Verdict)


@feature("chat")
async def _() -> None:
    await chat(CHAT)


@feature("stream")
async def _() -> None:
    await stream(CHAT)


@feature("tools")
async def _() -> None:
    await get(CHAT, ToolOutput)


@feature("schema")
async def _() -> None:
    await get(CHAT, NativeOutput)


@feature("responses")
async def _() -> None:
    await chat(RESPONSES)
    await stream(RESPONSES)
    await get(RESPONSES, ToolOutput)
    await get(RESPONSES, NativeOutput)
