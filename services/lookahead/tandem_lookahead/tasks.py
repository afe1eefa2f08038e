"""Ending background tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


async def end_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels until all are done: one cancellation can get lost in a library's clean-up (a connection
    being opened, `wait_for` whose future is just done), and a loop would then go on for ever."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.2)
