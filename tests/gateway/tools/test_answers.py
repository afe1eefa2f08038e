"""Answers with tool calls, as unmodified clients see them: OpenAI's, LangChain's and LiteLLM's, and gRPC."""

from __future__ import annotations

import json
import re
from typing import Literal

import httpx
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import pydantic_function_tool
from pydantic import BaseModel
from tandem_proto.v1 import common_pb2, gateway_pb2
from tool_models import make_tool_folder

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Where is order 5?"}]
ARGS = '{"id": "#W5", "fast": true}'
#: As a model writes them, cut in the middle of markers, names and arguments.
CALL = (
    "I ", "look.", "\n<tool", "_call>\n{", '"name": "Find", "argu', 'ments": {"id": ', '"#W5", ',
    '"fast": true}', "}\n</tool_", "call>",
)  # fmt: skip
TWO = (*CALL[2:], '\n<tool_call>\n{"name": "Find", "arguments": {}}\n</tool_call>')


class Find(BaseModel):
    """Looks up an order."""

    id: str
    fast: bool = False


TOOL = {"type": "function", "function": {"name": "Find", "parameters": Find.model_json_schema()}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tool_folder(tmp_path_factory.mktemp("model"), "qwen2.5")


@pytest.fixture
def fronted(folder, pods, gateway):
    """A gateway with a pod that answers these words."""

    async def start(words: tuple[str, ...], model=folder, **settings: object):
        pod = await pods(words=words)
        front = await gateway(pod, model=model, **settings)
        front.pod = pod
        return front

    return start


async def test_openais_client_gets_a_whole_call(fronted):
    front = await fronted(CALL)
    answer = await front.openai.chat.completions.create(model="tiny-chat", messages=USER, tools=[TOOL])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "Find", ARGS)
    assert call.id.startswith("call_")


async def test_openais_client_gets_a_streamed_call(fronted):
    front = await fronted(TWO)
    async with front.openai.chat.completions.stream(
        model="tiny-chat", messages=USER, tools=[TOOL], stream_options={"include_usage": True}
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content in (None, "")
    assert [call.function.arguments for call in choice.message.tool_calls] == [ARGS, "{}"]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) >= 4  # not all at the end
    assert final.usage.completion_tokens == len(TWO)


