"""What every KV transport guarantees; each test runs over each transport."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from inproc_transport import InprocNetwork, InprocReceiver, InprocSender
from ipv6 import has_ipv6
from kv_groups import kv_group
from tandem_core.errors import InvalidRequestError, InvariantError, LayoutMismatchError, TransferError
from tandem_engine.transport.base import MAX_FRAME_BYTES, BlockStore, DropCause, Ticket, TransferState
from tandem_engine.transport.incoming import KVReceiver
from tandem_engine.transport.layout import KVLayout
from tandem_engine.transport.outgoing import KVSender, OutgoingTransfer
from tandem_engine.transport.zeromq import ReceiverOptions, SenderOptions, ZmqReceiver, ZmqSender
from waiting import pause, wait_until

LAYOUT = KVLayout(
    model_revision="abc",
    dtype="float16",
    kv_quantization="none",
    groups=(kv_group(range(4), 2, 8),),
    block_size=16,
    spec="0123456789abcdef",
)
BLOCK = LAYOUT.max_block_bytes
NUM_BLOCKS = 32
PATIENCE_S = 10.0


class ByteStore:
    """Blocks in one numpy array `[num_layers, num_blocks, block_bytes]`, with hooks before each call."""

    max_frame_bytes = MAX_FRAME_BYTES

    def __init__(self, seed: int | None = None) -> None:
        shape = (LAYOUT.num_layers, NUM_BLOCKS, BLOCK)
        self.data = np.zeros(shape, np.uint8)
        if seed is not None:
            self.data[:] = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        self.before_gather: Callable[[], None] = lambda: None
        self.before_scatter: Callable[[], None] = lambda: None

    def mark(self) -> None:
        return None

    def gather(self, layer: int, block_ids: Sequence[int], after: object = None) -> np.ndarray:
        self.before_gather()
        return self.data[layer, list(block_ids)]

    def scatter(
        self, layer: int, block_ids: Sequence[int], payload: memoryview, after: object = None
    ) -> None:
        self.before_scatter()
        self.data[layer, list(block_ids)] = np.frombuffer(payload, np.uint8).reshape(len(block_ids), BLOCK)


@dataclass
class Wire:
    """Makes both ends of one transport, and closes them."""

    kind: str
    network: InprocNetwork = field(default_factory=InprocNetwork)
    ends: list[KVReceiver | KVSender] = field(default_factory=list)

    def receiver(self, store: BlockStore, credit_bytes: int = 8 * BLOCK) -> KVReceiver:
        receiver: KVReceiver
        if self.kind == "inproc":
            receiver = InprocReceiver(self.network, LAYOUT, store, credit_bytes)
        else:
            host = "::1" if self.kind == "zmq-ipv6" else "127.0.0.1"
            options = ReceiverOptions(host, curve=self.kind == "zmq-curve", credit_bytes=credit_bytes)
            receiver = ZmqReceiver(LAYOUT, store, options)
        self.ends.append(receiver)
        return receiver

    def sender(self, store: BlockStore, layout: KVLayout = LAYOUT) -> KVSender:
        sender: KVSender
        if self.kind == "inproc":
            sender = InprocSender(self.network, layout, store)
        else:
            sender = ZmqSender(layout, store, SenderOptions(curve=self.kind == "zmq-curve"))
        self.ends.append(sender)
        return sender


@pytest.fixture(params=["inproc", "zmq-curve", "zmq-plain", "zmq-ipv6"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    if request.param == "zmq-ipv6" and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    wire = Wire(request.param)
    yield wire
    for end in wire.ends:
        end.close()


def put_all(outgoing: OutgoingTransfer, blocks: range) -> None:
    """Every layer of these logical blocks, which are the physical blocks of the same number."""
    for layer in range(LAYOUT.num_layers):
        outgoing.put(layer, blocks.start, blocks)


def assert_no_open_transfers(sender: KVSender, receiver: KVReceiver) -> None:
    assert sender.open_transfers == 0
    assert receiver.open_transfers == 0
    assert receiver.credit_outstanding_bytes == 0


def test_every_byte_arrives_whatever_the_order_of_layers_and_runs(wire: Wire) -> None:
    source, target = ByteStore(seed=1), ByteStore()
    receiver, sender = wire.receiver(target), wire.sender(source)
    physical = random.Random(1).sample(range(NUM_BLOCKS), 10)
    incoming = receiver.open([dict(enumerate(physical))])
    assert incoming.state is TransferState.BOOTSTRAPPING
    assert receiver.credit_outstanding_bytes == incoming.ticket.credit_bytes
    outgoing = sender.open(incoming.ticket)
    assert outgoing.state is TransferState.WAITING_FOR_INPUT
    for layer in (2, 0, 3, 1):
        for first, ids in ((7, (30, 29, 28)), (0, (5,)), (1, (9, 3, 4, 6, 11, 2))):
            outgoing.put(layer, first, ids)
    outgoing.finish().result(PATIENCE_S)
    incoming.done.result(PATIENCE_S)
    assert outgoing.state is incoming.state is TransferState.SUCCESS
    assert np.array_equal(target.data[:, physical], source.data[:, [5, 9, 3, 4, 6, 11, 2, 30, 29, 28]])
    assert outgoing.sent_bytes == 10 * LAYOUT.num_layers * BLOCK
    assert set(receiver.dropped_frames.values()) == {0}
    assert_no_open_transfers(sender, receiver)


def test_only_wanted_blocks_travel_and_each_once(wire: Wire) -> None:
    source, target = ByteStore(seed=2), ByteStore()
    receiver, sender = wire.receiver(target), wire.sender(source)
    incoming = receiver.open([{1: 11, 2: 12, 5: 15}])
    outgoing = sender.open(incoming.ticket)
    put_all(outgoing, range(8))
    put_all(outgoing, range(1, 6))  # recomputed after a preemption, say
    outgoing.finish().result(PATIENCE_S)
    incoming.done.result(PATIENCE_S)
    assert outgoing.sent_bytes == 3 * LAYOUT.num_layers * BLOCK
    assert receiver.dropped_frames[DropCause.DUPLICATE] == 0
    assert np.array_equal(target.data[:, [11, 12, 15]], source.data[:, [1, 2, 5]])
    others = [block for block in range(NUM_BLOCKS) if block not in (11, 12, 15)]
    assert not target.data[:, others].any()


def test_bytes_in_flight_never_exceed_the_credit_of_a_slow_receiver(wire: Wire) -> None:
    source, target = ByteStore(seed=3), ByteStore()
    credit = 5 * BLOCK
    receiver, sender = wire.receiver(target, credit), wire.sender(source)
    incoming = receiver.open([{block: block for block in range(NUM_BLOCKS)}])
    outgoing = sender.open(incoming.ticket)
    seen: list[int] = []

    def slow() -> None:
        pause(0.003)
        seen.append(outgoing.in_flight_bytes)

    target.before_scatter = slow
    put_all(outgoing, range(NUM_BLOCKS))
    outgoing.finish().result(PATIENCE_S)
    assert 0 < max(seen) <= credit
    assert len(seen) >= 4 * NUM_BLOCKS * LAYOUT.num_layers * BLOCK // credit
    assert np.array_equal(target.data, source.data)


def test_put_does_not_wait_for_a_gather_that_is_under_way(wire: Wire) -> None:
    source, target = ByteStore(seed=4), ByteStore()
    receiver, sender = wire.receiver(target), wire.sender(source)
    gathering, go_on = threading.Event(), threading.Event()

    def block() -> None:
        gathering.set()
        assert go_on.wait(PATIENCE_S)

    source.before_gather = block
    outgoing = sender.open(receiver.open([{0: 0}]).ticket)
    outgoing.put(0, 0, [0])
    assert gathering.wait(PATIENCE_S)
    putting = threading.Thread(target=put_all, args=(outgoing, range(1)))
    putting.start()
    putting.join(PATIENCE_S)
    returned = not putting.is_alive()
    go_on.set()
    assert returned
    outgoing.finish().result(PATIENCE_S)


def test_abort_ends_writing_at_once_and_stops_the_sender(wire: Wire) -> None:
    source, target = ByteStore(seed=5), ByteStore()
    receiver, sender = wire.receiver(target), wire.sender(source)
    started: list[int] = []

    def slow() -> None:
        started.append(len(started))
        pause(0.005)

    target.before_scatter = slow
    incoming = receiver.open([{block: block for block in range(NUM_BLOCKS)}])
    outgoing = sender.open(incoming.ticket)
    put_all(outgoing, range(NUM_BLOCKS))
    finished = outgoing.finish()
    wait_until(lambda: len(started) >= 4)
    num_started = len(started)
    incoming.abort()
    assert len(started) <= num_started + 20, "an abort waits for one frame, whatever comes after it"
    at_abort = target.data.copy()
    assert receiver.credit_outstanding_bytes == 0
    with pytest.raises(TransferError, match="rejected"):
        finished.result(PATIENCE_S)
    pause(0.05)  # nothing more may happen
    assert np.array_equal(target.data, at_abort)
    assert not np.array_equal(target.data, source.data)
    assert incoming.state is outgoing.state is TransferState.FAILED
    with pytest.raises(TransferError, match="aborted"):
        incoming.done.result(0)
    with pytest.raises(TransferError, match="aborted"):
        incoming.reopen()
    assert receiver.dropped_frames[DropCause.UNKNOWN] >= 1
    assert_no_open_transfers(sender, receiver)
    incoming.abort()


def test_abort_ends_reading_at_once(wire: Wire) -> None:
    source, target = ByteStore(seed=6), ByteStore()
    receiver, sender = wire.receiver(target), wire.sender(source)
    gathers: list[float] = []

    def slow() -> None:
        pause(0.005)
        gathers.append(time.monotonic())

    source.before_gather = slow
    incoming = receiver.open([{block: block for block in range(NUM_BLOCKS)}])
    outgoing = sender.open(incoming.ticket)
    put_all(outgoing, range(NUM_BLOCKS))
    wait_until(lambda: len(gathers) >= 2)
    outgoing.abort("cancelled by the client")
    num_gathers = len(gathers)
    outgoing.put(0, 0, [0])
    pause(0.05)  # nothing more may happen
    assert len(gathers) == num_gathers
    with pytest.raises(TransferError, match="cancelled by the client"):
        outgoing.done.result(0)
    assert outgoing.in_flight_bytes == sender.open_transfers == 0
    assert not incoming.done.done()
    incoming.abort()
    assert_no_open_transfers(sender, receiver)


def test_a_retry_keeps_complete_blocks_and_asks_only_for_the_others(wire: Wire) -> None:
    source, target = ByteStore(seed=7), ByteStore()
    receiver = wire.receiver(target)
    first, second = wire.sender(source), wire.sender(source)
    incoming = receiver.open([{block: 31 - block for block in range(8)}])
    old = first.open(incoming.ticket)
    put_all(old, range(4))
    old.put(0, 4, [4, 5])
    wait_until(lambda: incoming.progress().verified_bytes == (4 * LAYOUT.num_layers + 2) * BLOCK)
    assert incoming.progress().missing_blocks == ((4, 5, 6, 7),)
    assert incoming.progress().total_bytes == 8 * LAYOUT.num_layers * BLOCK

    ticket = incoming.reopen()
    assert ticket == incoming.ticket
    assert (ticket.epoch, ticket.wanted_blocks) == (2, ((4, 5, 6, 7),))
    assert ticket.transfer_id == old.ticket.transfer_id
    new = second.open(ticket)
    put_all(new, range(8))
    new.finish().result(PATIENCE_S)
    incoming.done.result(PATIENCE_S)
    assert new.sent_bytes == 4 * LAYOUT.num_layers * BLOCK
    assert np.array_equal(target.data[:, 31:23:-1], source.data[:, :8])
    assert receiver.dropped_frames[DropCause.DUPLICATE] == 0

    # All is there but the first token was lost with the pod: a ticket for the token alone.
    last = second.open(incoming.reopen())
    put_all(last, range(8))
    last.finish().result(PATIENCE_S)
    assert last.sent_bytes == 0
    old.abort()
    assert_no_open_transfers(first, receiver)
    assert_no_open_transfers(second, receiver)


def test_a_retry_may_send_layers_again_after_the_missing_ones(wire: Wire) -> None:
    source, target = ByteStore(seed=7), ByteStore()
    receiver, sender = wire.receiver(target), wire.sender(source)
    incoming = receiver.open([{0: 0}])
    old = sender.open(incoming.ticket)
    for layer in range(LAYOUT.num_layers - 1):
        old.put(layer, 0, [0])
    wait_until(lambda: incoming.progress().verified_bytes == (LAYOUT.num_layers - 1) * BLOCK)
    old.abort()
    new = sender.open(incoming.reopen())
    for layer in reversed(range(LAYOUT.num_layers)):
        new.put(layer, 0, [0])
    new.finish().result(PATIENCE_S)
    incoming.done.result(PATIENCE_S)
    assert set(receiver.dropped_frames.values()) == {0}
    assert_no_open_transfers(sender, receiver)


def test_frames_of_the_epoch_before_a_retry_are_never_written(wire: Wire) -> None:
    late, target = ByteStore(seed=8), ByteStore()
    receiver, sender = wire.receiver(target), wire.sender(late)
    incoming = receiver.open([{0: 0, 1: 1}])
    old = sender.open(incoming.ticket)
    incoming.reopen()
    put_all(old, range(2))
    with pytest.raises(TransferError, match="stale_epoch"):
        old.done.result(PATIENCE_S)
    assert not target.data.any()
    assert receiver.dropped_frames[DropCause.STALE_EPOCH] >= 1
    assert incoming.progress().verified_bytes == 0
    incoming.abort()


def test_a_transfer_of_nothing_is_complete_at_once(wire: Wire) -> None:
    receiver, sender = wire.receiver(ByteStore()), wire.sender(ByteStore())
    incoming = receiver.open([{}])
    assert incoming.done.result(0) is None
    outgoing = sender.open(incoming.ticket)
    outgoing.finish().result(0)
    assert_no_open_transfers(sender, receiver)


def test_finishing_without_all_wanted_blocks_fails(wire: Wire) -> None:
    receiver, sender = wire.receiver(ByteStore()), wire.sender(ByteStore())
    incoming = receiver.open([{0: 0, 1: 1}])
    outgoing = sender.open(incoming.ticket)
    put_all(outgoing, range(1))
    with pytest.raises(TransferError, match=r"4 of 8 wanted .* never put"):
        outgoing.finish().result(PATIENCE_S)
    incoming.abort()
    assert_no_open_transfers(sender, receiver)


def test_putting_after_finish_or_outside_the_layers_is_our_own_bug(wire: Wire) -> None:
    target = ByteStore()
    receiver, sender = wire.receiver(target), wire.sender(ByteStore())
    outgoing = sender.open(receiver.open([{0: 0}]).ticket)
    with pytest.raises(InvariantError, match="layer 4 of 4"):
        outgoing.put(4, 0, [0])
    may_write = threading.Event()

    def hold() -> None:
        assert may_write.wait(PATIENCE_S)

    target.before_scatter = hold
    put_all(outgoing, range(1))
    finished = outgoing.finish()
    with pytest.raises(InvariantError, match="after finish"):
        outgoing.put(0, 0, [0])
    may_write.set()
    finished.result(PATIENCE_S)
    outgoing.put(0, 0, [0])  # a transfer that has ended takes no notice


def test_unequal_layouts_refuse_at_the_ticket(wire: Wire) -> None:
    receiver = wire.receiver(ByteStore())
    sender = wire.sender(ByteStore(), dataclasses.replace(LAYOUT, model_revision="def"))
    incoming = receiver.open([{0: 0}])
    with pytest.raises(LayoutMismatchError, match=r"model_revision \(here def, there abc\)"):
        sender.open(incoming.ticket)
    assert sender.open_transfers == 0


def test_a_ticket_that_cannot_work_is_refused(wire: Wire) -> None:
    receiver, sender = wire.receiver(ByteStore()), wire.sender(ByteStore())
    ticket = receiver.open([{0: 0}]).ticket
    for change, named in (
        ({"transfer_id": b"short"}, "transfer_id"),
        ({"epoch": 0}, "epoch"),
        ({"wanted_blocks": ((1, 1),)}, "wanted_blocks"),
        ({"wanted_blocks": ((-1, 0),)}, "wanted_blocks"),
        ({"credit_bytes": BLOCK - 1}, "credit_bytes"),
        ({"endpoint": "nowhere"}, "endpoint"),
    ):
        with pytest.raises(InvalidRequestError, match=f"ticket.{named}"):
            sender.open(dataclasses.replace(ticket, **change))
    sender.open(ticket)
    with pytest.raises(TransferError, match="already being sent"):
        sender.open(ticket)
    with pytest.raises(TransferError, match="in use"):
        receiver.open([{0: 0}], ticket.transfer_id)


def test_a_store_that_fails_fails_its_transfer_and_no_other(wire: Wire) -> None:
    def fail() -> None:
        raise OSError("the disk of the pool is on fire")

    source, target = ByteStore(seed=9), ByteStore()
    receiver, sender = wire.receiver(target), wire.sender(source)
    for store_is_source in (True, False):
        incoming = receiver.open([{0: 0}])
        outgoing = sender.open(incoming.ticket)
        if store_is_source:
            source.before_gather = fail
        else:
            target.before_scatter = fail
        put_all(outgoing, range(1))
        with pytest.raises(TransferError, match="on fire" if store_is_source else "failed to write"):
            outgoing.done.result(PATIENCE_S)
        if not store_is_source:
            with pytest.raises(TransferError, match="on fire"):
                incoming.done.result(PATIENCE_S)
        incoming.abort()
        source.before_gather = target.before_scatter = lambda: None

    incoming = receiver.open([{0: 0}])
    outgoing = sender.open(incoming.ticket)
    put_all(outgoing, range(1))
    outgoing.finish().result(PATIENCE_S)
    assert np.array_equal(target.data[:, 0], source.data[:, 0])
    assert_no_open_transfers(sender, receiver)


def test_closing_either_end_fails_what_is_open_in_under_a_second(wire: Wire) -> None:
    for sender_first in (True, False):
        source, target = ByteStore(seed=10), ByteStore()
        receiver, sender = wire.receiver(target), wire.sender(source)
        target.before_scatter = lambda: pause(0.005)
        incoming = receiver.open([{block: block for block in range(NUM_BLOCKS)}])
        outgoing = sender.open(incoming.ticket)
        put_all(outgoing, range(NUM_BLOCKS))
        started = time.monotonic()
        ends: list[KVReceiver | KVSender] = [sender, receiver]
        for end in ends if sender_first else reversed(ends):
            end.close()
            end.close()
        assert time.monotonic() - started < 1.0
        for done in (incoming.done, outgoing.done):
            with pytest.raises(TransferError):
                done.result(0)
        with pytest.raises(TransferError):
            receiver.open([{0: 0}])
        assert_no_open_transfers(sender, receiver)


def test_a_hundred_concurrent_transfers_with_faults_leave_nothing_open(wire: Wire) -> None:
    sources = [ByteStore(seed=20), ByteStore(seed=20), ByteStore(seed=20)]
    target = ByteStore()
    receiver = wire.receiver(target, credit_bytes=3 * BLOCK)
    senders = [wire.sender(source) for source in sources]
    rng = random.Random(0)
    outcomes: list[str] = []
    lock = threading.Lock()

    def send(ticket: Ticket, plan: random.Random) -> OutgoingTransfer:
        outgoing = plan.choice(senders).open(ticket)
        layers = plan.sample(range(LAYOUT.num_layers), LAYOUT.num_layers)
        for layer in layers:
            for block in range(NUM_BLOCKS):
                outgoing.put(layer, block, [block])
        return outgoing

    def run(block: int, fate: str, plan: random.Random) -> None:
        # Concurrent transfers own different destination blocks, as a block manager sees to.
        incoming = receiver.open([{block: block}])
        outgoing = send(incoming.ticket, plan)
        if fate == "retried":
            outgoing.abort()
            outgoing = send(incoming.reopen(), plan)
        elif fate == "closed":
            incoming.abort()
        elif fate == "aborted":
            outgoing.abort()
            incoming.abort()
        finished = outgoing.finish()
        try:
            incoming.done.result(PATIENCE_S)
            finished.result(PATIENCE_S)
        except TransferError:
            finished.exception(PATIENCE_S)
            result = "failed"
        else:
            assert np.array_equal(target.data[:, block], sources[0].data[:, block])
            result = "arrived"
        with lock:
            outcomes.append(f"{fate} {result}")

    def work(block: int, seed: int) -> None:
        plan = random.Random(seed)
        for fate in plan.sample(["normal", "normal", "retried", "closed", "aborted"], 5):
            target.data[:, block] = 0
            run(block, fate, plan)

    threads = [threading.Thread(target=work, args=(block, rng.random())) for block in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE_S)
    assert len(outcomes) == 100
    assert outcomes.count("normal arrived") == 40
    assert outcomes.count("retried arrived") == 20
    for sender in senders:
        assert_no_open_transfers(sender, receiver)
