"""The decode pod's end of KV transfers, without a wire: decides which frames are written into the pool.

    frame -> known? -> epoch? -> range wanted? -> length? -> not seen? -> digest? -> scatter -> credit
               |          |           |             |            |           |
             reject     reject      reject        reject    credit only    reject      (all: dropped, counted)

A transport derives from `KVReceiver`, passes received frames to `accept` and sends back what it returns. A
frame is checked and written under its transfer's lock, which `abort` and `reopen` take too: once they
return, an older frame is either completely written or never will be. A device may write after `scatter` has
returned. Then the receiver's thread waits once per transfer, before `done` is settled, and `abort` waits.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tandem_core.errors import InvariantError, TransferError

from tandem_engine.transport.base import (
    MAX_FRAME_BYTES,
    TRANSFER_ID_BYTES,
    BlockStore,
    DropCause,
    Ticket,
    Transfer,
    TransferProgress,
    TransferState,
)
from tandem_engine.transport.codec import Credit, Frame, Reject, digest
from tandem_engine.transport.layout import KVLayout


class Dropped(Exception):  # noqa: N818 (control flow, not an error)
    """The frame must not be written, because of `cause`."""

    def __init__(self, cause: DropCause, detail: str) -> None:
        super().__init__(f"{cause.value}: {detail}")
        self.cause = cause


class _GroupBlocks:
    """The destination's blocks of a group; `verified[index[layer], row]` says what is written, `row` counting
    the wanted blocks."""

    def __init__(self, layers: Sequence[int], block_bytes: int, dest: Mapping[int, int]) -> None:
        blocks = sorted(dest)
        #: Bytes of one layer.
        self.block_bytes = block_bytes
        self.physical = tuple(dest[block] for block in blocks)
        self.row = {block: row for row, block in enumerate(blocks)}
        self.index = {layer: i for i, layer in enumerate(layers)}
        self.verified: npt.NDArray[np.bool_] = np.zeros((len(layers), len(blocks)), dtype=bool)
        # Received in this epoch. A retry resends whole blocks, so a layer verified in an earlier epoch comes
        # again without being a duplicate.
        self.seen = np.zeros_like(self.verified)
        self.wanted: npt.NDArray[np.bool_] = np.ones(len(blocks), dtype=bool)

    def complete_rows(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.verified.all(axis=0), dtype=np.bool_)

    def missing(self) -> tuple[int, ...]:
        """Logical blocks that lack a layer."""
        complete = self.complete_rows()
        return tuple(block for block, row in self.row.items() if not complete[row])


class IncomingTransfer(Transfer):
    """One transfer."""

    def __init__(
        self,
        layout: KVLayout,
        store: BlockStore,
        ticket: Ticket,
        dest: Sequence[Mapping[int, int]],
        on_final: Callable[[bytes], None],
    ) -> None:
        super().__init__(ticket, TransferState.BOOTSTRAPPING if any(dest) else TransferState.SUCCESS)
        self._layout = layout
        self._store = store
        self._max_frame_bytes = max(MAX_FRAME_BYTES, layout.max_block_bytes)
        # What was launched for the blocks' former owners comes before the first write.
        self._after = store.mark()
        #: Waits for the writes that a device has not finished.
        self._wait_written: Callable[[], None] | None = None
        self._groups = [
            _GroupBlocks(group.layers, layout.block_bytes[group.layers[0]], own)
            for group, own in zip(layout.groups, dest, strict=True)
        ]
        self._on_final = on_final
        self._lock = threading.Lock()
        #: Set without the lock, which is not fair: a thread that writes frame after frame could keep it.
        self._is_failing = False
        if not any(dest):
            self._done.set_result(None)

    def progress(self) -> TransferProgress:
        with self._lock:
            return TransferProgress(
                sum(int(group.verified.sum()) * group.block_bytes for group in self._groups),
                sum(group.verified.size * group.block_bytes for group in self._groups),
                sum(int(group.seen.sum()) * group.block_bytes for group in self._groups),
                tuple([group.missing() for group in self._groups]),
            )

    def reopen(self) -> Ticket:
        """The next epoch's ticket, for the incomplete blocks, of which there may be none.

        Raises TransferError when the transfer was aborted.
        """
        with self._lock:
            if self._state is TransferState.FAILED:
                raise TransferError("an aborted transfer cannot be reopened; open a new one")
            missing = tuple([group.missing() for group in self._groups])
            self._ticket = dataclasses.replace(
                self._ticket, epoch=self._ticket.epoch + 1, wanted_blocks=missing
            )
            for group in self._groups:
                group.seen[:] = False
                group.wanted = ~group.complete_rows()
            if any(missing):
                self._state = TransferState.BOOTSTRAPPING
            return self._ticket

    def abort(self) -> None:
        """Ends the transfer at once; idempotent. After it returns, no byte of the transfer is written."""
        self.fail(TransferError("the transfer was aborted before it was complete"))

    def fail(self, error: Exception) -> None:
        """Ends the transfer with `error`, unless it has ended."""
        self._is_failing = True
        with self._lock:
            if self._state.is_final:
                return
            self._state = TransferState.FAILED
            if self._wait_written is not None:
                try:
                    self._wait_written()
                except Exception:
                    for group in self._groups:  # what the device has written is unknown
                        group.verified[:] = False
        self._on_final(self._ticket.transfer_id)
        self._done.set_exception(error)

    def accept(self, frame: Frame, payload: memoryview) -> None:
        """Checks and writes one frame; raises Dropped, or what the store raises."""
        with self._lock:
            group, rows = self._check(frame, payload)
            ids = group.physical[rows.start : rows.stop]
            self._wait_written = self._store.scatter(frame.layer, ids, payload, self._after)
            group.verified[group.index[frame.layer], rows] = True
            group.seen[group.index[frame.layer], rows] = True
            # Not `verified`: a retry sends every layer of its blocks. A transfer that ended before the
            # last of them would reject the rest and fail a correct sender.
            complete = all(group.seen[:, group.wanted].all() for group in self._groups)
            if complete and self._wait_written is not None:
                # The engine launches reads of these blocks after `done`; waiting here is under a millisecond
                # and spares it a wait of its own.
                self._wait_written()
            self._state = TransferState.SUCCESS if complete else TransferState.TRANSFERRING
        if complete:
            self._on_final(self._ticket.transfer_id)
            self._done.set_result(None)

    def _check(self, frame: Frame, payload: memoryview) -> tuple[_GroupBlocks, slice]:
        """The rows of its group that the frame fills; raises Dropped. The caller holds the lock."""
        if self._state.is_final or self._is_failing:
            raise Dropped(DropCause.UNKNOWN, "the transfer has ended")
        if frame.epoch != self._ticket.epoch:
            raise Dropped(DropCause.STALE_EPOCH, f"{frame.epoch}, now {self._ticket.epoch}")
        group, rows = self._rows(frame)
        if payload.nbytes > self._max_frame_bytes:
            raise Dropped(DropCause.BAD_LENGTH, f"{payload.nbytes} bytes, at most {self._max_frame_bytes}")
        if payload.nbytes != frame.num_blocks * group.block_bytes:
            raise Dropped(
                DropCause.BAD_LENGTH,
                f"{payload.nbytes} bytes for {frame.num_blocks} blocks of {group.block_bytes}",
            )
        if group.seen[group.index[frame.layer], rows].any():
            raise Dropped(DropCause.DUPLICATE, "written before")
        expected = digest(
            frame.transfer_id, frame.epoch, frame.layer, frame.first_block, frame.num_blocks, payload
        )
        if not secrets.compare_digest(expected, frame.digest):
            raise Dropped(DropCause.BAD_DIGEST, f"layer {frame.layer}, block {frame.first_block}")
        return group, rows

    def _rows(self, frame: Frame) -> tuple[_GroupBlocks, slice]:
        """Rows of the frame's blocks; consecutive wanted blocks have consecutive rows."""
        where = f"layer {frame.layer}, {frame.num_blocks} blocks from {frame.first_block}"
        if frame.layer not in self._layout.group_of:
            raise Dropped(DropCause.BAD_RANGE, where)
        group = self._groups[self._layout.group_of[frame.layer]]
        first = group.row.get(frame.first_block)
        last = group.row.get(frame.first_block + frame.num_blocks - 1)
        if (
            frame.num_blocks < 1
            or first is None
            or last is None
            or last - first != frame.num_blocks - 1
            or not group.wanted[first : last + 1].all()
        ):
            raise Dropped(DropCause.BAD_RANGE, where)
        return group, slice(first, last + 1)


