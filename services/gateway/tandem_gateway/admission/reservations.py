"""Room for requests that are not here: refused clients that come back, and requests that tenants are expected
to send. Each is a job on a pod, which counts as the requests that run."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter

from tandem_core.pod_model import Job
from tandem_core.slo import SloTarget

from tandem_gateway.admission.queue import MAX_RETRY_AFTER_S, Queue
from tandem_gateway.fleet.routing import Route
from tandem_gateway.request import TokenizedRequest

#: A tenant may be ahead of its share by this many seconds of best-effort work.
_AHEAD_S = 1.0
#: A tenant's demand is a mean over about this time; a tenant is active until this long after a request.
_MEMORY_S = 10.0
#: Room is kept for tenants that ask for less than this part of the work that a tenant asks for; equal tenants
#: differ by less by chance.
_MUCH_LESS = 0.5
#: A tenant with fewer recent requests than this is never considered noisy.
_NUM_NOISY = 5
#: Standard deviations by which room for quieter tenants exceeds what is needed on average.
_DEVIATIONS = 4.0
#: A refused client finds its room until it is this late.
_GRACE_S = 1.0
#: Room is kept from this long before the client is due back.
_NEAR_S = 2.0
_MOST_APPOINTMENTS = 4096
#: Share of all work that appointments may take; the rest is for new clients.
_SHARE_OF_RETURNING = 0.5
#: Weight of the newest client in the share of those that came back.
_ALPHA = 0.1


@dataclass
class _Tenant:
    weight: float
    #: Monotonic seconds: when its work is done at the speed of its share, and the last request.
    finish: float
    asked_at: float
    #: Requests, and the seconds of work that they ask for; older ones decay.
    num_asked: float = 0.0
    work_asked_s: float = 0.0

    def ask(self, now: float, work_s: float) -> None:
        kept = math.exp((self.asked_at - now) / _MEMORY_S)
        self.num_asked = self.num_asked * kept + 1
        self.work_asked_s = self.work_asked_s * kept + work_s
        self.asked_at = now

    def rate(self, now: float) -> float:
        """Requests per second."""
        return self.num_asked * math.exp((self.asked_at - now) / _MEMORY_S) / _MEMORY_S

    @property
    def mean_work_s(self) -> float:
        return self.work_asked_s / self.num_asked

    def demand(self, now: float) -> float:
        """Seconds of work asked for per second, by weight."""
        return self.rate(now) * self.mean_work_s / self.weight


class Demand:
    """What each tenant asks for. Belongs to one event loop.

    A tenant's share is its weight among the active tenants. Each best-effort request moves the tenant's
    finish time by its seconds of work over that share, as for a constant bandwidth server (Abeni and Buttazzo
    1998); those of a tenant that is ahead of the others are due later.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        #: All requests with objectives.
        self._with_objectives = _Tenant(1.0, 0.0, -math.inf)

    def ask(self, name: str, weight: float, work_s: float, *, has_objectives: bool) -> None:
        """A request of `work_s` seconds came, admitted or not."""
        now = self._forget()
        if has_objectives:
            self._with_objectives.ask(now, work_s)
        tenant = self._tenants.setdefault(name, _Tenant(weight, now, now))
        tenant.weight = weight
        tenant.ask(now, work_s)

    def charge(self, name: str, work_s: float) -> None:
        """A request began; nothing happens if its tenant has asked for nothing lately."""
        now, tenant = self._forget(), self._tenants.get(name)
        if tenant is None:
            return
        total = sum([one.weight for one in self._tenants.values()])
        tenant.finish = max(tenant.finish, now) + work_s * total / tenant.weight

    def ahead_s(self, name: str) -> float:
        """Seconds of work ahead of the active tenant that has used the least; 0 if there is no other one."""
        now = self._forget()
        if name not in self._tenants:
            return 0.0
        least = min([max(one.finish, now) for one in self._tenants.values()])
        return max(0.0, self._tenants[name].finish - least - _AHEAD_S)

    def is_quieter(self, name: str) -> bool:
        """Whether another tenant asks for much more work."""
        now = self._forget()
        noisy = max(self._tenants, key=lambda other: self._tenants[other].demand(now), default=name)
        if noisy == name or self._tenants[noisy].num_asked < _NUM_NOISY:
            return False
        own = self._tenants.get(name)
        return own is None or own.demand(now) < _MUCH_LESS * self._tenants[noisy].demand(now)

    def of_quieter(self, name: str) -> tuple[Collection[str], float, float]:
        """Tenants that ask for much less work than this one, their requests per second, and the mean seconds
        of work of these."""
        now = self._forget()
        own = self._tenants.get(name)
        most = 0.0 if own is None else _MUCH_LESS * own.demand(now)
        quiet = {other: one for other, one in self._tenants.items() if one.demand(now) < most}
        rate = sum([one.rate(now) for one in quiet.values()])
        work = sum([one.rate(now) * one.mean_work_s for one in quiet.values()])
        return quiet, rate, work / rate if rate else 0.0

    def with_objectives(self) -> tuple[float, float]:
        """Requests with objectives per second, of all tenants, and their mean seconds of work."""
        one = self._with_objectives
        return (one.rate(time.monotonic()), one.mean_work_s) if one.num_asked else (0.0, 0.0)

    def _forget(self) -> float:
        """Drops tenants that are no longer active; returns the time."""
        now = time.monotonic()
        self._tenants = {name: one for name, one in self._tenants.items() if one.asked_at > now - _MEMORY_S}
        return now


