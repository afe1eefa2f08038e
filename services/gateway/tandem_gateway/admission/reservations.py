"""Keeps room for future requests: those of refused clients that come back, and those that tenants are
expected to send. Each is a job in the pod model, like a running request.

    Demand          the work that each tenant asks for, compared with the others' and with its share
    Appointments    the times at which refused clients may come back
    Reservations    the jobs of both on a pod
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter

from tandem_core.pod_model import Job
from tandem_core.slo import SloTarget

from tandem_gateway.errors import MAX_RETRY_AFTER_S
from tandem_gateway.fleet.routing import Route
from tandem_gateway.request import TokenizedRequest

#: A tenant may be ahead of its share by this many seconds of work.
_AHEAD_S = 1.0
#: A tenant's demand is a mean over about this time; a tenant is active until this long after a request.
_MEMORY_S = 10.0
#: A tenant that sent this many requests in this shorter time is compared over it too, so that it is known as
#: noisy before it has filled the pods.
_SHORT_MEMORY_S, _MANY = 2.0, 16
#: A tenant is quieter than another one if it asks for less than this part of the other's work. Equal tenants
#: rarely differ this much by chance.
_MUCH_LESS = 0.5
#: A tenant with fewer recent requests than this is never considered noisy.
_NUM_NOISY = 5
#: Most jobs for expected requests, so that timelines stay short.
_MOST_JOBS = 16
#: Room is kept for a refused client until it is this late.
_GRACE_S = 1.0
#: Room is kept from this long before the client is due back.
_NEAR_S = 2.0
_MOST_APPOINTMENTS = 4096
#: Share of all work that appointments may take; the rest is for new clients.
_SHARE_OF_RETURNING = 0.5
#: Weight of the newest client in the share of those that came back.
_ALPHA = 0.1


@dataclass
class _Window:
    """Number and work of the requests of about the last `memory_s` seconds, with exponential decay."""

    memory_s: float
    num_asked: float = 0.0
    work_asked_s: float = 0.0
    #: Monotonic seconds of the last request.
    asked_at: float = -math.inf

    def ask(self, now: float, work_s: float) -> None:
        kept = self._kept(now)
        self.num_asked = self.num_asked * kept + 1
        self.work_asked_s = self.work_asked_s * kept + work_s
        self.asked_at = now

    def demand(self, now: float) -> float:
        """Seconds of work asked for per second."""
        return self.work_asked_s * self._kept(now) / self.memory_s

    def _kept(self, now: float) -> float:
        return math.exp((self.asked_at - now) / self.memory_s)


@dataclass
class _Tenant:
    weight: float
    #: Finish time: monotonic seconds at which its work ends at the speed of its share.
    finish: float
    asked: _Window = field(default_factory=lambda: _Window(_MEMORY_S))
    lately: _Window = field(default_factory=lambda: _Window(_SHORT_MEMORY_S))
    #: Requests with objectives only.
    promised: _Window = field(default_factory=lambda: _Window(_SHORT_MEMORY_S))

    def ask(self, now: float, work_s: float, *, has_objectives: bool) -> None:
        self.asked.ask(now, work_s)
        self.lately.ask(now, work_s)
        if has_objectives:
            self.promised.ask(now, work_s)

    def is_quieter(self, noisy: _Tenant, now: float) -> bool:
        """Whether this tenant asks for much less work than the other one, by weight."""
        if noisy.asked.num_asked < _NUM_NOISY:
            return False
        own, theirs = self.asked.demand(now) / self.weight, noisy.asked.demand(now) / noisy.weight
        if own < _MUCH_LESS * theirs:
            return True
        # A burst alone does not make a tenant noisy that asked for less work over the longer time.
        is_sure = noisy.lately.num_asked >= _MANY and own < theirs
        lately, theirs_lately = self.lately.demand(now), noisy.lately.demand(now)
        return is_sure and lately / self.weight < _MUCH_LESS * theirs_lately / noisy.weight


class Demand:
    """The work that each tenant asks for. Belongs to one event loop.

    A tenant's share is its weight divided by that of all active tenants. Each request that begins moves the
    tenant's finish time by its seconds of work divided by that share, as in a constant bandwidth server
    (Abeni and Buttazzo 1998). Best-effort requests of a tenant that is ahead of the others are due later.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def ask(self, name: str, weight: float, work_s: float, *, has_objectives: bool) -> None:
        """Counts a request of `work_s` seconds that arrived, admitted or not."""
        now = self._forget()
        tenant = self._tenants.setdefault(name, _Tenant(weight, now))
        tenant.weight = weight
        tenant.ask(now, work_s, has_objectives=has_objectives)

    def charge(self, name: str, work_s: float) -> None:
        """Charges a request that began to its tenant; does nothing for a tenant that is not active."""
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
        own = self._tenants.get(name, _Tenant(1.0, now))
        return any(own.is_quieter(other, now) for other in self._tenants.values())

    def before(self, name: str, *, has_objectives: bool) -> float:
        """Work that has priority over this tenant's requests, in seconds per second: requests with
        objectives, of all tenants before a best-effort request, of quieter tenants before one with
        objectives."""
        now = self._forget()
        own = self._tenants.get(name)
        if own is None:
            return 0.0
        return sum(
            [
                one.promised.demand(now)
                for one in self._tenants.values()
                if not has_objectives or one.is_quieter(own, now)
            ]
        )

    def _forget(self) -> float:
        """Drops tenants that are no longer active; returns the time."""
        now = time.monotonic()
        self._tenants = {
            name: one for name, one in self._tenants.items() if one.asked.asked_at > now - _MEMORY_S
        }
        return now


