"""Waiting for other threads, tasks and processes, with a limit that fails the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object], *, limit_s: float = 8.0) -> None:
    """Waits on the event loop until the condition is true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {limit_s} s"
        await asyncio.sleep(0.005)


async def until_async(condition: Callable[[], Awaitable[object]], *, limit_s: float = 8.0) -> None:
    """As `until`, for a condition that is awaited."""
    deadline = time.monotonic() + limit_s
    while not await condition():
        assert time.monotonic() < deadline, f"not true within {limit_s} s"
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], *, limit_s: float = 10.0, interval_s: float = 0.002) -> None:
    """As `until`, for a test without an event loop."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {limit_s} s"
        time.sleep(interval_s)


def pause(seconds: float) -> None:
    """For parts that must be slow, and for time in which nothing may happen: no event marks its end."""
    time.sleep(seconds)


async def pause_async(seconds: float) -> None:
    """As `pause`, on the event loop."""
    await asyncio.sleep(seconds)


async def run_ready_tasks() -> None:
    """Lets every task run that can, and those that these wake; nothing else passes time."""
    for _ in range(10):
        await asyncio.sleep(0)
