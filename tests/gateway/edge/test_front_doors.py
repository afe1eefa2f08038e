"""Limits of strangers, slow clients and greedy tenants at the public ports."""

import asyncio
import contextlib
import hashlib
import json
import shutil
import ssl
import string
import threading
import time
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tandem_cli import chat
from tandem_cli.up import certificates, health
from tandem_cli.up.supervisor import Health, ProcessSpec
from tandem_core.errors import InvalidRequestError
from tandem_gateway.dialects.fields import Ignored
from tandem_gateway.dialects.openai_models import ChatBody, CompletionBody, parse_json
from tandem_gateway.errors import UnsupportedFieldError
from tandem_gateway.main import GatewayProcess
from tandem_gateway.settings import GatewaySettings
from tandem_proto.v1 import gateway_pb2
from tandem_service.tls import Role
from waiting import pause_async, until, until_async

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CHAT_METHOD = "/tandem.v1.GatewayService/Chat"


async def raw_call(channel: grpc.aio.Channel, payload: bytes, key: str = "") -> grpc.StatusCode:
    """Sends the bytes as they are."""
    call = channel.unary_stream(CHAT_METHOD, request_serializer=None, response_deserializer=None)
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    try:
        async for _ in call(payload, metadata=metadata):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_grpc_message_without_a_key_is_not_received(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file)
    for payload in (b"\xff\xff", b"\x0a" * 20_000_000):
        assert await raw_call(front.channel, payload) is grpc.StatusCode.UNAUTHENTICATED
        assert await raw_call(front.channel, payload, "wrong") is grpc.StatusCode.UNAUTHENTICATED
    assert await raw_call(front.channel, b"\xff\xff", "acme-key") is grpc.StatusCode.INVALID_ARGUMENT
    too_large = b"\x0a" * 20_000_000
    assert await raw_call(front.channel, too_large, "acme-key") is grpc.StatusCode.RESOURCE_EXHAUSTED


async def started(channel: grpc.aio.Channel, method: str, payload: bytes | None, key: str = ""):
    """A call that sent its message, or with None only its metadata, and stays open."""
    open_call = channel.stream_stream if payload is None else channel.unary_stream
    call = open_call(method, request_serializer=None, response_deserializer=None)(
        *([] if payload is None else [payload]),
        metadata=(("authorization", f"Bearer {key}"),) if key else (),
    )
    with contextlib.suppress(grpc.aio.AioRpcError):  # it may have ended
        await call.wait_for_connection()
    return call


async def test_the_health_check_continues_after_an_error_in_predictions(pods, gateway, monkeypatch):
    pod = await pods()
    front = await gateway(pod)
    failed = asyncio.Event()

    def fails(_admission) -> None:
        failed.set()
        raise ValueError("no prediction")

    monkeypatch.setattr(front.process.metrics, "show_prediction", fails)
    await asyncio.wait_for(failed.wait(), 5.0)
    await pod.stop()
    stub = health_pb2_grpc.HealthStub(front.channel)

    async def serves_no_more() -> bool:
        status = (await stub.Check(health_pb2.HealthCheckRequest())).status
        return status == health_pb2.HealthCheckResponse.NOT_SERVING

    await until_async(serves_no_more)


async def test_calls_without_a_key_take_no_place(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file, max_in_flight=2, max_queue=2)
    health = "/grpc.health.v1.Health"
    opened = [await started(front.channel, f"{health}/Watch", b"") for _ in range(100)]
    opened += [await started(front.channel, f"{health}/Check", None) for _ in range(100)]
    opened += [await started(front.channel, CHAT_METHOD, None) for _ in range(100)]
    payload = gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage(role="user", content="hi")])
    assert await raw_call(front.channel, payload.SerializeToString(), "acme-key") is grpc.StatusCode.OK
    stub = health_pb2_grpc.HealthStub(front.channel)
    served = health_pb2.HealthCheckResponse.SERVING
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == served
    # The first streams are watched, the others end with a time to come again.
    await until(lambda: sum(call.done() for call in opened[:100]) == 68)
    watched = next(call for call in opened[:100] if not call.done())
    refused = next(call for call in opened[:100] if call.done())
    assert health_pb2.HealthCheckResponse.FromString(await watched.read()).status == served
    assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(await refused.trailing_metadata())["retry-after-ms"]) >= 1
    assert await opened[150].code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "has not arrived within 1 s" in await opened[150].details()
    assert await opened[250].code() is grpc.StatusCode.UNAUTHENTICATED
    for call in opened[:100]:
        call.cancel()

    async def is_free() -> bool:
        call = await started(front.channel, f"{health}/Watch", b"")
        try:
            return isinstance(await call.read(), bytes)
        except grpc.aio.AioRpcError:
            return False
        finally:
            call.cancel()

    await until_async(is_free)


