"""Transfers between two GPUs: what arrives, in frames of which size, and what an abort or a failure leaves.

The fake device runs copies only when a test or a waiting host says so; tests marked gpu use a real one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch
import zmq
from fake_streams import FakeStreams, SlowStreams
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_caches import BLOCK, LAYOUT, NUM_BLOCKS, block_bytes, caches, fill, same
from tandem_core.errors import TransferError
from tandem_engine.gpu_block_store import CudaStreams, GpuBlockStore, Streams
from tandem_engine.transport.base import MAX_FRAME_BYTES, DropCause, Ticket, TransferState
from tandem_engine.transport.codec import Credit, Frame, Reject
from tandem_engine.transport.incoming import IncomingTransfer, KVReceiver
from tandem_engine.transport.outgoing import KVSender, OutgoingTransfer
from tandem_engine.transport.zeromq import ReceiverOptions, SenderOptions, ZmqReceiver, ZmqSender
from waiting import pause, wait_until

WAIT_S = 10.0


# --- without a wire -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    """Both ends of transfers between two fake GPUs; a test carries the frames."""

    source: list[torch.Tensor] = dataclasses.field(default_factory=lambda: caches(seed=1))
    target: list[torch.Tensor] = dataclasses.field(default_factory=caches)
    out: FakeStreams = dataclasses.field(default_factory=FakeStreams)
    into: FakeStreams = dataclasses.field(default_factory=FakeStreams)
    num_slots: int = 4
    max_frame_bytes: int = 2 * BLOCK
    credit_bytes: int = 8 * BLOCK

    def __post_init__(self) -> None:
        self.read = GpuBlockStore(self.source, self.out, self.max_frame_bytes, self.num_slots)
        self.written = GpuBlockStore(self.target, self.into, self.max_frame_bytes, self.num_slots)
        self.sender = KVSender(LAYOUT, self.read, lambda: None)
        self.receiver = KVReceiver(LAYOUT, self.written, self.credit_bytes, endpoint="", public_key="")

    def open(self, blocks: range = range(NUM_BLOCKS)) -> tuple[IncomingTransfer, OutgoingTransfer]:
        incoming = self.receiver.open([{block: block for block in blocks}])
        return incoming, self.sender.open(incoming.ticket)

    def put_all(self, outgoing: OutgoingTransfer, blocks: range = range(NUM_BLOCKS)) -> None:
        for layer in range(LAYOUT.num_layers):
            outgoing.put(layer, blocks.start, blocks)

    def carry(self, outgoing: OutgoingTransfer) -> Credit | Reject | None:
        """One frame and its reply; None when there is no frame."""
        taken = self.sender.take_frame(outgoing)
        if taken is None:
            return None
        reply = self.receiver.accept(*taken)
        self.sender.on_reply(reply)
        return reply


def test_the_next_copy_is_under_way_during_digest_and_sending() -> None:
    pair = Pair()
    _, outgoing = pair.open()
    pair.put_all(outgoing)
    taken = pair.sender.take_frame(outgoing)
    starts = [entry for entry in pair.out.log if entry.startswith("start")]
    assert pair.out.log == [*starts, "wait" + starts[0].removeprefix("start")]
    assert len(starts) == 2
    assert pair.out.num_transfers == 1  # runs while the caller sends the first
    assert taken is not None
    assert outgoing.sent_bytes == 2 * BLOCK
    assert outgoing.in_flight_bytes == 4 * BLOCK


def test_a_layer_in_computation_does_not_hold_up_computed_ones() -> None:
    pair = Pair(num_slots=8)
    _, first = pair.open()
    _, second = pair.open()
    first.put(0, 0, range(2))
    second.put(0, 0, range(4))
    pair.out.run_all()
    first.put(1, 0, range(2))  # launched, not computed
    assert pair.sender.take_frame(first, computed=True) is not None
    assert pair.out.num_transfers == 0, "the next layer's copy would stand before the other transfer's"
    assert pair.sender.take_frame(first, computed=True) is None
    for _ in range(2):
        assert pair.sender.take_frame(second, computed=True) is not None
    assert pair.out.step_compute(), "nobody has waited for the computation"
    assert pair.sender.take_frame(first, computed=True) is not None


def test_where_all_transfers_wait_one_waits_for_the_computation() -> None:
    pair = Pair()
    _, outgoing = pair.open()
    outgoing.put(0, 0, range(2))
    assert pair.sender.take_frame(outgoing, computed=True) is None
    taken = pair.sender.take_frame(outgoing)
    assert taken is not None
    assert bytes(taken[1]) == block_bytes(pair.source[0], range(2))


def test_reading_ahead_keeps_to_the_credit_and_owes_nothing() -> None:
    pair = Pair(credit_bytes=4 * BLOCK, num_slots=12)  # frames of one block, four in flight
    _, outgoing = pair.open()
    pair.put_all(outgoing)
    frames = [pair.sender.take_frame(outgoing) for _ in range(5)]
    assert [frame is not None for frame in frames] == [True] * 4 + [False]
    assert outgoing.in_flight_bytes == pair.receiver.open([{}]).ticket.credit_bytes
    for _ in range(9):  # more than was sent
        outgoing.on_credit(BLOCK)
    assert outgoing.in_flight_bytes == 0
    assert outgoing.stalled_for_s() == 0.0
    assert pair.sender.take_frame(outgoing) is not None
    assert outgoing.in_flight_bytes == 2 * BLOCK  # one sent, one read ahead
    outgoing.on_credit(4 * BLOCK)
    assert outgoing.in_flight_bytes == BLOCK
    pause(0.002)
    assert outgoing.stalled_for_s() == 0.0  # the receiver has none of it


def test_an_aborted_sender_reads_no_block_any_more() -> None:
    pair = Pair()
    _, outgoing = pair.open()
    pair.put_all(outgoing)
    taken = pair.sender.take_frame(outgoing)
    assert pair.out.num_transfers == 1
    outgoing.abort("cancelled")
    assert pair.out.num_transfers == 0
    assert pair.sender.take_frame(outgoing) is None
    assert pair.sender.open_transfers == 0
    del taken
    assert pair.read._free.qsize() == pair.num_slots


def test_done_means_written_and_abort_means_nothing_is_written_later() -> None:
    pair = Pair()
    incoming, outgoing = pair.open()
    pair.put_all(outgoing)
    pair.carry(outgoing)
    assert pair.into.num_transfers == 1  # the receiver does not wait for a frame
    assert not pair.target[0].any()
    while pair.carry(outgoing) is not None:
        pass
    assert incoming.done.done()
    assert pair.into.num_transfers == 0
    for source, target in zip(pair.source, pair.target, strict=True):
        assert same(source[:NUM_BLOCKS], target[:NUM_BLOCKS])

    pair = Pair()
    incoming, outgoing = pair.open()
    pair.put_all(outgoing)
    pair.carry(outgoing)
    assert pair.into.num_transfers == 1
    incoming.abort()
    assert pair.into.num_transfers == 0
    assert isinstance(pair.carry(outgoing), Reject)
    assert pair.into.num_transfers == 0
    assert incoming.progress().verified_bytes == 2 * BLOCK  # what was written before stays usable


def test_writes_wait_for_what_was_launched_before_the_transfer_was_opened() -> None:
    """A block's former owner may have a copy within the pool under way."""
    pair = Pair()
    launched: list[str] = []
    pair.into.launch(lambda: (fill(pair.target[0], 0, 9), launched.append("before")))
    incoming, outgoing = pair.open(range(1))
    pair.into.launch(lambda: launched.append("after"))
    pair.put_all(outgoing, range(1))
    while pair.carry(outgoing) is not None:
        pass
    incoming.done.result(0)
    assert launched == ["before"]
    assert block_bytes(pair.target[0], [0]) == block_bytes(pair.source[0], [0])


