"""How long the turns of the event loop take, which all streams of a gateway share."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

#: Of CPU time between two turns. Not of the clock: other processes share the cores.
STALL_S = 0.05


@asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """CPU seconds of each turn while it is open.

    As in a gateway's process, the garbage collector leaves alone what was there before: here also what all
    tests have imported.
    """
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
