"""Waiting for what other threads, tasks and processes do, with a limit that fails the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], *, limit_s: float = 8.0) -> None:
    """Waits on the event loop until the condition is true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], bool], *, limit_s: float = 10.0) -> None:
    """The same for a test without an event loop."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