@pytest.mark.parametrize(
    "at", ["start of a read", "read", "start of reading ahead", "start of a write", "write"]
)
def test_a_copy_that_fails_fails_its_transfer(at: str) -> None:
    pair = Pair()
    incoming, outgoing = pair.open()
    pair.put_all(outgoing)
    if at == "start of reading ahead":
        assert pair.sender.take_frame(outgoing) is not None
    error = RuntimeError("device says no")
    if at.startswith("start"):
        (pair.into if "write" in at else pair.out).refuse = error
    elif at == "read":
        pair.out.broken = error
    else:
        assert isinstance(pair.carry(outgoing), Credit)
        assert incoming.progress().verified_bytes == 2 * BLOCK
        pair.into.broken = error
    while isinstance(pair.carry(outgoing), Credit):
        pass
    assert outgoing.state is TransferState.FAILED
    if "write" in at:
        assert incoming.state is TransferState.FAILED
        with pytest.raises(TransferError, match="device says no"):
            incoming.done.result(0)
        assert incoming.progress().verified_bytes == 0
    else:
        with pytest.raises(TransferError, match="device says no"):
            outgoing.done.result(0)
        incoming.abort()
        assert pair.read._free.qsize() == pair.num_slots
    assert pair.sender.open_transfers == pair.receiver.open_transfers == 0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 32), num_slots=st.integers(2, 6), max_frame=st.integers(1, 4))
