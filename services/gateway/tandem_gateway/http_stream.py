"""Server-sent events, and noticing at once that the client has left.

Starlette sees a disconnect when it next sends; a request that waits in the queue or for a slow pod would go
on computing for nobody. Here the connection is watched from the first byte to the last.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; cancels it and raises ClientGoneError as soon as the client disconnects.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for pending in (task, watch):
            pending.cancel()
        # The work must have given everything back before anyone goes on.
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(event: Mapping[str, object]) -> bytes:
    """One server-sent event with a JSON body."""
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends what the generator yields, as it comes; closes it when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # Response counts its empty body
        self._receive = request.receive
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            await send(start)
            await until_disconnect(self._receive, self._send_all(send))
        except ClientGoneError:
            return
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
