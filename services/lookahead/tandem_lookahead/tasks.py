"""Small things about tasks and events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


async def end_tasks(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels until all are done: one cancellation can get lost in a library's clean-up (a connection
    being opened, `wait_for` whose future is just done), and a loop would then go on for ever."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.2)


async def happens(event: asyncio.Event, limit_s: float) -> bool:
    """Whether the event is set within the limit."""
    try:
        await asyncio.wait_for(event.wait(), limit_s)
    except TimeoutError:
        return False
    return True
