"""Who is next when there is more work than can be done: shares of tenants, and slots of refused clients."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from operator import attrgetter

from tandem_gateway.admission.admitted import Admitted

#: A tenant may be ahead of its share by so many seconds.
_AHEAD_S = 1.0
#: How often a tenant asks is a mean over about so long; it is active until so long after its last request.
_MEMORY_S = 10.0
#: Room is kept for those that ask for less than this part of the work that a tenant asks for; chance makes
#: equal ones differ by less.
_MUCH_LESS = 0.5
#: Who asks often is also compared in the time of its last _NUM_RECENT requests, but no shorter time than
#: this: several are often sent at once. Of two equal ones one seems to ask for much less in about one case of
#: a hundred.
_NUM_RECENT, _LEAST_S = 32, 0.5
#: Requests of a tenant that are remembered one by one.
_MAX_RECENT = 256
#: Nor is a tenant outdone by one that asked for fewer requests than this lately.
_NUM_NOISY = 5
#: By how many standard deviations that room exceeds what is needed on average.
_DEVIATIONS = 4.0
#: How long a refused client may be late, and still find the room that was kept for it.
_GRACE_S = 1.0
#: So long before its slot, others begin to leave room for a client that is due back.
_NEAR_S = 2.0
#: Slots may lie so far ahead, and so many clients are expected at most: what they need is kept in memory.
MAX_AHEAD_S = 300.0
_MOST_BOOKED = 4096
#: Of all work, what slots are given to; the rest is for those that come for the first time.
_SHARE_OF_RETURNING = 0.5
#: Weight of the newest client in the share of those that came back.
_ALPHA = 0.1


@dataclass
class _Tenant:
    weight: float
    #: Monotonic seconds: by when its work is done at the speed of its share; and of its last request.
    finish: float
    asked_at: float
    #: Requests, and the seconds of work that they ask for; the older ones decayed in about _MEMORY_S.
    num_asked: float = 0.0
    work_asked_s: float = 0.0
    #: Monotonic seconds and seconds of work of each of the last ones.
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_RECENT))

    def ask(self, now: float, work_s: float) -> None:
        kept = math.exp((self.asked_at - now) / _MEMORY_S)
        self.num_asked = self.num_asked * kept + 1
        self.work_asked_s = self.work_asked_s * kept + work_s
        self.asked_at = now
        self.recent.append((now, work_s))

    def rate(self, now: float) -> float:
        """Requests per second in the last ten seconds or so."""
        return self.num_asked * math.exp((self.asked_at - now) / _MEMORY_S) / _MEMORY_S

    @property
    def mean_work_s(self) -> float:
        """Of a request."""
        return self.work_asked_s / self.num_asked

    def demand(self, now: float) -> float:
        """Seconds of work asked for per second in the last ten seconds or so, by weight."""
        return self.rate(now) * self.mean_work_s / self.weight

    def lately(self, now: float) -> _Lately | None:
        """None: it asks too rarely for a shorter time than ten seconds to tell anything."""
        if len(self.recent) < _NUM_RECENT or self.recent[-_NUM_RECENT][0] < now - _MEMORY_S:
            return None
        since = min(self.recent[-_NUM_RECENT][0], now - _LEAST_S)
        since = max(since, self.recent[0][0])
        return _Lately(since, self._work_since(since), now)

    def _work_since(self, at: float) -> float:
        """In seconds, by weight; infinite if it has asked so often that not all of it is remembered."""
        if len(self.recent) == _MAX_RECENT and self.recent[0][0] > at:
            return math.inf
        later = takewhile(lambda one: one[0] >= at, reversed(self.recent))
        return sum([work_s for _, work_s in later]) / self.weight

    def asks_much_less(self, other: _Tenant, now: float, lately: _Lately | None) -> bool:
        """Than the other one in the last ten seconds, or `lately`: one that begins to ask for much is known
        after its next few dozen requests."""
        own, theirs = self.demand(now), other.demand(now)
        if own < _MUCH_LESS * theirs:
            return True
        is_less = lately is not None and self._work_since(lately.since) < _MUCH_LESS * lately.work_s
        # Several at once are no proof of one that asked for less before.
        return is_less and own < theirs


@dataclass(frozen=True)
class _Lately:
    """What a tenant asked for since some monotonic second, in seconds of work, by weight."""

    since: float
    work_s: float
    now: float

    @property
    def demand(self) -> float:
        """Per second."""
        return self.work_s / max(self.now - self.since, _LEAST_S)


class FairShares:
    """By how much each tenant has used more than its share of the work, while others want theirs, and for how
    many requests of the others a tenant that asks for much has to leave room.

    A tenant's share is its weight among the tenants that are active. Each request moves the tenant's finish
    time by its seconds of work over that share, as for a constant bandwidth server (Abeni and Buttazzo 1998).
    Its requests without objectives are due later by as much as that is ahead of the least one of the active
    tenants. Not ahead of the clock: under overload all tenants run ahead of that. If another tenant asks
    for much more, its requests with objectives are due earlier; and while it has less than its share of what
    runs, they find the room that the other one has to leave.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def ask(self, name: str, weight: float, work_s: float) -> None:
        """A request came, admitted or not, that takes so many seconds of work."""
        now = self._forget()
        tenant = self._tenants.setdefault(name, _Tenant(weight, now, now))
        tenant.weight = weight
        tenant.ask(now, work_s)

    def charge(self, name: str, seconds: float) -> None:
        """A request that asked was admitted."""
        self._forget()
        tenant = self._tenants[name]
        total = sum([one.weight for one in self._tenants.values()])
        tenant.finish = max(tenant.finish, time.monotonic()) + seconds * total / tenant.weight

    def ahead_s(self, name: str) -> float:
        """Of the active tenant that has used the least; 0 if there is no other one."""
        now = self._forget()
        if name not in self._tenants:
            return 0.0
        least = min([max(one.finish, now) for one in self._tenants.values()])
        return max(0.0, self._tenants[name].finish - least - _AHEAD_S)

    def room_for_others(self, name: str, seconds: float, running: Mapping[str, int], work_s: float) -> float:
        """Requests of `work_s` that make up those of tenants which ask for much less: as many as these have
        here on average, if each stays for `seconds` (Little's law), and _DEVIATIONS standard deviations more,
        without those that are `running` (by tenant). All of them together, since for each alone many small
        ones would be kept more room than they use."""
        small, rate, mean_work_s = self._asking_much_less(name)
        most = round(_and_deviations(rate * seconds, _DEVIATIONS))
        return max(most - sum([running.get(other, 0) for other in small]), 0) * mean_work_s / work_s

    def num_overtaking(self, name: str, seconds: float, work_s: float) -> float:
        """Requests of `work_s` that make up those which tenants that ask for much less send in so many
        seconds, on average, and one standard deviation more."""
        _, rate, mean_work_s = self._asking_much_less(name)
        return _and_deviations(rate * seconds, 1.0) * mean_work_s / work_s

    def _asking_much_less(self, name: str) -> tuple[list[str], float, float]:
        """The tenants, their requests per second together, and the mean work of these in seconds."""
        now = self._forget()
        own = self._tenants.get(name)
        if own is None:
            return [], 0.0, 0.0
        lately = own.lately(now)
        small = {other: one for other, one in self._tenants.items() if one.asks_much_less(own, now, lately)}
        rate = sum([one.rate(now) for one in small.values()])
        work = sum([one.rate(now) * one.mean_work_s for one in small.values()])
        return list(small), rate, work / rate if rate else 0.0

    def asks_much_less(self, name: str, other: str) -> bool:
        """Than the other tenant, by weight; False unless both are active."""
        now = self._forget()
        one, theirs = self._tenants.get(name), self._tenants.get(other)
        if one is None or theirs is None:
            return False
        return one.asks_much_less(theirs, now, theirs.lately(now))

    def comes_first(self, name: str) -> bool:
        """Whether it asks for much less work than the tenant that asks for most, by weight. One that has not
        asked yet asks for less."""
        return self._noisier(name, self._forget()) is not None

    def is_outdone(self, name: str, weight: float, running: Mapping[str, int]) -> bool:
        """Whether it comes first, and has less than its share of what is `running`, and that noisy tenant
        more. `running`: places by tenant."""
        noisy = self._noisier(name, self._forget())
        if noisy is None:
            return False
        total = sum([one.weight for one in self._tenants.values()]) + weight * (name not in self._tenants)
        of_weight = sum(running.values()) / total
        return running.get(name, 0) < weight * of_weight and running.get(noisy, 0) > (
            self._tenants[noisy].weight * of_weight
        )

    def _noisier(self, name: str, now: float) -> str | None:
        """The tenant that asks for most, by weight, lately or in the last ten seconds, if this one asks for
        much less."""
        if not self._tenants:
            return None
        own = self._tenants.get(name)
        lately = {other: one.lately(now) for other, one in self._tenants.items()}
        demands = {other: one.demand(now) for other, one in self._tenants.items()}
        for by in ({other: one.demand for other, one in lately.items() if one is not None}, demands):
            noisy = max(by, key=by.__getitem__, default=None)
            if noisy is None:
                continue
            most = self._tenants[noisy]
            if most.num_asked >= _NUM_NOISY and (own is None or own.asks_much_less(most, now, lately[noisy])):
                return noisy
        return None

    def _forget(self) -> float:
        """Drops those that are no longer active; returns the time."""
        now = time.monotonic()
        self._tenants = {name: one for name, one in self._tenants.items() if one.asked_at > now - _MEMORY_S}
        return now


