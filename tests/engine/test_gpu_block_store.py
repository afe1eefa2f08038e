"""The store of a GPU's blocks: what may be read, written and reused when.

The fake device runs copies only when a test or a waiting host says so.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from fake_streams import FakeStreams
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_caches import BLOCK, NUM_BLOCKS, block_bytes, caches, fill
from tandem_engine.gpu_block_store import CudaStreams, GpuBlockStore
from tandem_engine.transport.base import PendingRead


class Ring(RuleBasedStateMachine):
    """Reads, writes, computation and both streams in any order.

    A read gives what the launched computation leaves in its blocks; a payload that somebody holds never
    changes; a write leaves its bytes, whatever happens to the caller's buffer.
    """

    NUM_SLOTS = 4
    SHAPE = (6, 4)  # blocks, int64 words: tiny blocks make fast tests

    @initialize()
    def start(self) -> None:
        self.streams = FakeStreams()
        self.caches = [torch.zeros(self.SHAPE, dtype=torch.int64) for _ in range(2)]
        self.store = GpuBlockStore(self.caches, self.streams, 2 * 8 * self.SHAPE[1], self.NUM_SLOTS)
        #: What each block holds once everything launched has run.
        self.expected = [cache.clone() for cache in self.caches]
        self.reading: list[tuple[PendingRead, bytes, set[tuple[int, int]]]] = []
        self.lent: list[tuple[memoryview, bytes]] = []
        self.writing: list[tuple[object, set[tuple[int, int]]]] = []
        self.values = iter(range(1, 1 << 40))

    def _busy(self) -> set[tuple[int, int]]:
        """Blocks of reads and writes, which holds keep from any other use."""
        return set().union(*(held for *_, held in self.reading), *(held for _, held in self.writing))

    def _pick(self, layer: int, blocks: list[int]) -> list[int]:
        return [block for block in blocks if (layer, block) not in self._busy()]

    blocks = st.lists(st.integers(0, SHAPE[0] - 1), min_size=1, max_size=2, unique=True)
    layers = st.integers(0, 1)

    @rule(layer=layers, blocks=blocks)
    def compute(self, layer: int, blocks: list[int]) -> None:
        for block in self._pick(layer, blocks):
            value = next(self.values)
            self.expected[layer][block] = value
            self.streams.launch(lambda block=block, value=value: self.caches[layer][block].fill_(value))

    @precondition(lambda self: self.store._free.qsize() > 0)
    @rule(layer=layers, blocks=blocks)
    def read(self, layer: int, blocks: list[int]) -> None:
        if blocks := self._pick(layer, blocks):
            pending = self.store.gather(layer, blocks, self.store.mark())
            expected = self.expected[layer][blocks].numpy().tobytes()
            self.reading.append((pending, expected, {(layer, block) for block in blocks}))

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), cancelled=st.booleans())
    def end_read(self, data: st.DataObject, cancelled: bool) -> None:
        pending, expected, _ = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        if cancelled:
            pending.cancel()
        else:
            self.lent.append((pending.wait(), expected))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def zeromq_releases(self, data: st.DataObject) -> None:
        self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))

    @precondition(lambda self: self.store._free.qsize() + len(self.store._writes) > 0)
    @rule(layer=layers, blocks=blocks)
    def write(self, layer: int, blocks: list[int]) -> None:
        if not (blocks := self._pick(layer, blocks)):
            return
        received = np.repeat(np.array([next(self.values) for _ in blocks]), self.SHAPE[1])
        self.expected[layer][blocks] = torch.from_numpy(received.copy()).view(len(blocks), -1)
        wait = self.store.scatter(layer, blocks, received.view(np.uint8).data, self.store.mark())
        received[:] = -7
        self.writing.append((wait, {(layer, block) for block in blocks}))

    @precondition(lambda self: self.writing)
    @rule()
    def end_writes(self) -> None:
        """Waits for the last: the earlier ones are over, too."""
        self.writing[-1][0]()  # type: ignore[operator]
        for _, held in self.writing:
            for layer, block in held:
                assert torch.equal(self.caches[layer][block], self.expected[layer][block])
        self.writing.clear()

    @rule(num_steps=st.integers(1, 4))
    def transfer_stream_runs(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.streams.step_transfer()

    @rule(num_steps=st.integers(1, 4))
    def compute_stream_runs(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.streams.step_compute()

    @invariant()
    def lent_bytes_do_not_change(self) -> None:
        for payload, expected in getattr(self, "lent", ()):
            assert payload.tobytes() == expected

    def teardown(self) -> None:
        if hasattr(self, "streams"):
            while self.reading:
                self.reading.pop()[0].cancel()
            self.lent.clear()
            self.streams.run_all()
            for cache, expected in zip(self.caches, self.expected, strict=True):
                assert torch.equal(cache, expected)
            self.store._take_slot()  # reclaims the writes'
            assert self.store._free.qsize() == self.NUM_SLOTS - 1  # none is lost


TestRing = Ring.TestCase
TestRing.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_a_read_waits_for_its_layer_and_for_no_later_one() -> None:
    streams, source = FakeStreams(), caches()
    store = GpuBlockStore(source, streams)
    streams.launch(lambda: fill(source[0], 3, 1))
    read = store.gather(0, [3], store.mark())
    computed: list[int] = []
    streams.launch(lambda: computed.append(1))  # the next layer
    assert not streams.step_transfer()
    assert bytes(read.wait()) == b"\1" * BLOCK
    assert not computed


def test_a_payload_keeps_its_slot_through_whatever_is_made_of_it() -> None:
    streams = FakeStreams()
    store = GpuBlockStore(caches(seed=1), streams, num_slots=3)
    made = np.frombuffer(store.gather(0, [1]).wait()[BLOCK // 2 :], np.uint8)[5:]
    expected = made.tobytes()
    for _ in range(6):
        store.gather(1, [2]).wait()
        assert made.tobytes() == expected
    assert store.counts.num_copied_out == 0
    del made
    gc.collect()
    assert store._free.qsize() == 3


def test_slow_peers_never_take_the_last_slot() -> None:
    store = GpuBlockStore(caches(seed=1), FakeStreams(), num_slots=4)
    held = [store.gather(0, [block]).wait() for block in range(NUM_BLOCKS)]
    assert store.counts.num_copied_out == NUM_BLOCKS - 3
    assert [bytes(payload) for payload in held] == [
        block_bytes(caches(seed=1)[0], [block]) for block in range(NUM_BLOCKS)
    ]
    assert not store.gather(0, [0]).may_read_ahead


def test_writes_beyond_the_slots_wait_for_the_oldest_alone() -> None:
    streams, target = FakeStreams(), caches()
    store = GpuBlockStore(target, streams, num_slots=2)
    for block in range(3):
        store.scatter(0, [block], memoryview(bytes([block + 1]) * BLOCK))
    assert streams.num_transfers == 2  # the first has run, for the third's slot
    assert block_bytes(target[0], [0]) == b"\1" * BLOCK
    assert not target[0][1:].any()


def test_a_copy_that_fails_gives_its_slot_back() -> None:
    streams = FakeStreams()
    store = GpuBlockStore(caches(), streams, num_slots=2)
    for start in (lambda: store.gather(0, [0]), lambda: store.scatter(0, [0], memoryview(bytes(BLOCK)))):
        streams.refuse = RuntimeError("launch failed")
        with pytest.raises(RuntimeError, match="launch failed"):
            start()
        assert store._free.qsize() == 2
    with pytest.raises(ValueError, match="broadcast"):
        store.scatter(0, [0], memoryview(bytes(2 * store.max_frame_bytes)))
    assert store._free.qsize() == 2
    read = store.gather(0, [0])
    streams.broken = RuntimeError("illegal address")
    with pytest.raises(RuntimeError, match="illegal address"):
        read.wait()
    assert store._free.qsize() == 2


def test_work_on_a_cuda_stream_lies_between_its_mark_and_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls; only a GPU can show their effect."""
    calls: list[str] = []

    class Stream:
        def __init__(self, name: object, priority: int = 0) -> None:
            self.name = "compute" if name == "compute" else "transfer"

        def wait_event(self, event: Event) -> None:
            calls.append(f"{self.name} waits")

        def synchronize(self) -> None:
            calls.append(f"{self.name} synchronizes")

    class Event:
        def __init__(self, blocking: bool = False) -> None:
            self.blocking = blocking

        def record(self, stream: Stream) -> None:
            calls.append(f"{stream.name} records{' a wait that sleeps' if self.blocking else ''}")

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        calls.append(f"enter {stream.name}")
        yield
        calls.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("compute"))
    streams = CudaStreams(torch.device("cuda"))
    streams.enqueue(lambda: calls.append("work"), streams.mark())
    assert calls == [
        "compute records", "enter transfer", "transfer waits", "work",
        "transfer records a wait that sleeps", "leave",
    ]  # fmt: skip
    calls.clear()

    def fail() -> None:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        streams.enqueue(fail, None)
    assert calls == ["enter transfer", "transfer synchronizes"]
