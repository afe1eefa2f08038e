"""The prefill pod's end of KV transfers, without a wire: decides what is sent next.

    put -> runs of wanted blocks, one frame each -> take_frame (gather, digest; within the credit) -> wire
                                                    credit <- wire: room for more
                                                    reject <- wire: FAILED, the queue is dropped

A transport derives from `KVSender`, asks `take_frame` for work and passes replies to `on_reply`. Blocks are
read only when their frame can leave, so a slow decode pod costs the prefill pod no copies. Where a device
copies them, the copy of the next frame runs during the digest and the sending of this one.

A device copies in the order of the requests. So a layer that is still being computed is asked for only when
no transfer has a frame without waiting for the computation: otherwise one prompt's next layer would hold up
the computed layers of the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from tandem_core.errors import InvalidRequestError, InvariantError, TransferError

from tandem_engine.transport.base import (
    MAX_FRAME_BYTES,
    MIN_FRAMES_IN_FLIGHT,
    BlockStore,
    ByteArray,
    Mark,
    PendingRead,
    Ticket,
    Transfer,
    TransferState,
)
from tandem_engine.transport.codec import Credit, Frame, Reject, digest
from tandem_engine.transport.layout import KVLayout


@dataclass(frozen=True)
class _Run:
    """Blocks of one layer that fit one frame."""

    layer: int
    first_block: int
    block_ids: tuple[int, ...]
    #: Read after this mark of the store.
    after: Mark | None


@dataclass(frozen=True)
class _Started:
    """A run that is charged to the credit and being read, or read."""

    run: _Run
    num_bytes: int
    read: memoryview | ByteArray | PendingRead


class OutgoingTransfer(Transfer):
    """One transfer."""

    def __init__(
        self,
        layout: KVLayout,
        store: BlockStore,
        ticket: Ticket,
        on_work: Callable[[], None],
        on_final: Callable[[OutgoingTransfer], None],
    ) -> None:
        super().__init__(ticket, TransferState.WAITING_FOR_INPUT)
        self._layout = layout
        self._store = store
        rows = [{block: row for row, block in enumerate(blocks)} for blocks in ticket.wanted_blocks]
        rows += [{}] * (len(layout.groups) - len(rows))
        #: By layer: the number of each wanted block, and whether it was put.
        self._rows = [rows[layout.group_of[layer]] for layer in range(layout.num_layers)]
        self._queued = [np.zeros(len(own), dtype=bool) for own in self._rows]
        self._largest = min(
            store.max_frame_bytes,
            MAX_FRAME_BYTES,
            ticket.credit_bytes // MIN_FRAMES_IN_FLIGHT,
        )
        self._runs: deque[_Run] = deque()
        self._on_work = on_work
        self._on_final = on_final
        # Two locks: `put` is called between layers of the forward pass and must not wait for a gather.
        self._lock = threading.Lock()
        self._gathering = threading.Lock()
        self._finishing = False
        #: Guarded by `_gathering`.
        self._ahead: _Started | None = None
        self._ahead_bytes = 0
        #: With `_ahead_bytes`.
        self._in_flight_bytes = 0
        self._sent_bytes = 0
        self._last_credit_at = 0.0

    @property
    def sent_bytes(self) -> int:
        """Payload bytes sent."""
        return self._sent_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Payload bytes sent or being read, and not yet credited; at most the ticket's credit."""
        return self._in_flight_bytes

    def put(self, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
        """Queues one layer of consecutive blocks, as the computation launched so far leaves them; returns at
        once.

        `first_block` is the logical index of the first, `block_ids` the physical blocks. They must stay
        unchanged until `done` is settled. Blocks that are not wanted or were put before are skipped; on a
        failed transfer this does nothing (see `done`).
        """
        if not 0 <= layer < self._layout.num_layers:
            raise InvariantError(f"layer {layer} of {self._layout.num_layers} was put")
        after = self._store.mark()
        rows, queued = self._rows[layer], self._queued[layer]
        max_blocks = max(1, self._largest // self._layout.block_bytes[layer])
        with self._lock:
            if self._state.is_final:
                return
            if self._finishing:
                raise InvariantError("blocks were put after finish()")
            pending: list[int] = []
            for offset, block_id in enumerate(block_ids):
                row = rows.get(first_block + offset)
                is_new = row is not None and not queued[row]
                if is_new:
                    queued[row] = True
                    pending.append(block_id)
                if pending and (not is_new or len(pending) == max_blocks):
                    end = first_block + offset + int(is_new)
                    self._runs.append(_Run(layer, end - len(pending), tuple(pending), after))
                    pending = []
            if pending:
                end = first_block + len(block_ids)
                self._runs.append(_Run(layer, end - len(pending), tuple(pending), after))
            if self._runs:
                self._state = TransferState.TRANSFERRING
        self._on_work()

    def finish(self) -> Future[None]:
        """Nothing more will be put. Returns `done`, which fails if a wanted block was never put."""
        with self._lock:
            self._finishing = True
            total = sum(queued.size for queued in self._queued)
            missing = total - sum(int(queued.sum()) for queued in self._queued)
        if missing:
            self.abort(f"{missing} of {total} wanted (layer, block) pairs were never put")
        else:
            self._settle_if_complete()
        return self._done

    def abort(self, reason: str = "aborted") -> None:
        """Fails the transfer at once; idempotent. After it returns no block of it is read."""
        self.fail(TransferError(f"KV transfer failed: {reason}"))

    def fail(self, error: Exception) -> None:
        """Ends the transfer with `error`, unless it has ended."""
        with self._lock:
            if self._state.is_final:
                return
            self._state = TransferState.FAILED
            self._runs.clear()
            self._in_flight_bytes = 0
        with self._gathering:  # waits until a running gather is over
            ahead, self._ahead = self._ahead, None
            if ahead is not None and not isinstance(ahead.read, memoryview | np.ndarray):
                with contextlib.suppress(Exception):  # a copy that failed reads nothing any more
                    ahead.read.cancel()
        self._on_final(self)
        self._done.set_exception(error)

    def take_frame(self, *, computed: bool = False) -> tuple[Frame, memoryview] | None:
        """The next frame, charged to the credit; None when there is none or no credit for it.

        computed: also None when its blocks are still being computed.
        """
        with self._gathering:
            if computed and self._ahead is None and not self._next_is_computed():
                return None
            started, self._ahead = self._ahead or self._start(), None
            if started is None:
                return None
            run, num_bytes, read = started.run, started.num_bytes, started.read
            if isinstance(read, np.ndarray):
                payload = read.reshape(-1).data
            elif isinstance(read, memoryview):
                payload = read
            else:
                try:
                    if read.may_read_ahead and self._next_is_computed(run.after):
                        self._ahead = self._start()
                except Exception:
                    read.cancel()
                    raise
                payload = read.wait()
            if payload.nbytes != num_bytes:
                raise InvariantError(f"the block store gathered {payload.nbytes} bytes, not {num_bytes}")
            ticket = self._ticket
            block_range = (ticket.transfer_id, ticket.epoch, run.layer, run.first_block, len(run.block_ids))
            frame = Frame(*block_range, digest(*block_range, payload))
            with self._lock:
                self._ahead_bytes = self._ahead.num_bytes if self._ahead is not None else 0
                self._sent_bytes += num_bytes
                if self._in_flight_bytes - self._ahead_bytes <= num_bytes:  # nothing was owed before
                    self._last_credit_at = time.monotonic()
        return frame, payload

    def _next_is_computed(self, waited_for: Mark | None = None) -> bool:
        """Whether the next run, if any, is computed by now, or with the mark `waited_for`."""
        with self._lock:
            after = self._runs[0].after if self._runs else None
        return after is None or after is waited_for or after.query()

    def _start(self) -> _Started | None:
        """Charges the next run to the credit and starts reading it; None when there is none or no credit for
        it. The caller holds `_gathering`."""
        with self._lock:
            if not self._runs:
                return None
            num_bytes = len(self._runs[0].block_ids) * self._layout.block_bytes[self._runs[0].layer]
            if self._in_flight_bytes + num_bytes > self._ticket.credit_bytes:
                return None
            run = self._runs.popleft()
            self._in_flight_bytes += num_bytes
        return _Started(run, num_bytes, self._store.gather(run.layer, run.block_ids, run.after))

    def on_credit(self, num_bytes: int) -> None:
        with self._lock:
            # A receiver owes nothing for a frame that is still being read.
            self._in_flight_bytes = max(self._ahead_bytes, self._in_flight_bytes - num_bytes)
            self._last_credit_at = time.monotonic()
        self._settle_if_complete()

    def stalled_for_s(self) -> float:
        """Seconds without credit while the receiver owes some; 0 when it owes none."""
        with self._lock:
            owes = self._in_flight_bytes > self._ahead_bytes
            return time.monotonic() - self._last_credit_at if owes else 0.0

    def _settle_if_complete(self) -> None:
        with self._lock:
            if self._state.is_final or not self._finishing or self._runs or self._in_flight_bytes:
                return
            self._state = TransferState.SUCCESS
        self._on_final(self)
        self._done.set_result(None)


class KVSender:
    """All outgoing transfers of a pod, by id and epoch, served in turn. A transport derives from it and
    adds the wire; `on_work` wakes its thread."""

    def __init__(self, layout: KVLayout, store: BlockStore, on_work: Callable[[], None]) -> None:
        self._layout = layout
        self._store = store
        self._on_work = on_work
        self._lock = threading.Lock()
        self._transfers: dict[tuple[bytes, int], OutgoingTransfer] = {}
        self._closed = False

    def open(self, ticket: Ticket) -> OutgoingTransfer:
        """Starts the sending end of a ticket.

        Raises LayoutMismatchError when the decode pod's layout differs, InvalidRequestError for an endpoint
        or credit that cannot work, TransferError when the ticket is in use or the sender is closed.
        """
        self._layout.check(ticket.layout_fingerprint, ticket.layout_description)
        if ticket.credit_bytes < self._layout.max_block_bytes:
            raise InvalidRequestError(
                "ticket.credit_bytes",
                f"{ticket.credit_bytes}, must be at least one block's {self._layout.max_block_bytes}",
            )
        if len(ticket.wanted_blocks) > len(self._layout.groups):
            raise InvalidRequestError(
                "ticket.wanted_blocks",
                f"of {len(ticket.wanted_blocks)} groups, the layout has {len(self._layout.groups)}",
            )
        transfer = OutgoingTransfer(self._layout, self._store, ticket, self._on_work, self._forget)
        key = (ticket.transfer_id, ticket.epoch)
        with self._lock:
            if self._closed:
                raise TransferError("the KV sender is closed")
            if key in self._transfers:
                raise TransferError(f"epoch {key[1]} of this transfer is already being sent")
            self._transfers[key] = transfer
        return transfer

    def take_frame(
        self, transfer: OutgoingTransfer, *, computed: bool = False
    ) -> tuple[Frame, memoryview] | None:
        """The transfer's next frame, or None. Never raises: an error of the store fails the transfer."""
        try:
            return transfer.take_frame(computed=computed)
        except Exception as error:  # the store's; it must not end the thread of all transfers
            failure = TransferError(f"reading blocks to send failed: {error}")
            failure.__cause__ = error
            transfer.fail(failure)
            return None

    def on_reply(self, reply: Credit | Reject) -> None:
        """Applies a receiver's reply; one for a transfer that has ended here is ignored."""
        with self._lock:
            transfer = self._transfers.get((reply.transfer_id, reply.epoch))
        if transfer is None:
            return
        match reply:
            case Credit():
                transfer.on_credit(reply.num_bytes)
            case Reject():
                transfer.abort(f"rejected by the decode pod ({reply.reason})")

    @property
    def transfers(self) -> list[OutgoingTransfer]:
        with self._lock:
            return list(self._transfers.values())

    @property
    def open_transfers(self) -> int:
        with self._lock:
            return len(self._transfers)

    def close(self) -> None:
        """Aborts open transfers; nothing can be opened afterwards. Idempotent."""
        with self._lock:
            self._closed = True
        for transfer in self.transfers:
            transfer.abort("the KV sender was closed")

    def _forget(self, transfer: OutgoingTransfer) -> None:
        with self._lock:
            self._transfers.pop((transfer.ticket.transfer_id, transfer.ticket.epoch), None)
