"""OpenAI's Responses API, through OpenAI's client: one object, typed events, nothing stored."""

import json

import openai
import pytest
from tandem_proto.v1 import common_pb2

ITEMS = [
    {"role": "developer", "content": "Go."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "1"},
    {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "2"},
    {"type": "function_call_output", "call_id": "c1", "output": "shipped"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "lost"}]},
]


@pytest.fixture
async def front(pods, gateway):
    return await gateway(await pods())


async def test_a_response_has_the_text_and_usage_of_a_chat(front):
    response = await front.openai.responses.create(model="tiny-chat", instructions="You help.", input="hi")
    chat = await front.openai.chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "system", "content": "You help."}, {"role": "user", "content": "hi"}],
    )
    assert response.output_text == chat.choices[0].message.content == "Hello there!"
    assert (response.status, response.object, response.error) == ("completed", "response", None)
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.model_extra["tandem_receipt"]["decode_pod"] == "d-0"
    assert response.model_extra["store"] is False, "OpenAI's default is true, but nothing is stored here"
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")


async def test_a_stream_has_openais_events_in_their_order_and_numbers(front):
    stream = await front.openai.responses.create(model="tiny-chat", input="hi", stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello there!"
    assert events[7].text == "Hello there!"
    last = events[-1].response
    assert last.output_text == "Hello there!" and last.id == events[0].response.id
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {last.output[0].id}


async def test_the_clients_stream_helper_collects_the_response(front):
    async with front.openai.responses.stream(model="tiny-chat", input="hi") as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_text == "Hello there!"


async def test_an_answer_cut_by_its_limit_is_incomplete(pods, gateway):
    front = await gateway(await pods(words=("a",), reason=common_pb2.FINISH_REASON_LENGTH))
    cut = await front.openai.responses.create(model="tiny-chat", input="hi", max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    stream = await front.openai.responses.create(
        model="tiny-chat", input="hi", max_output_tokens=1, stream=True
    )
    assert [event async for event in stream][-1].type == "response.incomplete"


async def test_items_become_the_messages_of_a_chat(front, pods):
    await front.openai.responses.create(model="tiny-chat", input=ITEMS)
    chat = [
        {"role": "developer", "content": "Go."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": str(n)}}
            for n in (1, 2)
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "shipped"},
        {"role": "tool", "tool_call_id": "c2", "content": "lost"},
    ]  # fmt: skip
    await front.openai.chat.completions.create(model="tiny-chat", messages=chat)
    tokens = [
        (await front.http.post("/tokenize", json={"messages": chat})).json()["count"],
        (await front.openai.responses.create(model="tiny-chat", input=ITEMS)).usage.input_tokens,
    ]
    assert tokens[0] == tokens[1]


async def test_logprobs_are_included_on_request(front):
    stream = await front.openai.responses.create(
        model="tiny-chat", input="hi", include=["message.output_text.logprobs"], top_logprobs=2, stream=True
    )
    events = [event async for event in stream]
    part = events[-1].response.output[0].content[0]
    assert part.logprobs is not None


BAD_TOOL = {"type": "function", "name": "f", "parameters": {"type": "objekt"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "message", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "messages": []}, None),
        ({"input": "a", "max_tokens": 3}, "max_tokens"),
        ({"input": "a", "max_outputtokens": 3}, "max_outputtokens"),
        ({"input": "a", "temperature": 9}, "temperature"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "include": ["file_search_call.results"]}, "include"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "a", "text": {"verbosity": "high"}}, "text.verbosity"),
        ({"input": "a", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "word " * 5000}, "input"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"tpye": 1}}}},
            "text.format.schema",
        ),
        ({"input": "a", "tools": [BAD_TOOL]}, "tools[0].parameters.type"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(front, fields, param):
    answer = await front.http.post("/v1/responses", json=fields)
    assert answer.status_code == 400, answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param


async def test_fields_without_an_effect_are_accepted(front):
    response = await front.openai.responses.create(
        model="tiny-chat", input="hi", store=True, metadata={"a": "b"}, user="u", truncation="disabled",
        parallel_tool_calls=True, text={"format": {"type": "text"}}, background=False, include=[], tools=[],
        previous_response_id=None, service_tier="auto", extra_body={"seed": 5, "slo_class": "batch"},
    )  # fmt: skip
    assert response.output_text == "Hello there!"


async def test_a_cut_stream_is_resumed_with_the_same_ids_and_numbers(front):
    body, with_ids = {"input": "hi", "stream": True}, {"x-event-ids": "true"}
    async with front.http.stream("POST", "/v1/responses", json=body, headers=with_ids) as answer:
        frames = [frame async for frame in _frames(answer)]
    number, frame = [(n, frame) for n, frame in enumerate(frames) if "id" in frame][1]
    headers = {"last-event-id": frame["id"]}
    async with front.http.stream("POST", "/v1/responses", headers=headers) as answer:
        rest = [frame async for frame in _frames(answer)]
    assert rest == frames[number + 1 :]
    other = await front.http.post("/v1/chat/completions", headers=headers)
    assert other.status_code == 400, "an answer is resumed where it began"


async def test_a_repeated_request_gets_the_response_of_the_first(front):
    headers = {"idempotency-key": "one"}
    first, second = [
        (await front.http.post("/v1/responses", json={"input": "hi"}, headers=headers)).json() for _ in "ab"
    ]
    assert first["id"] == second["id"] and first["output"] == second["output"]


async def test_a_failure_in_a_stream_is_an_error_event(pods, gateway):
    import grpc

    front = await gateway(await pods(fail_with=grpc.StatusCode.INTERNAL, fail_after=1))
    stream = await front.openai.responses.create(model="tiny-chat", input="hi", stream=True)
    with pytest.raises(openai.APIError, match=r"the decode pod .* failed"):
        async for _ in stream:
            pass


async def _frames(answer):
    """Events as {"event", "data", "id" if there is one}."""
    text = (await answer.aread()).decode()
    for block in text.strip().split("\n\n"):
        frame = dict(line.split(": ", 1) for line in block.splitlines())
        yield {**frame, "data": json.loads(frame["data"])}
