"""Runs uvicorn in the process's event loop, without its signal handlers and with a bounded drain. Adds limits
on connections, on their age, and on the time until a request's headers have arrived."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)

#: Served to a few connections beyond the limit, so that probes do not consider a full gateway dead.
_PROBE_PATHS = frozenset({"/health", "/ping"})
_PROBE_CONNECTIONS = 64
_PROBE_TIMEOUT_S = 1.0
#: Idle connections are closed after this time.
_KEEP_ALIVE_S = 20


def _last(send: Send) -> Send:
    """Adds the header that closes the connection after the response."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        await send(message)

    return send_last


class _ConnectionApp:
    """The application as one connection sees it. A response is the connection's last one if it begins at
    `ends_at` (the loop's time) or later, and with `serves_probes_only`, which refuses other requests."""

    def __init__(self, app: ASGIApp, *, ends_at: float) -> None:
        self._app = app
        self._ends_at = ends_at
        self.serves_probes_only = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if self.serves_probes_only and scope["path"] not in _PROBE_PATHS:
            app = Response(status_code=503, headers={"retry-after": "1"})
        is_last = self.serves_probes_only or asyncio.get_running_loop().time() >= self._ends_at
        await app(scope, receive, _last(send) if is_last else send)


class _LimitedProtocol(H11Protocol):  # type: ignore[misc]  # uvicorn is not followed by mypy
    """One connection. Subclasses set the limits."""

    max_connections: int
    #: 0: no limit.
    max_connection_age_s: float
    header_timeout_s: float
    #: Start of the wait for another request; None: it does not wait.
    idle_since: float | None = None
    #: Runs from the connection, or the first byte of another request, to the end of the request's headers.
    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # Varied, so that connections opened together do not close together.
        age_s = (self.max_connection_age_s or math.inf) * random.uniform(0.9, 1.0)
        app = _ConnectionApp(self.app, ends_at=self.loop.time() + age_s)
        self.app: ASGIApp = app
        num_beyond = len(self.connections) - self.max_connections
        if num_beyond > 0 and self._close_longest_idle():
            num_beyond -= 1
        if num_beyond > _PROBE_CONNECTIONS:
            transport.write(_TOO_MANY)
            transport.close()
            return
        if num_beyond > 0:
            app.serves_probes_only = True
            self.header_timeout_s = min(self.header_timeout_s, _PROBE_TIMEOUT_S)
        self._expect_headers()

    def _close_longest_idle(self) -> bool:
        """Closes the connection that has waited longest for another request. Returns whether there was
        one."""
        idle = [other for other in self.connections if other.idle_since is not None and other is not self]
        if not idle:
            return False
        longest = min(idle, key=lambda other: other.idle_since)
        longest.idle_since = None
        longest.transport.close()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_are_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        request_before = self.cycle
        self.idle_since = None
        if self._headers_due is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_headers()
        super().data_received(data)
        if self.cycle is not request_before:
            self._headers_are_here()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since = self.loop.time()
        if self._headers_due is None and self.conn.trailing_data[0]:  # the next request has begun
            self._expect_headers()

    def _expect_headers(self) -> None:
        self._headers_due = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _headers_are_here(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


class _QuietServer(uvicorn.Server):  # type: ignore[misc]  # uvicorn is not followed by mypy
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """PodServer handles the signals and drains both protocols."""
        yield


class HttpServer:
    """`await start()`, then `close_after_responses()` if a drain comes first, and `await stop(grace_s)`."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        max_connections: int,
        max_connection_age_s: float = 0.0,
        header_timeout_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app = app
        self._closes_after_responses = False
        self._ssl_options: dict[str, object] = {}
        if tls is not None:
            self._ssl_options["ssl_context_factory"] = lambda config, default: tls
        self._protocol = type(
            "Protocol",
            (_LimitedProtocol,),
            {
                "max_connections": max_connections,
                "max_connection_age_s": max_connection_age_s,
                "header_timeout_s": header_timeout_s,
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
            **self._ssl_options,
        )
        self._server = _QuietServer(config)
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
