"""A client that stops reading, or never begins, frees its place."""

import asyncio

from starlette.requests import Request
from tandem_gateway.edge.http_stream import EventStream
from tandem_proto.v1 import gateway_pb2

SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": []}


async def _never_disconnects() -> dict[str, str]:
    await asyncio.Event().wait()
    return {}


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


async def test_an_http_client_that_stops_reading_counts_as_disconnected():
    source = Source()
    events = source.events()
    sent = []

    async def send(message) -> None:
        if len(sent) == 2:
            await asyncio.Event().wait()
        sent.append(message["type"])

    stream = EventStream(Request(SCOPE, _never_disconnects), events, source=events, send_timeout_s=0.05)
    async with asyncio.timeout(3.0):
        await stream(SCOPE, _never_disconnects, send)
    assert source.closed
    assert sent == ["http.response.start", "http.response.body"]


async def test_an_http_client_that_leaves_before_the_first_byte_frees_the_place():
    source = Source()
    events = source.events()
    await anext(events)

    async def body():
        async for event in events:
            yield event

    async def send(message) -> None:
        await asyncio.Event().wait()

    async def disconnected() -> dict[str, str]:
        return {"type": "http.disconnect"}

    stream = EventStream(Request(SCOPE, disconnected), body(), source=events)
    async with asyncio.timeout(3.0):
        await stream(SCOPE, disconnected, send)
    assert source.closed


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
