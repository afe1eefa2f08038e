"""A ZeroMQ proxy between KV senders and one KV receiver. It reads the frames, and damages them by seed.

    KV sender -> ROUTER (tickets name this one) -> faults of the transfer -> DEALER -> KV receiver
              <-                                <- faults on credit       <-

Each transfer has one kind of fault and a rate, both drawn from the seed and the transfer's id.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import itertools
import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import zmq
from tandem_engine.transport.base import TRANSFER_ID_BYTES
from tandem_engine.transport.codec import Credit, Frame, decode, digest, encode


class FrameFault(enum.StrEnum):
    DROP = "drop"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    DELAY = "delay"
    THROTTLE = "throttle"
    #: Frames of an earlier epoch are sent again in a later one.
    STALE = "stale"
    #: Frames that no ticket allows, from another connection.
    FORGE = "forge"
    #: Credit is lost, doubled or damaged.
    CREDIT = "credit"
    #: Nothing passes for a while, for any transfer.
    CUT = "cut"


#: Share of a transfer's frames that are damaged, for faults that end an attempt, and for the others.
_FATAL_RATES, _RATES = (0.02, 0.1, 1.0), (0.3, 1.0)
_FATAL = frozenset({FrameFault.DROP, FrameFault.CORRUPT, FrameFault.CREDIT})
_POLL_MS = 50


@dataclass
class _Plan:
    """What happens to one transfer."""

    rng: random.Random
    fault: FrameFault
    rate: float
    bytes_per_s: float
    #: When the throttled link is free again.
    free_at: float = 0.0
    #: Held back until the next frame has passed.
    held: list[list[bytes]] = field(default_factory=list)
    #: Frames by epoch, for STALE.
    seen: defaultdict[int, list[list[bytes]]] = field(default_factory=lambda: defaultdict(list))


class FrameProxy:
    """Runs from its construction to `close`. `num_faults` counts damaged frames by kind."""

    def __init__(self, receiver_endpoint: str, seed: int, kinds: tuple[FrameFault, ...]) -> None:
        self._receiver = receiver_endpoint
        self._seed = seed
        self._kinds = kinds
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._plans: dict[bytes, _Plan] = {}
        #: (when, order, back, what); a plan: the frames that it holds back.
        self._waiting: list[tuple[float, int, zmq.Socket[bytes], list[bytes] | _Plan]] = []
        self._order = itertools.count()
        self._cut_until = 0.0
        self.num_faults: Counter[FrameFault] = Counter()
        self.num_frames = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="frame-proxy", daemon=True)
        self._thread.start()

    def cut(self, seconds: float) -> None:
        """Loses everything in both directions for this time."""
        self._cut_until = time.monotonic() + seconds

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        forger = self._back(b"", poller)
        while not self._stopping.is_set():
            wait_ms = _POLL_MS
            if self._waiting:
                wait_ms = max(0, min(_POLL_MS, int((self._waiting[0][0] - time.monotonic()) * 1000) + 1))
            for socket, _ in poller.poll(wait_ms):
                if socket is self._front:
                    self._take_frames(poller, forger)
                else:
                    self._take_replies(socket)
            self._send_due()

    def _back(self, peer: bytes, poller: zmq.Poller) -> zmq.Socket[bytes]:
        back = self._backs.get(peer)
        if back is None:
            back = self._backs[peer] = self._context.socket(zmq.DEALER)
            back.linger = 0
            back.sndhwm = 0
            back.connect(self._receiver)
            poller.register(back, zmq.POLLIN)
        return back

    def _take_frames(self, poller: zmq.Poller, forger: zmq.Socket[bytes]) -> None:
        while True:
            try:
                peer, *parts = self._front.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            frame = decode(parts[0])
            assert isinstance(frame, Frame)  # what a KV sender sends
            self.num_frames += 1
            if time.monotonic() < self._cut_until:
                self.num_faults[FrameFault.CUT] += 1
                continue
            self._pass_on(frame, parts, self._back(peer, poller), forger)

    def _plan(self, transfer_id: bytes) -> _Plan:
        plan = self._plans.get(transfer_id)
        if plan is None:
            rng = random.Random(f"{self._seed}:{transfer_id.hex()}")
            fault = rng.choice(self._kinds)
            rate = rng.choice(_FATAL_RATES if fault in _FATAL else _RATES)
            plan = _Plan(rng, fault, rate, bytes_per_s=10 ** rng.uniform(4.8, 7))
            self._plans[transfer_id] = plan
            if len(self._plans) > 4096:  # of transfers that ended long ago
                del self._plans[next(iter(self._plans))]
        return plan

    def _pass_on(
        self, frame: Frame, parts: list[bytes], back: zmq.Socket[bytes], forger: zmq.Socket[bytes]
    ) -> None:
        plan = self._plan(frame.transfer_id)
        rng = plan.rng
        is_faulty = rng.random() < plan.rate and plan.fault not in (FrameFault.CREDIT, FrameFault.CUT)
        if is_faulty and plan.fault is not FrameFault.STALE:
            self.num_faults[plan.fault] += 1
        match plan.fault if is_faulty else None:
            case FrameFault.DROP:
                return
            case FrameFault.CORRUPT:
                back.send_multipart(_damaged(frame, parts, rng))
            case FrameFault.DUPLICATE:
                back.send_multipart(parts)
                self._send_later(rng.choice((0.0, rng.uniform(0, 0.05))), back, parts)
            case FrameFault.REORDER:
                plan.held.append(parts)
                self._send_later(0.02, back, plan)  # if no other frame comes
                return
            case FrameFault.DELAY:
                self._send_later(rng.choice((0.002, 0.02, 0.3)) * rng.random(), back, parts)
            case FrameFault.THROTTLE:
                now = time.monotonic()
                plan.free_at = max(now, plan.free_at) + len(parts[1]) / plan.bytes_per_s
                self._send_later(plan.free_at - now, back, parts)
            case FrameFault.FORGE:
                forger.send_multipart(_forged(frame, parts, rng))
                back.send_multipart(parts)
            case FrameFault.STALE:
                self._pass_on_stale(plan, frame, parts, back)
            case _:
                back.send_multipart(parts)
        while plan.held:
            back.send_multipart(plan.held.pop(0))

    def _pass_on_stale(self, plan: _Plan, frame: Frame, parts: list[bytes], back: zmq.Socket[bytes]) -> None:
        """The first epoch loses a frame, so that there is a second one; frames of the first come with it."""
        plan.seen[frame.epoch].append(parts)
        if frame.epoch == 1:
            if len(plan.seen[1]) != 2:
                back.send_multipart(parts)
            return
        for old in plan.seen[frame.epoch - 1][:4]:
            self.num_faults[FrameFault.STALE] += 1
            back.send_multipart(old)
        back.send_multipart(parts)

    def _take_replies(self, back: zmq.Socket[bytes]) -> None:
        peer = next(peer for peer, socket in self._backs.items() if socket is back)
        while True:
            try:
                reply = back.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            if not peer:
                continue  # an answer to the forger
            if time.monotonic() < self._cut_until:
                self.num_faults[FrameFault.CUT] += 1
                continue
            for copy in self._damaged_reply(reply):
                self._front.send_multipart([peer, copy])

    def _damaged_reply(self, reply: bytes) -> list[bytes]:
        message = decode(reply)
        plan = self._plan(message.transfer_id)
        is_faulty = isinstance(message, Credit) and plan.rng.random() < plan.rate
        if plan.fault is not FrameFault.CREDIT or not is_faulty:
            return [reply]
        assert isinstance(message, Credit)
        self.num_faults[FrameFault.CREDIT] += 1
        wrong = dataclasses.replace(message, epoch=message.epoch + 1)
        return plan.rng.choice([[], [reply, reply], [b"\xff" + reply], [encode(wrong), reply]])

    def _send_later(self, delay_s: float, back: zmq.Socket[bytes], what: list[bytes] | _Plan) -> None:
        due = time.monotonic() + delay_s
        heapq.heappush(self._waiting, (due, next(self._order), back, what))

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, back, what = heapq.heappop(self._waiting)
            if isinstance(what, _Plan):
                while what.held:
                    back.send_multipart(what.held.pop(0))
            else:
                back.send_multipart(what)


def _damaged(frame: Frame, parts: list[bytes], rng: random.Random) -> list[bytes]:
    """The frame with one of the errors that a wire or a broken sender makes."""
    header, payload = parts
    at = rng.randrange(len(payload))
    flipped = payload[:at] + bytes([payload[at] ^ (1 << rng.randrange(8))]) + payload[at + 1 :]
    match rng.randrange(8):
        case 0 | 1 | 2:
            return [header, flipped]
        case 3:
            return [header, payload[:at]]
        case 4:
            return [header, payload + b"\0"]
        case 5:
            return [encode(dataclasses.replace(frame, layer=frame.layer + 1)), payload]
        case 6:
            return [encode(dataclasses.replace(frame, first_block=frame.first_block + 1)), payload]
        case _:
            return [rng.randbytes(len(header)), payload]


def _forged(frame: Frame, parts: list[bytes], rng: random.Random) -> list[bytes]:
    """What somebody sends who has no ticket, or an old one, or more than the ticket allows.

    Not what somebody could send who knows the transfer's id, which is the permission to write.
    """
    payload = bytes(len(parts[1]))
    place = dataclasses.replace(
        frame,
        **rng.choice(
            (
                {"transfer_id": rng.randbytes(TRANSFER_ID_BYTES)},
                {"first_block": frame.first_block + 100_000},
                {"layer": frame.layer + 1_000},
                {"epoch": frame.epoch - 1},
                {"num_blocks": frame.num_blocks + 1_000_000},
                {},
            )
        ),
    )
    if place != frame:
        at = (place.transfer_id, place.epoch, place.layer, place.first_block, place.num_blocks)
        place = dataclasses.replace(place, digest=digest(*at, memoryview(payload)))
    if rng.random() < 0.1:
        return [encode(Credit(frame.transfer_id, frame.epoch, 1 << 40)), payload]
    return [encode(place), payload]