def tenants_with_one_request(folder: Path) -> Path:
    """A keys file of the tenants greedy and other, each of which may have one request; their keys are their
    names."""
    lines = [
        {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": key, "max_requests": 1}
        for key in ("greedy", "other")
    ]
    path = folder / "keys.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def test_a_tenants_open_calls_are_limited(pods, gateway, tmp_path):
    keys = tenants_with_one_request(tmp_path)
    front = await gateway(await pods(), api_keys_file=keys, read_timeout_s=30.0)
    opened = [await started(front.channel, CHAT_METHOD, None, "greedy") for _ in range(17)]
    payload = gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage(role="user", content="hi")])
    refused = await started(front.channel, CHAT_METHOD, payload.SerializeToString(), "greedy")
    assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "tenant greedy has 17 calls open here, limit 17" in await refused.details()
    assert int(dict(await refused.trailing_metadata())["retry-after-ms"]) >= 1
    refused = await front.http.post(CHAT, json={"messages": USER}, headers={"authorization": "Bearer greedy"})
    assert refused.status_code == 429
    assert await raw_call(front.channel, payload.SerializeToString(), "other") is grpc.StatusCode.OK
    for call in opened:
        call.cancel()

    async def is_free() -> bool:
        return await raw_call(front.channel, payload.SerializeToString(), "greedy") is grpc.StatusCode.OK

    await until_async(is_free)


async def test_readers_of_an_answer_count_as_calls_of_their_tenant(pods, gateway, tmp_path):
    keys = tenants_with_one_request(tmp_path)
    pod = await pods(pause_s=0.5)
    front = await gateway(pod, api_keys_file=keys)
    greedy, other = ({"authorization": f"Bearer {name}"} for name in ("greedy", "other"))
    async with contextlib.AsyncExitStack() as stack:
        body = {"messages": USER, "stream": True}
        with_ids = {**greedy, "x-event-ids": "true"}
        first = await stack.enter_async_context(front.http.stream("POST", CHAT, json=body, headers=with_ids))
        lines = first.aiter_lines()
        event_id = (await anext(lines)).removeprefix("id: ")
        pod.pause_s = 30.0
        statuses = []
        for _ in range(20):
            reader = front.http.stream("POST", CHAT, headers={**greedy, "last-event-id": event_id})
            statuses.append((await stack.enter_async_context(reader)).status_code)
        assert statuses == [200] * 16 + [429] * 4
        assert (await front.http.get("/v1/models", headers=other)).status_code == 200


async def test_a_tenants_long_texts_do_not_delay_other_tenants(pods, gateway, keys_file, monkeypatch):
    front = await gateway(await pods(), api_keys_file=keys_file)
    monkeypatch.setattr("tandem_gateway.call.gateway.INLINE_CHARS", 2)
    tokenizer = front.process.gateway.tokenizer
    encode, may_go_on, begun = tokenizer.encode, threading.Event(), []

    def slow(text: str, **options: bool) -> list[int]:
        begun.append(text)
        if text.startswith("slow"):
            may_go_on.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)

    def ask(text: str, key: str) -> asyncio.Task[httpx.Response]:
        headers = {"authorization": f"Bearer {key}"}
        return asyncio.create_task(front.http.post("/v1/completions", json={"prompt": text}, headers=headers))

    try:
        # As many characters as eight of the longest texts.
        limit = 8 * tokenizer.max_text_bytes
        texts = [f"slow {number:03}" for number in range(80)]
        texts += ["slow" + "x" * (tokenizer.max_text_bytes - 4 - 80)] * 8
        waiting = [ask(text, "acme-key") for text in texts]
        counts = front.process.gateway.tokenizing.waiting
        await until(lambda: counts["acme"] == limit and begun)
        refused = await ask("one more", "acme-key")
        assert refused.status_code == 429
        message = refused.json()["error"]["message"]
        assert f"texts of {limit} characters wait to be tokenized, limit {limit}" in message
        assert (await ask("another tenant", "slow-key")).status_code == 200
        # A client that leaves frees no thread: the next text of its tenant waits for that of this one.
        for task in waiting:
            task.cancel()
        await until(lambda: not counts["acme"])
        following = ask("following", "acme-key")
        assert (await ask("another tenant", "slow-key")).status_code == 200
        assert len([text for text in begun if text.startswith(("slow", "following"))]) == 1
        may_go_on.set()
        assert (await following).status_code == 200
    finally:
        may_go_on.set()


