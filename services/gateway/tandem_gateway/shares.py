"""Who is next when there is more work than can be done: shares of tenants, and slots of refused clients."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from tandem_gateway.admitted import Admitted

#: A tenant may be ahead of its share by so many seconds.
_AHEAD_S = 1.0
#: How often a tenant asks is a mean over about so long; it is active until so long after its last request.
_MEMORY_S = 10.0
#: Room is kept for those that ask for less than this part of what a tenant asks for; chance makes equal ones
#: differ by less.
_MUCH_LESS = 0.5
#: How long a refused client may be late, and still find the room that was kept for it.
_GRACE_S = 1.0
#: So long before its slot, others begin to leave room for a client that is due back.
_NEAR_S = 2.0
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
    #: Requests, the older ones decayed.
    num_asked: float = 0.0

    def rate(self, now: float) -> float:
        """Requests per second."""
        return self.num_asked * math.exp((self.asked_at - now) / _MEMORY_S) / _MEMORY_S


class FairShares:
    """By how much each tenant has used more than its share of the work, while others want theirs, and for how
    many requests of the others a tenant that asks for much has to leave room.

    A tenant's share is its weight among the tenants that are active. Each request moves the tenant's finish
    time by its seconds of work over that share, as for a constant bandwidth server (Abeni and Buttazzo 1998).
    A tenant is ahead by the time until then: its requests are due that much later, behind those of others.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def ask(self, name: str, weight: float) -> None:
        """A request came, admitted or not."""
        now = self._forget()
        tenant = self._tenants.setdefault(name, _Tenant(weight, now, now))
        tenant.num_asked = tenant.rate(now) * _MEMORY_S + 1
        tenant.weight, tenant.asked_at = weight, now

    def charge(self, name: str, seconds: float) -> None:
        """A request that asked was admitted."""
        self._forget()
        tenant = self._tenants[name]
        total = sum([one.weight for one in self._tenants.values()])
        tenant.finish = max(tenant.finish, time.monotonic()) + seconds * total / tenant.weight

    def ahead_s(self, name: str) -> float:
        """0 if no other tenant is active."""
        now = self._forget()
        if self._tenants.keys() <= {name} or name not in self._tenants:
            return 0.0
        return max(0.0, self._tenants[name].finish - now - _AHEAD_S)

    def room_for_others(self, name: str, seconds: float, running: Mapping[str, int]) -> int:
        """Requests of tenants that ask for much less: as many as they have here on average, if each stays for
        `seconds` (Little's law), and one standard deviation more, without those that are `running`."""
        now, room = self._forget(), 0
        own = self._tenants.get(name)
        if own is None:
            return 0
        for other, one in self._tenants.items():
            if one.rate(now) / one.weight < _MUCH_LESS * own.rate(now) / own.weight:
                mean = one.rate(now) * seconds
                room += max(round(mean + math.sqrt(mean)) - running.get(other, 0), 0)
        return room

    def _forget(self) -> float:
        """Drops those that are no longer active; returns the time."""
        now = time.monotonic()
        self._tenants = {name: one for name, one in self._tenants.items() if one.asked_at > now - _MEMORY_S}
        return now


@dataclass
class _Booking:
    key: int
    #: Monotonic seconds.
    slot: float
    #: What the client that comes back is expected to need.
    expected: Admitted
    is_open: bool = True


class Bookings:
    """When refused clients may come back: one after the other, each when the work of those before it can be
    done beside that of new clients. Belongs to one event loop."""

    def __init__(self) -> None:
        #: By content of the request, in order: equal requests are common, such as greetings.
        self._open: defaultdict[int, deque[_Booking]] = defaultdict(deque)
        #: All that are not over, in order.
        self._order: deque[_Booking] = deque()
        #: When the next slot is free.
        self._free_at = 0.0
        #: Share of the clients that came back in their slots lately; at first nobody knows.
        self.returning = 0.5

    def slot(self, earliest: float) -> float:
        """The monotonic seconds of the next slot, at `earliest` or later."""
        return max(earliest, self._free_at)

    def book(self, key: int, slot: float, work_s: float, expected: Admitted) -> None:
        """`slot`: as said by the method of that name."""
        self._forget_missed()
        self._free_at = slot + work_s * self.returning / _SHARE_OF_RETURNING
        booking = _Booking(key, slot, expected)
        self._open[key].append(booking)
        self._order.append(booking)

    def redeem(self, key: int) -> bool:
        """Whether the client comes at the time that it was told."""
        self._forget_missed()
        if key not in self._open or self._open[key][0].slot - _GRACE_S > time.monotonic():
            return False
        self._close(key)
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
        while self._order and self._order[0].slot < oldest:
            booking = self._order.popleft()
            if booking.is_open:
                self._close(booking.key)
                self.returning *= 1 - _ALPHA

    def _close(self, key: int) -> None:
        self._open[key].popleft().is_open = False
        if not self._open[key]:
            del self._open[key]
