"""Anthropic's Messages API: one message, typed events, refusals."""

import json

import pytest

ASKED = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def front(pods, gateway):
    return await gateway(await pods())


async def test_a_message_has_the_text_and_usage_of_a_chat(front):
    body = {**ASKED, "model": "tiny-chat", "system": [{"type": "text", "text": "You help."}]}
    message = (await front.http.post("/v1/messages", json=body)).json()
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "hi"}]
    chat = (await front.http.post("/v1/chat/completions", json={"messages": messages})).json()
    assert message["content"] == [{"type": "text", "text": "Hello there!"}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny-chat")
    assert message["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert message["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]


async def test_a_stream_has_anthropics_events_in_their_order(front):
    answer = await front.http.post("/v1/messages", json={**ASKED, "stream": True})
    blocks = [block.splitlines() for block in answer.text.strip().split("\n\n")]
    events = [json.loads(lines[-1].removeprefix("data: ")) for lines in blocks]
    names = [next(line for line in lines if line.startswith("event: "))[7:] for lines in blocks]
    assert (
        names
        == [event["type"] for event in events]
        == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 3,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    )
    assert "".join(event["delta"]["text"] for event in events[2:5]) == "Hello there!"
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_tools_in_the_history_become_those_of_a_chat(front):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "b"}, {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]},
            {"type": "text", "text": "d"},
        ]},
    ]  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "user", "content": "d"},
    ]
    answer = (await front.http.post("/v1/messages", json={**ASKED, "messages": messages})).json()
    counted = (await front.http.post("/tokenize", json={"messages": chat})).json()
    assert answer["usage"]["input_tokens"] == counted["count"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"stop": ["a"]}, "stop"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"temprature": 1.0}, "temprature"),
        ({"stop_sequences": ["a" * 9000]}, "stop_sequences"),
        ({"tools": [{"name": "f", "input_schema": {"type": "objekt"}}]}, "tools[0].input_schema.type"),
    ],
)
async def test_unsupported_fields_are_refused_by_name_in_anthropics_format(front, fields, param):
    answer = await front.http.post("/v1/messages", json={**ASKED, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["param"] == param


async def test_anthropics_key_header_is_accepted(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file)
    for key, status in (("acme-key", 200), ("wrong", 401)):
        answer = await front.http.post("/v1/messages", json=ASKED, headers={"x-api-key": key})
        assert answer.status_code == status
