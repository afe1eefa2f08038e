"""Notices pods that send nothing, in time during which this process runs.

After a pause of the gateway itself (a stopped process, a long turn of the event loop) everything is late, the
pods' messages too. Turns of a ticker, rather than the clock, tell the two apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

_TURN_S = 0.1


class Silence:
    """Belongs to one event loop. `limit_s`: longest silence, in a loop that turns as it should."""

    def __init__(self, limit_s: float) -> None:
        self._num_turns = round(limit_s / _TURN_S)
        self._turn = 0
        #: The current waits, with the turn in which each began.
        self._waits: dict[asyncio.Timeout, int] = {}
        self._ticker: asyncio.TimerHandle | None = None

    async def within(self, read: Awaitable[T]) -> T:
        """The result of `read`. Raises TimeoutError if there is none in time."""
        async with asyncio.timeout(None) as wait:
            self._waits[wait] = self._turn
            if self._ticker is None:
                self._tick_later()
            try:
                return await read
            finally:
                del self._waits[wait]

    def _tick_later(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(_TURN_S, self._tick)

    def _tick(self) -> None:
        self._ticker, self._turn = None, self._turn + 1
        for wait, began in self._waits.items():
            # One more, since the first turn may come at once.
            if self._turn - began > self._num_turns and not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())
        if self._waits:
            self._tick_later()
