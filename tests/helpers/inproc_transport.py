"""KV transfer within a process: the real `KVReceiver` and `KVSender`, with a call in place of the socket.

The call runs on the sender's own thread, so a frame is acknowledged before the next one leaves.
"""

from __future__ import annotations

import secrets
import threading

from tandem_core.errors import InvalidRequestError
from tandem_engine.transport.base import DEFAULT_CREDIT_BYTES, BlockStore, Ticket
from tandem_engine.transport.codec import Credit, Frame, Reject
from tandem_engine.transport.incoming import KVReceiver
from tandem_engine.transport.layout import KVLayout
from tandem_engine.transport.outgoing import KVSender, OutgoingTransfer


class InprocNetwork:
    """The receivers that senders of this process can reach, by endpoint."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receivers: dict[str, KVReceiver] = {}

    def bind(self, receiver: KVReceiver) -> str:
        """Makes a receiver reachable; returns its endpoint."""
        endpoint = f"inproc://{secrets.token_hex(8)}"
        with self._lock:
            self._receivers[endpoint] = receiver
        return endpoint

    def unbind(self, endpoint: str) -> None:
        with self._lock:
            self._receivers.pop(endpoint, None)

    def find(self, endpoint: str) -> KVReceiver | None:
        with self._lock:
            return self._receivers.get(endpoint)


class InprocReceiver(KVReceiver):
    """Writes happen on the senders' threads."""

    def __init__(
        self,
        network: InprocNetwork,
        layout: KVLayout,
        store: BlockStore,
        credit_bytes: int = DEFAULT_CREDIT_BYTES,
    ) -> None:
        super().__init__(layout, store, credit_bytes, endpoint=network.bind(self), public_key="")
        self._network = network

    def close(self) -> None:
        self._network.unbind(self.endpoint)
        super().close()


class InprocSender(KVSender):
    """One thread serves all transfers in turn, a frame at a time."""

    def __init__(self, network: InprocNetwork, layout: KVLayout, store: BlockStore) -> None:
        self._work = threading.Event()
        super().__init__(layout, store, self._work.set)
        self._network = network
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="kv-sender", daemon=True)
        self._thread.start()

    def open(self, ticket: Ticket) -> OutgoingTransfer:
        if self._network.find(ticket.endpoint) is None:
            raise InvalidRequestError("ticket.endpoint", f"no receiver at {ticket.endpoint} in this process")
        return super().open(ticket)

    def close(self) -> None:
        super().close()
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
                for transfer in self.transfers:
                    taken = self.take_frame(transfer)
                    if taken is not None:
                        frame, payload = taken
                        self.on_reply(self._deliver(transfer.ticket.endpoint, frame, payload))
                        busy = True

    def _deliver(self, endpoint: str, frame: Frame, payload: memoryview) -> Credit | Reject:
        receiver = self._network.find(endpoint)
        if receiver is None:
            return Reject(frame.transfer_id, frame.epoch, "the receiver is gone")
        return receiver.accept(frame, payload)
