"""Cut streams are resumed, and repeated requests joined, in one gateway and in another through Redis."""

import asyncio
import hashlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import httpx
import pytest
import redis.asyncio as redis
from fake_pods import REVISION, FakePod
from google.protobuf.descriptor import Descriptor
from redis_servers import RedisServer, answers
from structlog.testing import capture_logs
from tandem_gateway.answers.answer_store import FORMAT, PAGE_EVENTS, StoreError
from tandem_proto.v1 import answers_pb2, gateway_pb2
from waiting import until, until_async

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = tuple(f" word{index}" for index in range(8))
CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
COMPLETION_BODY = {"prompt": "hi", "stream": True, "logprobs": 2}
WITH_USAGE = {**CHAT_BODY, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}


@pytest.fixture
async def redis_url(tmp_path: Path) -> AsyncIterator[str]:
    server = RedisServer(tmp_path / "redis", is_persistent=False)
    await server.start()
    async with redis.Redis.from_url(server.url) as client:
        await answers(client)
    yield server.url
    await server.stop()


@pytest.fixture
async def gateway(gateway: Callable) -> Callable:
    """Gateways whose clients ask for ids."""

    async def start(*pods: FakePod, **settings: object):
        front = await gateway(*pods, **settings)
        front.http.headers["x-event-ids"] = "true"
        return front

    return start


async def key_of(client: redis.Redis, event_id: str) -> str:
    """Redis' key of the answer's hash."""
    (key,) = await client.keys(f"tandem:answer:*:{{{event_id[:16]}}}")
    return key.decode()


async def never_renewed() -> None:
    """Replaces AnswerStore.renew_lease, as if the gateway were paused for longer than its lease."""
    raise StoreError("paused")


