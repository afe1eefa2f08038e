"""A client that stops reading, or never begins, frees its place."""

import asyncio
import ssl
from contextlib import AsyncExitStack

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from tandem_cli.up import certificates
from tandem_gateway.edge.http_server import HttpServer
from tandem_gateway.edge.http_stream import EventStream
from tandem_proto.v1 import gateway_pb2
from tandem_service.tls import Role
from waiting import until

SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": []}
#: More than the kernel's buffers of a connection take.
LARGE = 12 << 20


class Source:
    """A request that has begun; `closed` once its place is free."""

    def __init__(self) -> None:
        self.closed = False

    async def events(self):
        try:
            for _ in range(3):
                yield b"data"
        finally:
            self.closed = True


async def test_an_http_client_that_leaves_before_the_first_byte_frees_the_place():
    source = Source()
    held, events = AsyncExitStack(), source.events()
    held.push_async_callback(events.aclose)
    await anext(events)

    async def body():
        async for event in events:
            yield event

    async def send(message) -> None:
        await asyncio.Event().wait()

    async def disconnected() -> dict[str, str]:
        return {"type": "http.disconnect"}

    stream = EventStream(Request(SCOPE, disconnected), body(), held=held, ping=b"")
    async with asyncio.timeout(3.0):
        await stream(SCOPE, disconnected, send)
    assert source.closed


async def test_a_silent_stream_has_pings_between_its_events(monkeypatch):
    may_end, sent = asyncio.Event(), []

    async def connected() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    async def events():
        yield b"first"
        await may_end.wait()
        yield b"last"

    async def send(message) -> None:
        sent.append(message.get("body"))
        if sent.count(b"ping") == 2:
            may_end.set()

    held = AsyncExitStack()
    monkeypatch.setattr("tandem_gateway.edge.http_stream._PING_S", 0.02)
    stream = EventStream(Request(SCOPE, connected), events(), held=held, ping=b"ping")
    async with asyncio.timeout(3.0):
        await stream(SCOPE, connected, send)
    assert [part for part in sent if part != b"ping"] == [None, b"first", b"last", b""]


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    async def parts():
        while True:
            await asyncio.sleep(0)
            yield b"x" * 65536

    await StreamingResponse(parts())(scope, receive, send)


APPS = {
    "a whole response": PlainTextResponse(b"x" * LARGE),
    "a stream": endless,
}


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
async def test_a_response_that_is_not_read_ends_its_connection(app, with_tls, tmp_path):
    tls = client_tls = None
    if with_tls:
        certificates.prepare(tmp_path)
        files = certificates.issue(tmp_path, Role.GATEWAY)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(files.cert, files.key)
        client_tls = ssl.create_default_context()
        client_tls.check_hostname, client_tls.verify_mode = False, ssl.CERT_NONE
    num_open, num_begun = 0, 0

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_open, num_begun
        num_open, num_begun = num_open + 1, num_begun + 1
        try:
            await app(scope, receive, send)
        finally:
            num_open -= 1

    server = HttpServer(
        counted,
        "127.0.0.1",
        0,
        is_known=lambda _: True,
        max_connections=2,
        header_timeout_s=5.0,
        unread_s=0.3,
        tls=tls,
    )
    await server.start()
    opened = []
    try:
        for _ in range(2):  # known callers take all places
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=client_tls, limit=1024
            )
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            opened.append((reader, writer))
        await until(lambda: num_begun == 2)
        await until(lambda: num_open == 0)
    finally:
        for _, writer in opened:
            writer.transport.abort()
        await server.stop(0.0)


async def test_a_grpc_client_that_reads_nothing_is_cut_off_after_its_deadline(pods, gateway):
    # Slow enough to run at the deadline, although all of it fits into buffers.
    pod = await pods(words=("x" * 500_000,) * 40, pause_s=0.05)
    front = await gateway(pod, request_timeout_s=1.5)
    messages = [gateway_pb2.ChatMessage(role="user", content="hi")]
    call = front.grpc.Chat(gateway_pb2.ChatRequest(messages=messages))
    try:
        await pod.started.wait()
        await front.until_metric("tandem_requests_in_flight", 1)
        # A second and a half, and the five that a client has to read the rest.
        await front.until_metric("tandem_requests_in_flight", 0)
    finally:
        call.cancel()
