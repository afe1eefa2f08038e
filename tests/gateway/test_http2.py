"""HTTP/2 on the HTTP port: streams, credit, resets, the end of a connection, and bytes that are no HTTP/2."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from tandem_gateway.http2 import PREFACE
from tandem_gateway.http_server import HttpServer


class App:
    """An ASGI application with a behaviour for each path."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.left = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        request = Request(scope, receive)
        match scope["path"]:
            case "/echo":
                await Response(await request.body())(scope, receive, send)
            case "/refuse":
                await Response(status_code=401)(scope, receive, send)
            case "/last":
                await Response(b"bye", headers={"connection": "close"})(scope, receive, send)
            case "/crash":
                raise RuntimeError("as it is meant to")
            case "/wait":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await self.may_end.wait()
                await send({"type": "http.response.body", "body": b"waited"})
            case "/flood":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                flooding = asyncio.create_task(self._flood(send))
                while (await receive())["type"] != "http.disconnect":
                    pass
                flooding.cancel()
                self.left.set()

    async def _flood(self, send) -> None:
        while True:
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            self.num_sent += 1


@asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[tuple[App, HttpServer]]:
    app = App()
    server = HttpServer(app, "127.0.0.1", 0, **{"max_connections": 8, "header_timeout_s": 5.0, **limits})
    await server.start()
    try:
        yield app, server
    finally:
        await server.stop(0)


def http2_client(server: HttpServer) -> httpx.AsyncClient:
    url = f"http://127.0.0.1:{server.port}"
    return httpx.AsyncClient(base_url=url, http1=False, http2=True, trust_env=False)