def events_of(text: str) -> list[tuple[str, dict | str]]:
    """(id, JSON) of each complete event; [DONE] as it is."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("id", ""), data if data == "[DONE]" else json.loads(data)))
    return found


async def first_events(front, path: str, body: dict, count: int, **headers: str) -> list[tuple[str, dict]]:
    """Reads this many events, then closes the connection."""
    text = ""
    async with front.http.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for part in response.aiter_text():
            text += part
            if text.count("\n\n") >= count:
                break
    return events_of(text)[:count]


async def rest(front, path: str, last_id: str, **headers: str) -> list[tuple[str, dict | str]]:
    response = await front.http.post(path, headers={"last-event-id": last_id, **headers})
    assert response.status_code == 200, response.text
    return events_of(response.text)


def without_times(events: list[tuple[str, dict | str]]) -> list[str]:
    """The JSON without fields that differ between two computations."""
    shown = []
    for _, event in events:
        if isinstance(event, dict) and event.get("usage"):
            event = {**event, "usage": {**event["usage"], "tandem_receipt": None}}
        shown.append(json.dumps(event, sort_keys=True))
    return shown


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, CHAT_BODY), (CHAT, WITH_USAGE), (COMPLETIONS, COMPLETION_BODY)]
)
async def test_a_stream_cut_after_any_event_is_resumed(pods, gateway, path, body):
    pod = await pods(words=WORDS)
    front = await gateway(pod)
    for count in range(1, len(WORDS) + 2):
        head = await first_events(front, path, body, count)
        tail = await rest(front, path, head[-1][0])
        again = await rest(front, path, head[0][0])  # the answer a second time, from its start
        assert without_times(head + tail) == without_times(head[:1] + again)
        assert {event["id"] for _, event in head + tail if isinstance(event, dict)} == {head[0][1]["id"]}
        assert tail[-1] == ("", "[DONE]")
        assert await _text(path, head + tail) == "".join(WORDS)


async def _text(path: str, events: list[tuple[str, dict | str]]) -> str:
    choices = [event["choices"][0] for _, event in events if isinstance(event, dict) and event["choices"]]
    return "".join(
        choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices
    )


async def test_a_stream_without_reader_stops_its_pod_and_resumes_after_its_last_token(pods, gateway):
    pod = await pods(words=WORDS, pause_s=0.1)
    front = await gateway(pod)
    head = await first_events(front, CHAT, CHAT_BODY, 3)
    await asyncio.wait_for(pod.cancelled.wait(), 5)
    tail = await rest(front, CHAT, head[-1][0])
    assert await _text(CHAT, head + tail) == "".join(WORDS)
    first, second = pod.requests
    assert list(second.output_token_ids)[:3] == [10, 11, 12]
    assert second.sampling == first.sampling  # the seed is the same
    assert second.decode_retries  # so its text is not shared twice


@pytest.fixture
def two_gateways(gateway: Callable, redis_url: str) -> Callable:
    """`await two_gateways(decode_pod, setting=value)` starts two on one Redis; settings are of the first."""

    async def start(pod: FakePod, **settings: object) -> tuple:
        fronts = await gateway(pod, redis_url=redis_url, **settings), await gateway(pod, redis_url=redis_url)
        async with redis.Redis.from_url(redis_url) as client:

            async def are_alive() -> bool:
                return len(await client.keys("tandem:gateway:*")) == len(fronts)

            await until_async(are_alive)
        return fronts

    return start


async def test_another_gateway_resumes_a_cut_stream(pods, two_gateways):
    pod = await pods(words=WORDS, pause_s=0.05)
    one, other = await two_gateways(pod)
    for count in (1, 4, 8):
        head = await first_events(one, CHAT, WITH_USAGE, count)
        middle = await first_events_resumed(other, head[-1][0], 1)
        tail = await rest(one, CHAT, middle[-1][0])
        assert await _text(CHAT, head + middle + tail) == "".join(WORDS)
        assert tail[-2][1]["usage"]["completion_tokens"] == len(WORDS)


async def test_clients_that_resume_at_once_share_one_computation(pods, two_gateways):
    pod = await pods(words=WORDS, pause_s=0.05)
    one, other = await two_gateways(pod)
    head = await first_events(one, CHAT, CHAT_BODY, 3)
    tails = await asyncio.gather(*(rest(other, CHAT, head[-1][0]) for _ in range(4)))
    assert {await _text(CHAT, head + tail) for tail in tails} == {"".join(WORDS)}
    assert len(pod.requests) == 2, "what was begun, and the rest of it"


async def first_events_resumed(front, last_id: str, count: int) -> list[tuple[str, dict]]:
    return await first_events(front, CHAT, {}, count, **{"last-event-id": last_id})


async def test_a_gateway_that_stops_ends_streams_with_an_error_and_another_resumes_them(pods, two_gateways):
    pod = await pods(words=WORDS, pause_s=0.2)
    one, other = await two_gateways(pod, drain_s=0.6)
    reading = asyncio.create_task(one.http.post(CHAT, json=CHAT_BODY))
    call = one.grpc.Chat(
        gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage(role="user", content="x")])
    )
    chunks = [await call.read()]
    await one.process.stop()
    text = (await reading).text
    *head, last = events_of(text)
    assert "Last-Event-ID" in last[1]["error"]["message"]
    assert last[0] == ""
    tail = await rest(other, CHAT, head[-1][0])
    assert await _text(CHAT, head + tail) == "".join(WORDS)

    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        while (message := await call.read()) is not grpc.aio.EOF:
            chunks.append(message)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    resumed = other.grpc.Chat(gateway_pb2.ChatRequest(last_event_id=chunks[-1].chunk.event_id))
    chunks += [message async for message in resumed]
    assert "".join(message.chunk.text for message in chunks) == "".join(WORDS)
    assert chunks[-1].end.receipt.output_tokens == len(WORDS)


async def test_a_gateway_without_lease_does_not_append_to_a_claimed_answer(
    pods, two_gateways, redis_url, monkeypatch
):
    pod = await pods(words=WORDS, pause_s=0.2)
    one, other = await two_gateways(pod)
    text = ""
    async with (
        redis.Redis.from_url(redis_url) as client,
        one.http.stream("POST", CHAT, json=CHAT_BODY) as response,
    ):
        parts = response.aiter_text()
        text += await anext(parts)
        owner = await client.hget(await key_of(client, events_of(text)[0][0]), "owner")
        monkeypatch.setattr(one.process.store, "renew_lease", never_renewed)
        await client.delete(b"tandem:gateway:" + owner.partition(b":")[0])
        tail = await rest(other, CHAT, events_of(text)[0][0])
        assert await _text(CHAT, events_of(text)[:1] + tail) == "".join(WORDS)
        async for part in parts:
            text += part
    assert "another gateway" in events_of(text)[-1][1]["error"]["message"]


async def test_unwritten_tokens_of_a_dead_gateway_are_computed_again(
    pods, two_gateways, redis_url, monkeypatch
):
    monkeypatch.setattr(
        "tandem_gateway.answers.answer_writer.WRITE_S", 60.0
    )  # the store gets the first event alone
    pod = await pods(words=WORDS, pause_s=0.2)
    one, other = await two_gateways(pod)
    for path, body in ((CHAT, WITH_USAGE), (COMPLETIONS, COMPLETION_BODY)):
        pod.requests.clear()
        head = await first_events(one, path, body, 5, **{"idempotency-key": path})  # is not released
        store = one.process.store
        monkeypatch.setattr(store, "renew_lease", never_renewed)
        async with redis.Redis.from_url(redis_url) as client:
            await client.delete(f"tandem:gateway:{store.id}")
        tail = await rest(other, path, head[-1][0])
        assert await _text(path, head + tail) == "".join(WORDS)
        again = await rest(other, path, head[0][0])
        assert without_times(head + tail) == without_times(head[:1] + again)
        _, second = pod.requests
        assert list(second.output_token_ids) == [10]
        assert second.one_token_chunks


@pytest.mark.parametrize("with_redis", [False, True])
async def test_requests_with_one_key_get_one_answer(pods, gateway, two_gateways, with_redis):
    pod = await pods(words=WORDS, pause_s=0.1)
    fronts = await two_gateways(pod) if with_redis else (await gateway(pod),)
    body = {**CHAT_BODY, "stream": False, "temperature": 1.0}
    headers = {"idempotency-key": "order-17"}
    running = [asyncio.create_task(front.http.post(CHAT, json=body, headers=headers)) for front in fronts * 2]
    responses = [await task for task in running]
    responses.append(await fronts[-1].http.post(CHAT, json=body, headers=headers))  # after the end
    shown = {json.dumps(response.json(), sort_keys=True) for response in responses}
    assert len(shown) == 1
    assert len(pod.requests) == 1

    other = await fronts[-1].http.post(CHAT, json={**body, "temperature": 0.5}, headers=headers)
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    bad = await fronts[0].http.post(CHAT, json=body, headers={"idempotency-key": "x" * 256})
    assert bad.status_code == 400


async def test_a_key_holds_at_each_gateway_while_redis_hangs(pods, gateway, tmp_path):
    """Two gateways compute equal answers, because the seed is equal. Both count it."""
    server = RedisServer(tmp_path / "redis", is_persistent=False)
    await server.start()
    async with redis.Redis.from_url(server.url) as client:
        await answers(client)
    pod = await pods(words=WORDS, pause_s=0.1)
    fronts = [await gateway(pod, redis_url=server.url) for _ in range(2)]
    headers = {"idempotency-key": "order-17"}

    async def ask(front) -> str:
        response = await front.http.post(CHAT, json={**CHAT_BODY, "stream": False}, headers=headers)
        return response.json()["choices"][0]["message"]["content"]

    os.kill(server.pid, signal.SIGSTOP)
    try:
        texts = await asyncio.gather(*(ask(front) for front in fronts * 2))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert set(texts) == {"".join(WORDS)}
    assert len(pod.requests) == 2
    counts = [await front.metric('tandem_answers_not_kept_total{cause="redis"}') for front in fronts]
    assert counts == [1, 1]
    assert await ask(fronts[0]) == "".join(WORDS)
    assert len(pod.requests) == 2
    await server.stop()


async def test_a_request_with_a_key_is_computed_after_its_client_leaves(pods, gateway):
    pod = await pods(words=WORDS, pause_s=0.1)
    front = await gateway(pod)
    await first_events(front, CHAT, CHAT_BODY, 1, **{"idempotency-key": "k"})
    response = await front.http.post(CHAT, json=CHAT_BODY, headers={"idempotency-key": "k"})
    assert await _text(CHAT, events_of(response.text)) == "".join(WORDS)
    assert len(pod.requests) == 1
    assert not pod.cancelled.is_set()


async def test_grpc_requests_with_one_key_get_one_answer(pods, gateway):
    pod = await pods(words=WORDS, pause_s=0.05)
    front = await gateway(pod)
    message = gateway_pb2.ChatMessage(role="user", content="x")

    async def ask(**fields: object) -> str:
        call = front.grpc.Chat(gateway_pb2.ChatRequest(messages=[message], idempotency_key="k", **fields))
        return "".join([response.chunk.text async for response in call])

    assert set(await asyncio.gather(ask(), ask(request_id="second"))) == {"".join(WORDS)}
    assert len(pod.requests) == 1
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await ask(slo_class="batch")
    assert refusal.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_failed_request_does_not_keep_its_key(pods, gateway):
    pod = await pods(words=WORDS, fail_with=grpc.StatusCode.INTERNAL)
    front = await gateway(pod)
    headers = {"idempotency-key": "k"}
    assert (await front.http.post(CHAT, json=CHAT_BODY, headers=headers)).status_code == 500
    pod.fail_with = None
    response = await front.http.post(CHAT, json=CHAT_BODY, headers=headers)
    assert await _text(CHAT, events_of(response.text)) == "".join(WORDS)


async def test_unknown_event_ids_are_refused(pods, gateway, keys_file):
    front = await gateway(await pods(words=WORDS), api_keys_file=keys_file)
    acme, slow = {"authorization": "Bearer acme-key"}, {"authorization": "Bearer slow-key"}
    ((event_id, _),) = await first_events(front, CHAT, CHAT_BODY, 1, **acme)
    answer_id, _, _ = event_id.partition("-")

    async def status(last_id: str, path: str = CHAT, headers: dict[str, str] = acme) -> int:
        response = await front.http.post(path, headers={**headers, "last-event-id": last_id})
        return response.status_code

    assert await status(event_id) == 200
    assert await status(event_id, headers=slow) == 404  # another tenant's
    assert await status(event_id, headers={}) == 401
    assert await status(event_id, COMPLETIONS) == 400
    assert await status(f"{answer_id}-9") == 200  # the end
    assert await status(f"{answer_id}-10") == 404  # after the end
    assert await status(f"{answer_id[:16]}{'0' * 8}-1") == 404  # another answer of that name
    assert await status(f"{'0' * 24}-1") == 404
    for text in ("", "x", f"{answer_id}", f"{answer_id}--1", f"{answer_id}-{'9' * 5000}", event_id.upper()):
        assert await status(text) == 400


async def test_answers_expire_and_can_be_switched_off(pods, gateway):
    pod = await pods(words=WORDS)
    front = await gateway(pod, resume_ttl_s=0.3)
    ((event_id, _),) = await first_events(front, CHAT, CHAT_BODY, 1)

    async def is_gone() -> bool:
        return await front.metric("tandem_kept_answer_bytes") == 0

    await until_async(is_gone)
    response = await front.http.post(CHAT, headers={"last-event-id": event_id})
    assert response.status_code == 404

    front = await gateway(pod, resume_ttl_s=0)
    assert {event_id for event_id, _ in await first_events(front, CHAT, CHAT_BODY, 3)} == {""}


async def test_answers_in_memory_are_bounded(pods, gateway):
    pod = await pods(words=("x" * 100_000,) * 4)
    front = await gateway(pod, resume_max_bytes=1 << 20)
    ids = []
    for _ in range(5):
        response = await front.http.post(CHAT, json=CHAT_BODY)
        ids.append(events_of(response.text)[0][0])
    assert await front.metric("tandem_kept_answer_bytes") <= 1 << 20
    statuses = [
        (await front.http.post(CHAT, headers={"last-event-id": event_id})).status_code for event_id in ids
    ]
    assert statuses[0] == 404
    assert statuses[-1] == 200
    gone = await front.http.post(CHAT, headers={"last-event-id": ids[0]})
    assert gone.json()["error"]["code"] == "answer_not_found"

    # Answers that are computed are not dropped. When they fill the memory, the next one has no ids.
    slow = await pods(words=("x" * 100_000,) * 12, pause_s=0.3)
    front = await gateway(slow, resume_max_bytes=1 << 20)
    running = asyncio.create_task(front.http.post(CHAT, json=CHAT_BODY))

    async def is_full() -> bool:
        return await front.metric("tandem_kept_answer_bytes") > 1 << 20

    await until_async(is_full)
    assert {event_id for event_id, _ in await first_events(front, CHAT, CHAT_BODY, 2)} == {""}
    assert await front.metric('tandem_answers_not_kept_total{cause="memory"}') == 1
    assert len(events_of((await running).text)) == 14


async def test_a_key_that_cannot_be_kept_is_refused_and_others_keep_theirs(pods, gateway, keys_file):
    pod = await pods(words=("x" * 100_000,) * 3)
    front = await gateway(pod, api_keys_file=keys_file, resume_max_bytes=1 << 20)

    async def ask(key: str, tenant: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {tenant}-key", "idempotency-key": key}
        headers |= {"x-slo-class": "batch"} if tenant == "slow" else {}
        return await front.http.post(CHAT, json={**CHAT_BODY, "stream": False}, headers=headers)

    first = await ask("k", "slow")
    answers = [await ask(f"k{number}", "acme") for number in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert answers[-1].headers["x-refusal-reason"] == "kept answers"
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 120
    assert "Idempotency-Key" in answers[-1].json()["error"]["message"]
    assert (await ask("k0", "acme")).text == answers[0].text
    assert (await ask("k", "slow")).text == first.text
    assert len(pod.requests) == 3, "no answer was computed twice"


async def test_a_stream_continues_when_redis_stops(pods, gateway, tmp_path):
    server = RedisServer(tmp_path / "redis", is_persistent=False)
    await server.start()
    async with redis.Redis.from_url(server.url) as client:
        await answers(client)
    pod = await pods(words=WORDS, pause_s=0.2)
    front = await gateway(pod, redis_url=server.url)

    async def is_connected() -> bool:
        return front.process.store.is_connected

    await until_async(is_connected)
    text = ""
    async with front.http.stream("POST", CHAT, json=CHAT_BODY) as response:
        async for part in response.aiter_text():
            if not text:
                await server.stop()
            text += part
    assert await _text(CHAT, events_of(text)) == "".join(WORDS)
    tail = await rest(front, CHAT, events_of(text)[2][0])  # from memory
    assert await _text(CHAT, events_of(text)[:3] + tail) == "".join(WORDS)


async def until_released(client: redis.Redis, key: str) -> None:
    """Waits until no gateway computes the answer."""

    async def is_released() -> bool:
        return await client.hget(key, "owner") == b""

    await until_async(is_released)


async def test_resuming_an_answer_that_redis_lost_fails_with_not_found(pods, two_gateways, redis_url):
    pod = await pods(words=WORDS, pause_s=0.05)
    front, _ = await two_gateways(pod)
    ((event_id, _),) = await first_events(front, CHAT, CHAT_BODY, 1)
    async with redis.Redis.from_url(redis_url) as client:
        key = await key_of(client, event_id)
        await until_released(client, key)
        async with front.http.stream("POST", CHAT, headers={"last-event-id": event_id}) as response:
            await anext(response.aiter_text())
        await until_released(client, key)
        await client.flushall()
    statuses = []
    while 404 not in statuses:
        response = await front.http.post(CHAT, headers={"last-event-id": event_id})
        statuses.append(response.status_code)
        # First those that this gateway has.
        event_id = [event_id, *(known for known, _ in events_of(response.text) if known)][-1]
        assert len(statuses) <= 4


@pytest.mark.parametrize("what", ["record", "event", "kind of record", "kind of events", "slo class"])
async def test_foreign_values_in_redis_affect_only_their_answer(pods, two_gateways, redis_url, what):
    pod = await pods(words=WORDS)
    one, other = await two_gateways(pod)
    ((event_id, _),) = await first_events(one, CHAT, CHAT_BODY, 1)
    async with redis.Redis.from_url(redis_url) as client:
        key = await key_of(client, event_id)
        await until_released(client, key)
        match what:
            case "record":
                await client.hset(key, "record", b"\xff\xff")
            case "event":
                await client.lset(key + ":events", 0, b"\xff")
            case "slo class":
                record = answers_pb2.AnswerRecord.FromString(await client.hget(key, "record"))
                record.slo_class = "unknown"
                await client.hset(key, "record", record.SerializeToString())
            case "kind of record":
                await client.delete(key)
                await client.set(key, b"x")
            case "kind of events":
                await client.delete(key + ":events")
                await client.set(key + ":events", b"x")
        response = await other.http.post(CHAT, headers={"last-event-id": event_id})
        assert response.status_code == (200 if what == "slo class" else 404)
        head = await first_events(one, CHAT, CHAT_BODY, 1)  # other answers go on through Redis
        assert await _text(CHAT, head + await rest(other, CHAT, head[-1][0])) == "".join(WORDS)


OTHER_MODELS = [
    {"revision": "ef" * 32},
    {"tokenizer_hash": "ef" * 32},
    {"name": "other-chat", "revision": "01" * 32},
]


@pytest.mark.parametrize("fields", OTHER_MODELS, ids=["revision", "tokenizer", "model"])
async def test_models_in_one_redis_do_not_share_answers(
    pods, gateway, model_folder, redis_url, tmp_path, fields
):
    """An answer is neither resumed nor joined by a gateway of another model, also if the name is the same."""
    copy = Path(shutil.copytree(model_folder, tmp_path / "other"))
    manifest = json.loads((copy / "tandem.json").read_text())
    (copy / "tandem.json").write_text(json.dumps({**manifest, **fields}))
    revision = fields.get("revision", REVISION)
    one = await gateway(await pods(words=WORDS), redis_url=redis_url)
    other_pod = await pods("d-1", words=(" other",) * 3, revision=revision)
    other = await gateway(other_pod, redis_url=redis_url, model=copy)
    fronts = one, other
    key = {"idempotency-key": "order-17"}
    heads = [await first_events(front, CHAT, CHAT_BODY, 2, **key) for front in fronts]
    for front, head in zip(fronts, reversed(heads), strict=True):
        refused = await front.http.post(CHAT, headers={"last-event-id": head[-1][0]})
        assert refused.status_code == 404, refused.text
        assert "another model" in refused.json()["error"]["message"]
    texts = [
        await _text(CHAT, head + await rest(front, CHAT, head[-1][0]))
        for front, head in zip(fronts, heads, strict=True)
    ]
    assert texts == ["".join(WORDS), " other" * 3]


def _fields(message: Descriptor, seen: set[str]) -> list[str]:
    """Every field of the message and of those in it."""
    if message.full_name in seen:
        return []
    seen.add(message.full_name)
    found = [f"{message.full_name}.{field.name} {field.number} {field.type}" for field in message.fields]
    for field in message.fields:
        if field.message_type is not None:
            found += _fields(field.message_type, seen)
    return found


def test_a_changed_record_of_an_answer_has_a_new_format():
    """If this fails, raise FORMAT unless gateways of the last release ignore the change without harm, and
    replace the digest."""
    fields = sorted(_fields(answers_pb2.AnswerRecord.DESCRIPTOR, set()))
    digest = hashlib.sha256("\n".join(fields).encode()).hexdigest()[:16]
    assert (FORMAT, digest) == (3, "09740cee4ea287f5")


async def test_an_answer_is_stored_although_redis_first_reply_is_lost(pods, two_gateways, monkeypatch):
    pod = await pods(words=WORDS, pause_s=0.05)
    one, other = await two_gateways(pod)
    store = one.process.store
    begin, num_lost = store.begin, 0

    async def lose_the_reply(*arguments: object) -> bool:
        nonlocal num_lost
        done = await begin(*arguments)
        if num_lost == 0:
            num_lost += 1
            raise StoreError("no reply")
        return done

    monkeypatch.setattr(store, "begin", lose_the_reply)
    head = await first_events(one, CHAT, CHAT_BODY, 5)
    assert num_lost == 1
    assert await _text(CHAT, head + await rest(other, CHAT, head[-1][0])) == "".join(WORDS)


async def test_an_answer_continues_when_another_task_closes_the_connection_to_redis(
    pods, two_gateways, monkeypatch
):
    pod = await pods(words=WORDS, pause_s=0.3)
    one, other = await two_gateways(pod)
    call, num_lost = redis.Redis.evalsha, 0

    async def closed_at_first(client: redis.Redis, *arguments: object) -> int:
        nonlocal num_lost
        if num_lost:
            return await call(client, *arguments)
        num_lost += 1
        raise AttributeError("'NoneType' object has no attribute 'writelines'")  # as redis-py does

    monkeypatch.setattr(redis.Redis, "evalsha", closed_at_first)
    head = await first_events(one, CHAT, CHAT_BODY, 6)
    assert num_lost == 1  # then there is a new connection
    assert await _text(CHAT, head + await rest(other, CHAT, head[-1][0])) == "".join(WORDS)


async def test_a_client_that_resumes_waits_for_redis(pods, two_gateways, monkeypatch):
    pod = await pods(words=WORDS, pause_s=0.05)
    one, other = await two_gateways(pod)
    head = await first_events(one, CHAT, CHAT_BODY, 3)
    store, calls = other.process.store, []

    def away_at_first(read: Callable) -> Callable:
        async def read_later(*arguments: object) -> object:
            calls.append(arguments)
            if len(calls) in (1, 2, 4, 5):  # while it is looked for, and when it is taken over
                raise StoreError("away")
            return await read(*arguments)

        return read_later

    monkeypatch.setattr(store, "read", away_at_first(store.read))
    monkeypatch.setattr(store, "read_on", away_at_first(store.read_on))
    assert await _text(CHAT, head + await rest(other, CHAT, head[-1][0])) == "".join(WORDS)
    assert len(calls) > 5


async def test_an_answer_is_written_once_at_a_time(pods, two_gateways, monkeypatch):
    """Redis is down when the answer begins, and slow when it returns."""
    pod = await pods(words=WORDS, pause_s=0.05)
    one, other = await two_gateways(pod)
    store = one.process.store
    begin, num_calls = store.begin, 0

    async def slow(*arguments: object) -> bool:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 2:
            raise StoreError("away")
        done = await begin(*arguments)
        await asyncio.sleep(0.3)
        return done

    monkeypatch.setattr(store, "begin", slow)
    head = await first_events(one, CHAT, CHAT_BODY, 6)
    assert num_calls == 3
    assert await _text(CHAT, head + await rest(other, CHAT, head[-1][0])) == "".join(WORDS)


async def test_an_answer_is_claimed_although_its_release_is_lost(pods, two_gateways, monkeypatch):
    pod = await pods(words=WORDS, pause_s=0.05)
    one, other = await two_gateways(pod)
    store, num_lost = one.process.store, 0

    async def lose_the_release(name: str, owner: str) -> None:
        nonlocal num_lost
        num_lost += 1
        store.end(owner)
        raise StoreError("away")

    monkeypatch.setattr(store, "release", lose_the_release)
    head = await first_events(one, CHAT, CHAT_BODY, 4)
    await until(lambda: num_lost)
    tail = await asyncio.wait_for(rest(other, CHAT, head[-1][0]), 5)
    assert await _text(CHAT, head + tail) == "".join(WORDS)


async def test_following_an_answer_does_not_read_its_prompts_again(pods, two_gateways, redis_url):
    pod = await pods(words=WORDS, pause_s=0.2)
    one, other = await two_gateways(pod)
    body = {**COMPLETION_BODY, "prompt": [list(range(5, 205))] * 16, "logprobs": None}
    prompts_bytes = 16 * 200
    headers = {"idempotency-key": "k"}
    async with redis.Redis.from_url(redis_url) as client:

        async def num_sent() -> int:
            return int((await client.info("stats"))["total_net_output_bytes"])

        computing = asyncio.create_task(one.http.post(COMPLETIONS, json=body, headers=headers))
        await until_async(lambda: has_key(client, "tandem:answer:*:events"))
        before = await num_sent()
        followed = await other.http.post(COMPLETIONS, json=body, headers=headers)
        num_bytes = await num_sent() - before
    assert len(pod.requests) == 16, "the second gateway must have followed"
    assert followed.text == (await computing).text
    assert num_bytes < 20 * prompts_bytes, "dozens of reads, of which one needs the prompts"


async def test_a_long_answer_is_read_in_pages(pods, two_gateways, monkeypatch):
    pod = await pods(words=WORDS * 16)
    one, other = await two_gateways(pod)
    body = {**CHAT_BODY, "n": 8, "max_tokens": len(WORDS) * 16}
    whole = events_of((await one.http.post(CHAT, json=body)).text)
    assert len(whole) > 2 * PAGE_EVENTS
    read, pages = redis.Redis.lrange, []

    async def counted(*arguments: object) -> list:
        pages.append(await read(*arguments))
        return pages[-1]

    monkeypatch.setattr(redis.Redis, "lrange", counted)
    tail = await rest(other, CHAT, whole[0][0])
    assert without_times(tail) == without_times(whole[1:])
    assert max(map(len, pages)) == PAGE_EVENTS


async def test_a_slow_search_for_one_answer_delays_no_other(pods, two_gateways, monkeypatch):
    pod = await pods(words=WORDS)
    _, other = await two_gateways(pod)
    store, is_slow, go_on = other.process.store, asyncio.Event(), asyncio.Event()
    read = store.read

    async def slow_at_first(name: str) -> object:
        if not is_slow.is_set():
            is_slow.set()
            await go_on.wait()
        return await read(name)

    monkeypatch.setattr(store, "read", slow_at_first)
    first, second = ({"idempotency-key": key} for key in ("first", "second"))
    slow = asyncio.create_task(other.http.post(CHAT, json=CHAT_BODY, headers=first))
    await is_slow.wait()
    assert (await asyncio.wait_for(other.http.post(CHAT, json=CHAT_BODY, headers=second), 5)).is_success
    go_on.set()
    assert (await slow).is_success


async def has_key(client: redis.Redis, pattern: str) -> bool:
    return bool(await client.keys(pattern))


async def test_a_gateway_lists_no_computation_after_redis_lost_answers(pods, two_gateways, redis_url):
    pod = await pods(words=WORDS, pause_s=0.4)
    front, _ = await two_gateways(pod)
    async with redis.Redis.from_url(redis_url) as client:
        computing = asyncio.create_task(first_events(front, CHAT, CHAT_BODY, len(WORDS)))
        for _ in range(3):
            await until_async(lambda: has_key(client, "tandem:answer:*:events"))
            await client.flushall()
        await computing

        async def lists_none() -> bool:
            listed = await client.get(f"tandem:gateway:{front.process.store.id}")
            return listed is not None and len(listed.split()) == 1  # the number of the next one

        await until_async(lists_none)


REDIS_GAUGE = "tandem_gateway_redis_connected"


async def test_a_redis_that_does_not_answer_shows_in_log_and_metrics(pods, gateway, tmp_path):
    server = RedisServer(tmp_path / "redis", is_persistent=False)
    pod = await pods(words=WORDS)
    with capture_logs() as lines:
        front = await gateway(pod, redis_url=server.url)  # it does not run yet
        assert await front.metric(REDIS_GAUGE) == 0
        await server.start()
        await front.until_metric(REDIS_GAUGE, 1)
        await server.stop()
        await front.until_metric(REDIS_GAUGE, 0)
    events = [line["event"].partition(";")[0] for line in lines if "Redis" in line["event"]]
    assert events == ["Redis does not answer", "Redis connected", "Redis lost"]
    without = await gateway(pod)
    assert REDIS_GAUGE not in (await without.http.get(without.metrics_url)).text
