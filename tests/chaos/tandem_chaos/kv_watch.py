"""A KV sender and a KV receiver that are the product's own, and note what they send and write.

Each written frame must be of an open transfer, of its current epoch, in its place, and the first of its kind.
When a transfer ends, each block that it calls complete must have the bytes that the prefill pod's pool had.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import cast

import xxhash
from tandem_engine.transport.base import BlockStore, ByteArray, Mark, PendingRead, TransferState
from tandem_engine.transport.codec import Credit, Frame, Reject
from tandem_engine.transport.incoming import IncomingTransfer
from tandem_engine.transport.layout import KVLayout
from tandem_engine.transport.outgoing import OutgoingTransfer
from tandem_engine.transport.zeromq import ReceiverOptions, SenderOptions, ZmqReceiver, ZmqSender

from tandem_chaos.frame_faults import FrameFault, FrameFaults
from tandem_chaos.frame_proxy import FrameProxy
from tandem_chaos.violations import Violations

#: (layer, logical block) -> hashes of its bytes, one per attempt: pods may differ behind the last token.
_Hashes = defaultdict[tuple[int, int], set[int]]


class KVWatch:
    """What was sent and written, by transfer. Called from the threads of senders and receiver."""

    def __init__(self, violations: Violations) -> None:
        self._violations = violations
        self._lock = threading.Lock()
        self._sent: dict[bytes, _Hashes] = {}
        self._open: dict[bytes, IncomingTransfer] = {}
        self._dest: dict[bytes, Mapping[int, int]] = {}
        self._written: dict[bytes, set[tuple[int, int, int]]] = {}
        self.num_complete = 0
        self.num_failed = 0

    def opened(self, transfer: IncomingTransfer, dest: Mapping[int, int]) -> None:
        with self._lock:
            name = transfer.ticket.transfer_id
            self._open[name], self._dest[name] = transfer, dict(dest)
            self._sent[name], self._written[name] = defaultdict(set), set()

    def sent(self, frame: Frame, payload: memoryview) -> None:
        size = payload.nbytes // frame.num_blocks
        with self._lock:
            hashes = self._sent.get(frame.transfer_id)
            for index in range(frame.num_blocks if hashes is not None else 0):
                part = payload[index * size : (index + 1) * size]
                assert hashes is not None
                hashes[frame.layer, frame.first_block + index].add(xxhash.xxh3_64_intdigest(part))

    def written(self, frame: Frame, block_ids: Sequence[int]) -> None:
        with self._lock:
            transfer = self._open.get(frame.transfer_id)
            if transfer is None or transfer.state.is_final:
                self._violations.add("a frame of a transfer that is not open was written into the pool")
                return
            if frame.epoch != transfer.ticket.epoch:
                self._violations.add(
                    f"a frame of epoch {frame.epoch} was written in epoch {transfer.ticket.epoch}"
                )
            for offset, block_id in enumerate(block_ids):
                block = frame.first_block + offset
                if self._dest[frame.transfer_id].get(block) != block_id:
                    self._violations.add(f"block {block} was written into a block that is not its own")
                key = (frame.epoch, frame.layer, block)
                if key in self._written[frame.transfer_id]:
                    self._violations.add(f"layer {frame.layer} of block {block} was written twice")
                self._written[frame.transfer_id].add(key)

    def ended(self, transfer_id: bytes, layout: KVLayout, store: BlockStore) -> None:
        """Compares what arrived. The blocks still belong to the transfer."""
        with self._lock:
            transfer = self._open.pop(transfer_id)
            sent, dest = self._sent.pop(transfer_id), self._dest.pop(transfer_id)
            del self._written[transfer_id]
        if transfer.state is TransferState.SUCCESS:
            self.num_complete += 1
        else:
            self.num_failed += 1
        for block in dest.keys() - set(transfer.progress().missing_blocks[0]):
            for layer in range(layout.num_layers):
                got = cast("ByteArray", store.gather(layer, [dest[block]]))  # of a pool on a CPU
                if xxhash.xxh3_64_intdigest(got.tobytes()) not in sent[layer, block]:
                    self._violations.add(
                        f"layer {layer} of block {block} of {len(dest)} differs from what was sent "
                        f"{len(sent[layer, block])} times; {transfer.state.value} in epoch "
                        f"{transfer.ticket.epoch}"
                    )


class WatchedStore:
    """The pool, with small frames; `on_write` is told of each write before it happens."""

    def __init__(
        self,
        store: BlockStore,
        *,
        max_frame_bytes: int,
        on_write: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._on_write = on_write
        self.max_frame_bytes = max_frame_bytes

    def mark(self) -> Mark | None:
        return self._store.mark()

    def gather(
        self, layer: int, block_ids: Sequence[int], after: object | None = None
    ) -> memoryview | ByteArray | PendingRead:
        return self._store.gather(layer, block_ids, after)

    def scatter(
        self, layer: int, block_ids: Sequence[int], payload: memoryview, after: object | None = None
    ) -> Callable[[], None] | None:
        self._on_write(block_ids)
        return self._store.scatter(layer, block_ids, payload, after)


class WatchedSender(ZmqSender):
    """Sends one block a frame."""

    def __init__(self, watch: KVWatch, layout: KVLayout, store: BlockStore, options: SenderOptions) -> None:
        self._watch = watch
        small = WatchedStore(store, max_frame_bytes=layout.max_block_bytes)
        super().__init__(layout, small, replace(options, curve=False))

    def take_frame(
        self, transfer: OutgoingTransfer, *, computed: bool = False
    ) -> tuple[Frame, memoryview] | None:
        taken = super().take_frame(transfer, computed=computed)
        if taken is not None:
            self._watch.sent(*taken)
        return taken


class WatchedReceiver(ZmqReceiver):
    """Its tickets name a proxy in front of it, which damages frames; `rng` draws the ids of the transfers."""

    def __init__(
        self,
        watch: KVWatch,
        seed: int,
        kinds: tuple[FrameFault, ...],
        credit_blocks: int,
        layout: KVLayout,
        store: BlockStore,
        options: ReceiverOptions,
    ) -> None:
        self._watch = watch
        self._rng = Random(seed)
        self._frame: Frame | None = None
        credit_bytes = credit_blocks * layout.max_block_bytes
        super().__init__(
            layout,
            WatchedStore(store, max_frame_bytes=store.max_frame_bytes, on_write=self._on_write),
            replace(options, curve=False, credit_bytes=credit_bytes),
        )
        self.proxy = FrameProxy(self.endpoint, FrameFaults(seed, kinds))
        self.endpoint = self.proxy.endpoint

    def open(self, dest: Sequence[Mapping[int, int]], transfer_id: bytes | None = None) -> IncomingTransfer:
        transfer = super().open(dest, transfer_id or self._rng.randbytes(16))
        if any(dest):
            self._watch.opened(transfer, dest[0])  # the models of these tests have one group
        return transfer

    def _forget(self, transfer_id: bytes) -> None:
        # Called when a transfer has ended and nobody knows yet, so that nobody writes on in its last block.
        super()._forget(transfer_id)
        self._watch.ended(transfer_id, self._layout, self._store)

    def accept(self, frame: Frame, payload: memoryview) -> Credit | Reject:
        self._frame = frame
        return super().accept(frame, payload)

    def _on_write(self, block_ids: Sequence[int]) -> None:
        assert self._frame is not None
        self._watch.written(self._frame, block_ids)

    def close(self) -> None:
        self.proxy.close()
        super().close()
