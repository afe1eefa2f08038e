"""Who is next when there is more work than can be done: shares of tenants, and slots of refused clients."""

from __future__ import annotations

import time
from collections import defaultdict, deque

#: A tenant is active for so long after its last work; it may be ahead of its share by so many seconds.
_ACTIVE_S, _AHEAD_S = 10.0, 1.0
#: How long a refused client may be late, and still find the room that was kept for it.
GRACE_S = 1.0
#: Weight of the newest client in the share of those that came back.
_ALPHA = 0.1


class FairShares:
    """By how much each tenant has used more than its share of the work, while others want theirs.

    A tenant's share is its weight among the tenants that are active. Each request moves the tenant's finish
    time by its seconds of work over that share, as for a constant bandwidth server (Abeni and Buttazzo 1998).
    A tenant is ahead by the time until then: its requests are due that much later, behind those of others.
    """

    def __init__(self) -> None:
        #: Finish times of tenants that were active lately, and their weights.
        self._finish: dict[str, tuple[float, float]] = {}
        #: When a request was refused last.
        self._refused_at: dict[str, float] = {}

    def ahead_s(self, tenant: str) -> float:
        """0 if no other tenant is active."""
        self._forget()
        if self._finish.keys() <= {tenant}:
            return 0.0
        finish, _ = self._finish.get(tenant, (0.0, 0.0))
        return max(0.0, finish - time.monotonic() - _AHEAD_S)

    def refused(self, tenant: str) -> None:
        self._refused_at[tenant] = time.monotonic()

    def leaves_too_little(self, tenant: str) -> bool:
        """Whether another tenant, which is not ahead, was refused lately."""
        self._forget()
        return any(name != tenant and not self.ahead_s(name) for name in self._refused_at)

    def charge(self, tenant: str, weight: float, seconds: float) -> None:
        self._forget()
        now = time.monotonic()
        finish, _ = self._finish.get(tenant, (now, weight))
        total = weight + sum([theirs for name, (_, theirs) in self._finish.items() if name != tenant])
        self._finish[tenant] = max(finish, now) + seconds * total / weight, weight

    def _forget(self) -> None:
        now = time.monotonic()
        self._finish = {name: one for name, one in self._finish.items() if one[0] > now - _ACTIVE_S}
        self._refused_at = {name: at for name, at in self._refused_at.items() if at > now - _ACTIVE_S}


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
