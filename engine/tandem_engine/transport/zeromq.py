"""KV transfer over ZeroMQ: one ROUTER per decode pod, one or more DEALERs per peer on the prefill pod.

    prefill pod                                             decode pod
    kv-sender thread: gather, digest -> DEALER  == tcp ==>  ROUTER -> kv-receiver thread: check, scatter
                                   [header, payload]
                          KVSender <- DEALER    <== tcp ==  ROUTER <- credit or reject  [header]

Only these two threads touch the sockets; other threads reach them through the transfers and a wake-up pipe.
Payloads are not copied here: the gathered array goes to ZeroMQ, the received buffer to the store. ZeroMQ
drops its reference to the array when it has sent it, which frees the buffer of a store that reuses buffers.

ZeroMQ encrypts a connection in one of its threads, at half to one gigabyte per second. Pods with GPUs compute
KV faster than that, so their frames take turns on several connections (`num_connections`), each with a thread
of its own at both ends. The order in which frames arrive does not matter.

CURVE (on by default) encrypts, and proves each end to the other. The ticket has the receiver's public key and
the secret key of the one client that the receiver lets in, so only pods that it has called can connect:
ZeroMQ bounds the size of a part, not of a message of many parts, which it holds until the last one is there.
A sender that has the wrong server key never completes the handshake, so none of its bytes reach the receiver.
The 128-bit transfer id is what allows writing.

The ticket travels on the Prefill call. Mutual TLS authenticates that call both ways and encrypts it, which
binds the receiver's key to the decode pod's certificate, and the client's key and the id to the prefill
pod's. Without TLS, whoever reads the call can write into the transfer.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from tandem_core.errors import InvalidRequestError, TransferError
from zmq.utils import z85

from tandem_engine.transport.base import (
    DEFAULT_CREDIT_BYTES,
    MAX_FRAME_BYTES,
    BlockStore,
    DropCause,
    Ticket,
)
from tandem_engine.transport.codec import (
    MAX_HEADER_BYTES,
    Credit,
    Frame,
    MalformedError,
    Reject,
    decode,
    encode,
)
from tandem_engine.transport.incoming import KVReceiver
from tandem_engine.transport.layout import KVLayout
from tandem_engine.transport.outgoing import KVSender, OutgoingTransfer

#: Room for CURVE's nonce, tag and flags around a message of the largest size.
_ENCRYPTION_BYTES = 256

#: Messages of one peer that may wait in the receiver; the byte credit keeps correct peers far below it.
_RECEIVE_QUEUE = 64

#: Replies that may wait for one peer, many more than the credit lets a peer that reads wait for. Those to a
#: peer that does not read are dropped.
_REPLY_QUEUE = 1000

#: A connection that answers no ping for this long is dropped, so that a vanished host frees its socket.
_HEARTBEAT_INTERVAL_MS = 500
_HEARTBEAT_TIMEOUT_MS = 1500

#: How often the sender looks for stalled transfers and idle peers, while there are any.
_TICK_MS = 100


class _WakePipe:
    """Lets any thread interrupt another's poll."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        # A late wake-up must not write to a descriptor that was closed and reused.
        self._lock = threading.Lock()
        self._closed = False

    def wake(self) -> None:
        # A full pipe wakes the poll already.
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._write_fd, b"w")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.read_fd, 65536)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.read_fd)
            os.close(self._write_fd)