def _and_deviations(mean: float, number: float) -> float:
    """The mean of a count that has Poisson's distribution, and so many of its standard deviations more."""
    return mean + number * math.sqrt(mean)


@dataclass(eq=False)
class _Booking:
    key: int
    #: Monotonic seconds from which it is expected, and until which it takes what slots are given to.
    slot: float
    until: float
    #: What the client that comes back is expected to need.
    expected: Admitted
    is_open: bool = True


_slot_of = attrgetter("slot")


class Bookings:
    """When refused clients may come back: one after the other, each when the work of those before it can be
    done beside that of new clients. Belongs to one event loop."""

    def __init__(self) -> None:
        #: By content of the request: equal requests are common, such as greetings. These and all others that
        #: are not over are in the order of their slots.
        self._open: defaultdict[int, list[_Booking]] = defaultdict(list)
        self._order: list[_Booking] = []
        #: Share of the clients that came back in their slots lately; at first nobody knows.
        self.returning = 0.5

    def book(
        self,
        key: int,
        earliest: float,
        work_s: float,
        expected: Callable[[float], Admitted],
        gives_way: Callable[[str], bool],
    ) -> float:
        """Returns the monotonic seconds of the first free slot, at `earliest` or later, and remembers what is
        expected then, unless that is far ahead or as many are expected as can be. `gives_way`: whether slots
        of a tenant do not count."""
        self._forget_missed()
        length = work_s * self.returning / _SHARE_OF_RETURNING
        slot = earliest
        gives_way = cache(gives_way)
        for other in self._order:
            if other.until > slot and not gives_way(other.expected.request.tenant):
                if other.slot >= slot + length:
                    break
                slot = other.until
        if slot < time.monotonic() + MAX_AHEAD_S and len(self._order) < _MOST_BOOKED:
            booking = _Booking(key, slot, slot + length, expected(slot))
            insort(self._open[key], booking, key=_slot_of)
            insort(self._order, booking, key=_slot_of)
        return slot

    def redeem(self, key: int) -> bool:
        """Whether the client comes at the time that it was told."""
        self._forget_missed()
        if key not in self._open or self._open[key][0].slot - _GRACE_S > time.monotonic():
            return False
        self._close(self._open[key][0])
        self.returning += _ALPHA * (1 - self.returning)
        return True

    def due_back(self) -> list[Admitted]:
        """Those whose slots are near, in order; of these as many as are likely to come."""
        self._forget_missed()
        near = time.monotonic() + _NEAR_S
        due = [one.expected for one in takewhile(lambda one: one.slot < near, self._order) if one.is_open]
        return due[: round(self.returning * len(due))]

    def _forget_missed(self) -> None:
        oldest = time.monotonic() - _GRACE_S
        num_over = bisect_left(self._order, oldest, key=_slot_of)
        for booking in self._order[:num_over]:
            if booking.is_open:
                self._close(booking)
                self.returning *= 1 - _ALPHA
        del self._order[:num_over]

    def _close(self, booking: _Booking) -> None:
        booking.is_open = False
        of_key = self._open[booking.key]
        of_key.remove(booking)
        if not of_key:
            del self._open[booking.key]