def test_transfers_in_any_order_arrive_equal_or_not_at_all(seed: int, num_slots: int, max_frame: int) -> None:
    """Eight transfers, more than slots. Layers are computed, copies run, peers release and credit late, and
    transfers are aborted, in any order."""
    rng = random.Random(seed)
    pair = Pair(caches(), caches(), num_slots=num_slots, max_frame_bytes=max_frame * BLOCK)
    pair.credit_bytes = rng.choice([2, 4, 8]) * BLOCK
    final = caches(seed=2)
    ends = {block: pair.open(range(block, block + 1)) for block in range(NUM_BLOCKS)}
    held: list[tuple[Frame, memoryview, bytes]] = []
    aborted: dict[int, bytes] = {}
    to_put = [(layer, block) for layer in range(LAYOUT.num_layers) for block in ends]

    def compute() -> None:
        if to_put:
            layer, block = to_put.pop(rng.randrange(len(to_put)))
            pair.out.launch(lambda: pair.source[layer][block].copy_(final[layer][block]))
            ends[block][1].put(layer, block, [block])

    def take() -> None:
        taken = pair.sender.take_frame(ends[rng.choice(list(ends))][1])
        if taken is not None:
            held.append((*taken, bytes(taken[1])))

    def deliver() -> None:
        if held:
            frame, payload, bytes_then = held.pop(rng.randrange(len(held)))
            assert payload == bytes_then
            pair.sender.on_reply(pair.receiver.accept(frame, payload))

    def abort() -> None:
        block = rng.choice(list(ends))
        if len(aborted) < 3 and block not in aborted and not ends[block][0].done.done():
            ends[block][1].abort()
            for cache in pair.source:  # reused at once
                fill(cache, block, 0xEE)
            ends[block][0].abort()
            aborted[block] = b"".join(block_bytes(cache, [block]) for cache in pair.target)

    actions = [compute, take, take, deliver, deliver, pair.out.step_transfer, pair.out.step_compute]
    for _ in range(100):
        rng.choice([*actions, pair.into.step_transfer, abort])()
    while to_put:
        compute()
    while not all(incoming.done.done() for incoming, _ in ends.values()):
        take()
        deliver()
    pair.out.run_all()
    pair.into.run_all()
    for block, (incoming, _) in ends.items():
        got = b"".join(block_bytes(cache, [block]) for cache in pair.target)
        if block in aborted:
            assert got == aborted[block]
        else:
            incoming.done.result(0)
            assert got == b"".join(block_bytes(cache, [block]) for cache in final)
    held.clear()
    assert pair.read._free.qsize() == num_slots


