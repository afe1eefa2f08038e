"""Streamed responses, with immediate detection of a client disconnect.

Starlette detects a disconnect only when it sends, so a request in the queue or on a slow pod would keep
computing. This module watches the connection during the whole request. A client that stays connected but does
not read for `send_timeout_s` counts as disconnected, because it would keep its slot forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

#: Limit on one send.
_SEND_TIMEOUT_S = 30.0


class ClientGoneError(Exception):
    """The client closed the connection or stopped reading."""


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`. Cancels it and raises ClientGoneError when the client disconnects.

    Read the request's body first.
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
        # Wait until the work has released everything.
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class PartedResponse(Response):
    """A response whose body is sent in parts. Raises ClientGoneError when the client does not read one."""

    def __init__(
        self, media_type: str, headers: Mapping[str, str], send_timeout_s: float = _SEND_TIMEOUT_S
    ) -> None:
        super().__init__(media_type=media_type, headers={"x-accel-buffering": "no", **headers})
        del self.headers["content-length"]  # Response counts its empty body
        self._send_timeout_s = send_timeout_s

    async def start(self, send: Send) -> None:
        message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._send_within(send, message)

    async def send_part(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": not is_last}
        await self._send_within(send, message)

    async def _send_within(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await send(message)
        except TimeoutError:
            raise ClientGoneError from None


class EventStream(PartedResponse):
    """Streams `events`; closes it when the client disconnects.

    `source` is the generator that `events` reads. It is closed here too, because `events` does not run its
    own clean-up if it never started.
    """

    def __init__(
        self,
        request: Request,
        events: AsyncGenerator[bytes, None],
        *,
        source: AsyncGenerator[object, None],
        send_timeout_s: float = _SEND_TIMEOUT_S,
    ) -> None:
        super().__init__("text/event-stream", {"cache-control": "no-cache"}, send_timeout_s)
        self._receive = request.receive
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._source), aclosing(self._events):
                await until_disconnect(self._receive, self._send_all(send))
        except ClientGoneError:
            return

    async def _send_all(self, send: Send) -> None:
        await self.start(send)
        async for event in self._events:
            await self.send_part(send, event)
        await self.send_part(send, b"", is_last=True)
