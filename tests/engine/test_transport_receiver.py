"""The receiver of KV over ZeroMQ, and the codec: frames that are good, misplaced, damaged, or none at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import numpy as np
import pytest
import zmq
from ipv6 import has_ipv6
from resident_memory import in_own_process, resident_bytes
from tandem_core.errors import InvariantError
from tandem_engine.transport.base import MAX_FRAME_BYTES, DropCause, TransferState
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
from tandem_engine.transport.zeromq import ReceiverOptions, ZmqReceiver
from waiting import pause
from zeromq_peers import BLOCK, LAYOUT, ByteStore, RawSender, frame_for


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


PAYLOAD = bytes(range(256)) * (BLOCK // 256)
DAMAGED = b"\xff" + PAYLOAD[1:]


def test_a_good_frame_is_written_and_credited(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender
) -> None:
    incoming = receiver.open([{0: 7, 1: 8}])
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
    ticket = receiver.open([{0: 0, 1: 1, 5: 5}]).ticket
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
    incoming = receiver.open([{0: 0, 1: 1}])
    receiver.open([{2: 2}], b"x" * 16)
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
    frame = frame_for(receiver.open([{0: 0}]).ticket, PAYLOAD)
    raw_sender.send(encode(frame), DAMAGED)
    assert isinstance(raw_sender.reply(), Reject)
    raw_sender.send(encode(frame), PAYLOAD)
    assert isinstance(raw_sender.reply(), Credit)
    assert receiver.dropped_frames[DropCause.BAD_DIGEST] == 1
    assert store.data[0, 0].tobytes() == PAYLOAD


def test_a_duplicate_is_counted_and_credited_but_not_written_again(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender
) -> None:
    ticket = receiver.open([{0: 0}]).ticket
    for payload in (PAYLOAD, DAMAGED):
        raw_sender.send(encode(frame_for(ticket, payload)), payload)
        assert isinstance(raw_sender.reply(), Credit)
    assert receiver.dropped_frames[DropCause.DUPLICATE] == 1
    assert store.num_scatters == 1
    assert store.data[0, 0].tobytes() == PAYLOAD


def test_a_retry_cannot_write_a_block_that_is_complete(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender
) -> None:
    incoming = receiver.open([{0: 0, 1: 1}])
    for layer in range(LAYOUT.num_layers):
        raw_sender.send(encode(frame_for(incoming.ticket, PAYLOAD, layer=layer)), PAYLOAD)
        assert isinstance(raw_sender.reply(), Credit)
    raw_sender.send(encode(frame_for(incoming.reopen(), DAMAGED)), DAMAGED)
    assert isinstance(raw_sender.reply(), Reject)
    assert receiver.dropped_frames[DropCause.BAD_RANGE] == 1
    assert store.data[0, 0].tobytes() == PAYLOAD


def test_a_frame_looked_up_before_abort_but_accepted_after_it_is_not_written(store: ByteStore) -> None:
    """Fixes the order lookup, abort, accept, which threads would not show reliably."""
    transfer = KVReceiver(LAYOUT, store, 8 * BLOCK, endpoint="tcp://127.0.0.1:1", public_key="").open(
        [{0: 0}]
    )
    frame = frame_for(transfer.ticket, PAYLOAD)
    transfer.abort()
    with pytest.raises(Dropped) as caught:
        transfer.accept(frame, memoryview(PAYLOAD))
    assert caught.value.cause is DropCause.UNKNOWN
    assert store.num_scatters == 0


def test_two_blocks_cannot_be_promised_one_place(receiver: ZmqReceiver) -> None:
    with pytest.raises(InvariantError, match="same physical block"):
        receiver.open([{0: 3, 1: 3}])


def test_what_is_no_message_is_counted_and_the_receiver_lives_on(
    receiver: ZmqReceiver, store: ByteStore, raw_sender: RawSender
) -> None:
    good = frame_for(receiver.open([{0: 0}]).ticket, PAYLOAD)
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
    ticket = receiver.open([{0: 0}]).ticket
    huge = bytes(MAX_FRAME_BYTES + (1 << 16))
    with closing(RawSender(receiver.endpoint)) as attacker:
        attacker.send(encode(frame_for(ticket, huge)), huge)
        raw_sender.send(encode(frame_for(ticket, PAYLOAD)), PAYLOAD)
        assert isinstance(raw_sender.reply(), Credit)
        pause(0.1)  # nothing of the attacker's may arrive
    assert store.num_scatters == 1
    assert set(receiver.dropped_frames.values()) == {0}


def test_tickets_carry_the_advertised_host() -> None:
    options = ReceiverOptions(advertised_host="decode-0.tandem")
    with closing(ZmqReceiver(LAYOUT, ByteStore(), options)) as receiver:
        assert receiver.open([{0: 0}]).ticket.endpoint == receiver.endpoint
        assert receiver.endpoint.startswith("tcp://decode-0.tandem:")


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
def test_tickets_of_an_ipv6_address_have_brackets() -> None:
    with closing(ZmqReceiver(LAYOUT, ByteStore(), ReceiverOptions("::1"))) as receiver:
        assert receiver.open([{0: 0}]).ticket.endpoint.startswith("tcp://[::1]:")


def test_a_port_that_is_taken_is_reported(receiver: ZmqReceiver) -> None:
    port = int(receiver.endpoint.rpartition(":")[2])
    with pytest.raises(zmq.ZMQError, match="in use"):
        ZmqReceiver(LAYOUT, ByteStore(), ReceiverOptions(port=port))


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


def send_parts(endpoint: str, keys: tuple[bytes, bytes, bytes], num_parts: int) -> None:
    """One message of many large parts; waits for a reply, which nobody owes it."""
    with closing(RawSender(endpoint, keys)) as peer:
        with suppress(zmq.Again):  # refused before the last part
            peer.send(*[bytes(3_000_000)] * num_parts)
        with pytest.raises(AssertionError, match="no reply"):
            peer.reply()


def test_only_the_client_of_the_tickets_gets_anything_in() -> None:
    """ZeroMQ holds all parts of a message, however many, before the receiver sees the first."""
    with closing(ZmqReceiver(LAYOUT, ByteStore())) as receiver:
        before = resident_bytes()
        stranger = (receiver.public_key.encode(), *zmq.curve_keypair())
        in_own_process(send_parts, receiver.endpoint, stranger, num_parts=100)
        assert resident_bytes() - before < 60 << 20
        assert set(receiver.dropped_frames.values()) == {0}

        ticket = receiver.open([{0: 7}]).ticket
        secret = ticket.client_secret_key.encode()
        known = (ticket.public_key.encode(), zmq.curve_public(secret), secret)
        with closing(RawSender(receiver.endpoint, known)) as peer:
            frame = frame_for(ticket, PAYLOAD)
            peer.send(encode(frame), PAYLOAD)
            assert peer.reply() == Credit(frame.transfer_id, 1, BLOCK)


def test_a_ticket_shows_no_key_when_it_is_logged() -> None:
    with closing(ZmqReceiver(LAYOUT, ByteStore())) as receiver:
        ticket = receiver.open([{0: 7}]).ticket
        assert len(ticket.client_secret_key) == 40
        assert ticket.client_secret_key not in repr(ticket)
        assert repr(ticket.transfer_id) not in repr(ticket)


def flood(endpoint: str, header: bytes, num_messages: int) -> None:
    """Frames of an unknown transfer; reads no reply."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.rcvhwm, dealer.sndhwm, dealer.rcvbuf, dealer.linger = 1, 0, 4096, 20_000
    dealer.connect(endpoint)
    for _ in range(num_messages):
        dealer.send_multipart([header, b""])
    dealer.close()
    context.term()


def test_replies_to_a_peer_that_does_not_read_are_bounded(receiver: ZmqReceiver) -> None:
    num_messages = 250_000
    unknown = encode(Frame(b"0" * 16, 1, 0, 0, 1, bytes(8)))
    before = peak = resident_bytes()
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(in_own_process, flood, receiver.endpoint, unknown, num_messages)
        while not flooding.done():
            peak = max(peak, resident_bytes())
            pause(0.01)
        flooding.result()
    assert receiver.dropped_frames[DropCause.UNKNOWN] > num_messages / 2, "most must have been answered"
    assert peak - before < 3 << 20
