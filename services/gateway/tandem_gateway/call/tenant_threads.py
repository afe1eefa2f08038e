"""Threads for the callers' heavy work, in turns of tenants: tokenizing long texts, checking guides."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandem_gateway.auth import Caller

T = TypeVar("T")


class TenantThreads:
    """A tenant has one piece of work at a time in the threads or in front of them, so that no tenant occupies
    all. Without API keys there are no tenants to tell apart. Belongs to one event loop."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        #: Sizes of unfinished work, by tenant.
        self.waiting: Counter[str] = Counter()
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(asyncio.BoundedSemaphore)

    async def run(self, caller: Caller, work: Callable[[], T], size: int = 1) -> T:
        self.waiting[caller.tenant] += size
        try:
            if caller.is_anyone:
                return await asyncio.wrap_future(self._threads.submit(work))
            turn = self._turns[caller.tenant]
            await turn.acquire()
            loop = asyncio.get_running_loop()
            running = self._threads.submit(work)
            # The thread continues when the caller leaves, and holds the tenant's turn until it ends.
            running.add_done_callback(lambda _: loop.call_soon_threadsafe(turn.release))
            return await asyncio.wrap_future(running)
        finally:
            self.waiting[caller.tenant] -= size
