"""HTTP/2 on the HTTP port, for clients that begin with its preface: `buf curl` does, without TLS too.

Http2Protocol takes a connection over from uvicorn's HTTP/1.1 protocol and calls the same ASGI application, in
one task for each stream. The `h2` package keeps the protocol's state; this module moves bytes.

    HEADERS        -> a task runs the application
    DATA           -> the request's body; credit is given back as the application reads
    RST_STREAM     -> `http.disconnect`, as for a closed connection
    the response   -> waits for the client's credit and for the socket, like a slow HTTP/1.1 connection
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from urllib.parse import unquote

import structlog
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame
from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

#: At a time. Each may leave a body of one flow-control window (64 KiB in all streams) unread.
_MAX_STREAMS = 64
#: In a connection's life: each costs a task, also one that is reset at once.
_MAX_STREAMS_EVER = 1000
#: Of answers to PING and SETTINGS that the client does not read; streams wait long before.
_MAX_UNREAD_BYTES = 4 * 1024 * 1024
#: RFC 9113, 8.2.2.
_CONNECTION_HEADERS = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)


class Http2Protocol(asyncio.Protocol):
    """One connection. It closes after `idle_timeout_s` without a stream, and after the response that says
    `connection: close`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        connections: set[object],
        tasks: set[asyncio.Task[None]],
        idle_timeout_s: float,
    ) -> None:
        """`connections` and `tasks` are those of uvicorn's server, which waits for them when it stops."""
        self._app = app
        self._connections = connections
        self._tasks = tasks
        self._idle_timeout_s = idle_timeout_s
        self._loop = asyncio.get_running_loop()
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        # In force at once, not when the client has acknowledged them.
        self.h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: _MAX_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
            },
        )
        self._streams: dict[int, _Stream] = {}
        self._num_streams_ever = 0
        self._is_last = False
        self._idle_timer: asyncio.TimerHandle | None = None
        #: Since when it waits for a further stream.
        self.idle_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.flow = FlowControl(transport)
        self._connections.add(self)
        self._scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "2",
            "scheme": "https" if is_ssl(transport) else "http",
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
            "root_path": "",
        }
        self.h2.initiate_connection()
        self.flush()
        self._expect_stream()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._end_waiting()
        for stream in self._streams.values():
            stream.lost()
        self.flow.resume_writing()

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def shutdown(self) -> None:
        """Called by uvicorn when it stops."""
        self.close_after_streams()

    def close_after_streams(self) -> None:
        """Tells the client to open no more here. h2's own GOAWAY would end those that run."""
        if not self._is_last:
            self._is_last = True
            self.flush()
            frame = GoAwayFrame(0, last_stream_id=self.h2.highest_inbound_stream_id)
            self.transport.write(frame.serialize())
        if not self._streams:
            self._close()

    def data_received(self, data: bytes) -> None:
        try:
            events = self.h2.receive_data(data)
        except ProtocolError:
            self._close()  # with the GOAWAY that h2 has written
            return
        for event in events:
            self._handle(event)
        self.flush()
        if self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.transport.abort()

    def flush(self) -> None:
        data = self.h2.data_to_send()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def _handle(self, event: Event) -> None:
        match event:
            case RequestReceived():
                self._begin(event)
            case DataReceived() if (stream := self._streams.get(event.stream_id)) is not None:
                stream.got(event.data, event.flow_controlled_length)
            case DataReceived():
                self.acknowledge(event.flow_controlled_length, event.stream_id)
            case StreamEnded() if (stream := self._streams.get(event.stream_id)) is not None:
                stream.got_all()
            case StreamReset() if (stream := self._streams.pop(event.stream_id, None)) is not None:
                stream.lost()
                self._expect_stream()
            case WindowUpdated() | RemoteSettingsChanged():
                for stream in self._streams.values():
                    stream.changed.set()
            case ConnectionTerminated():
                self._close()

    def _begin(self, event: RequestReceived) -> None:
        stream_id = event.stream_id
        assert stream_id is not None
        if self._is_last:
            self.reset(stream_id, ErrorCodes.REFUSED_STREAM)  # it may be sent again, on another connection
            return
        stream = _Stream(self, stream_id, _scope(self._scope, event.headers or ()))
        self._streams[stream_id] = stream
        self._end_waiting()
        self._num_streams_ever += 1
        if self._num_streams_ever == _MAX_STREAMS_EVER:
            self.close_after_streams()
        task = self._loop.create_task(stream.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ended(self, stream_id: int) -> None:
        """Called by a stream whose application has returned."""
        if self._streams.pop(stream_id, None) is not None:
            self._expect_stream()

    def acknowledge(self, num_bytes: int, stream_id: int | None) -> None:
        """Lets the client send as many again."""
        if num_bytes and stream_id is not None:
            with contextlib.suppress(ProtocolError):
                self.h2.acknowledge_received_data(num_bytes, stream_id)

    def reset(self, stream_id: int, code: ErrorCodes) -> None:
        with contextlib.suppress(ProtocolError):
            self.h2.reset_stream(stream_id, code)
        self.flush()

    def _expect_stream(self) -> None:
        if self._streams or self.transport.is_closing():
            return
        if self._is_last:
            self._close()
            return
        if self._idle_timer is None:
            self.idle_since = self._loop.time() if self._num_streams_ever else None
            self._idle_timer = self._loop.call_later(self._idle_timeout_s, self._close)

    def _end_waiting(self) -> None:
        self.idle_since = None
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _close(self) -> None:
        with contextlib.suppress(ProtocolError):
            self.h2.close_connection()
        self.flush()
        self.transport.close()


def _scope(of_connection: Scope, headers: Iterable[tuple[bytes, bytes]]) -> Scope:
    pseudo = {name: value for name, value in headers if name.startswith(b":")}
    raw_path, _, query = pseudo.get(b":path", b"*").partition(b"?")
    plain = [(name, value) for name, value in headers if not name.startswith(b":")]
    if b":authority" in pseudo and not any(name == b"host" for name, _ in plain):
        plain.append((b"host", pseudo[b":authority"]))
    return {
        **of_connection,
        "method": pseudo[b":method"].decode("latin-1"),
        "path": unquote(raw_path.decode("latin-1")),
        "raw_path": raw_path,
        "query_string": query,
        "headers": plain,
        "state": {},
    }


class _Stream:
    """A request and its response: the application's `receive` and `send`."""

    def __init__(self, connection: Http2Protocol, stream_id: int, scope: Scope) -> None:
        self._connection = connection
        self._id = stream_id
        self._scope = scope
        self._body = bytearray()
        #: Bytes of flow control that the client has used and not got back.
        self._num_owed = 0
        self._has_all = self._has_told_all = False
        self._is_lost = self._is_complete = False
        #: Set after each change that `receive` or `send` may wait for.
        self.changed = asyncio.Event()

    def got(self, data: bytes, num_controlled: int) -> None:
        self._body += data
        self._num_owed += num_controlled
        self.changed.set()

    def got_all(self) -> None:
        self._has_all = True
        self.changed.set()

    def lost(self) -> None:
        self._is_lost = True
        self.changed.set()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        except Exception as error:
            if not self._is_complete:  # else the application has answered and logged it
                structlog.get_logger("tandem.http").exception("unexpected exception", exc_info=error)
        finally:
            if not self._is_complete and not self._is_lost:
                self._connection.reset(self._id, ErrorCodes.INTERNAL_ERROR)
            self._connection.acknowledge(self._num_owed, self._id)
            self._connection.ended(self._id)

    async def _wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()

    async def _receive(self) -> Message:
        while True:
            if self._is_lost or self._is_complete:
                return {"type": "http.disconnect"}
            if self._body or (self._has_all and not self._has_told_all):
                body = bytes(self._body)
                self._body.clear()
                self._has_told_all = self._has_all
                self._connection.acknowledge(self._num_owed, self._id)
                self._num_owed = 0
                self._connection.flush()
                return {"type": "http.request", "body": body, "more_body": not self._has_all}
            await self._wait()

    async def _send(self, message: Message) -> None:
        if self._is_lost or self._is_complete:
            return
        try:
            if message["type"] == "http.response.start":
                self._send_start(message)
            else:
                is_last = not message.get("more_body", False)
                await self._send_body(bytes(message.get("body", b"")), is_last=is_last)
        except ProtocolError:  # the stream or the connection has ended
            self.lost()

    def _send_start(self, message: Message) -> None:
        headers = [(b":status", str(message["status"]).encode())]
        for name, value in message.get("headers", ()):
            if name.lower() not in _CONNECTION_HEADERS:
                headers.append((name.lower(), value))
            elif (name.lower(), value.lower()) == (b"connection", b"close"):
                self._connection.close_after_streams()
        self._connection.h2.send_headers(self._id, headers)
        self._connection.flush()

    async def _send_body(self, body: bytes, *, is_last: bool) -> None:
        h2 = self._connection.h2
        rest = memoryview(b"" if self._scope["method"] == "HEAD" else body)
        while rest and not self._is_lost:
            size = min(len(rest), h2.local_flow_control_window(self._id), h2.max_outbound_frame_size)
            if size <= 0:
                await self._wait()
                continue
            h2.send_data(self._id, bytes(rest[:size]))
            self._connection.flush()
            rest = rest[size:]
            await self._connection.flow.drain()
        if is_last and not self._is_lost:
            self._is_complete = True
            h2.end_stream(self._id)
            if not self._has_all:  # the client need not send the rest
                self._connection.reset(self._id, ErrorCodes.NO_ERROR)
            self._connection.flush()
            self.changed.set()
