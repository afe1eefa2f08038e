"""Streams as simple clients read them: early headers, plain events, pings, ids on request, usage."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import grpc
import httpx
import openai
import pytest
import requests

USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: Mapping[str, Mapping[str, object]] = {
    CHAT: {"messages": USER, "stream": True},
    COMPLETIONS: {"prompt": "hi", "stream": True},
    RESPONSES: {"input": "hi", "stream": True},
    MESSAGES: {"messages": USER, "stream": True, "max_tokens": 20},
}
#: What str.splitlines, JavaScript and careless parsers of events break at.
HOSTILE = (
    "a\u2028b", "c\u2029d", "e\x85f", "\r\n", "\r", "\n\n", "\x0b\x0c\x1c\x1d\x1e", "data: [DONE]",
    "\ndata: x", "\n\nevent: error\nid: 7\n\n", ": ping", "\ufeff", "\0", "é\U0001f600", " ",
)  # fmt: skip
TEXT = "".join(HOSTILE)


def text_of(event: Mapping) -> str:
    """The text that an event of any dialect adds."""
    if event.get("type") in ("response.output_text.delta", "content_block_delta"):
        delta = event["delta"]
        return delta if isinstance(delta, str) else delta.get("text", "")
    if not event.get("choices"):
        return ""
    choice = event["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def by_stripped_lines(lines: Iterator[str]) -> str:
    """A reader that takes each line for an event, strips `data: ` and parses the rest, like the benchmarks of
    vLLM and sglang. A reader of typed events also skips the lines of types."""
    text = ""
    for line in lines:
        line = line.strip()
        if not line or line.startswith("event: "):
            continue
        data = line.removeprefix("data: ")
        if data != "[DONE]":
            text += text_of(json.loads(data))
    return text


def by_blocks(body: str) -> str:
    """A reader that takes each block for an event, whose data is its last line."""
    datas = [block.rpartition("\n")[2].removeprefix("data: ") for block in body.split("\n\n") if block]
    return "".join(text_of(json.loads(data)) for data in datas if data != "[DONE]")


def by_the_standard(body: bytes) -> str:
    """A reader as the HTML standard describes it."""
    text, data = "", []
    for line in body.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line:
            if data and "\n".join(data) != "[DONE]":
                text += text_of(json.loads("\n".join(data)))
            data = []
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
    return text


def by_requests(url: str, body: Mapping[str, object]) -> str:
    with requests.Session() as session:
        session.trust_env = False
        with session.post(url, json=body, stream=True, timeout=10) as answer:
            return by_stripped_lines(answer.iter_lines(decode_unicode=True))


@pytest.fixture
def _quick_pings(monkeypatch) -> None:
    monkeypatch.setattr("tandem_gateway.edge.http_stream._PING_S", 0.05)


@pytest.mark.usefixtures("_quick_pings")
@pytest.mark.parametrize("pause_s", [0.0, 0.1], ids=["without pings", "with pings"])
@pytest.mark.parametrize("path", BODIES)
async def test_clients_of_all_kinds_get_the_same_text(path, pause_s, pods, gateway):
    front = await gateway(await pods(words=HOSTILE, pause_s=pause_s))
    body = BODIES[path]
    async with front.http.stream("POST", path, json=body) as answer:
        raw = b"".join([part async for part in answer.aiter_raw()])
    async with front.http.stream("POST", path, json=body) as answer:
        lines = [line async for line in answer.aiter_lines()]
    assert by_stripped_lines(iter(lines)) == TEXT, "httpx"
    assert by_stripped_lines(iter(raw.decode().splitlines())) == TEXT
    assert by_blocks(raw.decode()) == TEXT
    assert by_the_standard(raw) == TEXT
    assert await asyncio.to_thread(by_requests, front.url + path, body) == TEXT


async def test_openais_client_gets_the_same_text(pods, gateway):
    front = await gateway(await pods(words=HOSTILE))
    chunks = await front.openai.chat.completions.create(model="", messages=USER, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == TEXT
    parts = await front.openai.completions.create(model="", prompt="hi", stream=True)
    assert "".join([part.choices[0].text async for part in parts]) == TEXT
    events = await front.openai.responses.create(model="", input="hi", stream=True)
    assert "".join([e.delta async for e in events if e.type == "response.output_text.delta"]) == TEXT


@pytest.mark.parametrize("path", BODIES)
async def test_events_have_ids_only_for_clients_that_ask(path, pods, gateway):
    front = await gateway(await pods())
    plain = (await front.http.post(path, json=BODIES[path])).text
    starts = ("data: ", "event: ") if path in (RESPONSES, MESSAGES) else ("data: ",)
    assert all(line.startswith(starts) for line in plain.split("\n") if line)
    for headers in ({"x-event-ids": "true"}, {"idempotency-key": "k"}):
        answer = await front.http.post(path, json=BODIES[path], headers=headers)
        ids = [line.removeprefix("id: ") for line in answer.text.split("\n") if line.startswith("id: ")]
        assert len(ids) > 1
        rest = await front.http.post(path, headers={"last-event-id": ids[0]})
        assert rest.status_code == 200 and "id: " + ids[-1] in rest.text, "who resumes may do so again"
    off = await front.http.post(path, json=BODIES[path], headers={"x-event-ids": "False"})
    assert "\nid: " not in "\n" + off.text
    wrong = await front.http.post(path, json=BODIES[path], headers={"x-event-ids": "yes"})
    assert wrong.status_code == 400 and "send true or false" in wrong.text


async def test_an_answer_without_ids_is_not_kept(pods, gateway):
    front = await gateway(await pods())
    for headers, is_kept in (({}, False), ({"x-event-ids": "true"}, True)):
        await front.http.post(CHAT, json=BODIES[CHAT], headers=headers)
        assert bool(await front.metric("tandem_kept_answer_bytes")) is is_kept


@pytest.fixture
async def opened() -> AsyncIterator[Callable]:
    """`await opened(front, path)` returns a response when its headers are there, and the seconds it took."""
    streams: list = []

    async def start(front, path: str = CHAT, **headers: str) -> tuple[httpx.Response, float]:
        client = httpx.AsyncClient(base_url=front.url, timeout=10.0, trust_env=False)
        began = time.monotonic()
        stream = client.stream("POST", path, json=BODIES[path], headers=headers)
        response = await stream.__aenter__()
        streams.append((client, stream))
        return response, time.monotonic() - began

    yield start
    for client, stream in streams:
        await stream.__aexit__(None, None, None)
        await client.aclose()


@pytest.mark.parametrize("path", BODIES)
async def test_headers_come_before_a_late_first_token(path, pods, gateway, opened):
    front = await gateway(await pods(pause_s=3.0, words=("late",)))
    response, seconds = await opened(front, path)
    assert response.status_code == 200 and seconds < 1.5
    assert "late" in (await response.aread()).decode()


async def test_a_request_in_the_queue_has_its_headers(pods, gateway, opened):
    pod = await pods(pause_s=30.0)
    front = await gateway(pod, max_in_flight=1)
    await opened(front)
    await pod.started.wait()
    response, seconds = await opened(front)
    assert response.status_code == 200 and seconds < 1.5
    assert await front.metric("tandem_queue_length") == 1
    assert len(pod.requests) == 1


async def test_an_immediate_refusal_has_a_status(pods, gateway, opened):
    pod = await pods(fail_with=grpc.StatusCode.RESOURCE_EXHAUSTED)
    front = await gateway(pod)
    assert (await opened(front))[0].status_code == 429, "by the pod"
    pod.fail_with = grpc.StatusCode.INVALID_ARGUMENT
    assert (await opened(front))[0].status_code == 400, "by the pod"
    full = await gateway(await pods(pause_s=30.0), max_in_flight=1, max_queue=0)
    await opened(full)
    assert (await opened(full))[0].status_code == 429, "by admission"


async def test_a_late_failure_is_an_event(pods, gateway, opened):
    front = await gateway(await pods(pause_s=0.5, fail_with=grpc.StatusCode.INVALID_ARGUMENT, fail_after=1))
    response, _ = await opened(front)
    text = (await response.aread()).decode()
    assert response.status_code == 200
    assert "Hello" in text and "says no" in text and "[DONE]" not in text


@pytest.mark.usefixtures("_quick_pings")
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("headers", [{}, {"x-event-ids": "true"}])
async def test_silence_is_filled_with_pings(path, headers, pods, gateway):
    front = await gateway(await pods(pause_s=0.3))
    answer = await front.http.post(path, json=BODIES[path], headers=headers)
    if path == MESSAGES:
        assert 'event: ping\ndata: {"type":"ping"}\n\n' in answer.text
    else:
        assert (": ping\n" if headers else "\n\n\n\n") in answer.text
        assert (": ping" in answer.text) is bool(headers)
    assert by_the_standard(answer.content) == "Hello there!"


@pytest.mark.usefixtures("_quick_pings")
@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}])
async def test_openais_client_ignores_pings(headers, pods, gateway):
    front = await gateway(await pods(pause_s=0.4))
    stream = await front.openai.chat.completions.create(
        model="", messages=USER, stream=True, extra_headers=headers
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello there!"


async def test_a_gateway_that_stops_names_last_event_id_only_for_streams_with_ids(pods, gateway):
    for headers, is_named in (({}, False), ({"x-event-ids": "true"}, True)):
        front = await gateway(await pods(pause_s=0.5, words=("a",) * 100))
        stream = await front.openai.chat.completions.create(
            model="", messages=USER, stream=True, extra_headers=headers
        )
        await anext(stream)
        stopping = asyncio.create_task(front.process.stop())
        with pytest.raises(openai.APIError, match="stopping") as ended:
            async for _ in stream:
                pass
        assert ("Last-Event-ID" in str(ended.value)) is is_named
        await front.openai.close()
        await front.http.aclose()
        await stopping


async def test_usage_is_in_each_chunk_on_request(pods, gateway):
    front = await gateway(await pods())
    for path in (CHAT, COMPLETIONS):
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**BODIES[path], "n": 2, "stream_options": options}
        text = (await front.http.post(path, json=body)).text
        *chunks, last = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
        num_prompt = last["usage"]["prompt_tokens"]
        for index in range(2):
            usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3, 3]
            assert all(usage["prompt_tokens"] == num_prompt for usage in usages)
            assert all(u["total_tokens"] == num_prompt + u["completion_tokens"] for u in usages)
        body["stream_options"] = {"continuous_usage_stats": True}
        assert '"usage"' not in (await front.http.post(path, json=body)).text, "as in vLLM"
