"""The thread that owns an engine, and how other threads reach it.

Only this thread uses the engine's state. Other threads pass functions to `call`, which run between steps and
resolve a future. Each request's outputs go to the listener given for it. The thread sleeps while
there is no work.

An exception in a step is a bug, and the state may be broken: every listener receives it, `failed` is set,
and the process is expected to exit and be restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tandem_core.errors import InvariantError
from tandem_kernels import native

from tandem_engine.engine import Engine, EngineSnapshot, StepOutput

T = TypeVar("T")
#: Called on the engine's thread with an output, or with the exception that ended the request or the engine.
Listener = Callable[[StepOutput | Exception], None]

#: Time without work after which the invariants are checked; that takes milliseconds in a large pool.
_CHECK_AFTER_S = 0.2
#: Wait when there is work but none can be scheduled (all blocks are in transfers).
_NOTHING_SCHEDULED_WAIT_S = 0.005


class EngineLoop:
    """Runs `Engine.step` on its own thread until closed."""

    def __init__(self, engine: Engine, on_failure: Callable[[Exception], None] | None = None) -> None:
        self.engine = engine
        self.failed: Exception | None = None
        #: Whether the thread hangs. Set by the code that watches `progress`.
        self.is_stuck = False
        self._is_waiting = False
        self._num_turns = 0
        self._snapshot = self.engine.snapshot()
        self._on_failure = on_failure
        self._listeners: dict[str, Listener] = {}
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops after the current step; drops running requests."""
        self._closing = True
        self._calls.put(None)
        self._thread.join()

    def progress(self) -> int | None:
        """Changes while the thread works; None while it waits for work."""
        if self._is_waiting:
            return None
        return self._num_turns + self.engine.work_done() + native.work_done()

    def has_died(self) -> bool:
        """Whether the thread has ended and `close` did not end it."""
        return self._thread.ident is not None and not (self._thread.is_alive() or self._closing)

    def snapshot(self) -> tuple[EngineSnapshot, float]:
        """The newest snapshot, and the seconds since the thread reported: 0 while it waits for work.

        Raises the exception that ended the engine.
        """
        if self.failed is not None:
            raise self.failed
        newest = self._snapshot
        return newest, 0.0 if self._is_waiting else time.monotonic() - newest.taken

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs function on the engine's thread, between steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        if self.failed is not None:
            future.set_exception(self.failed)
        else:
            self._calls.put(run)
        return future

    def call_async(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """`call` for callers on an event loop."""
        return asyncio.wrap_future(self.call(function))

    # The rest is called on the engine's thread only (through `call`).

    def listen(self, request_id: str, listener: Listener) -> None:
        if request_id in self._listeners:
            raise InvariantError(f"request {request_id} is already running here")
        self._listeners[request_id] = listener

    def forget(self, request_id: str) -> None:
        """Stops listening and aborts the request if it still runs."""
        self._listeners.pop(request_id, None)
        self.engine.abort(request_id)

    def publish(self, output: StepOutput) -> None:
        listener = self._listeners.get(output.request.request_id)
        if output.finished:
            self._listeners.pop(output.request.request_id, None)
        if listener is not None:
            listener(output.error or output)

    def _run(self) -> None:
        try:
            while not self._closing:
                is_idle = not self.engine.has_work()
                if is_idle:
                    self.engine.rest()
                self._drain(block=is_idle)
                steps_before = self.engine.num_steps
                outputs = self.engine.step()
                self._snapshot = self.engine.snapshot()
                for output in outputs:
                    self.publish(output)
                if self.engine.num_steps == steps_before and self.engine.has_work():
                    self._drain(block=True, timeout=_NOTHING_SCHEDULED_WAIT_S)
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            failure = error if isinstance(error, Exception) else InvariantError(repr(error))
            failure.__traceback__ = error.__traceback__
            self.failed = failure
            # First, because a pod exits here: its clients see a lost connection and retry elsewhere.
            if self._on_failure is not None:
                self._on_failure(failure)
            for listener in list(self._listeners.values()):
                listener(failure)

    def _drain(self, *, block: bool, timeout: float | None = None) -> None:
        """Runs the queued calls; with block, waits for the first one."""
        is_checked = not block or timeout is not None
        has_called = False
        while True:
            self._num_turns += 1
            self._is_waiting = block
            try:
                call = self._calls.get(block=block, timeout=timeout if is_checked else _CHECK_AFTER_S)
            except queue.Empty:
                if not is_checked:
                    is_checked = True
                    self.engine.check()
                    self._snapshot = self.engine.snapshot()
                    continue
                if has_called:  # the next step may be long
                    self._snapshot = self.engine.snapshot()
                return
            finally:
                self._is_waiting = False
            if call is None:
                return
            call()
            has_called = is_checked = True
            block = False


async def wait_for_future(future: Future[Any], timeout_s: float) -> bool:
    """Whether the future settles within timeout_s; the caller reads its result or exception from the future.

    Unlike asyncio.wrap_future it never cancels the future and logs no warning about unread exceptions.
    """
    settled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_done(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has closed
            loop.call_soon_threadsafe(settled.set)

    future.add_done_callback(on_done)
    # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that coincides with the result.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await settled.wait()
    return future.done()
