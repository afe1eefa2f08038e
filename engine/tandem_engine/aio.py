"""Lets an event loop wait for the futures of other threads."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from typing import Any


async def wait_for_future(future: Future[Any], timeout_s: float) -> bool:
    """Whether the future settles within timeout_s; the caller reads its result or exception from the future.

    Unlike asyncio.wrap_future it never cancels the future and logs no warning about unread exceptions.
    """
    settled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_done(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has closed, so nobody waits
            loop.call_soon_threadsafe(settled.set)

    future.add_done_callback(on_done)
    # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that coincides with the result.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await settled.wait()
    return future.done()