class Client:
    """One connection, frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **options: int) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = H2Connection(H2Configuration(client_side=True))
        initial = {SettingCodes[name]: value for name, value in options.items()}
        self.h2.local_settings = Settings(client=True, initial_values=initial)
        self.h2.initiate_connection()
        self.flush()
        self.events: list[Event] = []

    @classmethod
    async def connect(cls, server: HttpServer, **options: int) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", server.port), **options)

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def post(self, path: str, body: bytes | None = b"") -> int:
        """`body` None: it does not end."""
        stream_id = self.h2.get_next_available_stream_id()
        headers = {":method": "POST", ":path": path, ":scheme": "http", ":authority": "x"}
        self.h2.send_headers(stream_id, list(headers.items()))
        if body is not None:
            self.h2.send_data(stream_id, body, end_stream=True)
        self.flush()
        return stream_id

    async def until(self, kind: type[Event], stream_id: int | None = None) -> Event:
        """The next one of this kind, of the stream."""
        async with asyncio.timeout(5.0):
            while True:
                for number, event in enumerate(self.events):
                    if isinstance(event, kind) and stream_id in (None, getattr(event, "stream_id", None)):
                        return self.events.pop(number)
                data = await self.reader.read(1 << 16)
                assert data, "the server has closed"
                self.events += self.h2.receive_data(data)
                self.flush()

    async def until_closed(self) -> None:
        async with asyncio.timeout(5.0):
            while data := await self.reader.read(1 << 16):
                self.events += self.h2.receive_data(data)
        self.writer.close()


async def test_bodies_larger_than_a_window_pass_in_both_directions():
    async with serving() as (_, server), http2_client(server) as http:
        bodies = [bytes([number]) * 300_000 for number in range(10)]
        answers = await asyncio.gather(*(http.post("/echo", content=body) for body in bodies))
        assert [answer.content for answer in answers] == bodies
        assert {answer.http_version for answer in answers} == {"HTTP/2"}
        assert (await http.head("/echo")).status_code == 200


async def test_the_port_speaks_http_1_too():
    async with serving() as (_, server):
        url = f"http://127.0.0.1:{server.port}/echo"
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.post(url, content=b"PRI * HTTP/2.0")
        assert (answer.http_version, answer.content) == ("HTTP/1.1", b"PRI * HTTP/2.0")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"P")  # begins as HTTP/2's preface
        await asyncio.sleep(0.02)
        writer.write(b"OST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\nhi")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


async def test_a_preface_may_arrive_in_parts():
    async with serving() as (_, server):
        client = await Client.connect(server)
        client.post("/echo", b"hi")
        sent = bytearray()
        client.writer = type("Writer", (), {"write": sent.extend})()
        client.h2 = H2Connection(H2Configuration(client_side=True))
        client.h2.initiate_connection()
        client.post("/echo", b"hi")
        client.reader, client.writer = await asyncio.open_connection("127.0.0.1", server.port)
        for byte in sent:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.until(DataReceived)).data == b"hi"
        client.writer.close()


async def test_a_client_without_credit_stops_the_application_and_may_leave():
    async with serving() as (app, server):
        client = await Client.connect(server, INITIAL_WINDOW_SIZE=2500)
        stream_id = client.post("/flood")
        assert sum([(await client.until(DataReceived)).flow_controlled_length for _ in range(3)]) == 2500
        await asyncio.sleep(0.05)
        assert app.num_sent == 2, "the third waits for credit"
        client.h2.increment_flow_control_window(1000, stream_id)
        client.flush()
        assert (await client.until(DataReceived)).flow_controlled_length == 500
        assert app.num_sent == 3
        client.h2.reset_stream(stream_id)
        client.flush()
        async with asyncio.timeout(5.0):
            await app.left.wait()
        client.post("/echo", b"hi")
        assert (await client.until(DataReceived)).data == b"hi"
        client.writer.close()


async def test_a_closed_connection_ends_its_streams():
    async with serving() as (app, server):
        client = await Client.connect(server)
        client.post("/flood")
        await client.until(DataReceived)
        client.writer.close()
        async with asyncio.timeout(5.0):
            await app.left.wait()


async def test_an_answer_before_the_end_of_the_body_ends_the_stream_alone():
    async with serving() as (_, server):
        client = await Client.connect(server)
        stream_id = client.post("/refuse", None)
        await client.until(StreamEnded)
        assert (await client.until(StreamReset)).error_code == ErrorCodes.NO_ERROR
        client.post("/crash")
        reset = await client.until(StreamReset)
        assert (reset.stream_id, reset.error_code) == (stream_id + 2, ErrorCodes.INTERNAL_ERROR)
        echo = client.post("/echo", b"hi")
        assert (await client.until(DataReceived, echo)).data == b"hi"
        client.writer.close()


async def test_bodies_that_nobody_reads_use_up_no_credit():
    async with serving() as (_, server):
        client = await Client.connect(server)
        for _ in range(8):
            client.post("/refuse", b"x" * 10_000)
            await client.until(StreamEnded)
        echo = client.post("/echo", b"x" * 10_000)
        assert (await client.until(DataReceived, echo)).flow_controlled_length == 10_000
        client.writer.close()


async def test_the_last_response_of_a_connection_lets_the_others_end():
    async with serving() as (app, server):
        client = await Client.connect(server)
        waiting = client.post("/wait")
        await client.until(ResponseReceived)
        client.post("/last")
        goaway = await client.until(ConnectionTerminated)
        assert (goaway.error_code, goaway.last_stream_id) == (ErrorCodes.NO_ERROR, waiting + 2)
        # h2 takes the connection for ended; the server still sends what it has begun.
        app.may_end.set()
        async with asyncio.timeout(5.0):
            assert b"waited" in await client.reader.read()
        client.writer.close()


async def test_a_stop_lets_streams_end():
    async with serving() as (app, server):
        client = await Client.connect(server)
        client.post("/wait")
        await client.until(ResponseReceived)
        stopping = asyncio.create_task(server.stop(5.0))
        await client.until(ConnectionTerminated)
        app.may_end.set()
        async with asyncio.timeout(5.0):
            assert b"waited" in await client.reader.read()
            await stopping
        client.writer.close()


async def test_a_connection_without_streams_is_closed_however_it_keeps_itself_alive():
    async with serving(header_timeout_s=0.2) as (_, server):
        client = await Client.connect(server)

        async def ping() -> None:
            while True:
                client.h2.ping(b"12345678")
                client.flush()
                await asyncio.sleep(0.02)

        pinging = asyncio.create_task(ping())
        await client.until_closed()
        pinging.cancel()


async def test_idle_connections_shut_nobody_out():
    async with serving(max_connections=3) as (_, server):
        clients = []
        for _ in range(6):
            clients.append(await Client.connect(server))
            clients[-1].post("/echo", b"hi")
            await clients[-1].until(StreamEnded)
        for client in clients[:3]:
            await client.until_closed()
        for client in clients[3:]:
            client.writer.close()


async def test_a_connection_takes_only_so_many_streams(monkeypatch):
    monkeypatch.setattr("tandem_gateway.http2._MAX_STREAMS_EVER", 3)
    async with serving() as (_, server):
        client = await Client.connect(server)
        for number in range(3):
            client.post("/echo", b"hi %d" % number)
        async with asyncio.timeout(5.0):
            received = await client.reader.read()
        assert GoAwayFrame(0, last_stream_id=5).serialize() in received
        assert all(b"hi %d" % number in received for number in range(3))
        client.writer.close()


async def test_more_streams_at_once_than_allowed_end_the_connection():
    async with serving() as (_, server):
        client = await Client.connect(server)
        client.h2.remote_settings.max_concurrent_streams = 1000
        for _ in range(65):
            client.post("/wait")
        await client.until_closed()
        async with http2_client(server) as http:
            assert (await http.post("/echo", content=b"hi")).content == b"hi"


frames = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 10),
    st.integers(0, 255),
    st.integers(0, 5) | st.integers(0, 2**32 - 1),
    st.binary(max_size=60),
)


async def no_bytes_stop_the_server(server: HttpServer, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(PREFACE + sent)
    writer.write_eof()
    async with asyncio.timeout(5.0):
        while await reader.read(1 << 16):
            pass
    writer.close()


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    """For all examples of a test."""
    async with serving(max_connections=1000) as (_, server):
        yield server


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=st.binary(max_size=200) | st.lists(frames, max_size=8).map(b"".join))
async def test_no_bytes_stop_the_server(server, sent, caplog):
    await no_bytes_stop_the_server(server, sent)
    assert not caplog.records


@pytest.mark.wide
@settings(max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=st.binary(max_size=200) | st.lists(frames, max_size=8).map(b"".join))
async def test_none_of_many_bytes_stop_the_server(server, sent, caplog):
    await no_bytes_stop_the_server(server, sent)
    assert not caplog.records
