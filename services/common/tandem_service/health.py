"""grpc.health.v1 as the pod's server needs it: set without awaiting, and watchers end when it drains.

The library's aio servicer keeps Watch streams open for ever, which would make each drain last its full
limit, and its `set` is a coroutine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]

Status = health_pb2.HealthCheckResponse.ServingStatus


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Knows the given services and "" (the whole server); all start NOT_SERVING.

    Belongs to one event loop; call it from there only.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = frozenset({"", *service_names})
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        self._serving = serving
        self._notify()

    def close(self) -> None:
        """NOT_SERVING for good; watchers hear it and their streams end."""
        self._serving = False
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        # Waiters hold the old event; whoever comes later waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        if service not in self._names:
            return int(Status.Value("SERVICE_UNKNOWN"))
        return int(Status.Value("SERVING" if self._serving else "NOT_SERVING"))

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told: int | None = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
                # It may have changed while that was sent, for the last time perhaps.
            elif self._closed:
                return
            else:
                await changed.wait()
