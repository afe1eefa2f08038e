"""KV transfer between two engines of one process: the same protocol without a wire.

For tests and for running both roles in one process. Credit, digest, epochs and books are the real ones
(`incoming.py`, `outgoing.py`); only the socket is replaced by a call, made on the sender's own thread. So a
frame is acknowledged before the next one leaves.
"""

from __future__ import annotations

import secrets
import threading

from tandem_core.errors import InvalidRequestError

from tandem_engine.transport.base import DEFAULT_CREDIT_BYTES, BlockStore, Outgoing, Ticket
from tandem_engine.transport.codec import Credit, Frame, Reject
from tandem_engine.transport.incoming import BookedReceiver, IncomingBook
from tandem_engine.transport.layout import KVLayout
from tandem_engine.transport.outgoing import BookedSender, OutgoingBook


class InprocNetwork:
    """The receivers that senders of this process can reach, by endpoint."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._books: dict[str, IncomingBook] = {}

    def bind(self, book: IncomingBook) -> str:
        """Makes a receiver reachable; returns its endpoint."""
        endpoint = f"inproc://{secrets.token_hex(8)}"
        with self._lock:
            self._books[endpoint] = book
        return endpoint

    def unbind(self, endpoint: str) -> None:
        with self._lock:
            self._books.pop(endpoint, None)

    def find(self, endpoint: str) -> IncomingBook | None:
        with self._lock:
            return self._books.get(endpoint)


class InprocReceiver(BookedReceiver):
    """See `KVReceiver`. Writes happen on the senders' threads."""

    def __init__(
        self,
        network: InprocNetwork,
        layout: KVLayout,
        store: BlockStore,
        credit_bytes: int = DEFAULT_CREDIT_BYTES,
    ) -> None:
        book = IncomingBook(layout, store, credit_bytes)
        super().__init__(book, network.bind(book), public_key="")
        self._network = network

    def close(self) -> None:
        self._network.unbind(self._endpoint)
        self._book.close()


class InprocSender(BookedSender):
    """See `KVSender`. One thread serves all transfers in turn, a frame at a time."""

    def __init__(self, network: InprocNetwork, layout: KVLayout, store: BlockStore) -> None:
        self._work = threading.Event()
        super().__init__(OutgoingBook(layout, store, self._work.set))
        self._network = network
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="kv-sender", daemon=True)
        self._thread.start()

    def open(self, ticket: Ticket) -> Outgoing:
        if self._network.find(ticket.endpoint) is None:
            raise InvalidRequestError("ticket.endpoint", f"no receiver at {ticket.endpoint} in this process")
        return self._book.open(ticket)

    def close(self) -> None:
        self._book.close()
        self._stopping = True
        self._work.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stopping:
            self._work.wait()
            self._work.clear()
            busy = True
            while busy and not self._stopping:
                busy = False
                for transfer in self._book.transfers:
                    taken = self._book.take_frame(transfer)
                    if taken is not None:
                        frame, payload = taken
                        self._book.on_reply(self._deliver(transfer.ticket.endpoint, frame, payload))
                        busy = True

    def _deliver(self, endpoint: str, frame: Frame, payload: memoryview) -> Credit | Reject:
        receiver = self._network.find(endpoint)
        if receiver is None:
            return Reject(frame.transfer_id, frame.epoch, "the receiver is gone")
        return receiver.accept(frame, payload)
