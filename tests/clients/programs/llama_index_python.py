"""LlamaIndex's OpenAILike."""

from __future__ import annotations

from harness import BASE_URL, MODEL, feature
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

# snippet
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=MODEL,
    api_base=BASE_URL,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=100,
)
print(llm.complete("What is 2+2?"))
# end

MESSAGES = [ChatMessage(role="user", content="Where is my order?")]


class Verdict(BaseModel):
    """Says whether it is late."""

    is_late: bool


def look_up_order(urgent: bool) -> str:
    """Looks up an order."""
    return "It was sent yesterday."


@feature("chat")
def _() -> None:
    assert llm.chat(MESSAGES).raw.usage.completion_tokens > 0


@feature("stream")
def _() -> None:
    assert list(llm.stream_chat(MESSAGES))


@feature("tools")
def _() -> None:
    answer = llm.chat_with_tools(
        [FunctionTool.from_defaults(look_up_order)], chat_history=MESSAGES, tool_required=True
    )
    calls = llm.get_tool_calls_from_response(answer)
    assert all(isinstance(call.tool_kwargs["urgent"], bool) for call in calls)
    assert calls


@feature("schema")
def _() -> None:
    verdict = llm.structured_predict(Verdict, PromptTemplate("Is my order late?"))
    assert isinstance(verdict, Verdict)


@feature("completions")
def _() -> None:
    completing = OpenAILike(model=MODEL, api_base=BASE_URL, api_key="none", max_tokens=8)
    assert completing.complete("Once upon").raw.usage.completion_tokens > 0
