"""Waiting, on an event loop, for what threads do."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from typing import Any


async def wait_for_future(future: Future[Any], timeout_s: float) -> bool:
    """Whether the future settles within timeout_s; its result or exception stays with the future.

    Unlike asyncio.wrap_future it never cancels the future and never complains of an exception nobody took.
    """
    settled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_done(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(settled.set)

    future.add_done_callback(on_done)
    # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that meets the result.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await settled.wait()
    return future.done()