async def test_an_http_body_without_a_key_is_not_read(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file, read_timeout_s=0.5)
    reader, writer = await open_connection(front)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000000\r\n\r\n{")
    refusal = await asyncio.wait_for(reader.readline(), 10)
    assert b" 401 " in refusal
    writer.write(b"{" * 1000)
    await asyncio.wait_for(reader.read(), 10)  # the server closes, although most of the body is missing
    writer.close()


async def test_a_request_after_an_early_refusal_uses_the_same_connection(pods, gateway, keys_file):
    """The refusal comes before the end of the refused body."""
    front = await gateway(await pods(words=("a", "b"), pause_s=0.8), api_keys_file=keys_file)
    reader, writer = await open_connection(front)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n{")
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 10)
    body = json.dumps({"messages": USER}).encode()
    writer.write(
        b"    POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer acme-key\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    assert b"usage" in await asyncio.wait_for(reader.read(), 10), "it takes longer than the time for the rest"
    writer.close()


BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}).encode()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"])
async def test_a_body_that_a_page_of_another_site_may_send_is_refused(path, pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    for headers in (
        {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": ""},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ):  # fmt: skip
        origin = {"origin": "https://evil.example"}
        refused = await front.http.post(path, content=BODY, headers={**headers, **origin})
        assert refused.status_code == 415
        assert "application/json" in refused.text or "uncompressed" in refused.text
    assert not pod.requests


def chunked(parts: list[bytes]) -> bytes:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        "transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def test_a_body_of_tiny_chunks_ends_the_connection(pods, gateway):
    front = await gateway(await pods())
    reader, writer = await open_connection(front)
    writer.write(chunked([b" "] * 40_000))
    with contextlib.suppress(ConnectionError):
        assert b" 200 " not in await asyncio.wait_for(reader.read(), 10)
    writer.close()


async def test_large_bodies_in_chunks_arrive_whole(pods, gateway):
    front = await gateway(await pods())
    limit = (await front.http.get("/v1/models")).json()["data"][0]["limits"]["max_body_bytes"]
    body = json.dumps({"messages": USER}).encode()
    body += b" " * (limit - len(body))
    assert limit > 32_768
    for size in (100, 4_096, limit):
        reader, writer = await open_connection(front)
        writer.write(chunked([body[at : at + size] for at in range(0, len(body), size)]))
        answer = await asyncio.wait_for(reader.read(), 10)
        assert b" 200 " in answer.split(b"\r\n", 1)[0]
        writer.close()


async def test_too_many_bytes_of_headers_are_refused(pods, gateway):
    front = await gateway(await pods())
    reader, writer = await open_connection(front)
    writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * 12_000 + b"\r\n")
    with contextlib.suppress(ConnectionError):
        assert b" 200 " not in await asyncio.wait_for(reader.read(), 10)
    writer.close()


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(pods, gateway, monkeypatch):
    front = await gateway(await pods())
    tokenizer = front.process.gateway.tokenizer
    too_long = "x" * (tokenizer.max_text_bytes + 1)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("was tokenized")

    for name in ("encode", "encode_chat"):
        monkeypatch.setattr(tokenizer, name, fail)
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": too_long}]}),
        (CHAT, {"messages": [{"role": "user", "content": too_long[: len(too_long) // 2 + 1]}] * 2}),
        ("/v1/completions", {"prompt": too_long}),
    ):
        response = await front.http.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "Shorten the prompt" in response.json()["error"]["message"]


async def open_connection(front):
    return await asyncio.open_connection("127.0.0.1", front.process.http_port)


HALF_SENT = {
    "nothing": b"",
    "half a line": b"POST /v1/chat",
    "half the headers": b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-",
    "half the body": (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 50\r\n\r\n{"
    ),
    "half of a second request": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /health HT",
}


@pytest.mark.parametrize("sent", HALF_SENT.values(), ids=HALF_SENT.keys())
async def test_a_request_that_arrives_too_slowly_is_refused(pods, gateway, sent):
    front = await gateway(await pods(), read_timeout_s=0.3)
    reader, writer = await open_connection(front)
    writer.write(sent)
    received = await asyncio.wait_for(reader.read(), 10)  # until the server closes
    assert (b" 408 " in received) is (b"{" in sent)
    writer.close()


async def test_a_slow_answer_is_not_cut_off(pods, gateway):
    front = await gateway(await pods(words=("a", "b", "c"), pause_s=0.3), read_timeout_s=0.2)
    for _ in range(2):  # over one connection
        response = await front.http.post(CHAT, json={"messages": USER})
        assert response.json()["choices"][0]["message"]["content"] == "abc"
        await asyncio.sleep(0.4)


async def ask_once(front, path: str) -> bytes:
    """Returns all bytes until the server closes the connection."""
    reader, writer = await open_connection(front)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_beyond_the_limit_of_connections_only_health_is_served(pods, gateway):
    pod = await pods(pause_s=30.0)
    front = await gateway(pod, max_connections=3)
    await front.http.aclose()
    busy = [await send_chat(front, "none") for _ in range(3)]
    await until(lambda: len(pod.requests) == 3)
    reader, writer = await open_connection(front)
    assert await asyncio.wait_for(reader.read(), 10) == b"", "without a request it ends within a second"
    refused, health = [await ask_once(front, path) for path in ("/v1/models", "/health")]
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in refused
    assert health.startswith(b"HTTP/1.1 200 ")
    assert all(b"connection: close" in answer for answer in (refused, health))
    for _, other in [*busy, (reader, writer)]:
        other.close()
    front.http = httpx.AsyncClient(base_url=front.url, trust_env=False)

    async def is_free() -> bool:
        try:
            return (await front.http.get("/v1/models")).status_code == 200
        except httpx.TransportError:
            return False

    await until_async(is_free)


async def send_chat(front, key: str):
    reader, writer = await open_connection(front)
    body = json.dumps({"messages": USER}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return reader, writer


STRANGERS = {
    "silent": b"",
    "half a request": b"POST /v1/chat",
    "refused": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "wrong key": b"POST / HTTP/1.1\r\nhost: a\r\nauthorization: Bearer x\r\ncontent-length: 9\r\n\r\n",
    "unread": b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 40,
}


@pytest.mark.parametrize("sent", STRANGERS.values(), ids=STRANGERS)
async def test_strangers_connections_displace_each_other_and_no_callers(pods, gateway, keys_file, sent):
    """Test with more connections than there are places, before and after a caller's."""
    pod = await pods(words=("a", "b"), pause_s=0.3)
    front = await gateway(pod, max_connections=8, api_keys_file=keys_file)
    await front.http.aclose()
    strangers = []

    async def flood() -> None:
        for _ in range(20):
            _, writer = await open_connection(front)
            writer.write(sent)
            strangers.append(writer)

    try:
        await flood()
        reader, writer = await asyncio.wait_for(send_chat(front, "acme-key"), 1.0)
        await asyncio.wait_for(pod.started.wait(), 1.0)
        await flood()
        answer = await asyncio.wait_for(reader.readline(), 5.0)
        assert b" 200 " in answer
        writer.close()
    finally:
        for stranger in strangers:
            stranger.transport.abort()


async def test_tls_handshakes_count_as_connections_and_end(pods, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tandem_service.channels.HANDSHAKE_MS", 300)
    certificates.prepare(tmp_path)
    files = certificates.issue(tmp_path, Role.GATEWAY)
    pod = await pods()
    process = GatewayProcess(
        GatewaySettings(
            model=model_folder, decode=(pod.target,), grpc_port=0, http_port=0, drain_s=0.0,
            tls_cert=files.cert, tls_key=files.key, max_connections=8,
        )
    )  # fmt: skip
    await process.start()
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    silent = []
    try:
        silent += [await asyncio.open_connection("127.0.0.1", process.http_port) for _ in range(20)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in silent]
        await until(lambda: sum(task.done() for task in ended) >= 12)
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            name = {"sni_hostname": Role.GATEWAY.dns_name}
            url = f"https://127.0.0.1:{process.http_port}/health"
            assert (await client.get(url, extensions=name)).status_code == 200
        silent.append(await asyncio.open_connection("127.0.0.1", process.grpc_port))
        assert await asyncio.wait_for(silent[-1][0].read(), 30) == b""
    finally:
        for _, writer in silent:
            writer.close()
        await process.stop()


async def test_connections_close_at_their_age_limit(pods, gateway):
    """Clients can then move to new gateways; running answers continue."""
    pod = await pods(words=("a",) * 20, pause_s=0.05)
    front = await gateway(pod, max_connection_age_s=0.5)
    messages = [gateway_pb2.ChatMessage(role="user", content="hi")]
    call = front.grpc.Chat(gateway_pb2.ChatRequest(messages=messages))
    assert len([response async for response in call]) == 21, "a second on a connection of half of one"
    seen = set()
    give_up_at = time.monotonic() + 5
    async with httpx.AsyncClient(base_url=front.url, trust_env=False) as http:
        while "close" not in seen and time.monotonic() < give_up_at:
            seen.add((await http.get("/health")).headers.get("connection", "stays"))
            await pause_async(0.05)
    assert seen == {"stays", "close"}


async def test_a_gateway_without_decode_pods_is_ready_and_holds_requests(pods, gateway):
    """Held requests start a role scaled to zero. After a while they are refused with a retry-after."""
    front = await gateway(decode=("127.0.0.1:1",), failover_wait_s=0.5, metrics_port=0)
    url = f"http://127.0.0.1:{front.process.metrics_port}/readyz"
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(url)).status_code == 200
    asked_at = time.monotonic()
    body = {"model": "", "messages": [{"role": "user", "content": "hi"}]}
    answer = await front.http.post(CHAT, json=body)
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert time.monotonic() - asked_at > 0.4


async def test_one_tenant_cannot_take_every_place(pods, gateway, tmp_path):
    keys = tmp_path / "keys.jsonl"
    lines = [
        {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": key, **limits}
        for key, limits in (("greedy", {}), ("small", {"max_requests": 1}), ("other", {}))
    ]
    keys.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pod = await pods(pause_s=30.0)
    front = await gateway(pod, api_keys_file=keys, max_in_flight=2, max_queue=2)

    def ask(key: str) -> asyncio.Task[httpx.Response]:
        headers = {"authorization": f"Bearer {key}"}
        return asyncio.create_task(front.http.post(CHAT, json={"messages": USER}, headers=headers))

    running = [ask("greedy"), ask("greedy")]  # half of the four places
    await front.until_metric("tandem_requests_in_flight", 2)
    refused = await ask("greedy")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "tenant greedy has 2 requests here already, limit 2" in refused.json()["error"]["message"]
    running += [ask("other"), ask("small")]
    await front.until_metric("tandem_queue_length", 2)
    assert (await ask("small")).status_code == 429
    for task in running:
        task.cancel()
    await front.until_metric("tandem_requests_in_flight", 0)
    pod.pause_s = 0.0
    assert (await ask("greedy")).status_code == 200


async def test_a_tenants_rate_of_tokens_is_limited(pods, gateway, tmp_path):
    keys = tmp_path / "keys.jsonl"
    line = {"key_sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t", "tokens_per_minute": 40}
    keys.write_text(json.dumps(line))
    front = await gateway(await pods(), api_keys_file=keys)
    headers = {"authorization": "Bearer k"}
    first = await front.http.post(CHAT, json={"messages": USER}, headers=headers)
    usage = first.json()["usage"]
    used = usage["prompt_tokens"] + usage["completion_tokens"]
    second = await front.http.post(CHAT, json={"messages": USER}, headers=headers)
    assert (second.status_code == 429) is (used >= 40)
    third = await front.http.post(CHAT, json={"messages": USER}, headers=headers)
    assert third.status_code == 429
    assert "has used its 40 tokens per minute" in third.json()["error"]["message"]
    # It may begin when the bucket has a token: some seconds for what is missing, at 40 a minute.
    assert 1 <= int(third.headers["retry-after"]) <= 2 * used * 60 / 40


async def test_requests_that_only_the_context_limits_hold_the_usual_tokens(
    pods, gateway, model_folder, tmp_path
):
    """They hold more as their answers grow, so that the tenant may send others meanwhile."""
    folder = tmp_path / "long"
    shutil.copytree(model_folder, folder)
    manifest = json.loads((folder / "tandem.json").read_text())
    (folder / "tandem.json").write_text(json.dumps({**manifest, "max_model_len": 8192}))
    keys = tmp_path / "keys.jsonl"
    line = {"key_sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t", "tokens_per_minute": 1000}
    keys.write_text(json.dumps(line))
    pod = await pods(pause_s=0.001, words=("a",) * 1200)
    front = await gateway(pod, api_keys_file=keys, model=folder)
    headers, body = {"authorization": "Bearer k"}, {"messages": USER}

    async def status(**fields: int) -> int:
        return (await front.http.post(CHAT, json={**body, **fields}, headers=headers)).status_code

    running = asyncio.create_task(status())
    await front.until_metric("tandem_requests_in_flight", 1)
    assert await status(max_tokens=1) == 200
    await front.until_metric('tandem_output_tokens_total{slo_class="standard"}', 1000, at_least=True)
    assert await status(max_tokens=1) == 429
    assert await running == 200


async def test_requests_hold_the_tokens_that_they_may_use(pods, gateway, tmp_path):
    """Otherwise requests that begin at once could use the tokens of an hour."""
    keys = tmp_path / "keys.jsonl"
    line = {"key_sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t", "tokens_per_minute": 100}
    keys.write_text(json.dumps(line))
    pod = await pods(pause_s=30.0)
    front = await gateway(pod, api_keys_file=keys)
    headers = {"authorization": "Bearer k"}
    body = {"messages": USER, "max_tokens": 150}
    running = [asyncio.create_task(front.http.post(CHAT, json=body, headers=headers))]
    await front.until_metric("tandem_requests_in_flight", 1)
    refused = await front.http.post(CHAT, json=body, headers=headers)
    assert refused.status_code == 429
    assert 25 <= int(refused.headers["retry-after"]) <= 60, "the debt is that of one request"
    running[0].cancel()
    await front.until_metric("tandem_requests_in_flight", 0)
    pod.pause_s = 0.0
    again = await front.http.post(CHAT, json=body, headers=headers)
    assert again.status_code == 200, "it gave back what it did not use"


async def test_a_caller_cannot_choose_its_tenant(pods, gateway, keys_file):
    pod = await pods()
    front = await gateway(pod, api_keys_file=keys_file)
    forged = dict.fromkeys(("tenant", "x-tenant", "tandem-tenant"), "slow")
    headers = {"authorization": "Bearer acme-key", **forged}
    for name in ("tenant", "user", "safety_identifier", "prompt_cache_key"):
        answer = await front.http.post(CHAT, json={"messages": USER, name: "slow"}, headers=headers)
        assert answer.status_code == 200
    # Field 2 of DecodeRequest is the tenant; fields 60 to 70 of ChatRequest are unknown.
    message = gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage(role="user", content="hi")])
    payload = message.SerializeToString() + b"".join(
        bytes([(field << 3 | 2) & 0x7F | 0x80, field >> 4, 4]) + b"slow" for field in range(60, 71)
    )
    assert await raw_call(front.channel, payload, "acme-key") is grpc.StatusCode.OK
    call = front.grpc.Chat(message, metadata=list(headers.items()))
    assert [response async for response in call]
    assert {request.tenant for request in pod.requests} == {"acme"}


async def test_every_503_has_a_retry_after(gateway):
    front = await gateway(failover_wait_s=0.0, decode=("127.0.0.1:9",))
    for response in (await front.http.get("/health"), await front.http.post(CHAT, json={"messages": USER})):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
    call = front.grpc.Chat(
        gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage(role="user", content="x")])
    )
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call.read()
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert int(dict(refusal.value.trailing_metadata())["retry-after-ms"]) >= 1


async def test_both_ports_speak_tls_and_take_a_new_certificate(pods, model_folder, tmp_path):
    folder = tmp_path / "tls"
    certificates.prepare(folder)
    files = certificates.issue(folder, Role.GATEWAY)
    pod = await pods()
    given_settings = GatewaySettings(
        model=model_folder, decode=(pod.target,), grpc_port=0, http_port=0, drain_s=0.0,
        tls_cert=files.cert, tls_key=files.key,
    )  # fmt: skip
    process = GatewayProcess(given_settings)
    await process.start()
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))

    async def certificates_of_both() -> list[bytes]:
        shown = []
        context.set_alpn_protocols(["h2", "http/1.1"])
        for port, protocol in ((process.http_port, "http/1.1"), (process.grpc_port, "h2")):
            _, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname=Role.GATEWAY.dns_name
            )
            connection = writer.get_extra_info("ssl_object")
            assert connection.selected_alpn_protocol() == protocol
            shown.append(connection.getpeercert(binary_form=True))
            writer.close()
        return shown

    try:
        first = await certificates_of_both()
        credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
        options = [("grpc.ssl_target_name_override", Role.GATEWAY.dns_name), ("grpc.enable_http_proxy", 0)]
        target = f"127.0.0.1:{process.grpc_port}"
        async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
            message = gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage(role="user", content="hi")])
            assert await raw_call(channel, message.SerializeToString()) is grpc.StatusCode.OK
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            name = {"sni_hostname": Role.GATEWAY.dns_name}
            url = f"https://127.0.0.1:{process.http_port}{CHAT}"
            answer = await client.post(url, json={"messages": USER}, extensions=name)
            assert answer.json()["choices"][0]["message"]["content"] == "Hello there!"
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://127.0.0.1:{process.http_port}/health")
        certificates.issue(folder, Role.GATEWAY)
        second = await certificates_of_both()
        assert all(old != new for old, new in zip(first, second, strict=True))
    finally:
        await process.stop()


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"host": "0.0.0.0"}, "no API keys are required"),
        ({"host": "::"}, "no API keys are required"),
        ({"tls_cert": "a.pem"}, "--tls-cert and --tls-key go together"),
        ({"host": "0.0.0.0", "insecure": True}, "no API keys are required; give --api-keys-file"),
        ({"api_keys_file": "keys", "no_api_keys": True}, "exclude each other; give one"),
    ],
)
def test_a_gateway_off_loopback_without_keys_does_not_start(model_folder, given_settings, message):
    with pytest.raises(ValueError, match=message):
        GatewaySettings(model=model_folder, decode=("127.0.0.1:1",), **given_settings)
    GatewaySettings(model=model_folder, decode=("127.0.0.1:1",), host="0.0.0.0", no_api_keys=True)