class KVReceiver:
    """All incoming transfers of a pod, by id. A transport derives from it and adds the wire."""

    def __init__(
        self,
        layout: KVLayout,
        store: BlockStore,
        credit_bytes: int,
        *,
        endpoint: str,
        public_key: str,
        client_secret_key: str = "",
    ) -> None:
        #: What tickets tell the senders.
        self.endpoint = endpoint
        self.public_key = public_key
        self._client_secret_key = client_secret_key
        # A frame holds at least one block: with less credit nothing could be sent.
        self._credit_bytes = max(credit_bytes, layout.max_block_bytes)
        self._layout = layout
        self._store = store
        self._lock = threading.Lock()
        self._transfers: dict[bytes, IncomingTransfer] = {}
        self._closed = False
        self._dropped = dict.fromkeys(DropCause, 0)

    def open(self, dest: Sequence[Mapping[int, int]], transfer_id: bytes | None = None) -> IncomingTransfer:
        """Expects blocks: `dest` maps, for each group, every wanted logical block of the prompt to a physical
        block.

        Without wanted blocks the transfer is complete at once. Without `transfer_id` (16 bytes) a random one
        is drawn. Raises TransferError when the id is in use or the receiver is closed, InvariantError when
        two logical blocks share a physical one.
        """
        if any(len(set(own.values())) < len(own) for own in dest):
            raise InvariantError("two logical blocks were given the same physical block")
        ticket = Ticket(
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES) if transfer_id is None else transfer_id,
            epoch=1,
            endpoint=self.endpoint,
            public_key=self.public_key,
            layout_fingerprint=self._layout.fingerprint,
            layout_description=self._layout.description,
            wanted_blocks=tuple(tuple(sorted(own)) for own in dest),
            credit_bytes=self._credit_bytes,
            client_secret_key=self._client_secret_key,
        )
        transfer = IncomingTransfer(self._layout, self._store, ticket, dest, self._forget)
        with self._lock:
            if self._closed:
                raise TransferError("the KV receiver is closed")
            if ticket.transfer_id in self._transfers:
                raise TransferError("this transfer id is already in use")
            if any(ticket.wanted_blocks):
                self._transfers[ticket.transfer_id] = transfer
        return transfer

    def accept(self, frame: Frame, payload: memoryview) -> Credit | Reject:
        """Writes the frame or drops it; returns the reply to its sender. Never raises."""
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
            # The sender counts a duplicate's bytes as in flight, so it gets credit for them, too.
        except Exception as error:  # the store's; it must not end the thread of all transfers
            assert transfer is not None
            failure = TransferError(f"writing a received block failed: {error}")
            failure.__cause__ = error
            transfer.fail(failure)
            return Reject(frame.transfer_id, frame.epoch, "the decode pod failed to write the blocks")
        return Credit(frame.transfer_id, frame.epoch, payload.nbytes)

    def count_drop(self, cause: DropCause) -> None:
        with self._lock:
            self._dropped[cause] += 1

    @property
    def dropped_frames(self) -> dict[DropCause, int]:
        """Since the start; every cause has an entry."""
        with self._lock:
            return dict(self._dropped)

    @property
    def open_transfers(self) -> int:
        with self._lock:
            return len(self._transfers)

    @property
    def credit_outstanding_bytes(self) -> int:
        """Bytes that senders may have in flight towards this pod; zero when no transfer is open."""
        with self._lock:
            return sum(transfer.ticket.credit_bytes for transfer in self._transfers.values())

    def close(self) -> None:
        """Fails open transfers; nothing can be opened afterwards. Idempotent."""
        with self._lock:
            self._closed = True
            transfers = list(self._transfers.values())
        for transfer in transfers:
            transfer.fail(TransferError("the KV receiver was closed"))

    def _forget(self, transfer_id: bytes) -> None:
        with self._lock:
            self._transfers.pop(transfer_id, None)