# --- frame sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sender_takes", "credit", "largest"),
    [
        (MAX_FRAME_BYTES, 8 << 20, 2 << 20),  # one connection
        (MAX_FRAME_BYTES, 64 << 20, MAX_FRAME_BYTES),  # eight
        (16 << 20, 64 << 20, MAX_FRAME_BYTES),
        (1 << 20, 64 << 20, 1 << 20),
        (1, 64 << 20, BLOCK),
    ],
)
def test_a_frame_is_as_large_as_the_store_and_the_credit_allow(
    sender_takes: int, credit: int, largest: int
) -> None:
    class Blocks:
        max_frame_bytes = sender_takes

        def mark(self) -> None:
            return None

        def gather(self, layer: int, block_ids: object, after: object = None) -> memoryview:
            return memoryview(bytes(len(block_ids) * BLOCK))  # type: ignore[arg-type]

    ticket = Ticket(b"0" * 16, 1, "", "", LAYOUT.fingerprint, "", (tuple(range(256)),), credit)
    outgoing = KVSender(LAYOUT, Blocks(), lambda: None).open(ticket)  # type: ignore[arg-type]
    outgoing.put(0, 0, range(256))
    taken = outgoing.take_frame()
    assert taken is not None
    assert taken[1].nbytes == largest


def test_a_receiver_refuses_frames_that_are_too_large() -> None:
    pair = Pair()
    incoming, _ = pair.open(range(1))
    place = (incoming.ticket.transfer_id, 1, 0, 0, 1)
    reply = pair.receiver.accept(Frame(*place, b""), memoryview(bytes(MAX_FRAME_BYTES + 1)))
    assert isinstance(reply, Reject)
    assert "at most" in reply.reason
    assert pair.receiver.dropped_frames[DropCause.BAD_LENGTH] == 1