async def test_a_refused_request_uses_no_tokens(pods, gateway, tmp_path):
    keys = tmp_path / "keys.jsonl"
    line = {"key_sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t", "tokens_per_minute": 1200}
    keys.write_text(json.dumps(line | {"max_requests": 1}))
    pod = await pods(pause_s=30.0)
    front = await gateway(pod, api_keys_file=keys)
    headers = {"authorization": "Bearer k"}
    running = asyncio.create_task(front.http.post(CHAT, json={"messages": USER}, headers=headers))
    await front.until_metric("tandem_requests_in_flight", 1)
    for _ in range(10):
        refused = await front.http.post(CHAT, json={"messages": USER}, headers=headers)
        assert refused.status_code == 429
        assert "requests here already" in refused.json()["error"]["message"]
    running.cancel()


async def test_quotes_in_answers_are_bounded(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file)
    headers = {"authorization": "Bearer acme-key"}
    long = "v" * 5000
    bodies = [{"messages": USER, name: long} for name in ("model", "slo_class", "speculation")]
    bodies.append({"messages": [{"role": long, "content": "hi"}]})
    answers = [await front.http.post(CHAT, json=body, headers=headers) for body in bodies]
    answers.append(await front.http.get("/" + long, headers=headers))
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert "v" * 80 in answer.text
        assert len(answer.text) < 600


