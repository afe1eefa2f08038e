"""Streamed responses, with immediate detection of a client disconnect.

Starlette detects a disconnect only when it sends, so a request in the queue or on a slow pod would keep
computing. This module watches the connection during the whole request; the server disconnects a client that
stops reading. While there are no events, pings are sent, because proxies and clients end silent connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tandem_service.tasks import end_tasks

T = TypeVar("T")

#: Longest time without bytes; proxies and clients commonly wait for 30 s or more.
_PING_S = 10.0


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
    """A response whose body is sent in parts."""

    def __init__(self, media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(media_type=media_type, headers={"x-accel-buffering": "no", **headers})
        del self.headers["content-length"]  # Response counts its empty body

    async def start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def send_part(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


class EventStream(PartedResponse):
    """Streams `events`, and `ping` when there is none for _PING_S. Closes them when the client disconnects.

    `held` is closed with the response, also if `events` never started, which does not run its own clean-up.
    """

    def __init__(
        self,
        request: Request,
        events: AsyncGenerator[bytes, None],
        *,
        held: AsyncExitStack,
        ping: bytes,
    ) -> None:
        super().__init__("text/event-stream", {"cache-control": "no-cache"})
        self._receive = request.receive
        self._events = events
        self._held = held
        self._ping = ping
        #: The loop's time.
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._held, aclosing(self._events):
                await until_disconnect(self._receive, self._send_all(send))
        except ClientGoneError:
            return

    async def _send_all(self, send: Send) -> None:
        await self.start(send)
        pings = asyncio.create_task(self._send_pings(send))
        try:
            async for event in self._events:
                await self._send_event(send, event)
        finally:
            await end_tasks([pings])
        await self.send_part(send, b"", is_last=True)

    async def _send_event(self, send: Send, event: bytes) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        await self.send_part(send, event)

    async def _send_pings(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            await asyncio.sleep(self._sent_at + _PING_S - loop.time())
            if loop.time() >= self._sent_at + _PING_S:
                await self._send_event(send, self._ping)
