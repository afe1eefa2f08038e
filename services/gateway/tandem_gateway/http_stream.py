"""Server-sent events, and noticing at once that the client has left.

Starlette sees a disconnect when it next sends; a request that waits in the queue or for a slow pod would go
on computing for nobody. Here the connection is watched from the first byte to the last. A client that stays
but reads nothing for too long counts as gone, or it would keep its place for ever.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

#: Longest that a client may keep one send waiting.
_SEND_TIMEOUT_S = 30.0


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
    """Sends what `events` yields, as it comes; closes it when the client leaves.

    `source` is what `events` reads. It is closed here too, since a generator that never started does not
    run the clean-up it would have done itself.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        events: AsyncGenerator[bytes, None],
        *,
        source: AsyncGenerator[object, None],
        send_timeout_s: float = _SEND_TIMEOUT_S,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # Response counts its empty body
        self._receive = request.receive
        self._events = events
        self._source = source
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._source), aclosing(self._events):
                await until_disconnect(self._receive, self._send_all(send))
        except ClientGoneError:
            return

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._send(send, start)
        async for event in self._events:
            await self._send(send, {"type": "http.response.body", "body": event, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)
        except TimeoutError:
            raise ClientGoneError from None
