"""A device of two streams on CPU memory: launched work runs later, when a test or a waiting host runs it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class FakeEvent:
    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams
        self.passed = False

    def query(self) -> bool:
        self._streams.raise_if_broken()
        return self.passed

    def synchronize(self) -> None:
        self._streams.run_until(self)


@dataclass
class _Work:
    run: Callable[[], object]
    after: FakeEvent | None
    done: FakeEvent


class FakeStreams:
    """`Streams` over CPU memory. A host that waits runs the streams just as far as it must.

    An error in a stream is final, as on CUDA: every later wait raises it. `log` names what happened in order.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.log: list[str] = []
        self.broken: Exception | None = None
        #: Raised by the next `enqueue`.
        self.refuse: Exception | None = None
        self._compute: deque[_Work] = deque()
        self._transfers: deque[_Work] = deque()

    def pinned(self, num_words: int) -> Tensor:
        return torch.full((num_words,), -1, dtype=torch.int64)

    on_device = pinned

    def launch(self, work: Callable[[], object]) -> None:
        """Adds to the compute stream, as the engine does."""
        with self.lock:
            self._compute.append(_Work(work, None, FakeEvent(self)))

    def mark(self) -> FakeEvent:
        with self.lock:
            event = FakeEvent(self)
            self._compute.append(_Work(lambda: None, None, event))
            return event

    def enqueue(self, work: Callable[[], None], after: FakeEvent | None) -> FakeEvent:
        with self.lock:
            refuse, self.refuse = self.refuse, None
            if refuse is not None:
                raise refuse
            event = FakeEvent(self)
            self._transfers.append(_Work(work, after, event))
            self.log.append(f"start {id(event)}")
            return event

    @property
    def num_transfers(self) -> int:
        """Copies that have not run."""
        return len(self._transfers)

    def step_compute(self) -> bool:
        """Runs the next work of the compute stream; False when there is none."""
        with self.lock:
            return self._run(self._compute)

    def step_transfer(self) -> bool:
        """Runs the next copy; False when there is none, or the computation has not reached its mark."""
        with self.lock:
            after = self._transfers[0].after if self._transfers else None
            return (after is None or after.passed) and self._run(self._transfers)

    def run_until(self, event: FakeEvent) -> None:
        with self.lock:
            self.log.append(f"wait {id(event)}")
            while not event.passed:
                self.raise_if_broken()
                assert self.step_transfer() or self.step_compute(), "waits for what was never launched"
            self.raise_if_broken()

    def run_all(self) -> None:
        while self.step_transfer() or self.step_compute():
            pass

    def raise_if_broken(self) -> None:
        if self.broken is not None:
            raise self.broken

    def _run(self, stream: deque[_Work]) -> bool:
        if not stream:
            return False
        work = stream.popleft()
        if self.broken is None:
            try:
                work.run()
            except Exception as error:
                self.broken = error
        work.done.passed = True
        return True


class SlowStreams(FakeStreams):
    """As FakeStreams, with a thread as the device; a waiting host runs nothing."""

    def __init__(self, copy_s: float = 0.0005) -> None:
        super().__init__()
        self._changed = threading.Condition(self.lock)
        self._copy_s = copy_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-device", daemon=True)
        self._thread.start()

    def run_until(self, event: FakeEvent) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: event.passed or self.broken is not None, 10.0)
            self.raise_if_broken()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stopping.wait(self._copy_s):
            with self._changed:
                if self.step_compute() | self.step_transfer():
                    self._changed.notify_all()