# --- over ZeroMQ ----------------------------------------------------------------------------------------


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def streams_of(device: str, stack: ExitStack) -> Streams:
    if device == "cpu":
        return stack.enter_context(closing(SlowStreams()))
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return CudaStreams(torch.device(device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_slots", [2, 8])
def test_every_byte_arrives_between_two_devices(device: str, num_slots: int, stack: ExitStack) -> None:
    """Eight transfers at a time, each layer put as it is computed, then another eight over the same slots."""
    out, into = streams_of(device, stack), streams_of(device, stack)
    source, target, final = caches(device=device), caches(device=device), caches(seed=3, device=device)
    read, written = (
        GpuBlockStore(held, streams, 2 * BLOCK, num_slots)
        for held, streams in ((source, out), (target, into))
    )
    receiver = stack.enter_context(closing(ZmqReceiver(LAYOUT, written)))
    sender = stack.enter_context(closing(ZmqSender(LAYOUT, read, SenderOptions(curve=False))))
    for _ in range(2):
        for cache in (*source, *target):
            cache.zero_()
        ends = [receiver.open([{block: NUM_BLOCKS - 1 - block}]) for block in range(NUM_BLOCKS)]
        outgoing = [sender.open(incoming.ticket) for incoming in ends]
        for layer in range(LAYOUT.num_layers):

            def compute(layer: int = layer) -> None:
                source[layer].copy_(final[layer])

            if isinstance(out, FakeStreams):
                out.launch(lambda: pause(0.01))
                out.launch(compute)
            else:
                torch.cuda._sleep(20_000_000)
                compute()
            for block, transfer in enumerate(outgoing):
                transfer.put(layer, block, [block])
        for transfer, incoming in zip(outgoing, ends, strict=True):
            transfer.finish().result(WAIT_S)
            incoming.done.result(WAIT_S)
        for there, expected in zip(target, final, strict=True):
            hashes = [
                hashlib.sha256(block_bytes(cache, order)).hexdigest()
                for cache, order in (
                    (there, range(NUM_BLOCKS)),
                    (expected, reversed(range(NUM_BLOCKS))),
                )
            ]
            assert hashes[0] == hashes[1]
    assert read.counts.read_bytes == written.counts.written_bytes
    assert read.counts.read_bytes == 2 * NUM_BLOCKS * LAYOUT.num_layers * BLOCK
    wait_until(lambda: read._free.qsize() == num_slots)  # ZeroMQ has released every frame


def test_a_peer_that_takes_nothing_does_not_hold_up_the_others(stack: ExitStack) -> None:
    """Its frames stay in ZeroMQ's queue, with the slots that they lie in."""
    context = stack.enter_context(zmq.Context())
    dead_end = context.socket(zmq.ROUTER)
    dead_end.rcvhwm = 1
    dead_end.setsockopt(zmq.RCVBUF, 4096)
    port = dead_end.bind_to_random_port("tcp://127.0.0.1")
    stack.callback(dead_end.close, linger=0)
    source, target = caches(seed=4), caches()
    read = GpuBlockStore(source, streams_of("cpu", stack), 2 * BLOCK, num_slots=3)
    written = GpuBlockStore(target, streams_of("cpu", stack), 2 * BLOCK, num_slots=3)
    receiver = stack.enter_context(closing(ZmqReceiver(LAYOUT, written, ReceiverOptions(curve=False))))
    sender = stack.enter_context(closing(ZmqSender(LAYOUT, read, SenderOptions(curve=False, stall_s=0.6))))
    endpoint = f"tcp://127.0.0.1:{port}"
    slow = Ticket(b"0" * 16, 1, endpoint, "", LAYOUT.fingerprint, "", (tuple(range(200)),), 1 << 30)
    stuck = sender.open(slow)
    for layer in range(LAYOUT.num_layers):
        stuck.put(layer, 0, [block % NUM_BLOCKS for block in range(200)])
    wait_until(lambda: read.counts.num_copied_out > 0)
    incoming = receiver.open([{block: block for block in range(NUM_BLOCKS)}])
    outgoing = sender.open(incoming.ticket)
    for layer in range(LAYOUT.num_layers):
        outgoing.put(layer, 0, range(NUM_BLOCKS))
    outgoing.finish().result(WAIT_S)
    incoming.done.result(0)
    for a, b in zip(source, target, strict=True):
        assert same(a[:NUM_BLOCKS], b[:NUM_BLOCKS])
    with pytest.raises(TransferError, match="no credit"):
        stuck.done.result(WAIT_S)
    wait_until(lambda: read._free.qsize() == 3)  # with the connection went its frames


def test_aborts_at_any_time_leave_no_late_write_and_no_lost_slot(stack: ExitStack) -> None:
    source, target = caches(seed=5), caches()
    read = GpuBlockStore(source, streams_of("cpu", stack), BLOCK, num_slots=4)
    into = streams_of("cpu", stack)
    written = GpuBlockStore(target, into, BLOCK, num_slots=4)
    receiver = stack.enter_context(closing(ZmqReceiver(LAYOUT, written, ReceiverOptions(curve=False))))
    sender = stack.enter_context(closing(ZmqSender(LAYOUT, read, SenderOptions(curve=False))))
    rng = random.Random(6)
    for number in range(20):
        incoming = receiver.open([{block: block for block in range(NUM_BLOCKS)}])
        outgoing = sender.open(incoming.ticket)
        for layer in range(LAYOUT.num_layers):
            outgoing.put(layer, 0, range(NUM_BLOCKS))
        pause(rng.uniform(0, 0.01))
        threads = [threading.Thread(target=end.abort) for end in (incoming, outgoing)]
        for thread in threads[:: 1 if number % 2 else -1]:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        at_abort = [cache.clone() for cache in target]
        pause(0.003)
        for cache, before in zip(target, at_abort, strict=True):
            assert same(cache, before)
            cache.zero_()
    wait_until(lambda: read._free.qsize() == 4)
    assert receiver.open_transfers == sender.open_transfers == 0
