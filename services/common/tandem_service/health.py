"""grpc.health.v1 with a synchronous setter, whose Watch streams end when the server drains.

The library's aio servicer keeps Watch streams open for ever, so each drain would last its full limit; and
its `set` is a coroutine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_core.errors import quoted

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]

Status = health_pb2.HealthCheckResponse.ServingStatus


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Serves the given services and "" (the whole server); all start NOT_SERVING.

    Call it from one event loop only.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = frozenset({"", *service_names})
        #: Read by other threads too.
        self.is_serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        self.is_serving = serving
        self._notify()

    def close(self) -> None:
        """Sets NOT_SERVING permanently; watchers are notified and their streams end."""
        self.is_serving = False
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        # Current waiters hold the old event; later ones wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        if service not in self._names:
            return int(Status.Value("SERVICE_UNKNOWN"))
        return int(Status.Value("SERVING" if self.is_serving else "NOT_SERVING"))

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {quoted(request.service)} here")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: _Context
    ) -> health_pb2.HealthListResponse:
        statuses = {
            name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in sorted(self._names)
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        sent: int | None = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
                # The status may have changed while this was sent, so check again before waiting.
            elif self._closed:
                return
            else:
                await changed.wait()
