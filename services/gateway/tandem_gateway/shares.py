"""Who is next when there is more work than can be done: shares of tenants, and slots of refused clients."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

#: A tenant may be ahead of its share by so many seconds.
_AHEAD_S = 1.0
#: How often a tenant asks is a mean over about so long; it is active until so long after its last request.
_MEMORY_S = 10.0
#: Room is kept for those that ask for less than this part of what a tenant asks for; chance makes equal ones
#: differ by less.
_MUCH_LESS = 0.5
#: How long a refused client may be late, and still find the room that was kept for it.
GRACE_S = 1.0
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


class Bookings:
    """When refused clients may come back: one after the other, each when the work of those before it can be
    done. Belongs to one event loop."""

    def __init__(self) -> None:
        #: By content of the request, in order: equal requests are common, such as greetings.
        self._slots: defaultdict[int, deque[float]] = defaultdict(deque)
        #: All slots in order, with their requests; also those that were redeemed.
        self._order: deque[tuple[float, int]] = deque()
        #: When the next slot is free.
        self._free_at = 0.0
        #: Share of the clients that came back in their slots lately; at first nobody knows.
        self.returning = 0.5

    def book(self, key: int, earliest: float, work_s: float) -> float:
        """Returns the monotonic seconds of the slot, at `earliest` or later."""
        self._forget_missed()
        slot = max(earliest, self._free_at)
        self._free_at = slot + work_s * self.returning
        self._slots[key].append(slot)
        self._order.append((slot, key))
        return slot

    def redeem(self, key: int) -> bool:
        """Whether the client comes at the time that it was told."""
        self._forget_missed()
        if key not in self._slots or self._slots[key][0] - GRACE_S > time.monotonic():
            return False
        self._remove(key)
        self.returning += _ALPHA * (1 - self.returning)
        return True

    def _forget_missed(self) -> None:
        oldest = time.monotonic() - GRACE_S
        while self._order and self._order[0][0] < oldest:
            slot, key = self._order.popleft()
            if key in self._slots and self._slots[key][0] == slot:
                self._remove(key)
                self.returning *= 1 - _ALPHA

    def _remove(self, key: int) -> None:
        self._slots[key].popleft()
        if not self._slots[key]:
            del self._slots[key]
