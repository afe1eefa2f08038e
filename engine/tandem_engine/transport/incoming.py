"""The decode pod's half of the protocol, without a wire: which frame may be written, and the books.

    frame -> known? -> epoch? -> range wanted? -> length? -> not seen? -> digest? -> scatter -> credit
               |          |           |             |            |           |
             reject     reject      reject        reject    credit only    reject      (all: dropped, counted)

Both transports feed `IncomingBook.accept` and send back what it returns. A frame is judged and written
under its transfer's lock, which `close` and `reopen` take too: once they return, an older frame is either
completely written or never will be.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from tandem_core.errors import InvariantError

from tandem_engine.errors import TransferError
from tandem_engine.transport.base import (
    TRANSFER_ID_BYTES,
    BlockStore,
    Counters,
    DropCause,
    Incoming,
    KVReceiver,
    Progress,
    Ticket,
    TransferState,
)
from tandem_engine.transport.codec import Credit, Frame, Reject, digest
from tandem_engine.transport.layout import KVLayout


class Dropped(Exception):  # noqa: N818 (a verdict, not an error)
    """The verdict that a frame is not to be written, because of `cause`."""

    def __init__(self, cause: DropCause, detail: str) -> None:
        super().__init__(f"{cause.value}: {detail}")
        self.cause = cause


class IncomingTransfer(Incoming):
    """One transfer; `verified[layer, row]` says what is written, `row` counting the destination's blocks."""

    def __init__(
        self,
        layout: KVLayout,
        store: BlockStore,
        ticket: Ticket,
        dest: Mapping[int, int],
        on_final: Callable[[bytes], None],
    ) -> None:
        super().__init__(
            ticket, TransferState.BOOTSTRAPPING if ticket.wanted_blocks else TransferState.SUCCESS
        )
        self._layout = layout
        self._store = store
        self._blocks = ticket.wanted_blocks
        self._physical = tuple(dest[block] for block in self._blocks)
        self._row = {block: row for row, block in enumerate(self._blocks)}
        self._verified: npt.NDArray[np.bool_] = np.zeros((layout.num_layers, len(self._blocks)), dtype=bool)
        # What came in this epoch. A retry resends whole blocks, so that a layer verified before comes
        # again without being a duplicate.
        self._seen = np.zeros_like(self._verified)
        self._wanted: npt.NDArray[np.bool_] = np.ones(len(self._blocks), dtype=bool)
        self._on_final = on_final
        self._lock = threading.Lock()
        if not self._blocks:
            self._done.set_result(None)

    def progress(self) -> Progress:
        with self._lock:
            complete = self._complete_rows()
            return Progress(
                int(self._verified.sum()),
                self._verified.size,
                tuple(block for block, row in self._row.items() if complete[row]),
            )

    def reopen(self) -> Ticket:
        with self._lock:
            if self._state is TransferState.FAILED:
                raise TransferError("a closed transfer cannot be reopened; open a new one")
            complete = self._complete_rows()
            missing = tuple(block for block, row in self._row.items() if not complete[row])
            self._ticket = dataclasses.replace(
                self._ticket, epoch=self._ticket.epoch + 1, wanted_blocks=missing
            )
            self._seen[:] = False
            self._wanted = ~complete
            if missing:
                self._state = TransferState.BOOTSTRAPPING
            return self._ticket

    def _complete_rows(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self._verified.all(axis=0), dtype=np.bool_)

    def close(self) -> None:
        self.fail(TransferError("the transfer was closed before it was complete"))

    def fail(self, error: Exception) -> None:
        """End the transfer with `error`, unless it has ended."""
        with self._lock:
            if self._state.is_final:
                return
            self._state = TransferState.FAILED
        self._on_final(self._ticket.transfer_id)
        self._done.set_exception(error)

    def accept(self, frame: Frame, payload: memoryview) -> None:
        """Judge and write one frame; raises Dropped, or whatever the store raises."""
        with self._lock:
            rows = self._judge(frame, payload)
            ids = self._physical[rows.start : rows.stop]
            self._store.scatter(frame.layer, ids, payload)
            self._verified[frame.layer, rows] = True
            self._seen[frame.layer, rows] = True
            # Not `_verified`: a retry sends every layer of its blocks, and a transfer that ended before the
            # last of them would refuse them and so fail an honest sender.
            complete = bool(self._seen[:, self._wanted].all())
            self._state = TransferState.SUCCESS if complete else TransferState.TRANSFERRING
        if complete:
            self._on_final(self._ticket.transfer_id)
            self._done.set_result(None)

    def _judge(self, frame: Frame, payload: memoryview) -> slice:
        """The rows the frame fills; raises Dropped. The lock is held."""
        if self._state.is_final:
            raise Dropped(DropCause.UNKNOWN, "the transfer has ended")
        if frame.epoch != self._ticket.epoch:
            raise Dropped(DropCause.STALE_EPOCH, f"{frame.epoch}, now {self._ticket.epoch}")
        rows = self._rows(frame)
        if payload.nbytes != frame.num_blocks * self._layout.block_bytes:
            raise Dropped(
                DropCause.BAD_LENGTH,
                f"{payload.nbytes} bytes for {frame.num_blocks} blocks of {self._layout.block_bytes}",
            )
        if self._seen[frame.layer, rows].any():
            raise Dropped(DropCause.DUPLICATE, "written before")
        expected = digest(
            frame.transfer_id, frame.epoch, frame.layer, frame.first_block, frame.num_blocks, payload
        )
        if not secrets.compare_digest(expected, frame.digest):
            raise Dropped(DropCause.BAD_DIGEST, f"layer {frame.layer}, block {frame.first_block}")
        return rows

    def _rows(self, frame: Frame) -> slice:
        """Rows of the frame's blocks: ascending blocks that follow each other have rows that do, too."""
        where = f"layer {frame.layer}, {frame.num_blocks} blocks from {frame.first_block}"
        first = self._row.get(frame.first_block)
        last = self._row.get(frame.first_block + frame.num_blocks - 1)
        if (
            frame.layer >= self._layout.num_layers
            or frame.num_blocks < 1
            or first is None
            or last is None
            or last - first != frame.num_blocks - 1
            or not self._wanted[first : last + 1].all()
        ):
            raise Dropped(DropCause.BAD_RANGE, where)
        return slice(first, last + 1)


