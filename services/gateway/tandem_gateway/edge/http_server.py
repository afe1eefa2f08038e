"""Runs uvicorn in the process's event loop, without its signal handlers and with a bounded drain. Adds limits
on connections, on their age, on the time until a request's headers have arrived, and on unread responses."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import ssl
from collections.abc import Callable, Iterator

import h11
import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem_gateway.edge.acceptor import Acceptor, Place

#: Served to connections beyond the limit, so that probes do not consider a full gateway dead.
_PROBE_PATHS = frozenset({"/health", "/ping"})
_PROBE_TIMEOUT_S = 1.0
_LENGTHS = {b"content-length", b"transfer-encoding"}
#: Idle connections are closed after this time.
_KEEP_ALIVE_S = 20
#: A client that takes fewer bytes in this time, though more wait for it, has gone.
_UNREAD_S, _LEAST_READ_BYTES = 30.0, 16 * 1024
#: Bytes of a request's line and headers.
_MAX_HEAD_BYTES = 16 * 1024
#: Bytes of one connection that are parsed in a turn of the loop.
_TURN_BYTES = 16 * 1024
#: Chunks of a body after which they must have this many bytes on average.
_MANY_CHUNKS, _LEAST_CHUNK_BYTES = 1000, 64
#: Time for a client to read a response before the end of its request.
_REST_S = 1.0


def _last(send: Send) -> Send:
    """Adds the header that closes the connection after the response."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        await send(message)

    return send_last


class _ConnectionApp:
    """The application as one connection sees it. A response is the connection's last one if it begins at
    `ends_at` (the loop's time) or later, beyond the limit of connections, where only probes are served, and
    if the request has two lengths, which a proxy may interpret differently (RFC 9112, 6.3)."""

    def __init__(
        self, app: ASGIApp, place: Place, is_known: Callable[[Scope], bool], *, ends_at: float
    ) -> None:
        self._app = app
        self._place = place
        self._is_known = is_known
        self._ends_at = ends_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, place = self._app, self._place
        if place.is_beyond and scope["path"] not in _PROBE_PATHS:
            app = Response(status_code=503, headers={"retry-after": "1"})
        is_last = place.is_beyond or asyncio.get_running_loop().time() >= self._ends_at
        is_last |= _LENGTHS.issubset(name for name, _ in scope["headers"])
        place.keep(self._is_known(scope))
        try:
            await app(scope, receive, _last(send) if is_last else send)
        finally:
            place.keep(False)


class _SmallChunksError(Exception):
    """A body consists of many small chunks, each of which costs as much time as kilobytes of a large one."""


class _Parser(h11.Connection):
    """Raises _SmallChunksError."""

    _num_chunks = _num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > _MANY_CHUNKS and self._num_bytes < _LEAST_CHUNK_BYTES * self._num_chunks:
                raise _SmallChunksError
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        return event


