"""Measures iterations of the event loop, which all streams of a gateway share."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

#: CPU time of an iteration. Not wall time, because other processes share the cores.
STALL_S = 0.05


@asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """CPU seconds of each iteration while it is open. As in a gateway, the garbage collector ignores older
    objects: here also imports of all tests."""
    turns: list[float] = []

    async def watch() -> None:
        while True:
            start = time.thread_time()
            await asyncio.sleep(0.001)
            turns.append(time.thread_time() - start)

    task = asyncio.create_task(watch())
    gc.freeze()
    try:
        yield turns
    finally:
        gc.unfreeze()
        task.cancel()
