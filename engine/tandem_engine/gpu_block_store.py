"""The blocks of a GPU's KV pool as bytes for transfers, copied concurrently with the computation.

    read   compute stream    layer n | mark | layer n + 1 ...
           transfer stream           wait(mark) | gather | copy to a pinned slot | event
           sender's thread   start the next read if computed, wait for this one, digest, send from the slot
    write  receiver's thread digest, payload into a pinned slot, credit
           transfer stream                       copy to the device | scatter | event

The slots are a ring of host memory that the device reads and writes by itself. A read's slot is free again
when ZeroMQ drops the last reference to its payload; when only one slot is left, the payload is copied out
instead, so that slow peers never take the last one. A write's slot is
free after its event. All copies are in one stream: when one is over, all earlier ones are.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tandem_core.errors import CapacityError
from torch import Tensor

from tandem_engine.transport.base import MAX_FRAME_BYTES

#: 128 MiB. A transfer has as much as 64 MiB in flight; the others are for reading ahead and for further
#: transfers.
NUM_SLOTS = 32
#: One sender or receiver never waits, since `lend` leaves a slot; this spares its thread a deadlock.
_SLOT_WAIT_S = 5.0
#: Reading ahead leaves as many slots to frames that could leave at once.
_SLOTS_NOT_READ_AHEAD = 2


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Waits until the stream has passed it; raises when the device has failed."""


class Streams(Protocol):
    """What the store needs of a device: memory that both sides reach, and order."""

    def pinned(self, num_words: int) -> Tensor:
        """int64 host memory that the device copies from and to by itself."""

    def on_device(self, num_words: int) -> Tensor:
        """int64 memory of the device."""

    def mark(self) -> Event:
        """The current end of the compute stream."""

    def enqueue(self, work: Callable[[], None], after: Event | None) -> Event:
        """Lets the transfer stream run `work` once it has passed `after`; returns the point behind it.

        When it raises, nothing of `work` runs any more.
        """


