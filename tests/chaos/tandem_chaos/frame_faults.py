"""Damages KV frames and credit by seed, whatever carries them.

Each transfer has one kind of fault and a rate, both drawn from the seed and the transfer's id.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Delivery:
    """A frame that reaches the receiver after a while."""

    delay_s: float
    parts: list[bytes]
    #: From somebody else's connection.
    is_forged: bool = False
    #: Instead: the frames that are held back, if they still are.
    held: list[list[bytes]] | None = None

    def take(self) -> list[list[bytes]]:
        if self.held is None:
            return [self.parts]
        taken = list(self.held)
        self.held.clear()
        return taken


class FrameFaults:
    """`num_faults` counts damaged frames by kind."""

    def __init__(self, seed: int, kinds: tuple[FrameFault, ...]) -> None:
        self._seed = seed
        self._kinds = kinds
        self._plans: dict[bytes, _Plan] = {}
        self.num_faults: Counter[FrameFault] = Counter()
        self.num_frames = 0

    def frame(self, frame: Frame, parts: list[bytes], now: float) -> list[Delivery]:
        """What becomes of a frame that is sent at `now`, in monotonic seconds."""
        self.num_frames += 1
        plan = self._plan(frame.transfer_id)
        rng = plan.rng
        is_faulty = rng.random() < plan.rate and plan.fault not in (FrameFault.CREDIT, FrameFault.CUT)
        if is_faulty and plan.fault is not FrameFault.STALE:
            self.num_faults[plan.fault] += 1
        intact = Delivery(0.0, parts)
        match plan.fault if is_faulty else None:
            case FrameFault.DROP:
                return []
            case FrameFault.REORDER:
                plan.held.append(parts)
                return [Delivery(0.02, [], held=plan.held)]  # if no other frame comes
            case FrameFault.CORRUPT:
                result = [Delivery(0.0, _damaged(frame, parts, rng))]
            case FrameFault.DUPLICATE:
                result = [intact, Delivery(rng.choice((0.0, rng.uniform(0, 0.05))), parts)]
            case FrameFault.DELAY:
                result = [Delivery(rng.choice((0.002, 0.02, 0.3)) * rng.random(), parts)]
            case FrameFault.THROTTLE:
                plan.free_at = max(now, plan.free_at) + len(parts[1]) / plan.bytes_per_s
                result = [Delivery(plan.free_at - now, parts)]
            case FrameFault.FORGE:
                result = [Delivery(0.0, _forged(frame, parts, rng), is_forged=True), intact]
            case FrameFault.STALE:
                result = [Delivery(0.0, one) for one in self._with_stale(plan, frame, parts)]
            case _:
                result = [intact]
        return result + [Delivery(0.0, one) for one in Delivery(0.0, [], held=plan.held).take()]

    def reply(self, reply: bytes) -> list[bytes]:
        """What becomes of a reply of the receiver."""
        message = decode(reply)
        plan = self._plan(message.transfer_id)
        if (
            plan.fault is not FrameFault.CREDIT
            or not isinstance(message, Credit)
            or plan.rng.random() >= plan.rate
        ):
            return [reply]
        self.num_faults[FrameFault.CREDIT] += 1
        wrong = dataclasses.replace(message, epoch=message.epoch + 1)
        return plan.rng.choice([[], [reply, reply], [b"\xff" + reply], [encode(wrong), reply]])

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

    def _with_stale(self, plan: _Plan, frame: Frame, parts: list[bytes]) -> list[list[bytes]]:
        """The first epoch loses a frame, so that there is a second one; frames of the first come with it."""
        plan.seen[frame.epoch].append(parts)
        if frame.epoch == 1:
            return [parts] if len(plan.seen[1]) != 2 else []
        old = plan.seen[frame.epoch - 1][:4]
        self.num_faults[FrameFault.STALE] += len(old)
        return [*old, parts]


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