@dataclass(eq=False)
class Appointment:
    """A refused request, and the time at which its client may send it again."""

    key: int
    tenant: str
    slo: SloTarget
    #: Seconds from its arrival until its first token is due.
    due_s: float
    route: Route
    num_places: int
    #: Monotonic seconds at which the client is expected.
    at: float
    #: Seconds that its work takes in its part of all work, if it comes.
    length_s: float
    is_open: bool = True

    def job(self, now: float) -> Job:
        """The request's future job on its decode pod."""
        route, ready_s = self.route, max(self.at - now, 0.0)
        start = route.start if route.is_local else route.stop
        due = now + ready_s + self.due_s
        return Job(due, start, route.stop, route.num_output, route.context, self.num_places, ready_s)


_at = attrgetter("at")


class Appointments:
    """The times at which refused clients may come back. Belongs to one event loop.

    The clients of a tenant come one after the other. The gap is the time for their work in the appointments'
    share of all work, which tenants divide equally, so one tenant's clients do not delay those of another.
    """

    def __init__(self) -> None:
        #: Open appointments by content of the request, several for equal requests; and all in order of time.
        self._open: defaultdict[int, list[Appointment]] = defaultdict(list)
        self._order: list[Appointment] = []
        #: Share of the recent clients that came back in time; half before the first one.
        self.returning = 0.5

    def make(
        self, key: int, request: TokenizedRequest, route: Route, num_places: int, after_s: float
    ) -> float:
        """Returns the seconds until the first free time from `after_s` on, and keeps an appointment for it,
        unless it is beyond the longest retry-after or `_MOST_APPOINTMENTS` exist."""
        self._forget_missed()
        now, num_tenants = time.monotonic(), len({*(one.tenant for one in self._order), request.tenant})
        length_s = num_places * route.work_s / _SHARE_OF_RETURNING * num_tenants
        at = now + min(after_s, MAX_RETRY_AFTER_S)
        for other in self._order:
            # The recent share of returning clients counts for earlier appointments too. After a flood of
            # clients that do not return, a new client does not wait for them.
            until = other.at + other.length_s * self.returning
            if other.tenant == request.tenant and until > at:
                if other.at >= at + length_s * self.returning:
                    break
                at = until
        if at < now + MAX_RETRY_AFTER_S and len(self._order) < _MOST_APPOINTMENTS:
            due_s = request.due - request.arrived
            made = Appointment(key, request.tenant, request.slo, due_s, route, num_places, at, length_s)
            insort(self._open[key], made, key=_at)
            insort(self._order, made, key=_at)
        return min(at - now, MAX_RETRY_AFTER_S)

    def keep(self, key: int) -> bool:
        """Whether the client comes at the time of its appointment, which is then closed."""
        self._forget_missed()
        if key not in self._open or self._open[key][0].at - _GRACE_S > time.monotonic():
            return False
        self._close(self._open[key][0])
        self.returning += _ALPHA * (1 - self.returning)
        return True

    def near(self) -> list[Appointment]:
        """Lists the next appointments in order, as many as are likely to be kept."""
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
    """Future requests as jobs. Belongs to one event loop."""

    def __init__(self) -> None:
        self.demand = Demand()
        self.appointments = Appointments()

    def due_back(self, tenant: str, route: Route) -> list[Appointment]:
        """Lists the first clients that are due back at the route's decode pod, at most a full batch. A
        quieter tenant need not leave room for clients of other tenants."""
        is_quieter = self.demand.is_quieter(tenant)
        due = [
            one
            for one in self.appointments.near()
            if one.route.decode is route.decode and (one.tenant == tenant or not is_quieter)
        ]
        return due[: route.decode.load.model.max_batch]

    def expected(self, request: TokenizedRequest, route: Route) -> list[Job]:
        """Jobs of requests with priority that are expected at the decode pod while the request is here: the
        mean number and one standard deviation more. A job may stand for several requests."""
        now = time.monotonic()
        work = self.demand.before(request.tenant, has_objectives=request.has_objectives)
        # Arrivals per second, in requests like this one.
        rate = work / route.work_s / route.num_decode
        # Arrivals extend the stay, which brings more arrivals; a request with objectives stays until it is
        # due.
        here_s = max(route.end_s, request.due - now) if request.has_objectives else route.end_s
        number = round(rate * here_s + math.sqrt(rate * here_s))
        size = min(-(-number // _MOST_JOBS), route.decode.load.model.max_batch)
        start = route.start if route.is_local else route.stop
        stop = start + size * (route.stop - start)
        jobs = []
        for num_before in range(0, min(number, size * _MOST_JOBS), max(size, 1)):
            # By this time the mean plus one standard deviation has grown by one request.
            ready_s = (math.sqrt(num_before + 1.25) - 0.5) ** 2 / rate
            jobs.append(Job(now + ready_s, start, stop, route.num_output, route.context, size, ready_s))
        return jobs