class _Worker:
    """A thread with a ZeroMQ context of its own, which has a thread per connection of a peer, and a pipe to
    interrupt its poll."""

    def __init__(self, num_connections: int) -> None:
        self.context = zmq.Context(io_threads=num_connections)
        self.pipe = _WakePipe()
        #: The thread's function returns when this is set.
        self.stopping = False
        self._thread: threading.Thread | None = None

    def start(self, name: str, serve: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the thread to return, then closes the context's sockets; idempotent."""
        if self.stopping:
            return
        self.stopping = True
        self.pipe.wake()
        if self._thread is not None:
            self._thread.join()
        self.pipe.close()
        self.context.destroy(linger=0)


def _configure(socket: zmq.Socket[bytes], max_message_bytes: int) -> None:
    socket.linger = 0
    socket.maxmsgsize = max_message_bytes
    socket.heartbeat_ivl = _HEARTBEAT_INTERVAL_MS
    socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class ReceiverOptions:
    """Where a decode pod's KV ingress listens and what it grants."""

    host: str = "127.0.0.1"
    #: 0 takes a free one.
    port: int = 0
    #: The host to put into tickets, when it is not `host` (as with 0.0.0.0).
    advertised_host: str | None = None
    curve: bool = True
    #: None: DEFAULT_CREDIT_BYTES for each connection.
    credit_bytes: int | None = None
    #: Connections of a peer that are served at the same time.
    num_connections: int = 1


class ZmqReceiver(KVReceiver):
    """Raises zmq.ZMQError when the address cannot be bound."""

    def __init__(
        self, layout: KVLayout, store: BlockStore, options: ReceiverOptions = ReceiverOptions()
    ) -> None:
        self._worker = _Worker(options.num_connections)
        self._router = self._worker.context.socket(zmq.ROUTER)
        largest = max(MAX_FRAME_BYTES, layout.max_block_bytes)
        _configure(self._router, largest + _ENCRYPTION_BYTES)
        self._router.rcvhwm = _RECEIVE_QUEUE
        self._router.sndhwm = _REPLY_QUEUE
        public_key = client_secret_key = ""
        #: Gets ZeroMQ's questions whether a client may connect (ZeroMQ's RFC 27).
        self._door = self._worker.context.socket(zmq.REP)
        self._client_key = b""
        try:
            if options.curve:
                public, secret = zmq.curve_keypair()
                self._router.curve_server = True
                self._router.curve_publickey = public
                self._router.curve_secretkey = secret
                public_key = public.decode()
                client_public, client_secret = zmq.curve_keypair()
                client_secret_key = client_secret.decode()
                self._client_key = z85.decode(client_public)
                self._door.bind("inproc://zeromq.zap.01")
            self._router.ipv6 = ":" in options.host
            self._router.bind(f"tcp://{_bracketed(options.host)}:{options.port or '*'}")
        except zmq.ZMQError:
            self._worker.close()
            raise
        bound = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        host = _bracketed(options.advertised_host or options.host)
        endpoint = f"tcp://{host}:{bound.rpartition(':')[2]}"
        credit_bytes = options.credit_bytes or DEFAULT_CREDIT_BYTES * options.num_connections
        super().__init__(
            layout,
            store,
            credit_bytes,
            endpoint=endpoint,
            public_key=public_key,
            client_secret_key=client_secret_key,
        )
        self._worker.start("kv-receiver", self._serve)

    def close(self) -> None:
        super().close()
        self._worker.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._door, zmq.POLLIN)
        poller.register(self._worker.pipe.read_fd, zmq.POLLIN)
        while not self._worker.stopping:
            poller.poll()
            self._worker.pipe.drain()
            while not self._worker.stopping:
                self._admit()
                try:
                    parts = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
                except zmq.Again:
                    break
                self._receive(parts)

    def _admit(self) -> None:
        """Lets in the client whose key the tickets have."""
        with contextlib.suppress(zmq.Again):
            while True:
                version, request_id, *_, key = self._door.recv_multipart(zmq.DONTWAIT)
                status = b"200" if hmac.compare_digest(key, self._client_key) else b"400"
                self._door.send_multipart([version, request_id, status, b"", b"", b""])

    def _receive(self, parts: list[zmq.Frame]) -> None:
        try:
            if len(parts) != 3:
                raise MalformedError(f"{len(parts)} parts instead of peer, header, payload")
            # Bounded before it is copied: the part may be as large as a payload.
            if len(parts[1]) > MAX_HEADER_BYTES:
                raise MalformedError("the header is too long")
            frame = decode(parts[1].bytes)
            if not isinstance(frame, Frame):
                raise MalformedError("only frames travel to the decode pod")
        except MalformedError:
            self.count_drop(DropCause.MALFORMED)
            return
        reply = self.accept(frame, parts[2].buffer)
        # A disconnected peer gets no reply.
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([parts[0].bytes, encode(reply)], zmq.DONTWAIT)


@dataclass
class _Peer:
    """The connections to one decode pod, kept between transfers."""

    dealers: list[zmq.Socket[bytes]] = field(default_factory=list)
    transfers: list[OutgoingTransfer] = field(default_factory=list)
    #: Attempts to send.
    num_sent: int = 0
    #: Connections on which the decode pod has replied.
    replied: set[zmq.Socket[bytes]] = field(default_factory=set)
    idle_since: float = 0.0


@dataclass(frozen=True)
class SenderOptions:
    """How long a prefill pod waits."""

    #: Without credit for this long, while it is owed, a transfer fails.
    stall_s: float = 1.0
    #: A connection without a transfer is closed after this long.
    idle_s: float = 60.0
    #: Refuse tickets without a public key, whose KV would travel unencrypted.
    curve: bool = True
    #: Connections to each decode pod.
    num_connections: int = 1


