"""The sender of KV over ZeroMQ: credit, connections, keys, and peers that fail."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import numpy as np
import pytest
import zmq
from tandem_core.errors import InvalidRequestError, TransferError
from tandem_engine.transport.base import DEFAULT_CREDIT_BYTES
from tandem_engine.transport.codec import Credit, Reject
from tandem_engine.transport.zeromq import ReceiverOptions, SenderOptions, ZmqReceiver, ZmqSender
from waiting import pause, wait_until
from zeromq_peers import BLOCK, LAYOUT, WAIT_MS, ByteStore, RawReceiver, frame_for


@pytest.fixture
def raw_receiver() -> Iterator[RawReceiver]:
    with closing(RawReceiver()) as raw_receiver:
        yield raw_receiver


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
            ticket = dataclasses.replace(raw_receiver.ticket, transfer_id=transfer_id, wanted_blocks=((0,),))
            outgoing = sender.open(ticket)
            outgoing.put(0, 0, [0])
            outgoing.put(1, 0, [0])
            raw_receiver.frames(quiet_ms=20)
            raw_receiver.answer(Credit(transfer_id, 1, 2 * BLOCK))
            outgoing.finish().result(WAIT_MS / 1000)
    assert len(raw_receiver.peers) == 1


def test_a_connection_is_opened_when_the_peer_has_replied_on_all_others(raw_receiver: RawReceiver) -> None:
    """Otherwise ZeroMQ would serve all of them in one thread."""
    ticket = dataclasses.replace(
        raw_receiver.ticket, wanted_blocks=(tuple(range(10_000)),), credit_bytes=1 << 40
    )
    options = SenderOptions(curve=False, stall_s=30, num_connections=3)
    with closing(ZmqSender(LAYOUT, ByteStore(), options)) as sender:
        outgoing = sender.open(ticket)
        blocks = iter(ticket.wanted_blocks[0])

        def send_one() -> None:
            outgoing.put(0, next(blocks), [0])
            assert len(raw_receiver.frames(quiet_ms=5)) == 1

        for num_peers in (1, 2, 3):
            # A new connection takes its turn once it stands, which takes as long as the machine likes.
            deadline = time.monotonic() + WAIT_MS / 1000
            while len(raw_receiver.peers) < num_peers and time.monotonic() < deadline:
                send_one()
            for _ in range(10):
                send_one()
            assert len(raw_receiver.peers) == num_peers
            raw_receiver.answer(Credit(ticket.transfer_id, 1, BLOCK))
        for _ in range(10):
            send_one()
        assert len(raw_receiver.peers) == options.num_connections


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


def test_a_connection_that_nobody_serves_holds_up_no_transfer() -> None:
    store, source = ByteStore(), ByteStore()
    source.data[:] = 7
    options = SenderOptions(num_connections=3, stall_s=0.5)
    with (
        closing(ZmqReceiver(LAYOUT, store, ReceiverOptions(num_connections=3))) as receiver,
        serving_one_connection(receiver.endpoint) as endpoint,
        closing(ZmqSender(LAYOUT, source, options)) as sender,
    ):
        for _ in range(3):
            incoming = receiver.open([{block: block for block in range(8)}])
            outgoing = sender.open(dataclasses.replace(incoming.ticket, endpoint=endpoint))
            for layer, block in itertools.product(range(LAYOUT.num_layers), range(8)):
                outgoing.put(layer, block, [block])
            outgoing.finish().result(WAIT_MS / 1000)
            incoming.done.result(WAIT_MS / 1000)


def test_every_byte_arrives_over_several_connections() -> None:
    store, source = ByteStore(), ByteStore()
    source.data[:] = np.random.default_rng(1).integers(0, 256, source.data.shape, np.uint8)
    with (
        closing(ZmqReceiver(LAYOUT, store, ReceiverOptions(num_connections=3))) as receiver,
        closing(ZmqSender(LAYOUT, source, SenderOptions(num_connections=3))) as sender,
    ):

        def transfer_all() -> int:
            """The number of connections after a transfer of everything."""
            store.data[:] = 0
            incoming = receiver.open([{block: block for block in range(8)}])
            assert incoming.ticket.credit_bytes == 3 * DEFAULT_CREDIT_BYTES
            outgoing = sender.open(incoming.ticket)
            for layer, block in itertools.product(range(LAYOUT.num_layers), range(8)):
                outgoing.put(layer, block, [block])
            outgoing.finish().result(WAIT_MS / 1000)
            incoming.done.result(WAIT_MS / 1000)
            assert np.array_equal(store.data[:, :8], source.data[:, :8])
            (peer,) = sender._peers.values()
            return len(peer.dealers)

        wait_until(lambda: transfer_all() == 3)
        assert transfer_all() == 3


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
def test_without_the_receivers_key_nothing_gets_through(key: str) -> None:
    store = ByteStore()
    with (
        closing(ZmqReceiver(LAYOUT, store)) as receiver,
        closing(ZmqSender(LAYOUT, ByteStore(), SenderOptions(curve=key != "none", stall_s=0.4))) as sender,
    ):
        assert len(receiver.public_key) == 40
        wrong = zmq.curve_keypair()[0].decode() if key == "another server's" else ""
        incoming = receiver.open([{0: 0}])
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
                incoming = receiver.open([{0: 3}])
                outgoing = sender.open(incoming.ticket)
                outgoing.put(0, 0, [0])
                outgoing.put(1, 0, [0])
                outgoing.finish().result(WAIT_MS / 1000)
                assert (target.data[:, 3] == 5).all()


def test_an_endpoint_that_resolves_to_nothing_fails_its_transfer_only() -> None:
    with (
        closing(ZmqReceiver(LAYOUT, ByteStore(), ReceiverOptions(curve=False))) as receiver,
        closing(ZmqSender(LAYOUT, ByteStore(), SenderOptions(curve=False))) as sender,
    ):
        ticket = receiver.open([{0: 0}]).ticket
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
        sender.open(receiver.open([{0: 0}]).ticket)
