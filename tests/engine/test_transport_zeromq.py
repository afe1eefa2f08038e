"""The ZeroMQ wire itself: raw peers on either side of it, honest and not."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

import numpy as np
import pytest
import zmq
from tandem_core.errors import InvalidRequestError, InvariantError, TransferError
from tandem_engine.transport.base import (
    DEFAULT_CREDIT_BYTES,
    MAX_FRAME_BYTES,
    DropCause,
    Ticket,
    TransferState,
)
from tandem_engine.transport.codec import (
    Credit,
    Frame,
    MalformedError,
    Message,
    Reject,
    decode,
    digest,
    encode,
)
from tandem_engine.transport.incoming import Dropped, KVReceiver
from tandem_engine.transport.layout import KVLayout
from tandem_engine.transport.zeromq import ReceiverOptions, SenderOptions, ZmqReceiver, ZmqSender
from waiting import pause, wait_until

LAYOUT = KVLayout(
    model_revision="abc",
    dtype="float16",
    kv_quantization="none",
    num_layers=2,
    num_kv_heads=1,
    head_size=8,
    block_size=16,
    rope="theta=10000.0",
)
BLOCK = LAYOUT.block_bytes
WAIT_MS = 5000


class ByteStore:
    """Sixteen blocks in one numpy array; counts what is written."""

    max_frame_bytes = MAX_FRAME_BYTES

    def __init__(self) -> None:
        self.data = np.zeros((LAYOUT.num_layers, 16, BLOCK), np.uint8)
        self.num_scatters = 0

    def mark(self) -> None:
        return None

    def gather(self, layer: int, block_ids: Sequence[int], after: object = None) -> np.ndarray:
        return self.data[layer, list(block_ids)]

    def scatter(
        self, layer: int, block_ids: Sequence[int], payload: memoryview, after: object = None
    ) -> None:
        self.num_scatters += 1
        self.data[layer, list(block_ids)] = np.frombuffer(payload, np.uint8).reshape(len(block_ids), BLOCK)


class RawSender:
    """A DEALER without the sender's code: sends any bytes to a receiver without CURVE."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.connect(endpoint)

    def send(self, *parts: bytes) -> None:
        self._dealer.send_multipart(parts)

    def reply(self) -> Message:
        assert self._dealer.poll(WAIT_MS), "no reply"
        return decode(self._dealer.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


class RawReceiver:
    """A hand-made ROUTER: takes frames and answers only when a test says so."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.ticket = Ticket(
            transfer_id=b"0123456789abcdef",
            epoch=1,
            endpoint=f"tcp://127.0.0.1:{port}",
            public_key="",
            layout_fingerprint=LAYOUT.fingerprint,
            layout_description=LAYOUT.description,
            wanted_blocks=tuple(range(8)),
            credit_bytes=8 * BLOCK,
        )
        self.peers: set[bytes] = set()

    def frames(self, quiet_ms: int = 100) -> list[tuple[Frame, bytes]]:
        """What arrives until nothing did for `quiet_ms`."""
        frames = []
        wait_ms = WAIT_MS
        while self._router.poll(wait_ms):
            peer, header, payload = self._router.recv_multipart()
            message = decode(header)
            assert isinstance(message, Frame)
            self.peers.add(peer)
            frames.append((message, payload))
            wait_ms = quiet_ms
        return frames

    def is_quiet(self, for_ms: int) -> bool:
        return not self._router.poll(for_ms)

    def answer(self, message: Message) -> None:
        for peer in self.peers:
            self._router.send_multipart([peer, encode(message)])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def store() -> ByteStore:
    return ByteStore()


@pytest.fixture
def receiver(store: ByteStore) -> Iterator[ZmqReceiver]:
    with closing(ZmqReceiver(LAYOUT, store, ReceiverOptions(curve=False))) as receiver:
        yield receiver


@pytest.fixture
def raw_sender(receiver: ZmqReceiver) -> Iterator[RawSender]:
    with closing(RawSender(receiver.endpoint)) as raw_sender:
        yield raw_sender


@pytest.fixture
def raw_receiver() -> Iterator[RawReceiver]:
    with closing(RawReceiver()) as raw_receiver:
        yield raw_receiver


def frame_for(
    ticket: Ticket,
    payload: bytes,
    *,
    layer: int = 0,
    first_block: int = 0,
    num_blocks: int = 1,
    epoch: int = 1,
) -> Frame:
    place = (ticket.transfer_id, ticket.epoch, layer, first_block, num_blocks)
    return Frame(*place, digest(*place, memoryview(payload)))


PAYLOAD = bytes(range(256)) * (BLOCK // 256)
DAMAGED = b"\xff" + PAYLOAD[1:]


def test_a_good_frame_is_written_and_credited(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender
) -> None:
    incoming = receiver.open({0: 7, 1: 8})
    frame = frame_for(incoming.ticket, 2 * PAYLOAD, layer=1, num_blocks=2)
    raw_sender.send(encode(frame), 2 * PAYLOAD)
    assert raw_sender.reply() == Credit(frame.transfer_id, 1, 2 * BLOCK)
    assert store.data[1, [7, 8]].tobytes() == 2 * PAYLOAD
    assert incoming.state is TransferState.TRANSFERRING
    assert not incoming.done.done()


@pytest.mark.parametrize(
    ("cause", "change", "payload"),
    [
        (DropCause.UNKNOWN, {"transfer_id": b"fedcba9876543210"}, PAYLOAD),
        (DropCause.STALE_EPOCH, {"epoch": 0}, PAYLOAD),
        (DropCause.STALE_EPOCH, {"epoch": 2}, PAYLOAD),
        (DropCause.BAD_RANGE, {"layer": LAYOUT.num_layers}, PAYLOAD),
        (DropCause.BAD_RANGE, {"first_block": 3}, PAYLOAD),
        (DropCause.BAD_RANGE, {"num_blocks": 0}, b""),
        (DropCause.BAD_RANGE, {"first_block": 1, "num_blocks": 0}, b""),
        (DropCause.BAD_RANGE, {"first_block": 1, "num_blocks": 5}, 5 * PAYLOAD),
        (DropCause.BAD_RANGE, {"first_block": 1, "num_blocks": 2}, 2 * PAYLOAD),
        (DropCause.BAD_RANGE, {"num_blocks": 2**32 - 1}, PAYLOAD),
        (DropCause.BAD_LENGTH, {"num_blocks": 2}, PAYLOAD),
        (DropCause.BAD_LENGTH, {}, PAYLOAD + b"\0"),
        (DropCause.BAD_LENGTH, {}, b""),
        (DropCause.BAD_LENGTH, {}, bytes(MAX_FRAME_BYTES)),
        (DropCause.BAD_DIGEST, {"digest": b""}, PAYLOAD),
    ],
)
def test_a_frame_out_of_place_is_dropped_counted_and_rejected(
    receiver: ZmqReceiver,
    store: ByteStore,
    raw_sender: RawSender,
    cause: DropCause,
    change: dict[str, int | bytes],
    payload: bytes,
) -> None:
    """Each frame carries the right digest of what it claims, unless the digest is what is wrong."""
    ticket = receiver.open({0: 0, 1: 1, 5: 5}).ticket
    frame = dataclasses.replace(frame_for(ticket, payload), **change)  # type: ignore[arg-type]
    if "digest" not in change:
        place = (frame.transfer_id, frame.epoch, frame.layer, frame.first_block, frame.num_blocks)
        frame = dataclasses.replace(frame, digest=digest(*place, memoryview(payload)))
    raw_sender.send(encode(frame), payload)
    reply = raw_sender.reply()
    assert isinstance(reply, Reject)
    assert (reply.transfer_id, reply.epoch) == (frame.transfer_id, frame.epoch)
    assert cause.value in reply.reason
    assert receiver.dropped_frames == {other: int(other is cause) for other in DropCause}
    assert store.num_scatters == 0


@pytest.mark.parametrize(
    "moved", [{"layer": 1}, {"first_block": 1}, {"epoch": 2}, {"transfer_id": b"x" * 16}]
)
def test_a_digest_does_not_verify_in_another_place(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender, moved: dict[str, int | bytes]
) -> None:
    incoming = receiver.open({0: 0, 1: 1})
    receiver.open({2: 2}, b"x" * 16)
    stolen = frame_for(incoming.ticket, PAYLOAD)
    if "epoch" in moved:
        incoming.reopen()
    if "transfer_id" in moved:
        stolen = frame_for(incoming.ticket, PAYLOAD, first_block=2)
    raw_sender.send(encode(dataclasses.replace(stolen, **moved)), PAYLOAD)  # type: ignore[arg-type]
    assert isinstance(raw_sender.reply(), Reject)
    assert receiver.dropped_frames[DropCause.BAD_DIGEST] == 1
    assert store.num_scatters == 0


def test_a_damaged_payload_does_not_block_the_good_one(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender
) -> None:
    frame = frame_for(receiver.open({0: 0}).ticket, PAYLOAD)
    raw_sender.send(encode(frame), DAMAGED)
    assert isinstance(raw_sender.reply(), Reject)
    raw_sender.send(encode(frame), PAYLOAD)
    assert isinstance(raw_sender.reply(), Credit)
    assert receiver.dropped_frames[DropCause.BAD_DIGEST] == 1
    assert store.data[0, 0].tobytes() == PAYLOAD


def test_a_duplicate_is_counted_and_credited_but_not_written_again(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender
) -> None:
    ticket = receiver.open({0: 0}).ticket
    for payload in (PAYLOAD, DAMAGED):
        raw_sender.send(encode(frame_for(ticket, payload)), payload)
        assert isinstance(raw_sender.reply(), Credit)
    assert receiver.dropped_frames[DropCause.DUPLICATE] == 1
    assert store.num_scatters == 1
    assert store.data[0, 0].tobytes() == PAYLOAD


def test_a_retry_cannot_write_a_block_that_is_complete(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender
) -> None:
    incoming = receiver.open({0: 0, 1: 1})
    for layer in range(LAYOUT.num_layers):
        raw_sender.send(encode(frame_for(incoming.ticket, PAYLOAD, layer=layer)), PAYLOAD)
        assert isinstance(raw_sender.reply(), Credit)
    raw_sender.send(encode(frame_for(incoming.reopen(), DAMAGED)), DAMAGED)
    assert isinstance(raw_sender.reply(), Reject)
    assert receiver.dropped_frames[DropCause.BAD_RANGE] == 1
    assert store.data[0, 0].tobytes() == PAYLOAD


def test_a_frame_looked_up_before_abort_but_accepted_after_it_is_not_written(store: ByteStore) -> None:
    """Fixes the order lookup, abort, accept, which threads would not show reliably."""
    transfer = KVReceiver(LAYOUT, store, 8 * BLOCK, endpoint="tcp://127.0.0.1:1", public_key="").open({0: 0})
    frame = frame_for(transfer.ticket, PAYLOAD)
    transfer.abort()
    with pytest.raises(Dropped) as caught:
        transfer.accept(frame, memoryview(PAYLOAD))
    assert caught.value.cause is DropCause.UNKNOWN
    assert store.num_scatters == 0


def test_two_blocks_cannot_be_promised_one_place(receiver: ZmqReceiver) -> None:
    with pytest.raises(InvariantError, match="same physical block"):
        receiver.open({0: 3, 1: 3})


def test_what_is_no_message_is_counted_and_the_receiver_lives_on(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender
) -> None:
    good = frame_for(receiver.open({0: 0}).ticket, PAYLOAD)
    malformed: list[tuple[bytes, ...]] = [
        (b"",),
        (b"", b""),
        (b"\xff\xff\xff\xff", PAYLOAD),
        (encode(good),),
        (encode(good), PAYLOAD, b"more"),
        (encode(dataclasses.replace(good, transfer_id=b"short")), PAYLOAD),
        (encode(Credit(good.transfer_id, 1, 5)), b""),
        (encode(Reject(good.transfer_id, 1, "no")), b""),
        (bytes(1 << 20), PAYLOAD),
        (b"\x80\x04\x95.", b"a pickle"),
    ]
    for parts in malformed:
        raw_sender.send(*parts)
    raw_sender.send(encode(good), PAYLOAD)
    assert isinstance(raw_sender.reply(), Credit)
    assert receiver.dropped_frames[DropCause.MALFORMED] == len(malformed)
    assert store.num_scatters == 1


def test_a_message_beyond_the_size_limit_ends_its_connection_and_no_other(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender
) -> None:
    ticket = receiver.open({0: 0}).ticket
    huge = bytes(MAX_FRAME_BYTES + (1 << 16))
    with closing(RawSender(receiver.endpoint)) as attacker:
        attacker.send(encode(frame_for(ticket, huge)), huge)
        raw_sender.send(encode(frame_for(ticket, PAYLOAD)), PAYLOAD)
        assert isinstance(raw_sender.reply(), Credit)
        pause(0.1)  # nothing of the attacker's may arrive
    assert store.num_scatters == 1
    assert set(receiver.dropped_frames.values()) == {0}


def test_a_random_header_never_raises_anything_but_malformed() -> None:
    rng = np.random.default_rng(0)
    good = encode(Frame(b"0" * 16, 1, 2, 3, 4, b"d" * 16))
    num_malformed = 0
    for _ in range(2000):
        damaged = bytearray(good)
        for position in rng.integers(0, len(good), 3):
            damaged[position] = rng.integers(0, 256)
        try:
            decode(bytes(damaged))
        except MalformedError:
            num_malformed += 1
    assert num_malformed > 100


@pytest.mark.parametrize(
    "message",
    [
        Frame(b"0123456789abcdef", 3, 29, 62, 2, b"d" * 16),
        Credit(b"0123456789abcdef", 3, 1 << 40),
        Reject(b"0123456789abcdef", 3, "closed"),
    ],
)
def test_messages_survive_the_codec(message: Message) -> None:
    assert decode(encode(message)) == message


def test_the_sender_sends_exactly_its_credit_and_goes_on_as_credit_returns(raw_receiver: RawReceiver) -> None:
    ticket = raw_receiver.ticket
    store = ByteStore()
    store.data[:] = np.random.default_rng(0).integers(0, 256, store.data.shape, np.uint8)
    with closing(ZmqSender(LAYOUT, store, SenderOptions(curve=False, stall_s=30))) as sender:
        outgoing = sender.open(ticket)
        for layer in range(LAYOUT.num_layers):
            outgoing.put(layer, 0, range(8))
        finished = outgoing.finish()
        frames = raw_receiver.frames()
        assert sum(len(payload) for _, payload in frames) == outgoing.in_flight_bytes == 8 * BLOCK

        raw_receiver.answer(Credit(ticket.transfer_id, 2, 4 * BLOCK))  # of another epoch: no credit
        raw_receiver.answer(Credit(ticket.transfer_id, 1, BLOCK))  # less than the next frame needs
        raw_receiver.answer(Reject(b"another transfer", 1, "unknown"))
        assert outgoing.in_flight_bytes <= 8 * BLOCK
        assert raw_receiver.is_quiet(50)
        raw_receiver.answer(Credit(ticket.transfer_id, 1, BLOCK))
        more = raw_receiver.frames()
        assert sum(len(payload) for _, payload in more) == 2 * BLOCK
        frames += more
        raw_receiver.answer(Credit(ticket.transfer_id, 1, 8 * BLOCK))
        frames += raw_receiver.frames()
        assert not finished.done()
        raw_receiver.answer(Credit(ticket.transfer_id, 1, 6 * BLOCK))
        assert finished.result(WAIT_MS / 1000) is None
    for frame, payload in frames:
        blocks = slice(frame.first_block, frame.first_block + frame.num_blocks)
        assert payload == store.data[frame.layer, blocks].tobytes()
        assert frame == frame_for(
            ticket, payload, layer=frame.layer, first_block=frame.first_block, num_blocks=frame.num_blocks
        )
    assert sum(frame.num_blocks for frame, _ in frames) == 8 * LAYOUT.num_layers


def test_transfers_to_one_pod_share_a_connection(raw_receiver: RawReceiver) -> None:
    with closing(ZmqSender(LAYOUT, ByteStore(), SenderOptions(curve=False))) as sender:
        for number in range(3):
            transfer_id = bytes([number]) * 16
            ticket = dataclasses.replace(raw_receiver.ticket, transfer_id=transfer_id, wanted_blocks=(0,))
            outgoing = sender.open(ticket)
            outgoing.put(0, 0, [0])
            outgoing.put(1, 0, [0])
            raw_receiver.frames(quiet_ms=20)
            raw_receiver.answer(Credit(transfer_id, 1, 2 * BLOCK))
            outgoing.finish().result(WAIT_MS / 1000)
    assert len(raw_receiver.peers) == 1


def test_a_connection_is_opened_when_the_peer_has_replied_on_all_others(raw_receiver: RawReceiver) -> None:
    """Otherwise ZeroMQ would serve all of them in one thread."""
    options = SenderOptions(curve=False, stall_s=30, num_connections=3)
    with closing(ZmqSender(LAYOUT, ByteStore(), options)) as sender:
        outgoing = sender.open(raw_receiver.ticket)
        for block, num_peers in enumerate((1, 2, 3, 3, 3)):
            outgoing.put(0, block, [block])
            outgoing.put(1, block, [block])
            assert len(raw_receiver.frames(quiet_ms=20)) == 2
            assert len(raw_receiver.peers) == num_peers
            # To all peers, each of which counts it: more credit than is owed changes nothing.
            raw_receiver.answer(Credit(raw_receiver.ticket.transfer_id, 1, 2 * BLOCK))
            pause(0.05)


@contextmanager
def serving_one_connection(target: str) -> Iterator[str]:
    """The address of a proxy that forwards its first connection, and accepts others without a word."""
    host, _, port = target.removeprefix("tcp://").rpartition(":")
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        held: list[socket.socket] = []

        def pump(source: socket.socket, sink: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    sink.sendall(data)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client = listener.accept()[0]
                    held.append(client)
                    if len(held) > 1:
                        continue
                    server = socket.create_connection((host, int(port)))
                    stack.callback(server.shutdown, socket.SHUT_RDWR)
                    for pair in ((client, server), (server, client)):
                        threading.Thread(target=pump, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        assert len(held) > 1, "the sender opened one connection only"
        for client in held:
            client.close()


def test_a_connection_that_nobody_serves_holds_up_no_transfer(store: ByteStore) -> None:
    source = ByteStore()
    source.data[:] = 7
    options = SenderOptions(num_connections=3, stall_s=0.5)
    with (
        closing(ZmqReceiver(LAYOUT, store, ReceiverOptions(num_connections=3))) as receiver,
        serving_one_connection(receiver.endpoint) as endpoint,
        closing(ZmqSender(LAYOUT, source, options)) as sender,
    ):
        for _ in range(3):
            incoming = receiver.open({block: block for block in range(8)})
            outgoing = sender.open(dataclasses.replace(incoming.ticket, endpoint=endpoint))
            for layer, block in itertools.product(range(LAYOUT.num_layers), range(8)):
                outgoing.put(layer, block, [block])
            outgoing.finish().result(WAIT_MS / 1000)
            incoming.done.result(WAIT_MS / 1000)


def test_every_byte_arrives_over_several_connections(store: ByteStore) -> None:
    source = ByteStore()
    source.data[:] = np.random.default_rng(1).integers(0, 256, source.data.shape, np.uint8)
    with (
        closing(ZmqReceiver(LAYOUT, store, ReceiverOptions(num_connections=3))) as receiver,
        closing(ZmqSender(LAYOUT, source, SenderOptions(num_connections=3))) as sender,
    ):
        for _ in range(4):
            store.data[:] = 0
            incoming = receiver.open({block: block for block in range(8)})
            assert incoming.ticket.credit_bytes == 3 * DEFAULT_CREDIT_BYTES
            outgoing = sender.open(incoming.ticket)
            for layer, block in itertools.product(range(LAYOUT.num_layers), range(8)):
                outgoing.put(layer, block, [block])
            outgoing.finish().result(WAIT_MS / 1000)
            incoming.done.result(WAIT_MS / 1000)
            assert np.array_equal(store.data[:, :8], source.data[:, :8])
        assert [len(peer.dealers) for peer in sender._peers.values()] == [3]


def test_a_peer_that_goes_silent_fails_the_transfer_after_the_stall_time(raw_receiver: RawReceiver) -> None:
    with closing(ZmqSender(LAYOUT, ByteStore(), SenderOptions(curve=False, stall_s=0.3))) as sender:
        outgoing = sender.open(raw_receiver.ticket)
        pause(0.5)  # longer than stall_s
        assert not outgoing.done.done()  # nothing is owed while nothing was sent
        outgoing.put(0, 0, range(8))
        started = time.monotonic()
        with pytest.raises(TransferError, match=r"no credit from tcp://.* for 0\.3 s"):
            outgoing.done.result(WAIT_MS / 1000)
        assert 0.25 < time.monotonic() - started < 1.0
        assert sender.open_transfers == 0


def test_a_reject_stops_the_transfer_at_once(raw_receiver: RawReceiver) -> None:
    with closing(ZmqSender(LAYOUT, ByteStore(), SenderOptions(curve=False, stall_s=30))) as sender:
        outgoing = sender.open(raw_receiver.ticket)
        outgoing.put(0, 0, range(8))
        raw_receiver.frames()
        raw_receiver.answer(Reject(raw_receiver.ticket.transfer_id, 1, "closed"))
        with pytest.raises(TransferError, match="closed"):
            outgoing.done.result(WAIT_MS / 1000)
        assert raw_receiver.is_quiet(50)


@pytest.mark.parametrize("key", ["another server's", "none"])
def test_without_the_receivers_key_nothing_gets_through(store: ByteStore, key: str) -> None:
    with (
        closing(ZmqReceiver(LAYOUT, store)) as receiver,
        closing(ZmqSender(LAYOUT, ByteStore(), SenderOptions(curve=key != "none", stall_s=0.4))) as sender,
    ):
        assert len(receiver.public_key) == 40
        wrong = zmq.curve_keypair()[0].decode() if key == "another server's" else ""
        incoming = receiver.open({0: 0})
        outgoing = sender.open(dataclasses.replace(incoming.ticket, public_key=wrong))
        outgoing.put(0, 0, [0])
        with pytest.raises(TransferError, match="no credit"):
            outgoing.done.result(WAIT_MS / 1000)
        assert store.num_scatters == 0
        assert set(receiver.dropped_frames.values()) == {0}
        # With the right key the same transfer works.
        retry = sender.open(incoming.reopen())
        retry.put(0, 0, [0])
        retry.put(1, 0, [0])
        retry.finish().result(WAIT_MS / 1000)
        assert incoming.done.result(WAIT_MS / 1000) is None


def test_a_receiver_that_restarts_on_its_port_is_found_again() -> None:
    source = ByteStore()
    source.data[:] = 5
    port = 0
    with closing(ZmqSender(LAYOUT, source, SenderOptions(curve=False, stall_s=30))) as sender:
        for _ in range(2):
            target = ByteStore()
            with closing(ZmqReceiver(LAYOUT, target, ReceiverOptions(port=port))) as receiver:
                port = int(receiver.endpoint.rpartition(":")[2])
                incoming = receiver.open({0: 3})
                outgoing = sender.open(incoming.ticket)
                outgoing.put(0, 0, [0])
                outgoing.put(1, 0, [0])
                outgoing.finish().result(WAIT_MS / 1000)
                assert (target.data[:, 3] == 5).all()


def test_tickets_carry_the_advertised_host() -> None:
    options = ReceiverOptions(advertised_host="decode-0.tandem")
    with closing(ZmqReceiver(LAYOUT, ByteStore(), options)) as receiver:
        assert receiver.open({0: 0}).ticket.endpoint == receiver.endpoint
        assert receiver.endpoint.startswith("tcp://decode-0.tandem:")


def test_a_port_that_is_taken_is_reported(receiver: ZmqReceiver) -> None:
    port = int(receiver.endpoint.rpartition(":")[2])
    with pytest.raises(zmq.ZMQError, match="in use"):
        ZmqReceiver(LAYOUT, ByteStore(), ReceiverOptions(port=port))


def test_an_endpoint_that_resolves_to_nothing_fails_its_transfer_only(receiver: ZmqReceiver) -> None:
    with closing(ZmqSender(LAYOUT, ByteStore(), SenderOptions(curve=False))) as sender:
        ticket = receiver.open({0: 0}).ticket
        bad = sender.open(dataclasses.replace(ticket, endpoint="tcp://127.0.0.1:port"))
        bad.put(0, 0, [0])
        with pytest.raises(TransferError, match="sending to"):
            bad.done.result(WAIT_MS / 1000)
        good = sender.open(ticket)
        good.put(0, 0, [0])
        good.put(1, 0, [0])
        good.finish().result(WAIT_MS / 1000)
        wait_until(lambda: receiver.open_transfers == 0)


def test_a_ticket_without_a_key_is_refused() -> None:
    with (
        closing(ZmqReceiver(LAYOUT, ByteStore(), ReceiverOptions(curve=False))) as receiver,
        closing(ZmqSender(LAYOUT, ByteStore())) as sender,
        pytest.raises(InvalidRequestError, match=r"public_key.*must not be empty"),
    ):
        sender.open(receiver.open({0: 0}).ticket)
