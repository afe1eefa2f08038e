"""Updates on their way to one pod."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from tandem_lookahead.codec import Delta, Hello, Snapshot, Update

#: Updates that may wait for one pod before its stream is closed; it then resumes from its position.
MAX_WAITING_UPDATES = 4096


class FollowerLaggingError(Exception):
    """The pod reads too slowly; it should reconnect with its position (RESOURCE_EXHAUSTED)."""


class Follower:
    """What `put` takes comes out of `updates`, in order."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        #: Where the pod will be once it has read what was put.
        self.place = hello.place
        self._waiting: deque[Update] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self.is_lagging = False

    def put(self, update: Update) -> None:
        """Never blocks: a follower that is too far behind is closed instead."""
        if len(self._waiting) >= MAX_WAITING_UPDATES:
            self.is_lagging = True
            self._waiting.clear()
            self.close()
            return
        if isinstance(update, Delta | Snapshot):
            self.place = update.place
        self._waiting.append(update)
        self._changed.set()

    def close(self) -> None:
        """Ends `updates` after what is waiting."""
        self._closed = True
        self._changed.set()

    async def updates(self) -> AsyncIterator[Update]:
        """What was put, in order, until closed. Raises FollowerLaggingError."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self.is_lagging:
                raise FollowerLaggingError(
                    f"over {MAX_WAITING_UPDATES} updates were waiting; reconnect with have_position"
                )
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()