class _LimitedProtocol(H11Protocol):  # type: ignore[misc]  # uvicorn is not followed by mypy
    """One connection. Subclasses set the limits."""

    #: 0: no limit.
    max_connection_age_s: float
    header_timeout_s: float
    unread_s: float
    is_known: Callable[[Scope], bool]
    #: Set before the connection is made.
    place: Place
    #: Runs from the connection, or the first byte of another request, to the end of the request's headers.
    _headers_due: asyncio.TimerHandle | None = None
    #: Runs while the client has not taken all bytes.
    _reading_due: asyncio.TimerHandle | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Parser(h11.SERVER, _MAX_HEAD_BYTES)
        #: Received bytes that wait for the loop's next turn.
        self._received = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.place.abort = transport.abort
        transport.set_write_buffer_limits(1, 0)  # pauses when bytes wait, and resumes when none do
        # Varied, so that connections opened together do not close together.
        age_s = (self.max_connection_age_s or math.inf) * random.uniform(0.9, 1.0)
        ends_at = self.loop.time() + age_s
        self.app: ASGIApp = _ConnectionApp(self.app, self.place, type(self).is_known, ends_at=ends_at)
        if self.place.is_beyond:
            self.header_timeout_s = min(self.header_timeout_s, _PROBE_TIMEOUT_S)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.place.leave()
        self._headers_are_here()
        self._all_is_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handles at most _TURN_BYTES in a turn of the loop."""
        if self._received or len(data) > _TURN_BYTES:
            is_waiting = bool(self._received)
            self._received += data
            if not is_waiting:
                self._receive_part()
            return
        self._receive(data)

    def _receive_part(self) -> None:
        data = bytes(self._received[:_TURN_BYTES])
        del self._received[:_TURN_BYTES]
        self._receive(data)
        if self._received:
            self.transport.pause_reading()
            self.loop.call_soon(self._receive_next)

    def _receive_next(self) -> None:
        if self.transport.is_closing():
            return
        if len(self._received) <= _TURN_BYTES and not self.flow.read_paused:
            self.transport.resume_reading()
        self._receive_part()

    def _receive(self, data: bytes) -> None:
        request_before = self.cycle
        if self._headers_due is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_headers()
        try:
            super().data_received(data)
        except _SmallChunksError:
            self.transport.abort()
        if self.cycle is not request_before:
            self._headers_are_here()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # the rest of the body is not wanted
            self.loop.call_later(_REST_S, self._end_unfinished, self.cycle)
        if self._headers_due is None and self.conn.trailing_data[0]:  # the next request has begun
            self._expect_headers()

    def _end_unfinished(self, request: object) -> None:
        """Closes the connection, unless the rest of this request has arrived and others may follow."""
        if self.cycle is request and self.conn.their_state is h11.SEND_BODY:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._all_is_read()
        super().resume_writing()

    def _expect_reading(self) -> None:
        num_unread = self.transport.get_write_buffer_size()
        self._reading_due = self.loop.call_later(self.unread_s, self._check_reading, num_unread)

    def _check_reading(self, num_before: int) -> None:
        if num_before - self.transport.get_write_buffer_size() < _LEAST_READ_BYTES:
            self.transport.abort()
        else:
            self._expect_reading()

    def _all_is_read(self) -> None:
        if self._reading_due is not None:
            self._reading_due.cancel()
            self._reading_due = None

    def _expect_headers(self) -> None:
        self._headers_due = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _headers_are_here(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


class _QuietServer(uvicorn.Server):  # type: ignore[misc]  # uvicorn is not followed by mypy
    """Leaves signals to PodServer, which drains both protocols, and accepts by `Acceptor`."""

    def __init__(self, config: uvicorn.Config, max_connections: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._max_connections = max_connections
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None

        def make_protocol(place: Place) -> asyncio.Protocol:
            protocol: _LimitedProtocol = self.config.http_protocol_class(
                config=self.config, server_state=self.server_state, app_state={}
            )
            protocol.place = place
            return protocol

        self.servers = [
            Acceptor(sockets[0], make_protocol, max_connections=self._max_connections, tls=self._tls)
        ]
        self.started = True


class HttpServer:
    """`await start()`, then `close_after_responses()` if a drain comes first, and `await stop(grace_s)`.

    `is_known`: whether a request is one of a known caller; its connection then keeps its place.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        is_known: Callable[[Scope], bool],
        max_connections: int,
        max_connection_age_s: float = 0.0,
        header_timeout_s: float,
        unread_s: float = _UNREAD_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app = app
        self._closes_after_responses = False
        self._max_connections = max_connections
        self._tls = tls
        self._protocol = type(
            "Protocol",
            (_LimitedProtocol,),
            {
                "is_known": staticmethod(is_known),
                "max_connection_age_s": max_connection_age_s,
                "header_timeout_s": header_timeout_s,
                "unread_s": unread_s,
            },
        )
        self._host = host
        self._requested_port = port
        self._server: _QuietServer | None = None
        self._task: asyncio.Task[None] | None = None
        #: Bound port, known after `start`.
        self.port = 0

    async def start(self) -> None:
        """Raises OSError, with the remedy, when the port is taken."""
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, self._requested_port), family=family, backlog=1024)
        except OSError as error:
            raise OSError(
                f"cannot listen on {self._host}:{self._requested_port} ({error.strerror}); choose another "
                "with --http-port or --host"
            ) from error
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._call,
            interface="asgi3",
            http=self._protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
            ws="none",
        )
        config.load()
        self._server = _QuietServer(config, self._max_connections, self._tls)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise OSError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)

    def close_after_responses(self) -> None:
        """Closes each connection after its next response, so that clients reconnect elsewhere."""
        self._closes_after_responses = True

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, _last(send) if self._closes_after_responses else send)

    async def stop(self, grace_s: float) -> None:
        """Accepts no new connections, and closes open ones after `grace_s`."""
        if self._server is None or self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = round(grace_s)
        self._server.should_exit = True
        await self._task
