"""CPU time of the event loop's turns, which all streams of a gateway share."""

from __future__ import annotations

import asyncio
import gc
import inspect
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

#: CPU time between two turns. It is not clock time, because other processes share the cores.
STALL_S = 0.05
#: Shorter turns of a test's gateway pass: the machine may be slow, and its pauses count as CPU time.
_LONG_S = 0.1
_TESTS = (str(Path(__file__).parents[1]), "/pytest_asyncio/", "/tandem_cli/")


@asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """CPU seconds of each turn while it is open.

    As in a gateway's process, the garbage collector ignores earlier objects, here also what all tests have
    imported.
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


@contextmanager
def watched_callbacks(limit_s: float = _LONG_S) -> Iterator[list[str]]:
    """Callbacks that took more CPU time than the limit, except those of tests: seconds and description."""
    run, slow = asyncio.Handle._run, []

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        seconds = time.thread_time() - began
        if seconds > limit_s and not _is_of_tests(handle):
            slow.append(f"{seconds:.3f} s: {_described(handle)}")

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    gc.freeze()
    try:
        yield slow
    finally:
        gc.unfreeze()
        asyncio.Handle._run = run  # type: ignore[method-assign]


def _coroutine(handle: asyncio.Handle) -> object:
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return task.get_coro() if isinstance(task, asyncio.Task) else None


def _is_of_tests(handle: asyncio.Handle) -> bool:
    coroutine = _coroutine(handle)
    return inspect.iscoroutine(coroutine) and any(part in coroutine.cr_code.co_filename for part in _TESTS)


def _described(handle: asyncio.Handle) -> str:
    coroutine = _coroutine(handle)
    return repr(handle._callback) if coroutine is None else repr(coroutine)  # type: ignore[attr-defined]