class CudaStreams:
    """A CUDA device. The compute stream is the one current in the thread that asks for a mark: the default
    stream everywhere, as the engine sets no other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Before the computation's next kernels, which are long; a gather takes microseconds.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def pinned(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int64, pin_memory=True)

    def on_device(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int64, device=self._device)

    def mark(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def enqueue(self, work: Callable[[], None], after: Event | None) -> Event:
        # Blocking: a thread that waits sleeps, instead of taking a core from the engine's.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)  # type: ignore[arg-type]
            try:
                work()
            except BaseException:
                self._stream.synchronize()
                raise
            done.record(self._stream)
        return done


@dataclass
class CopyCounts:
    """What a store has copied since its start."""

    num_reads: int = 0
    read_bytes: int = 0
    #: Time that senders waited for a read's event. Next to nothing when reading ahead hides the copies.
    read_wait_s: float = 0.0
    #: Payloads that were copied out of their slot because slots were short.
    num_copied_out: int = 0
    num_writes: int = 0
    written_bytes: int = 0
    #: Time that receivers waited for a slot.
    slot_wait_s: float = 0.0


class _Slot:
    """Pinned memory for one payload and its block ids."""

    def __init__(self, streams: Streams, num_words: int, num_ids: int) -> None:
        self.words = streams.pinned(num_words)
        self.bytes: NDArray[np.uint8] = self.words.numpy().view(np.uint8)
        self.ids = streams.pinned(num_ids)


class GpuBlockStore:
    """A BlockStore over caches [num_blocks, ...] of one shape, one per layer."""

    def __init__(
        self,
        caches: Sequence[Tensor],
        streams: Streams,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        # As int64, whatever the type: fewer, larger elements are copied faster.
        self._blocks = [cache.view(cache.shape[0], -1).view(torch.int64) for cache in caches]
        self._block_words = self._blocks[0].shape[1]
        max_blocks = max(1, max_frame_bytes // (8 * self._block_words))
        self.max_frame_bytes = max_frame_bytes
        self.counts = CopyCounts()
        self._streams = streams
        # One of each is enough, because the transfer stream runs one copy after another.
        self._staging = streams.on_device(max_blocks * self._block_words).view(max_blocks, -1)
        self._ids = streams.on_device(max_blocks)
        # A SimpleQueue, because a slot may return from a destructor, in any thread.
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(num_slots):
            self._free.put(_Slot(streams, max_blocks * self._block_words, max_blocks))
        #: Writes that may not be over, oldest first.
        self._writes: deque[tuple[Event, _Slot]] = deque()
        # Work enters the stream whole, since it shares the staging memory.
        self._lock = threading.Lock()

    def mark(self) -> Event:
        return self._streams.mark()

    def gather(self, layer: int, block_ids: Sequence[int], after: Event | None = None) -> _Read:
        def work(slot: _Slot, ids: Tensor) -> None:
            staged = self._staging[: len(ids)]
            torch.index_select(self._blocks[layer], 0, ids, out=staged)
            slot.words[: staged.numel()].copy_(staged.view(-1), non_blocking=True)

        slot = self._take_slot()
        done = self._enqueue(slot, block_ids, work, after)
        self.counts.num_reads += 1
        self.counts.read_bytes += len(block_ids) * self._block_words * 8
        return _Read(self, slot, len(block_ids) * self._block_words * 8, done)

    def scatter(
        self, layer: int, block_ids: Sequence[int], payload: memoryview, after: Event | None = None
    ) -> Callable[[], None]:
        def work(slot: _Slot, ids: Tensor) -> None:
            staged = self._staging[: len(ids)]
            staged.view(-1).copy_(slot.words[: staged.numel()], non_blocking=True)
            self._blocks[layer].index_copy_(0, ids, staged)

        started = time.perf_counter()
        slot = self._take_slot()
        self.counts.slot_wait_s += time.perf_counter() - started
        done = self._enqueue(slot, block_ids, work, after, payload)
        with self._lock:
            self._writes.append((done, slot))
        self.counts.num_writes += 1
        self.counts.written_bytes += payload.nbytes
        return done.synchronize

    def _enqueue(
        self,
        slot: _Slot,
        block_ids: Sequence[int],
        work: Callable[[_Slot, Tensor], None],
        after: Event | None,
        payload: memoryview | None = None,
    ) -> Event:
        """Gives the slot back when it raises."""
        num_blocks = len(block_ids)

        def with_ids() -> None:
            ids = self._ids[:num_blocks]
            ids.copy_(slot.ids[:num_blocks], non_blocking=True)
            work(slot, ids)

        try:
            if payload is not None:
                slot.bytes[: payload.nbytes] = np.frombuffer(payload, np.uint8)
            slot.ids[:num_blocks] = torch.tensor(block_ids, dtype=torch.int64)
            with self._lock:
                return self._streams.enqueue(with_ids, after)
        except BaseException:
            self._free.put(slot)
            raise

    def _take_slot(self) -> _Slot:
        """A free slot; waits for one if there is none."""
        with self._lock:
            while self._writes and (self._free.empty() or self._writes[0][0].query()):
                self._writes[0][0].synchronize()
                self._free.put(self._writes.popleft()[1])
        try:
            return self._free.get(timeout=_SLOT_WAIT_S)
        except Empty:
            raise CapacityError(f"no transfer buffer came free within {_SLOT_WAIT_S} s") from None

    def may_read_ahead(self) -> bool:
        return self._free.qsize() > _SLOTS_NOT_READ_AHEAD

    def lend(self, slot: _Slot, num_bytes: int) -> memoryview:
        """The slot's bytes, until the result and everything made from it is dropped."""
        if self._free.empty():
            self.counts.num_copied_out += 1
            copied = slot.bytes[:num_bytes].copy()
            self._free.put(slot)
            return copied.data
        # A memoryview keeps this very array alive. An array made from it would only keep its base.
        lent = slot.bytes[:num_bytes]
        weakref.finalize(lent, self._free.put, slot).atexit = False
        return lent.data

    def take_back(self, slot: _Slot) -> None:
        self._free.put(slot)


class _Read:
    """A PendingRead into a slot."""

    def __init__(self, store: GpuBlockStore, slot: _Slot, num_bytes: int, done: Event) -> None:
        self._store = store
        self._slot = slot
        self._num_bytes = num_bytes
        self._done = done

    @property
    def may_read_ahead(self) -> bool:
        return self._store.may_read_ahead()

    def wait(self) -> memoryview:
        started = time.perf_counter()
        try:
            self._done.synchronize()
        except BaseException:
            self._store.take_back(self._slot)
            raise
        self._store.counts.read_wait_s += time.perf_counter() - started
        return self._store.lend(self._slot, self._num_bytes)

    def cancel(self) -> None:
        try:
            self._done.synchronize()
        finally:
            self._store.take_back(self._slot)