class IncomingBook:
    """All incoming transfers of a pod, by id, and what was dropped and why."""

    def __init__(self, layout: KVLayout, store: BlockStore, credit_bytes: int) -> None:
        # A frame holds at least one block: with less credit than that nothing could ever be sent.
        self._credit_bytes = max(credit_bytes, layout.block_bytes)
        self._layout = layout
        self._store = store
        self._lock = threading.Lock()
        self._transfers: dict[bytes, IncomingTransfer] = {}
        self._closed = False
        self._frames = 0
        self._bytes = 0
        self._dropped = dict.fromkeys(DropCause, 0)

    def open(
        self, dest: Mapping[int, int], transfer_id: bytes | None, endpoint: str, public_key: str
    ) -> IncomingTransfer:
        """See `KVReceiver.open`."""
        if len(set(dest.values())) < len(dest):
            raise InvariantError("two logical blocks were given the same physical block")
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES) if transfer_id is None else transfer_id,
            epoch=1,
            endpoint=endpoint,
            public_key=public_key,
            layout_fingerprint=self._layout.fingerprint,
            layout_description=self._layout.description,
            wanted_blocks=tuple(sorted(dest)),
            credit_bytes=self._credit_bytes,
        )
        transfer = IncomingTransfer(self._layout, self._store, ticket, dest, self._forget)
        with self._lock:
            if self._closed:
                raise TransferError("the KV receiver is closed")
            if ticket.transfer_id in self._transfers:
                raise TransferError("this transfer id is already in use")
            if ticket.wanted_blocks:
                self._transfers[ticket.transfer_id] = transfer
        return transfer

    def accept(self, frame: Frame, payload: memoryview) -> Credit | Reject:
        """Write the frame or drop it; returns what its sender is to be told. Never raises."""
        with self._lock:
            transfer = self._transfers.get(frame.transfer_id)
        try:
            if transfer is None:
                raise Dropped(DropCause.UNKNOWN, "no such transfer is open")
            transfer.accept(frame, payload)
        except Dropped as dropped:
            self.count_drop(dropped.cause)
            if dropped.cause is not DropCause.DUPLICATE:
                return Reject(frame.transfer_id, frame.epoch, str(dropped))
            # The sender holds the bytes against its credit; they are as much taken in as any.
        except Exception as error:  # the store's; it must not end the thread that serves all transfers
            assert transfer is not None
            failure = TransferError(f"writing a received block failed: {error}")
            failure.__cause__ = error
            transfer.fail(failure)
            return Reject(frame.transfer_id, frame.epoch, "the decode pod failed to write the blocks")
        else:
            with self._lock:
                self._frames += 1
                self._bytes += payload.nbytes
        return Credit(frame.transfer_id, frame.epoch, payload.nbytes)

    def count_drop(self, cause: DropCause) -> None:
        with self._lock:
            self._dropped[cause] += 1

    @property
    def counters(self) -> Counters:
        with self._lock:
            return Counters(self._frames, self._bytes, dict(self._dropped))

    @property
    def open_transfers(self) -> int:
        with self._lock:
            return len(self._transfers)

    @property
    def credit_outstanding_bytes(self) -> int:
        with self._lock:
            return sum(transfer.ticket.credit_bytes for transfer in self._transfers.values())

    def close(self) -> None:
        """Fail what is open; nothing can be opened afterwards."""
        with self._lock:
            self._closed = True
            transfers = list(self._transfers.values())
        for transfer in transfers:
            transfer.fail(TransferError("the KV receiver was closed"))

    def _forget(self, transfer_id: bytes) -> None:
        with self._lock:
            self._transfers.pop(transfer_id, None)


class BookedReceiver(KVReceiver):
    """What the receivers of all transports have in common; a transport adds the wire and `close`."""

    def __init__(self, book: IncomingBook, endpoint: str, public_key: str) -> None:
        self._book = book
        self._endpoint = endpoint
        self._public_key = public_key

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def public_key(self) -> str:
        return self._public_key

    def open(self, dest: Mapping[int, int], transfer_id: bytes | None = None) -> Incoming:
        return self._book.open(dest, transfer_id, self._endpoint, self._public_key)

    @property
    def counters(self) -> Counters:
        return self._book.counters

    @property
    def open_transfers(self) -> int:
        return self._book.open_transfers

    @property
    def credit_outstanding_bytes(self) -> int:
        return self._book.credit_outstanding_bytes
