"""The same frame faults on KV sender and receiver without sockets, threads or models: millions of frames.

One thread delivers frames and replies in the order of a simulated clock, so a seed repeats everything. Each
transfer goes as in a handoff: blocks are reserved and held, up to three attempts are made, then the transfer
is aborted and the blocks are given back. An attempt ends when nothing of it is under way any more: a pod
would notice that by its limits of time.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from kv_groups import kv_group
from tandem_core.errors import TransferError
from tandem_core.sampling import SamplingParams
from tandem_engine.block_manager import BlockGroup, BlockHold, BlockManager
from tandem_engine.request import Request
from tandem_engine.transport.base import ByteArray, DropCause
from tandem_engine.transport.codec import Credit, Frame, MalformedError, Reject, decode, encode
from tandem_engine.transport.incoming import IncomingTransfer, KVReceiver
from tandem_engine.transport.layout import KVLayout
from tandem_engine.transport.outgoing import KVSender, OutgoingTransfer

from tandem_chaos.frame_faults import FrameFault, FrameFaults
from tandem_chaos.kv_watch import KVWatch, WatchedStore
from tandem_chaos.violations import Violations

_LAYOUT = KVLayout(
    model_revision="simulated",
    dtype="float16",
    kv_quantization="none",
    groups=(kv_group(range(3), 1, 8),),
    block_size=16,
    spec="0123456789abcdef",
)
_NUM_BLOCKS = 256
_MAX_ATTEMPTS = 3
#: Transfers at a time.
_CONCURRENCY = 8
#: Between two frames of a sender.
_FRAME_S = 0.0001
#: Owner of forged frames, in place of a transfer and its epoch.
_NOBODY = (b"", 0)
KINDS = tuple(kind for kind in FrameFault if kind is not FrameFault.CUT)


class _Pool:
    """Blocks of one pod as bytes."""

    max_frame_bytes = _LAYOUT.max_block_bytes

    def __init__(self) -> None:
        self.data = np.zeros((_LAYOUT.num_layers, _NUM_BLOCKS, _LAYOUT.max_block_bytes), np.uint8)
        self.manager = BlockManager(
            [BlockGroup(_NUM_BLOCKS)], _LAYOUT.block_size, enable_prefix_caching=False
        )

    def mark(self) -> None:
        return None

    def gather(self, layer: int, block_ids: Sequence[int], after: object = None) -> ByteArray:
        block: ByteArray = self.data[layer, block_ids[0]]  # frames of one block
        return block

    def scatter(
        self, layer: int, block_ids: Sequence[int], payload: memoryview, after: object = None
    ) -> None:
        blocks = np.frombuffer(payload, np.uint8).reshape(len(block_ids), _LAYOUT.max_block_bytes)
        self.data[layer, list(block_ids)] = blocks


class _Receiver(KVReceiver):
    def __init__(self, pool: _Pool, watch: KVWatch, credit_blocks: int) -> None:
        self._watch = watch
        self._pool = pool
        self._frame: Frame | None = None
        store = WatchedStore(pool, max_frame_bytes=pool.max_frame_bytes, on_write=self._on_write)
        credit_bytes = credit_blocks * _LAYOUT.max_block_bytes
        super().__init__(_LAYOUT, store, credit_bytes, endpoint="tcp://simulated:1", public_key="")

    def receive(self, parts: list[bytes]) -> bytes | None:
        """The reply, as on the wire."""
        try:
            frame = decode(parts[0])
            if not isinstance(frame, Frame):
                raise MalformedError("only frames travel to the decode pod")
        except MalformedError:
            self.count_drop(DropCause.MALFORMED)
            return None
        self._frame = frame
        return encode(self.accept(frame, memoryview(parts[1])))

    def _on_write(self, block_ids: Sequence[int]) -> None:
        assert self._frame is not None
        self._watch.written(self._frame, block_ids)

    def _forget(self, transfer_id: bytes) -> None:
        super()._forget(transfer_id)
        self._watch.ended(transfer_id, _LAYOUT, self._pool)


@dataclass(eq=False)
class _Handoff:
    """One prompt on both pods."""

    request: Request
    incoming: IncomingTransfer
    decode_hold: BlockHold
    source: tuple[int, ...]
    prefill_hold: BlockHold
    outgoing: OutgoingTransfer | None = None
    num_attempts: int = 0
    #: Deliveries of the current attempt.
    under_way: int = 0


@dataclass
class SimulationReport:
    num_faults: dict[FrameFault, int] = field(default_factory=dict)
    num_frames: int = 0
    num_transfers: int = 0
    num_complete: int = 0
    num_dropped: dict[DropCause, int] = field(default_factory=dict)
    seconds: float = 0.0
    violations: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = sum(self.num_faults.values())
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.num_faults.items()))
        causes = ", ".join(f"{cause.value} {count:,}" for cause, count in self.num_dropped.items() if count)
        return (
            f"{total:,} faults on {self.num_frames:,} frames in {self.seconds:.0f} s "
            f"({total / self.seconds:,.0f}/s): {kinds}\n"
            f"{self.num_transfers:,} transfers, {self.num_complete:,} complete; frames that the receiver "
            f"dropped: {causes or 'none'}"
        )


class FrameSimulation:
    """`run` until so many frames were damaged, or something is wrong."""

    def __init__(
        self, seed: int, violations: Violations, kinds: tuple[FrameFault, ...] = KINDS, credit_blocks: int = 8
    ) -> None:
        self._rng = random.Random(seed)
        self._violations = violations
        self._faults = FrameFaults(seed, kinds)
        self._watch = KVWatch(violations)
        self._prefill, self._decode = _Pool(), _Pool()
        self._receiver = _Receiver(self._decode, self._watch, credit_blocks)
        self._sender = KVSender(_LAYOUT, self._prefill, lambda: None)
        self._running: dict[bytes, _Handoff] = {}
        self._now = 0.0
        self._order = itertools.count()
        #: (when, order, to the receiver?, transfer and epoch it belongs to, parts)
        self._events: list[tuple[float, int, bool, tuple[bytes, int], list[list[bytes]]]] = []
        self._names = itertools.count()

    def run(self, num_faults: int) -> SimulationReport:
        started = time.monotonic()
        while self._faults.num_faults.total() < num_faults and not self._violations.sentences:
            self._round(num_transfers=64)
        return SimulationReport(
            dict(self._faults.num_faults),
            self._faults.num_frames,
            next(self._names),
            self._watch.num_complete,
            self._receiver.dropped_frames,
            time.monotonic() - started,
            self._violations.sentences,
        )

    def _round(self, num_transfers: int) -> None:
        for _ in range(num_transfers):
            while len(self._running) >= _CONCURRENCY:
                self._step()
            self._begin()
        while self._running:
            self._step()
        self._events.clear()  # late frames of transfers that have ended: `_step` delivered most of them
        for name, pool in (("prefill", self._prefill), ("decode", self._decode)):
            for sentence in pool.manager.check():
                self._violations.add(f"{name}: {sentence}")
            if pool.manager.usage().used:
                self._violations.add(f"{name}: {pool.manager.usage().used} blocks are still used")
        if self._sender.open_transfers or self._receiver.open_transfers:
            self._violations.add("transfers are still open")

    def _begin(self) -> None:
        num_tokens = self._rng.choice((16, 100, 300))
        request = Request(
            request_id=f"r{next(self._names)}",
            prompt_token_ids=[1] * num_tokens,
            sampling=SamplingParams(max_tokens=1),
        )
        tables = []
        for pool in (self._prefill, self._decode):
            if not pool.manager.allocate(request, num_tokens):
                raise RuntimeError("the simulated pools are too small for the transfers at a time")
            tables.append(pool.manager.block_ids(request.request_id)[0])
        source, dest = tables
        shape = (_LAYOUT.num_layers, len(source), _LAYOUT.max_block_bytes)
        self._prefill.data[:, list(source)] = np.frombuffer(
            self._rng.randbytes(int(np.prod(shape))), np.uint8
        ).reshape(shape)
        wanted = {index: block for index, block in enumerate(dest) if self._rng.random() < 0.9}
        incoming = self._receiver.open([wanted], self._rng.randbytes(16))
        handoff = _Handoff(
            request,
            incoming,
            self._decode.manager.hold(dest),
            source,
            self._prefill.manager.hold(source),
        )
        if not wanted:
            self._end(handoff)
            return
        self._watch.opened(incoming, wanted)
        self._running[incoming.ticket.transfer_id] = handoff
        self._attempt(handoff)

    def _attempt(self, handoff: _Handoff) -> None:
        handoff.num_attempts += 1
        ticket = handoff.incoming.ticket if handoff.num_attempts == 1 else handoff.incoming.reopen()
        handoff.under_way = 0
        outgoing = handoff.outgoing = self._sender.open(ticket)
        for layer in range(_LAYOUT.num_layers):
            outgoing.put(layer, 0, handoff.source)
        outgoing.finish()
        self._send(handoff)

    def _send(self, handoff: _Handoff) -> None:
        assert handoff.outgoing is not None
        at = self._now
        while (taken := self._sender.take_frame(handoff.outgoing)) is not None:
            frame, payload = taken
            self._watch.sent(frame, payload)
            at += _FRAME_S
            key = (frame.transfer_id, frame.epoch)
            for delivery in self._faults.frame(frame, [encode(frame), payload.tobytes()], at):
                handoff.under_way += 1
                # What is held back is handed over when it is due.
                what = [delivery.parts] if delivery.held is None else delivery.held
                owner = key
                if delivery.is_forged:
                    owner = _NOBODY
                    handoff.under_way -= 1
                event = (at + delivery.delay_s, next(self._order), True, owner, what)
                heapq.heappush(self._events, event)

    def _step(self) -> None:
        """The next event; without one, every running attempt has come to its end."""
        if not self._events:
            for stuck in list(self._running.values()):
                self._attempt_ended(stuck)
            return
        self._now, _, is_frame, key, what = heapq.heappop(self._events)
        parts = list(what)
        what.clear()
        handoff = self._running.get(key[0])
        if handoff is not None and handoff.incoming.ticket.epoch == key[1]:
            handoff.under_way -= 1
        for one in parts:
            if is_frame:
                self._deliver(one, key)
            else:
                self._answer(one[0])
        if handoff is not None and handoff.incoming.ticket.transfer_id in self._running:
            self._send(handoff)
            assert handoff.outgoing is not None
            if handoff.under_way == 0 or handoff.outgoing.done.done():
                self._attempt_ended(handoff)

    def _deliver(self, parts: list[bytes], key: tuple[bytes, int]) -> None:
        reply = self._receiver.receive(parts)
        if reply is None or key == _NOBODY:
            return
        for one in self._faults.reply(reply):
            if (running := self._running.get(key[0])) and running.incoming.ticket.epoch == key[1]:
                running.under_way += 1
            event = (self._now + _FRAME_S, next(self._order), False, key, [[one]])
            heapq.heappush(self._events, event)

    def _answer(self, reply: bytes) -> None:
        try:
            message = decode(reply)
        except MalformedError:
            return
        if isinstance(message, Credit | Reject):
            self._sender.on_reply(message)

    def _attempt_ended(self, handoff: _Handoff) -> None:
        assert handoff.outgoing is not None
        handoff.outgoing.abort()
        if not handoff.incoming.done.done() and handoff.num_attempts < _MAX_ATTEMPTS:
            self._attempt(handoff)
            return
        del self._running[handoff.incoming.ticket.transfer_id]
        self._end(handoff)

    def _end(self, handoff: _Handoff) -> None:
        """As a handoff does: no byte is written after the abort, so the blocks may go."""
        handoff.incoming.abort()
        for pool, hold in ((self._decode, handoff.decode_hold), (self._prefill, handoff.prefill_hold)):
            pool.manager.release(hold)
            pool.manager.free(handoff.request)
        try:
            handoff.incoming.reopen()
        except TransferError:
            return
        if not handoff.incoming.done.done():
            self._violations.add("a transfer that was aborted can be reopened")
