"""Places for requests: how many run at once, and the queue of those that wait for one, the earliest deadline
first. What may begin is decided elsewhere (`Judge`)."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.forecast import Quantiles
from tandem_gateway.admission.limits import AdaptiveLimit, Overload, Turns
from tandem_gateway.admission.shares import MAX_AHEAD_S
from tandem_gateway.errors import OverloadedError, RefusalReason
from tandem_gateway.request import TokenizedRequest
from tandem_gateway.settings import Policy

MIN_RETRY_AFTER_S = 0.05
#: Requests without objectives take at most this share of the places, so that others find one; and fewer after
#: each second in which a request with objectives was refused. Ten seconds after the last one their limit
#: begins to grow by this factor in a second, and so from one to a full batch of sixteen in about twelve.
_BEST_EFFORT_SHARE, _RECOVERY = 0.75, 1.25
#: Nor more than pods compute at once, and a few that wait there for the next ends: when requests with
#: objectives come, those in flight are beside them, and the queue is not.
_MOST_OF_BATCHES = 1.25
#: Weight of the newest request in the exponentially weighted mean; about the last twenty count.
_ALPHA = 0.1


class Waiter(NamedTuple):
    """Ordered by the first two, which no other one has."""

    #: Monotonic seconds.
    due: float
    number: int
    admitted: Admitted
    #: Has a result when the request may begin.
    turn: asyncio.Future[None]


class Places:
    """Belongs to one event loop."""

    def __init__(
        self, *, max_in_flight: int, max_queue: int, policy: Policy, num_batch_places: Callable[[], int]
    ) -> None:
        """`num_batch_places`: sequences that pods compute at once; 0 without pods."""
        self._num_batch_places = num_batch_places
        self.max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._policy = policy
        self.num_in_flight = 0
        #: Places by tenant, of those in flight and waiting; and of requests with objectives alone.
        self.of_tenant: Counter[str] = Counter()
        self.promised: Counter[str] = Counter()
        #: Mean seconds from arrival to the end of a request.
        self.service_s = 1.0
        #: Whether the last request came while no pod's report said enough to predict anything.
        self.is_blind = False
        #: Of all requests, meanwhile.
        self.blind_limit = AdaptiveLimit(max_in_flight)
        #: Of the requests in flight, those that may wait.
        self._num_best_effort = 0
        self.best_effort_limit = AdaptiveLimit(
            max(1, int(_BEST_EFFORT_SHARE * max_in_flight)), recovery=_RECOVERY
        )
        self._best_effort_turns = Turns()
        self.overload = Overload()
        #: Those that wait with objectives, and without, in order.
        self._with_objectives: list[Waiter] = []
        self._best_effort: list[Waiter] = []
        self._order = itertools.count()
        #: Whether one that waited was admitted and is on its way to its pod. Until its work counts there, one
        #: turn of the loop later, the next one would be judged as if it were not there.
        self.is_placing = False

    @property
    def num_waiting(self) -> int:
        return len(self._with_objectives) + len(self._best_effort)

    def waiting(self) -> Iterator[Admitted]:
        waiters = itertools.chain(self._with_objectives, self._best_effort)
        return (waiter.admitted for waiter in waiters if not waiter.turn.done())

    def ended(self, e2e_s: float) -> None:
        """A request ended, so many seconds after its arrival."""
        self.service_s += _ALPHA * (e2e_s - self.service_s)

    def opened(self, admitted: Admitted) -> None:
        """It is there, to wait or to run."""
        self._count(admitted, admitted.num_places)

    def closed(self, admitted: Admitted) -> None:
        self._count(admitted, -admitted.num_places)

    def _count(self, admitted: Admitted, num_places: int) -> None:
        request = admitted.request
        for counter in (self.of_tenant, self.promised) if request.has_objectives else (self.of_tenant,):
            counter[request.tenant] += num_places
            if not counter[request.tenant]:
                del counter[request.tenant]

    # -- places ---------------------------------------------------------------------------------------

    def take(self, admitted: Admitted) -> None:
        self.num_in_flight += admitted.num_places
        self._num_best_effort += admitted.num_places * (not admitted.request.has_objectives)

    def leave(self, admitted: Admitted) -> None:
        self.num_in_flight -= admitted.num_places
        self._num_best_effort -= admitted.num_places * (not admitted.request.has_objectives)

    def fits(self, request: TokenizedRequest, num_places: int = 1) -> bool:
        """Whether it may have so many places now."""
        if request.has_objectives or self._policy is not Policy.PREDICT or not self._num_best_effort:
            return self._has_room(num_places)
        is_over = self._num_best_effort + num_places > int(self._most_best_effort)
        return not is_over and self._has_room(num_places)

    @property
    def _most_best_effort(self) -> float:
        of_batches = _MOST_OF_BATCHES * self._num_batch_places()
        return min(self.best_effort_limit.value, of_batches or math.inf)

    def refused(self) -> None:
        """A request with objectives was, for want of time."""
        self.overload.refused()
        self.best_effort_limit.lower_to(self._most_best_effort)
        self.best_effort_limit.ended(met=False)

    def _has_room(self, num_places: int) -> bool:
        """Whether so many places are free; who needs more than there are gets all of them."""
        return not self.num_in_flight or self.num_in_flight + num_places - 1 < self._limit

    @property
    def _limit(self) -> float:
        return self.blind_limit.value if self.is_blind else self.max_in_flight

    # -- the queue ------------------------------------------------------------------------------------

    def wait(self, admitted: Admitted) -> Waiter:
        """Who stops waiting for the turn calls `give_up`. Raises OverloadedError when the queue is full."""
        if self.num_waiting >= self._max_queue:
            raise OverloadedError(
                f"the queue is full ({self.num_waiting} waiting, limit {self._max_queue}); try again later",
                self.turn_s(),
                RefusalReason.QUEUE_FULL,
            )
        request, queue = admitted.request, self._queue_of(admitted)
        if not request.has_objectives and not queue:
            self._best_effort_turns.first_waits()
        waiter = Waiter(request.due, next(self._order), admitted, asyncio.get_running_loop().create_future())
        insort(queue, waiter)
        return waiter

    def give_up(self, waiter: Waiter) -> None:
        """Leaves the queue without its turn."""
        waiter.turn.cancel()
        self._remove(waiter)

    def _remove(self, waiter: Waiter) -> None:
        queue = self._queue_of(waiter.admitted)
        at = bisect_left(queue, waiter)
        if queue[at : at + 1] == [waiter]:
            del queue[at]

    def _queue_of(self, admitted: Admitted) -> list[Waiter]:
        return self._with_objectives if admitted.request.has_objectives else self._best_effort

    def is_behind_others(self, admitted: Admitted) -> bool:
        """Whether one of its kind that is due no later waits, whose place it would take."""
        first = _first(self._queue_of(admitted))
        return first is not None and first.due <= admitted.request.due

    def next_waiting(self, may_begin: Callable[[TokenizedRequest], bool]) -> Waiter | None:
        """Takes the one that has a place and the earliest deadline out of the queue. One for which there are
        too few places at all holds up everybody, or single requests would take each place that it waits for;
        one that has none otherwise holds up those of its kind."""
        firsts = [_first(queue) for queue in (self._with_objectives, self._best_effort)]
        for waiter in sorted([waiter for waiter in firsts if waiter is not None]):
            admitted = waiter.admitted
            if not self._has_room(admitted.num_places):
                return None
            if self.fits(admitted.request, admitted.num_places) and may_begin(admitted.request):
                self._remove(waiter)
                if not admitted.request.has_objectives:
                    self._best_effort_turns.began()
                return waiter
        return None

    def queued(self, request: TokenizedRequest, work_s: float) -> Quantiles:
        """Predicted, in the queue here. `work_s`: as of its route.

        Those without objectives have few turns in an overload, and many once it is over: after as long again
        as it has lasted, or as the queue has stood still.
        """
        num_with, num_without = (
            bisect_right(queue, request.due, key=attrgetter("due"))
            for queue in (self._with_objectives, self._best_effort)
        )
        if request.has_objectives:
            wait_s = (num_with + num_without + 1) * self.service_s / self.max_in_flight
            return Quantiles(wait_s, wait_s)
        longest_s = max(request.deadline - time.monotonic(), 0.0)
        as_lately_s = min(self._best_effort_turns.wait_s(num_without), longest_s)
        stopped_s = self.overload.lasted_s
        if not stopped_s:
            return Quantiles(as_lately_s, as_lately_s)
        if num_without:
            stopped_s = max(stopped_s, self._best_effort_turns.since_last_s)
        after_s = (num_without + 1) * work_s
        p50, high = (
            min(as_lately_s, times * stopped_s + after_s) for times in (Overload.HALF, Overload.NINE_TENTHS)
        )
        return Quantiles(p50, high)

    def turn_s(self) -> float:
        """When the next request behind the queue is likely to have its turn."""
        seconds = (self.num_waiting + 1) * self.service_s / self.max_in_flight
        return min(max(seconds, MIN_RETRY_AFTER_S), MAX_AHEAD_S)


def _first(queue: list[Waiter]) -> Waiter | None:
    """Who was cancelled a moment ago is still in the queue."""
    return next((waiter for waiter in queue if not waiter.turn.done()), None)