class ZmqSender(KVSender):
    def __init__(self, layout: KVLayout, store: BlockStore, options: SenderOptions = SenderOptions()) -> None:
        self._worker = _Worker(options.num_connections)
        super().__init__(layout, store, self._worker.pipe.wake)
        self._options = options
        #: By endpoint and public key: a restarted receiver has another key, hence another connection.
        self._peers: dict[tuple[str, str], _Peer] = {}
        self._poller = zmq.Poller()
        self._worker.start("kv-sender", self._serve)

    def open(self, ticket: Ticket) -> OutgoingTransfer:
        if not ticket.endpoint.startswith("tcp://"):
            raise InvalidRequestError("ticket.endpoint", f"{ticket.endpoint!r} is not tcp://host:port")
        if not ticket.public_key and self._options.curve:
            raise InvalidRequestError("ticket.public_key", "must not be empty: KV is sent only encrypted")
        if ticket.public_key and len(ticket.public_key) != 40:
            raise InvalidRequestError("ticket.public_key", "must be 40 characters of Z85")
        if ticket.client_secret_key and len(ticket.client_secret_key) != 40:
            raise InvalidRequestError("ticket.client_secret_key", "must be 40 characters of Z85")
        return super().open(ticket)

    def close(self) -> None:
        super().close()
        self._worker.close()

    def _serve(self) -> None:
        self._poller.register(self._worker.pipe.read_fd, zmq.POLLIN)
        busy = False
        while not self._worker.stopping:
            if not busy:
                self._poller.poll(_TICK_MS if self._peers else None)
                self._worker.pipe.drain()
            self._take_replies()
            busy = self._send_round()
            self._check_peers()

    def _send_round(self) -> bool:
        """One frame of each transfer that has one and may send it; whether any did.

        Waits for the computation only where all transfers must.
        """
        sent = [self._send_frame(transfer, computed=True) for transfer in self.transfers]
        return any(sent) or any(self._send_frame(transfer, computed=False) for transfer in self.transfers)

    def _send_frame(self, transfer: OutgoingTransfer, *, computed: bool) -> bool:
        taken = self.take_frame(transfer, computed=computed)
        if taken is None:
            return False
        frame, payload = taken
        try:
            dealer = self._send_header(self._connect(transfer), encode(frame))
            dealer.send(payload, zmq.DONTWAIT, copy=False)
        except (zmq.ZMQError, ValueError) as error:
            transfer.fail(TransferError(f"sending to {transfer.ticket.endpoint} failed: {error}"))
        return True

    @staticmethod
    def _send_header(peer: _Peer, header: bytes) -> zmq.Socket[bytes]:
        """Sends a message's first part on the next connection that stands, the first one at least."""
        for _ in peer.dealers:
            dealer = peer.dealers[peer.num_sent % len(peer.dealers)]
            peer.num_sent += 1
            try:
                dealer.send(header, zmq.SNDMORE | zmq.DONTWAIT)
                return dealer
            except zmq.Again:
                continue
        raise zmq.Again

    def _take_replies(self) -> None:
        for peer, dealer in [(p, dealer) for p in self._peers.values() for dealer in p.dealers]:
            while True:
                try:
                    parts = dealer.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    break
                peer.replied.add(dealer)
                try:
                    reply = decode(parts[0])
                except MalformedError:
                    continue
                if isinstance(reply, Credit | Reject):
                    self.on_reply(reply)

    def _connect(self, transfer: OutgoingTransfer) -> _Peer:
        """The transfer's peer, with one connection more if it has too few.

        The decode pod assigns a new connection to the thread with the fewest, and counts only established
        ones. So the next one is opened when the pod has replied on all others.
        """
        key = (transfer.ticket.endpoint, transfer.ticket.public_key)
        peer = self._peers.setdefault(key, _Peer())
        if transfer not in peer.transfers:
            peer.transfers.append(transfer)
        if len(peer.dealers) == len(peer.replied) < self._options.num_connections:
            peer.dealers.append(self._open_dealer(transfer.ticket, thread=len(peer.dealers)))
        return peer

    def _open_dealer(self, ticket: Ticket, thread: int) -> zmq.Socket[bytes]:
        """thread: the one of this context's that serves the connection."""
        dealer = self._worker.context.socket(zmq.DEALER)
        _configure(dealer, MAX_HEADER_BYTES + _ENCRYPTION_BYTES)
        # What may wait to be sent is bounded by the credit; a silent drop at a queue's end would only stall.
        dealer.sndhwm = 0
        dealer.affinity = 1 << thread
        # The first connection queues frames that it cannot send yet. The others get frames only once they are
        # established, so that an unserved connection delays none.
        dealer.immediate = thread > 0
        try:
            if ticket.public_key:
                dealer.curve_serverkey = ticket.public_key.encode()
                # A decode pod of an earlier version names no client, and lets any in.
                secret = ticket.client_secret_key.encode() or zmq.curve_keypair()[1]
                dealer.curve_publickey = zmq.curve_public(secret)
                dealer.curve_secretkey = secret
            dealer.ipv6 = "[" in ticket.endpoint
            dealer.connect(ticket.endpoint)
        except (zmq.ZMQError, ValueError):
            dealer.close(linger=0)
            raise
        self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def _check_peers(self) -> None:
        """Fail stalled transfers; close unused connections."""
        now = time.monotonic()
        for key, peer in list(self._peers.items()):
            stalled = False
            for transfer in peer.transfers:
                if transfer.stalled_for_s() > self._options.stall_s:
                    self._take_replies()  # this thread may have waited for a device since it last looked
                if transfer.stalled_for_s() > self._options.stall_s:
                    transfer.abort(f"no credit from {key[0]} for {self._options.stall_s} s")
                    stalled = True
            peer.transfers = [transfer for transfer in peer.transfers if not transfer.state.is_final]
            if peer.transfers:
                peer.idle_since = now
            # After a stall the connections go too, and with them the frames still queued in them.
            elif stalled or now - peer.idle_since > self._options.idle_s:
                for dealer in peer.dealers:
                    self._poller.unregister(dealer)
                    dealer.close(linger=0)
                del self._peers[key]
