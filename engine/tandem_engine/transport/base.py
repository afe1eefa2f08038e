"""What both ends of a KV transfer share: ticket, states, limits.

Life of a transfer:

    decode pod                                     prefill pod
    KVReceiver.open(dest) -> IncomingTransfer
      BOOTSTRAPPING  -- ticket, on the Prefill call -->  KVSender.open(ticket) -> OutgoingTransfer
                                                           WAITING_FOR_INPUT
                                                         put(layer, ...) as layers finish
      TRANSFERRING  <-- frames, within the byte credit --  TRANSFERRING
      verify, scatter -- credit ------------------------>
      SUCCESS once every wanted block has all layers     finish() -> SUCCESS once all bytes are credited
      FAILED on abort() before that                      FAILED on reject, stall or abort()

When a prefill pod dies, the decode pod calls `IncomingTransfer.reopen()`: the next epoch's ticket asks only
for the blocks that are incomplete, and frames of the old epoch are dropped from then on.

Ownership: a block in transfer belongs to its request and to the transfer. After `IncomingTransfer.abort()`
returns, or `done` is settled, no byte of the transfer is written. After `OutgoingTransfer.abort()` returns,
or `done` is settled, no block of the transfer is read. Both hold for a device's copies, too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tandem_core.errors import InvalidRequestError

TRANSFER_ID_BYTES = 16

#: Largest payload of one frame, unless a single block is larger. Part of the wire contract: receivers refuse
#: more.
MAX_FRAME_BYTES = 4 << 20

#: Payload bytes in flight per transfer and connection; also the most that a slow decode pod buffers per
#: transfer and connection. Loopback throughput is the same within noise from 8 to 32 MiB with frames of 1 to
#: 8 MiB, and a third lower at 2 MiB.
DEFAULT_CREDIT_BYTES = 8 << 20

#: A frame is at most the credit divided by this, so that reading, sending and writing of frames overlap.
MIN_FRAMES_IN_FLIGHT = 4

ByteArray = npt.NDArray[np.uint8]


class TransferState(enum.Enum):
    """Where one end of a transfer is."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting_for_input"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (TransferState.SUCCESS, TransferState.FAILED)


class DropCause(enum.Enum):
    """Why a receiver dropped a message."""

    UNKNOWN = "unknown"
    STALE_EPOCH = "stale_epoch"
    DUPLICATE = "duplicate"
    BAD_DIGEST = "bad_digest"
    BAD_RANGE = "bad_range"
    BAD_LENGTH = "bad_length"
    MALFORMED = "malformed"


@dataclass(frozen=True)
class Ticket:
    """A decode pod's permission to write into its KV blocks.

    The transfer id authorizes writing, so it is never logged, nor is the client's key.
    """

    transfer_id: bytes = field(repr=False)
    #: Number of the attempt, from 1.
    epoch: int
    endpoint: str
    #: Z85 CURVE key of the receiver; empty when its transport does not encrypt.
    public_key: str
    layout_fingerprint: str
    layout_description: str
    #: By group of the layout, the logical block indices still wanted, ascending.
    wanted_blocks: tuple[tuple[int, ...], ...]
    #: Payload bytes that may be in flight at once.
    credit_bytes: int
    #: Z85 CURVE key of the client that the receiver lets in; empty when its transport does not encrypt.
    client_secret_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if len(self.transfer_id) != TRANSFER_ID_BYTES:
            raise InvalidRequestError(
                "ticket.transfer_id", f"{len(self.transfer_id)} bytes, must be {TRANSFER_ID_BYTES}"
            )
        if self.epoch < 1:
            raise InvalidRequestError("ticket.epoch", f"{self.epoch}, must be at least 1")
        for blocks in self.wanted_blocks:
            if any(a >= b for a, b in pairwise(blocks)):
                raise InvalidRequestError("ticket.wanted_blocks", "must be ascending, without repeats")
            if blocks and blocks[0] < 0:
                raise InvalidRequestError("ticket.wanted_blocks", "must not be negative")


@dataclass(frozen=True)
class TransferProgress:
    """How far an incoming transfer is."""

    #: Verified and written in any epoch, of how many.
    verified_bytes: int
    total_bytes: int
    #: Received in this epoch. A retry sends every layer of its blocks.
    received_bytes: int
    #: By group, the logical indices of the blocks that lack a layer, ascending.
    missing_blocks: tuple[tuple[int, ...], ...]


class Mark(Protocol):
    """A point in a pod's computation."""

    def query(self) -> bool:
        """Whether the computation has passed it; raises when the device has failed."""


class PendingRead(Protocol):
    """Blocks that a device is copying to the host."""

    @property
    def may_read_ahead(self) -> bool:
        """Whether the store has buffers to start the next read before this one is waited for."""

    def wait(self) -> memoryview:
        """Returns the bytes when all are copied; raises what made the copy fail."""

    def cancel(self) -> None:
        """Drops the read; returns when the blocks are not read any more. Instead of `wait`."""


class BlockStore(Protocol):
    """A pod's KV blocks as bytes. A layer's block ids are those of its group. Called from the transport's
    thread, `mark` from any."""

    @property
    def max_frame_bytes(self) -> int:
        """Largest payload that it takes, unless a single block is larger."""

    def mark(self) -> Mark | None:
        """The point that the pod's computation has been launched up to; None if it has been computed."""

    def gather(
        self, layer: int, block_ids: Sequence[int], after: object | None = None
    ) -> memoryview | ByteArray | PendingRead:
        """The bytes of these physical blocks once the computation has passed the mark `after`, in order:
        contiguous, `len(block_ids) * block_bytes[layer]` long.

        The result may alias the pool: the digest detects a block that changes on the way.
        """

    def scatter(
        self, layer: int, block_ids: Sequence[int], payload: memoryview, after: object | None = None
    ) -> Callable[[], None] | None:
        """Writes `payload` (as `gather` gives it) into these physical blocks, not before the computation has
        passed the mark `after`. `payload` is not read after the return.

        A store that writes later returns a function that waits until this write and all earlier ones are
        over, and raises what made one fail.
        """


class Transfer:
    """One end of one transfer. Every method may be called from any thread."""

    def __init__(self, ticket: Ticket, state: TransferState) -> None:
        self._ticket = ticket
        self._state = state
        self._done: Future[None] = Future()

    @property
    def ticket(self) -> Ticket:
        """The ticket of the current epoch."""
        return self._ticket

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def done(self) -> Future[None]:
        """Settled once. Incoming, over all epochs: None when every wanted block is there, TransferError when
        aborted. Outgoing: None after `finish` when all bytes are credited, else TransferError.

        Callbacks run on the transport's thread or on the thread that calls `abort`; keep them short.
        """
        return self._done
