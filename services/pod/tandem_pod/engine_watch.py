"""Detects an engine whose thread hangs: it neither waits for work nor makes progress.

The compiled CPU kernels count their work, some columns of a product at a time, and the engine counts the
sequences that it verifies and the prompts' rows that it scores. So a second without progress is a hang for
any model and request. Without these kernels a step of the model is one unit, which takes far longer.

    stuck     the pod is NOT_SERVING, ends its streams with UNAVAILABLE and takes no new ones
    for 10 s  the process ends, so that its supervisor starts another
    it moves  the pod serves again: its memory was on a slow disk, or its host was suspended

Callers count a hang like a crash, against requests whose work was under way. The others get CANCELLED, which
does not count. A thread that has ended ends the process at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import structlog
from tandem_engine.loop import EngineLoop

_LOOK_S = 0.1
#: Streams must end within a second.
_COMPILED_LIMIT_S = 0.75
#: A step of a large model without compiled kernels takes tens of seconds.
_STEP_LIMIT_S = 120.0
_EXIT_AFTER_S = 10.0


class EngineWatch:
    """`await run()` until cancelled. Sets `loop.is_stuck`."""

    def __init__(
        self,
        loop: EngineLoop,
        *,
        counts_work: bool,
        on_change: Callable[[bool], None],
        on_hang: Callable[[Exception], None],
    ) -> None:
        """`counts_work`: whether progress is counted within a step. Calls `on_change(is_stuck)`, and
        `on_hang` if the engine stays stuck."""
        self._loop = loop
        self._limit_s = _COMPILED_LIMIT_S if counts_work else _STEP_LIMIT_S
        self._on_change = on_change
        self._on_hang = on_hang
        self._log = structlog.get_logger("tandem.engine")

    async def run(self) -> None:
        progress, silent_s = self._loop.progress(), 0.0
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            if self._loop.has_died():
                self._on_hang(RuntimeError("the engine's thread has ended"))
            # If this task runs late, so does the whole process: the host is busy or was suspended.
            silent_s += min(now - looked_at, 2 * _LOOK_S)
            looked_at = now
            last, progress = progress, self._loop.progress()
            if progress is None or progress != last:
                silent_s = 0.0
            is_stuck = silent_s > self._limit_s
            if is_stuck != self._loop.is_stuck:
                self._loop.is_stuck = is_stuck
                self._log.warning("the engine hangs" if is_stuck else "the engine moves again")
                self._on_change(is_stuck)
            if silent_s > self._limit_s + _EXIT_AFTER_S:
                self._on_hang(TimeoutError(f"the engine has made no progress for {silent_s:.0f} s"))


async def leave_if_stuck(
    loop: EngineLoop, context: grpc.aio.ServicerContext[Any, Any], request_id: str | None = None
) -> None:
    """Ends the call if the engine hangs, because normal ends of calls need the engine: with UNAVAILABLE, or
    with CANCELLED if the engine does not work on the request."""
    if not loop.is_stuck:
        return
    if request_id is None or loop.engine.is_under_way(request_id):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine hangs")
    await context.abort(grpc.StatusCode.CANCELLED, "the engine hangs with other requests")