def test_quotes_in_errors_are_bounded():
    for error in (
        InvalidRequestError("f" * 10**6, "m" * 10**6),
        UnsupportedFieldError("f" * 10**6, f"{'v' * 10**6!r} is not supported"),
    ):
        assert len(str(error)) < 1200
        assert len(error.field) <= 101


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.just("9" * 5000)
    | st.integers(0, 2**40).map(lambda exponent: 10 ** (exponent % 400)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "n", "tools", "user"}))
bodies = st.one_of(
    st.dictionaries(fields, json_values, max_size=6).map(
        lambda extra: json.dumps({"messages": USER, "prompt": "x", **extra}).encode()
    ),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
    st.text(string.printable, max_size=60).map(str.encode),
)


def parses_or_refuses(body: bytes) -> None:
    for kind in (ChatBody, CompletionBody):
        try:
            parsed = parse_json(kind, body).checked(Ignored())
            parsed.given_sampling()
            _ = parsed.chat_messages() if isinstance(parsed, ChatBody) else parsed.prompts()
        except InvalidRequestError as error:
            assert len(str(error)) < 1200


@given(bodies)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_body_is_parsed_or_refused_with_a_sentence(body: bytes):
    parses_or_refuses(body)


@pytest.mark.wide
@given(bodies)
@settings(max_examples=50_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_of_many_bodies_is_parsed_or_refused_with_a_sentence(body: bytes):
    parses_or_refuses(body)


@pytest.fixture
async def one_front(pods, gateway):
    """One gateway for all examples of a test."""
    return await gateway(await pods())


async def no_server_error(front, data: st.DataObject) -> None:
    body = data.draw(bodies)
    name = data.draw(
        st.sampled_from(["last-event-id", "idempotency-key", "x-request-id", "authorization", "content-type"])
    )
    value = data.draw(st.text(string.printable.strip(), max_size=300) | st.just("0" * 24 + "-1"))
    path = data.draw(st.sampled_from([CHAT, "/v1/completions"]))
    response = await front.http.post(path, content=body, headers={name: value})
    assert response.status_code < 500


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_random_bodies_and_headers_cause_no_server_error(one_front, data):
    await no_server_error(one_front, data)


@pytest.mark.wide
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_many_random_bodies_and_headers_cause_no_server_error(one_front, data):
    await no_server_error(one_front, data)


async def test_the_command_line_reaches_a_gateway_with_tls(pods, model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Role, "dns_name", property(lambda _: "localhost"))
    certificates.prepare(tmp_path)
    files = certificates.issue(tmp_path, Role.GATEWAY)
    pod = await pods()
    process = GatewayProcess(
        GatewaySettings(
            model=model_folder, decode=(pod.target,), grpc_port=0, http_port=0, drain_s=0.0,
            metrics_port=0, tls_cert=files.cert, tls_key=files.key,
        )
    )  # fmt: skip
    await process.start()
    url = f"http://127.0.0.1:{process.metrics_port}"
    spec = ProcessSpec("gateway", "gateway", (), ports={}, health_target=url)

    async def serves() -> bool:
        return await health.probe(spec) is Health.SERVING

    def options(ca_file: Path | None) -> chat.ChatOptions:
        target = f"https://localhost:{process.grpc_port}"
        return chat.ChatOptions(target, None, 0.0, 16, None, "chat", "", None, ca_file)

    monkeypatch.setattr(chat, "_RESUME_LIMIT_S", 0.0)
    try:
        await until_async(serves)
        assert await asyncio.to_thread(chat.ask_once, options(tmp_path / "ca.pem"), "hi") == 0
        assert "output 3" in capsys.readouterr().err  # of the receipt
        with pytest.raises(chat.GatewayError, match="is not trusted"):
            await asyncio.to_thread(chat.ask_once, options(None), "hi")
    finally:
        await process.stop()
    assert await health.probe(spec) is Health.SILENT


async def test_a_large_message_without_a_key_is_refused_and_not_sent_back(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file)
    stub = health_pb2_grpc.HealthStub(front.channel)
    with pytest.raises(grpc.aio.AioRpcError, match="bytes, limit 1024") as info:
        await stub.Check(health_pb2.HealthCheckRequest(service="x" * 10_000))
    assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(info.value.details()) < 200
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await stub.Check(health_pb2.HealthCheckRequest(service="x" * 1000))
    assert info.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(info.value.details()) < 200


async def test_idle_connections_make_room_for_new_ones(pods, gateway, keys_file, monkeypatch):
    monkeypatch.setattr("tandem_service.channels.MAX_IDLE_MS", 300)
    front = await gateway(await pods(), api_keys_file=keys_file, max_connections=4)
    idle = []
    for _ in range(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", front.process.http_port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        if await reader.readline() != b"":
            idle.append(writer)
    headers = {"authorization": "Bearer acme-key"}
    assert (await front.http.post(CHAT, json={"messages": USER}, headers=headers)).status_code == 200
    for writer in idle:
        writer.close()
    # gRPC: connections without a call are closed after a time, however they keep themselves alive.
    reader, writer = await asyncio.open_connection("127.0.0.1", front.process.grpc_port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    async with asyncio.timeout(60):
        while await reader.read(1 << 16):
            pass
    writer.close()


async def test_a_tenants_limits_apply_to_resumed_answers(pods, gateway, tmp_path):
    keys = tmp_path / "keys.jsonl"
    line = {"key_sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t", "max_requests": 1}
    keys.write_text(json.dumps(line))
    pod = await pods(pause_s=0.2)
    front = await gateway(pod, api_keys_file=keys)
    headers, body = {"authorization": "Bearer k"}, {"messages": USER, "stream": True}
    with_ids = {**headers, "x-event-ids": "true"}
    async with front.http.stream("POST", CHAT, json=body, headers=with_ids) as response:
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
                break
    pod.pause_s = 30.0
    await front.until_metric("tandem_requests_in_flight", 0)
    running = asyncio.create_task(front.http.post(CHAT, json={"messages": USER}, headers=headers))
    await front.until_metric("tandem_requests_in_flight", 1)
    resumed = await front.http.post(CHAT, headers={**headers, "last-event-id": event_id})
    assert resumed.status_code == 429, resumed.text
    assert "has 1 requests here already, limit 1" in resumed.text
    for _ in range(2):
        keyed = await front.http.post(
            CHAT, json={"messages": USER}, headers={**headers, "idempotency-key": "one"}
        )
        assert keyed.status_code == 429, "also when it is asked for again"
    running.cancel()
