"""Answers that a stop string or the token limit cuts within a tool call."""

from __future__ import annotations

import json

import pytest
from tandem_gateway.tools.answer_parser import AnswerDelta, AnswerParser
from tandem_proto.v1 import answers_pb2, common_pb2, decode_pb2
from tool_models import make_tool_folder

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
#: How an answer ends: at the model's end token, at a stop of the caller, at the token limit.
ENDS = {
    "end token": decode_pb2.DecodeFinished(reason=STOP),
    "stop": decode_pb2.DecodeFinished(reason=STOP, stop_reason="x"),
    "stop token": decode_pb2.DecodeFinished(reason=STOP, stop_token_id=0),
    "limit": decode_pb2.DecodeFinished(reason=LENGTH),
}
CUTS = ("stop", "stop token", "limit")
#: A text with a call by format; the second ones begin with content.
CALLS = {
    "hermes": '<tool_call>\n{"name": "find", "arguments": {"id": "5"}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "find", "parameters": {"id": "5"}}',
    "mistral": '[TOOL_CALLS] [{"name": "find", "arguments": {"id": "5"}}]',
    "mistral-args": '[TOOL_CALLS]find[ARGS]{"id": "5"}',
}


def parsed(tool_format: str, text: str, end: str, **form: object) -> tuple[AnswerParser, AnswerDelta]:
    parser = AnswerParser(
        answers_pb2.AnswerForm(tool_format=tool_format, tool_names=["find"], **form),
        seed="s",
        has_stops=end != "end token",
    )
    return parser, parser.push(text) + parser.finish(ENDS[end])


@pytest.mark.parametrize("end", CUTS)
@pytest.mark.parametrize("before", ["", "I look. "])
@pytest.mark.parametrize("tool_format", CALLS)
def test_markup_is_not_content_wherever_an_answer_is_cut(tool_format: str, before: str, end: str) -> None:
    call = CALLS[tool_format]
    num_begun = call.index('{"id"') + 1
    num_complete = call.index("}") + (1 if tool_format == "mistral-args" else 2)
    for length in range(2, len(call) + 1):
        parser, answer = parsed(tool_format, before + call[:length], end)
        assert answer.content.strip() == before.strip(), call[:length]
        num_shown = num_begun if end == "limit" else num_complete
        assert bool(answer.calls) == (length >= num_shown), call[:length]
        assert parser.ends_with_calls == (length >= num_complete and end != "limit"), call[:length]


@pytest.mark.parametrize("end", CUTS)
def test_a_required_call_without_a_marker_is_not_content(end: str) -> None:
    call = '{"name": "find", "parameters": {"id": "5"}}'
    for length in range(1, len(call)):
        assert not parsed("llama3", call[:length], end, guided=True, required=True)[1].content


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("text", ["a <", '```json\n{"a": 1', '{"a": "b', "1 <tools", "see [", "{"])
def test_text_that_may_not_be_a_call_stays_content(text: str, end: str) -> None:
    assert parsed("hermes", text, end)[1].content == text


def test_a_call_that_the_model_leaves_unfinished_is_shown() -> None:
    assert parsed("hermes", '<tool_call>{"name": "fi', "end token")[1].content
    assert parsed("hermes", '<tool_call>{"name": "find", "arguments": {', "end token")[0].ends_with_calls


def test_a_call_before_the_one_that_is_cut_stays() -> None:
    parser, answer = parsed("hermes", f"{CALLS['hermes']}\n{CALLS['hermes'][:50]}", "stop")
    assert ([call.index for call in answer.calls], parser.ends_with_calls) == ([0], False)


WORDS = ("I look. ", '<tool_call>\n{"name": "find", "argu', 'ments": {"city": "')
ASKED = {"role": "user", "content": "Where?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT = {
    "messages": [ASKED],
    "stop": ["Paris"],
    "tools": [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}],
}
MESSAGE = {
    "messages": [ASKED],
    "max_tokens": 99,
    "stop_sequences": ["Paris"],
    "tools": [{"name": "find", "input_schema": PARAMETERS}],
}


@pytest.fixture
def front(pods, gateway, tmp_path):
    async def start(**pod: object):
        served = await pods(**{"words": WORDS, **pod})
        front = await gateway(served, model=make_tool_folder(tmp_path, "qwen2.5"))
        front.pod = served
        return front

    return start


async def test_a_chat_stops_within_a_call(front):
    started = await front(stop_reason="Paris")
    (choice,) = (await started.http.post("/v1/chat/completions", json=CHAT)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Paris")
    assert choice["message"]["content"].strip() == "I look." and "tool_calls" not in choice["message"]
    stream = await started.openai.chat.completions.create(model="tiny-chat", stream=True, **CHAT)
    choices = [chunk.choices[0] async for chunk in stream if chunk.choices]
    assert choices[-1].finish_reason == "stop"
    assert "".join(choice.delta.content or "" for choice in choices).strip() == "I look."
    assert not any(choice.delta.tool_calls for choice in choices)


async def test_a_message_stops_within_a_call(front):
    started = await front(stop_reason="Paris")
    whole = (await started.http.post("/v1/messages", json=MESSAGE)).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "Paris")
    assert [block["type"] for block in whole["content"]] == ["text"]
    answer = await started.http.post("/v1/messages", json={**MESSAGE, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    (ending,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    assert ending == {"stop_reason": "stop_sequence", "stop_sequence": "Paris"}
    assert [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"] == ["text"]
    texts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts).strip() == "I look."


async def test_a_response_stops_within_a_call(front):
    started = await front(stop_reason="Paris")
    tools = [{"type": "function", "name": "find", "parameters": PARAMETERS, "strict": False}]
    asked = {"model": "tiny-chat", "input": "Where?", "tools": tools, "extra_body": {"stop": ["Paris"]}}
    whole = await started.openai.responses.create(**asked)
    *_, last = [event async for event in await started.openai.responses.create(**asked, stream=True)]
    for response in (whole, last.response):
        assert [(item.type, item.status) for item in response.output] == [("message", "completed")]


async def test_a_call_cut_by_the_limit_shows_no_markup(front):
    started = await front(words=('<tool_call>\n{"name": "fi',), reason=LENGTH)
    (choice,) = (await started.http.post("/v1/chat/completions", json=CHAT)).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    whole = (await started.http.post("/v1/messages", json=MESSAGE)).json()
    assert (whole["stop_reason"], whole["content"]) == ("max_tokens", [])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
async def test_stops_do_not_cut_a_required_call(front, choice):
    started = await front()
    await started.http.post("/v1/chat/completions", json={**CHAT, "tool_choice": choice})
    assert not started.pod.requests[-1].sampling.stop
    await started.http.post("/v1/chat/completions", json=CHAT)
    assert list(started.pod.requests[-1].sampling.stop) == ["Paris"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_before_a_stop_is_shown(front, stream):
    words = ('<tool_call>\n{"name": "find", "argum', 'ents": {"city": "Pa', 'ris"}}')
    started = await front(words=words, stop_reason="</tool_call>")
    body = {**CHAT, "stop": ["</tool_call>"], "stream": stream}
    text = (await started.http.post("/v1/chat/completions", json=body)).text
    assert '"finish_reason":"tool_calls"' in text
    assert r'"arguments":"{\"city\": \"Paris\"}"' in text, "in one piece"
