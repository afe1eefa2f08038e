"""Who is next when there is more work than can be done: shares of tenants, and slots of refused clients.

Work is in seconds of the whole fleet, see Route.work_s.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from dataclasses import dataclass

from tandem_core.fair_shares import fair_shares

#: A tenant may be ahead of its share by so many seconds.
_AHEAD_S = 1.0
#: What a tenant asks for is a mean over about so long; it is active until so long after its last request.
_MEMORY_S = 10.0
#: Of what the others asked for lately, so many times as much is kept for them: requests come in groups.
_ROOM_FOR_OTHERS = 1.25
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
    #: Seconds of work, the older ones decayed.
    asked_s: float = 0.0

    def asked(self, now: float) -> float:
        """Part of the fleet's time."""
        return self.asked_s * math.exp((self.asked_at - now) / _MEMORY_S) / _MEMORY_S


class FairShares:
    """Max-min shares of the fleet's time, by weight: what one tenant does not ask for is left to the others.

    Each request that is admitted moves its tenant's finish time by its work over its share, as for a constant
    bandwidth server (Abeni and Buttazzo 1998). A tenant is ahead by the time until then: its requests are due
    that much later, behind those of others.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def ask(self, name: str, weight: float, seconds: float) -> None:
        """A request came, admitted or not."""
        now = self._forget()
        tenant = self._tenants.setdefault(name, _Tenant(weight, now, now))
        tenant.asked_s = tenant.asked(now) * _MEMORY_S + seconds
        tenant.weight, tenant.asked_at = weight, now

    def charge(self, name: str, seconds: float) -> None:
        """A request that asked was admitted."""
        tenant = self._tenants[name]
        tenant.finish = max(tenant.finish, time.monotonic()) + seconds / self.share(name)

    def ahead_s(self, name: str) -> float:
        """0 if no other tenant is active."""
        now = self._forget()
        if self._tenants.keys() <= {name}:
            return 0.0
        return max(0.0, self._tenants[name].finish - now - _AHEAD_S) if name in self._tenants else 0.0

    def is_contended(self) -> bool:
        """Whether tenants ask for more than there is."""
        now = self._forget()
        return sum([tenant.asked(now) for tenant in self._tenants.values()]) > 1.0

    def share(self, name: str) -> float:
        """Of the fleet's time, for an active tenant that asks for as much as it can get."""
        now = self._forget()
        asked = {other: _ROOM_FOR_OTHERS * one.asked(now) for other, one in self._tenants.items()}
        weights = {other: one.weight for other, one in self._tenants.items()}
        return fair_shares(1.0, asked | {name: math.inf}, weights)[name]

    def _forget(self) -> float:
        """Drops those that are no longer active; returns the time."""
        now = time.monotonic()
        self._tenants = {name: one for name, one in self._tenants.items() if one.asked_at > now - _MEMORY_S}
        return now


class Bookings:
    """When refused clients may come back: those of a tenant one after the other, each when the work of those
    before it can be done. Belongs to one event loop."""

    def __init__(self) -> None:
        #: By content of the request, in order: equal requests are common, such as greetings.
        self._slots: defaultdict[int, deque[float]] = defaultdict(deque)
        #: All slots in order, with their requests; also those that were redeemed.
        self._order: deque[tuple[float, int]] = deque()
        #: By tenant, when its next slot is free.
        self._free_at: dict[str, float] = {}
        #: Share of the clients that came back in their slots lately; at first nobody knows.
        self.returning = 0.5

    def book(self, key: int, tenant: str, earliest: float, work_s: float) -> float:
        """`work_s`: at the speed of the tenant's share. Returns the monotonic seconds of the slot, at
        `earliest` or later."""
        self._forget_missed()
        slot = max(earliest, self._free_at.get(tenant, 0.0))
        self._free_at[tenant] = slot + work_s * self.returning
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
        self._free_at = {tenant: at for tenant, at in self._free_at.items() if at > oldest}
        while self._order and self._order[0][0] < oldest:
            slot, key = self._order.popleft()
            if key in self._slots and self._slots[key][0] == slot:
                self._remove(key)
                self.returning *= 1 - _ALPHA

    def _remove(self, key: int) -> None:
        self._slots[key].popleft()
        if not self._slots[key]:
            del self._slots[key]
