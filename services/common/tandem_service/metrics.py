"""Prometheus: one registry per process, served over HTTP as /metrics.

The metrics stand in `metric_table`. Each server has its own registry rather than prometheus_client's
global one, so two servers in one test process do not collide.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

#: An event loop that is blocked for longer is not alive.
_LIVE_S = 1.0
#: Connections at once, each with a thread; beyond them the oldest one ends. One may neither send nor read for
#: this time.
_MAX_CONNECTIONS, _IDLE_S = 32, 5.0


def new_registry() -> CollectorRegistry:
    """A registry with metrics of the process (memory, CPU, file descriptors, garbage collection)."""
    # Omits the `_created` series of each counter and histogram.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class MetricsServer:
    """An HTTP server without TLS for scrapers and probes, on its own thread.

    /metrics   the registry; a busy event loop does not block scrapes
    /readyz    200 while `is_ready` is true and the event loop turns, else 503: whether to send calls here
    /healthz   200 while `is_serving` is true, else 503: whether calls are answered, as in grpc.health.v1
    /livez     200 if the event loop of the constructor answers within a second, else 503

    The kubelet's probes use it because they have no client certificate for mutual TLS. Raises OSError when
    the port is taken. Create it inside the running event loop.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        *,
        is_ready: Callable[[], bool],
        is_serving: Callable[[], bool],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self._checks = {
            "/readyz": lambda: is_ready() and self._loop_turns(),
            "/healthz": is_serving,
            "/livez": self._loop_turns,
        }
        self._connections: list[socket.socket] = []
        handler: Any = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _IDLE_S})
        self._server.verify_request = self._make_place  # type: ignore[method-assign, assignment]
        self._metrics: WSGIApplication = self._server.get_app()  # type: ignore[assignment]
        self._server.set_app(self._answer)
        #: The bound port, also when the requested one was 0.
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _make_place(self, connection: socket.socket, _: object) -> bool:
        """Makes room for a new connection, which its thread closes."""
        self._connections = [one for one in self._connections if one.fileno() >= 0]
        if len(self._connections) >= _MAX_CONNECTIONS:
            with contextlib.suppress(OSError):
                self._connections.pop(0).shutdown(socket.SHUT_RDWR)
        self._connections.append(connection)
        return True

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        check = self._checks.get(environ["PATH_INFO"])
        if check is None:
            return self._metrics(environ, start_response)
        status = "200 OK" if check() else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{status}\n".encode()]

    def _loop_turns(self) -> bool:
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # closed
            return False
        return turned.wait(_LIVE_S)