@dataclass(eq=False)
class Appointment:
    """The time at which a refused client may come back."""

    key: int
    tenant: str
    slo: SloTarget
    #: Seconds from its arrival until its first token is due.
    due_s: float
    route: Route
    num_places: int
    #: Monotonic seconds from which it is expected, and until which its work takes the share of appointments.
    at: float
    until: float
    is_open: bool = True

    def job(self, now: float) -> Job:
        """Its future work on its decode pod."""
        route, ready_s = self.route, max(self.at - now, 0.0)
        start = route.start if route.is_local else route.stop
        due = now + ready_s + self.due_s
        return Job(due, start, route.stop, route.num_output, route.context, self.num_places, ready_s)


_at = attrgetter("at")


class Appointments:
    """When refused clients come back: those of a tenant one after the other, each when the work of those
    before it can be done in addition to that of new clients. Tenants share the machine equally, so the line
    of one does not delay another. Belongs to one event loop."""

    def __init__(self) -> None:
        #: By content of the request, since equal requests are common; all of them in order of their times.
        self._open: defaultdict[int, list[Appointment]] = defaultdict(list)
        self._order: list[Appointment] = []
        #: Share of the clients that came back in time lately; unknown at first.
        self.returning = 0.5

    def make(
        self, key: int, request: TokenizedRequest, route: Route, num_places: int, after_s: float
    ) -> float:
        """Returns seconds until the first free time after `after_s`, and remembers what is expected then,
        unless that is far ahead or as many are expected as can be."""
        self._forget_missed()
        now, num_tenants = time.monotonic(), len({*(one.tenant for one in self._order), request.tenant})
        length = num_places * route.work_s * self.returning / _SHARE_OF_RETURNING * num_tenants
        at = now + min(after_s, MAX_RETRY_AFTER_S)
        for other in self._order:
            if other.tenant == request.tenant and other.until > at:
                if other.at >= at + length:
                    break
                at = other.until
        if at < now + MAX_RETRY_AFTER_S and len(self._order) < _MOST_APPOINTMENTS:
            due_s = request.due - request.arrived
            made = Appointment(key, request.tenant, request.slo, due_s, route, num_places, at, at + length)
            insort(self._open[key], made, key=_at)
            insort(self._order, made, key=_at)
        return min(at - now, MAX_RETRY_AFTER_S)

    def keep(self, key: int) -> bool:
        """Whether the client comes at its time."""
        self._forget_missed()
        if key not in self._open or self._open[key][0].at - _GRACE_S > time.monotonic():
            return False
        self._close(self._open[key][0])
        self.returning += _ALPHA * (1 - self.returning)
        return True

    def near(self) -> list[Appointment]:
        """The next ones in order; of these as many as are likely to come."""
        self._forget_missed()
        near = time.monotonic() + _NEAR_S
        due = [one for one in takewhile(lambda one: one.at < near, self._order) if one.is_open]
        return due[: round(self.returning * len(due))]

    def _forget_missed(self) -> None:
        oldest = time.monotonic() - _GRACE_S
        num_over = bisect_left(self._order, oldest, key=_at)
        for one in self._order[:num_over]:
            if one.is_open:
                self._close(one)
                self.returning *= 1 - _ALPHA
        del self._order[:num_over]

    def _close(self, one: Appointment) -> None:
        one.is_open = False
        of_key = self._open[one.key]
        of_key.remove(one)
        if not of_key:
            del self._open[one.key]


class Reservations:
    """Belongs to one event loop."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.demand = Demand()
        self.appointments = Appointments()

    def due_back(self, tenant: str, route: Route) -> list[Appointment]:
        """The first clients that are due back at the route's decode pod, at most a full batch. A quieter
        tenant leaves no room for the clients of others."""
        is_quieter = self.demand.is_quieter(tenant)
        due = [
            one
            for one in self.appointments.near()
            if one.route.decode is route.decode and (one.tenant == tenant or not is_quieter)
        ]
        return due[: route.decode.load.model.max_batch]

    def room(self, request: TokenizedRequest, route: Route) -> int:
        """Requests like this one for which its decode pod needs room meanwhile: those of quieter tenants, and
        for a best-effort request those with objectives.

        As many are here on average if each stays as long as this one (Little's law), and some standard
        deviations more, without those that run.
        """
        quiet, rate, work_s = self.demand.of_quieter(request.tenant)
        # Those that wait without objectives take no room.
        num_running = sum([self._queue.with_objectives.get(tenant, 0) for tenant in quiet])
        work = _missing(rate * route.end_s, _DEVIATIONS, num_running) * work_s
        if not request.has_objectives:
            rate, work_s = self.demand.with_objectives()
            num_running = self._queue.with_objectives.total()
            work = max(work, _missing(rate * route.end_s, 1.0, num_running) * work_s)
        most = route.decode.load.model.max_batch
        return min(round(work / route.work_s / route.num_decode), most)


def _missing(mean: float, deviations: float, num_running: int) -> float:
    """Upper bound of a Poisson count with this mean, less the requests that run."""
    return max(round(mean + deviations * math.sqrt(mean)) - num_running, 0)