async def test_openais_parse_helper_gets_a_call(fronted):
    front = await fronted(CALL)
    answer = await front.openai.chat.completions.parse(
        model="tiny-chat", messages=USER, tools=[pydantic_function_tool(Find)]
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Find(id="#W5", fast=True)


async def test_a_stream_and_a_whole_answer_are_equal(fronted):
    front = await fronted(TWO)
    body = {"messages": USER, "tools": [TOOL]}
    whole = (await front.http.post(CHAT, json=body)).json()["choices"][0]["message"]
    streamed = await _joined(front, body)
    assert [call["function"] for call in streamed] == [call["function"] for call in whole["tool_calls"]]
    assert whole["content"] is None


async def _joined(front, body, **headers: str) -> list[dict]:
    response = await front.http.post(CHAT, json={**body, "stream": True}, headers=headers)
    return _calls_of(response.text)


def _calls_of(text: str) -> list[dict]:
    calls: list[dict] = []
    for event in re.findall(r"^data: (\{.*)$", text, re.M):
        for choice in json.loads(event)["choices"]:
            for part in choice["delta"].get("tool_calls", []):
                if "id" in part:
                    assert part["index"] == len(calls)
                    calls.append({"id": part["id"], "function": dict(part["function"])})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls


async def test_a_stream_that_is_resumed_inside_a_call_loses_nothing(fronted):
    """Resumed after any event, the client gets the call unchanged, with its id."""
    front = await fronted(CALL)
    body = {"messages": USER, "tools": [TOOL], "stream": True}
    response = await front.http.post(CHAT, json=body, headers={"x-event-ids": "true"})
    blocks = response.text.split("\n\n")
    ids = [re.match(r"id: (\S+)", block) for block in blocks]
    expected = _calls_of(response.text)
    assert expected[0]["function"]["arguments"] == ARGS
    for index, found in enumerate(ids):
        if found is None:
            continue
        rest = await front.http.post(CHAT, json=body, headers={"last-event-id": found[1]})
        assert rest.status_code == 200
        seen = "\n\n".join(blocks[: index + 1]) + "\n\n" + rest.text
        assert _calls_of(seen) == expected


async def test_without_tools_the_markers_are_text(fronted):
    front = await fronted(CALL)
    for extra in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        response = await front.http.post(CHAT, json={"messages": USER, **extra})
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == "".join(CALL)
        assert "tool_calls" not in choice["message"]


async def test_parallel_calls_can_be_switched_off(fronted):
    front = await fronted(TWO)
    body = {"messages": USER, "tools": [TOOL], "parallel_tool_calls": False}
    assert len((await front.http.post(CHAT, json=body)).json()["choices"][0]["message"]["tool_calls"]) == 1


async def test_older_functions_get_a_function_call(fronted):
    front = await fronted(CALL)
    answer = await front.openai.chat.completions.create(
        model="tiny-chat", messages=USER, functions=[TOOL["function"]]
    )
    assert answer.choices[0].finish_reason == "function_call"
    assert answer.choices[0].message.function_call.arguments == ARGS
    stream = await front.openai.chat.completions.create(
        model="tiny-chat", messages=USER, functions=[TOOL["function"]], stream=True
    )
    parts = [chunk.choices[0].delta.function_call async for chunk in stream]
    assert "".join(part.arguments for part in parts if part) == ARGS


async def test_mistrals_markers_are_special_tokens_and_its_ids_short(fronted, tmp_path):
    model = make_tool_folder(tmp_path, "mistral", ["[TOOL_CALLS]", "[INST]"])
    front = await fronted(("[TOOL_CALLS]", f"Find[ARGS]{ARGS}"), model)
    answer = await front.openai.chat.completions.create(model="tiny-chat", messages=USER, tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls
    assert len(call.id) == 9
    assert not front.pod.requests[0].sampling.skip_special_tokens
    # The client sends it back.
    messages = [*USER, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "x"}]
    await front.openai.chat.completions.create(model="tiny-chat", messages=messages, tools=[TOOL])


async def test_the_format_can_be_set(fronted):
    front = await fronted((f"[TOOL_CALLS]Find[ARGS]{ARGS}",), tool_format="mistral")
    answer = await front.openai.chat.completions.create(model="tiny-chat", messages=USER, tools=[TOOL])
    assert answer.choices[0].message.tool_calls[0].function.name == "Find"


async def test_reasoning_has_its_own_field_unless_splitting_is_off(fronted, tmp_path):
    words = ("<think>\nhm", " hm\n</th", "ink>\n\nSent", ".")
    model = make_tool_folder(tmp_path, "qwen3")
    front = await fronted(words, model)
    whole = (await front.http.post(CHAT, json={"messages": USER})).json()["choices"][0]["message"]
    assert (whole["reasoning_content"], whole["content"]) == ("hm hm", "Sent.")
    stream = await front.openai.chat.completions.create(model="", messages=USER, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm hm"
    assert "".join(delta.content or "" for delta in deltas) == "Sent."
    front = await fronted(words, model, split_reasoning=False)
    whole = (await front.http.post(CHAT, json={"messages": USER})).json()["choices"][0]["message"]
    assert whole["content"] == "".join(words)


async def test_grpc_gets_calls_and_reasoning(fronted):
    front = await fronted(CALL)
    request = gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage(role="user", content="x")],
        tools=[gateway_pb2.Tool(name="Find", parameters='{"type": "object"}')],
    )
    responses = [response async for response in front.grpc.Chat(request)]
    end = responses[-1].end
    parts = [response.chunk for response in responses[:-1]]
    assert end.reason == common_pb2.FINISH_REASON_TOOL_CALLS
    assert "".join(part.text for part in parts) + end.text == "I look."
    calls = [call for part in [*parts, end] for call in part.tool_calls]
    assert (calls[0].name, "".join(call.arguments for call in calls)) == ("Find", ARGS)
    assert calls[0].id.startswith("call_")


class TestLangChain:
    def model(self, front) -> ChatOpenAI:
        return ChatOpenAI(
            model="tiny-chat", base_url=f"{front.url}/v1", api_key="none", max_retries=0,
            http_async_client=httpx.AsyncClient(trust_env=False),
        )  # fmt: skip

    async def test_langchain_binds_tools_and_sends_a_second_turn(self, fronted):
        front = await fronted(CALL)
        model = self.model(front).bind_tools([Find])
        answer = await model.ainvoke("Where is order 5?")
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("Find", {"id": "#W5", "fast": True})
        history = [HumanMessage("Where?"), answer, ToolMessage("sent", tool_call_id=call["id"])]
        assert (await model.ainvoke(history)).tool_calls
        chunks = [chunk async for chunk in model.astream("Where is order 5?")]
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert whole.tool_calls[0]["args"] == {"id": "#W5", "fast": True}

    @pytest.mark.parametrize("choice", ["any", "auto", "none", "Find"])
    async def test_langchain_sets_tool_choices(self, choice, fronted):
        front = await fronted(CALL[2:])
        answer = await self.model(front).bind_tools([Find], tool_choice=choice).ainvoke("Where?")
        assert bool(answer.tool_calls) == (choice != "none")

    @pytest.mark.parametrize("strict", [None, True])
    async def test_langchain_gets_structured_output_by_function_calling(
        self, strict: Literal[True] | None, fronted
    ):
        front = await fronted(CALL[2:])
        model = self.model(front).with_structured_output(Find, method="function_calling", strict=strict)
        assert await model.ainvoke("Where?") == Find(id="#W5", fast=True)


async def test_litellm_gets_a_call(fronted, monkeypatch):
    """Not a development package: litellm requires an older python-dateutil than the Kubernetes client."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the internet
    litellm = pytest.importorskip("litellm")
    front = await fronted(CALL)
    answer = await litellm.acompletion(
        model="openai/tiny-chat", api_base=f"{front.url}/v1", api_key="none", messages=USER, tools=[TOOL],
        tool_choice="auto",
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("Find", ARGS)
    assert answer.choices[0].finish_reason == "tool_calls"
