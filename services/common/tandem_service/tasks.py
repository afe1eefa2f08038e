"""Ending tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


async def end_tasks(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels until all are done. A single cancellation can get lost in a library's clean-up, for example in
    a connection that is being opened."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.2)
