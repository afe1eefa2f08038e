"""The face of every KV transport: tickets, states, and the two ends of a transfer.

Life of a transfer:

    decode pod                                     prefill pod
    KVReceiver.open(dest) -> Incoming
      BOOTSTRAPPING  -- ticket, on the Prefill call -->  KVSender.open(ticket) -> Outgoing
                                                           WAITING_FOR_INPUT
                                                         Outgoing.put(layer, ...) as layers finish
      TRANSFERRING  <-- frames, within the byte credit --  TRANSFERRING
      verify, scatter -- credit ------------------------>
      SUCCESS once every wanted block has all layers     Outgoing.finish() -> SUCCESS once all was credited
      FAILED on close() before that                      FAILED on reject, stall or abort()

When a prefill pod dies, the decode pod calls `Incoming.reopen()`: the next epoch's ticket asks only for the
blocks that are not complete, and frames of the old epoch are dropped from then on.

Ownership: a destination block belongs to the request and to the transfer. `Incoming.close()` ends the
transfer's hold at once: when it has returned, no byte of the transfer is written any more. In the same way
no source block is gathered any more once `Outgoing.abort()` has returned or `done` is settled.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tandem_core.errors import InvalidRequestError

TRANSFER_ID_BYTES = 16

#: Largest payload of one frame, unless a single block is larger. Part of the wire contract: receivers
#: refuse more.
MAX_FRAME_BYTES = 4 << 20

#: Payload bytes in flight per transfer, which also bounds what a slow decode pod holds for each. Loopback
#: throughput was the same, within noise, from 8 to 32 MiB with frames of 1 to 8 MiB, and a third lower at 2.
DEFAULT_CREDIT_BYTES = 8 << 20

#: A sender makes frames of at most this share of the credit, so that gathering one, shipping others and
#: writing another overlap.
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
class Counters:
    """What a receiver has seen since it started."""

    accepted_frames: int = 0
    accepted_bytes: int = 0
    dropped: Mapping[DropCause, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Ticket:
    """A decode pod's permission to write into its KV blocks.

    The transfer id is what allows writing: it goes to the prefill pod and into no log.
    """

    transfer_id: bytes
    #: Counts the attempts, from 1.
    epoch: int
    endpoint: str
    #: Z85 CURVE key of the receiver; empty when its transport does not encrypt.
    public_key: str
    layout_fingerprint: str
    layout_description: str
    #: Logical block indices still wanted, ascending.
    wanted_blocks: tuple[int, ...]
    #: Payload bytes that may be in flight at once.
    credit_bytes: int

    def __post_init__(self) -> None:
        if len(self.transfer_id) != TRANSFER_ID_BYTES:
            raise InvalidRequestError(
                "ticket.transfer_id", f"{len(self.transfer_id)} bytes, must be {TRANSFER_ID_BYTES}"
            )
        if self.epoch < 1:
            raise InvalidRequestError("ticket.epoch", f"{self.epoch}, must be at least 1")
        if any(a >= b for a, b in zip(self.wanted_blocks, self.wanted_blocks[1:], strict=False)):
            raise InvalidRequestError("ticket.wanted_blocks", "must be ascending, without repeats")
        if self.wanted_blocks and self.wanted_blocks[0] < 0:
            raise InvalidRequestError("ticket.wanted_blocks", "must not be negative")


@dataclass(frozen=True)
class Progress:
    """How far an incoming transfer is, over all its epochs."""

    #: (layer, block) pairs verified and written, of how many.
    verified_pairs: int
    total_pairs: int
    #: Logical indices of the blocks that have every layer, ascending.
    complete_blocks: tuple[int, ...]


class BlockStore(Protocol):
    """A pod's KV blocks as bytes. Called from the transport's thread."""

    def gather(self, layer: int, block_ids: Sequence[int]) -> memoryview | ByteArray:
        """The bytes of these physical blocks, in order: contiguous, `len(block_ids) * block_bytes` long.

        The result may alias the pool: the digest catches a block that changes while it is on its way.
        """

    def scatter(self, layer: int, block_ids: Sequence[int], payload: memoryview) -> None:
        """Write `payload` (as `gather` gives it) into these physical blocks."""


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
        """Settled once. Incoming: over all epochs, None when every wanted block is there, TransferError when
        closed. Outgoing: None after `finish` when all is acknowledged, else TransferError.

        Callbacks run on the transport's thread or on the caller of `close` or `abort`; keep them short.
        """
        return self._done


class Incoming(Transfer, ABC):
    """The decode pod's end of one transfer."""

    @abstractmethod
    def progress(self) -> Progress: ...

    @abstractmethod
    def reopen(self) -> Ticket:
        """The next epoch's ticket, for what is still missing; nothing may be missing, then it wants no block.

        Raises TransferError when the transfer has been closed.
        """

    @abstractmethod
    def close(self) -> None:
        """End the transfer at once; idempotent. After it returns no byte of the transfer is written."""


class KVReceiver(ABC):
    """The decode pod's end of all its transfers."""

    @property
    @abstractmethod
    def endpoint(self) -> str: ...

    @property
    @abstractmethod
    def public_key(self) -> str: ...

    @abstractmethod
    def open(self, dest: Mapping[int, int], transfer_id: bytes | None = None) -> Incoming:
        """Expect blocks: `dest` maps each wanted logical block of the prompt to a physical block.

        An empty `dest` gives a transfer that is complete at once. `transfer_id` (16 bytes) is drawn at
        random when not given. Raises TransferError when it is in use or the receiver is closed,
        InvariantError when two blocks share a physical one.
        """

    @property
    @abstractmethod
    def counters(self) -> Counters: ...

    @property
    @abstractmethod
    def open_transfers(self) -> int: ...

    @property
    @abstractmethod
    def credit_outstanding_bytes(self) -> int:
        """Bytes that senders may have in flight towards this pod; zero when no transfer is open."""

    @abstractmethod
    def close(self) -> None:
        """Fail what is open and stop; idempotent."""


class Outgoing(Transfer, ABC):
    """The prefill pod's end of one transfer."""

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Payload bytes sent."""

    @property
    @abstractmethod
    def in_flight_bytes(self) -> int:
        """Payload bytes sent and not yet credited back; at most the ticket's credit."""

    @abstractmethod
    def put(self, layer: int, first_block: int, block_ids: Sequence[int]) -> None:
        """Queue one layer of consecutive blocks; returns at once.

        `first_block` is the logical index of the first, `block_ids` the physical blocks. They must stay
        unchanged until `done` is settled. What is not wanted or was put before is skipped; on a failed
        transfer this does nothing (see `done`).
        """

    @abstractmethod
    def finish(self) -> Future[None]:
        """Nothing more will be put. Returns `done`, which fails if a wanted block was never put."""

    @abstractmethod
    def abort(self, reason: str = "aborted") -> None:
        """Fail the transfer at once; idempotent. After it returns no block of it is gathered."""


class KVSender(ABC):
    """The prefill pod's end of all its transfers."""

    @abstractmethod
    def open(self, ticket: Ticket) -> Outgoing:
        """Take up a ticket.

        Raises LayoutMismatchError when the decode pod's layout differs, InvalidRequestError for an endpoint
        or credit that cannot work, TransferError when the ticket is in use or the sender is closed.
        """

    @property
    @abstractmethod
    def open_transfers(self) -> int: ...

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Payload bytes sent since the start."""

    @abstractmethod
    def close(self) -> None:
        """Abort what is open and stop; idempotent."""
