"""Places for requests: how many run at once, and the queue of those that wait for one, the earliest deadline
first. What may begin is decided elsewhere (`Judge`)."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from tandem_gateway.admitted import Admitted
from tandem_gateway.errors import OverloadedError, RefusalReason
from tandem_gateway.limits import AdaptiveLimit, Turns
from tandem_gateway.request import TokenizedRequest
from tandem_gateway.settings import Policy
from tandem_gateway.shares import MAX_AHEAD_S

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
        self.num_waiting = 0
        self.num_in_flight = 0
        #: Requests by tenant, in flight and waiting.
        self.of_tenant: Counter[str] = Counter()
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
        #: Heap of (deadline, arrival order, admitted, future). Cancelled futures stay in it and are skipped.
        self._waiters: list[tuple[float, int, Admitted, asyncio.Future[None]]] = []
        self._order = itertools.count()
        #: Whether one that waited was admitted and is on its way to its pod. Until its work counts there, one
        #: turn of the loop later, the next one would be judged as if it were not there.
        self.is_placing = False

    def waiting(self) -> Iterator[Admitted]:
        return (one for _, _, one, turn in self._waiters if not turn.done())

    def ended(self, e2e_s: float) -> None:
        """A request ended, so many seconds after its arrival."""
        self.service_s += _ALPHA * (e2e_s - self.service_s)

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
        self.best_effort_limit.lower_to(self._most_best_effort)
        self.best_effort_limit.ended(met=False)

    def _has_room(self, num_places: int) -> bool:
        """Whether so many places are free; who needs more than there are gets all of them."""
        return not self.num_in_flight or self.num_in_flight + num_places - 1 < self._limit

    @property
    def _limit(self) -> float:
        return self.blind_limit.value if self.is_blind else self.max_in_flight

    # -- the queue ------------------------------------------------------------------------------------

    def wait(self, admitted: Admitted) -> asyncio.Future[None]:
        """The future has a result when the request may begin; who stops waiting for it calls `give_up`.
        Raises OverloadedError when the queue is full."""
        if self.num_waiting >= self._max_queue:
            raise OverloadedError(
                f"the queue is full ({self.num_waiting} waiting, limit {self._max_queue}); try again later",
                self.turn_s(),
                RefusalReason.QUEUE_FULL,
            )
        request = admitted.request
        if not request.has_objectives and all(one.request.has_objectives for one in self.waiting()):
            self._best_effort_turns.first_waits()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (request.due, next(self._order), admitted, turn))
        self.num_waiting += 1
        return turn

    def give_up(self, turn: asyncio.Future[None]) -> None:
        """Who waits for it leaves the queue."""
        turn.cancel()
        self.num_waiting -= 1
        # Else those that gave up would be kept, with their prompts, for as long as no place is free.
        if len(self._waiters) > 2 * self.num_waiting + 16:
            self._waiters = [waiter for waiter in self._waiters if not waiter[3].done()]
            heapq.heapify(self._waiters)

    def next_waiting(
        self, may_begin: Callable[[TokenizedRequest], bool]
    ) -> tuple[Admitted, asyncio.Future[None]] | None:
        """Takes the one that has a place and the earliest deadline out of the queue; one that has none lets
        later ones pass."""
        passed, holds_best_effort, found = [], False, None
        while found is None and self._waiters and self.num_in_flight < self._limit:
            waiter = heapq.heappop(self._waiters)
            _, _, admitted, turn = waiter
            if turn.done():
                continue
            if not self.fits(admitted.request, admitted.num_places):
                passed.append(waiter)
                if admitted.num_places > 1 and not self._has_room(admitted.num_places):
                    break  # else single requests would take each place that it waits for
                continue
            if holds_best_effort or not may_begin(admitted.request):
                holds_best_effort = True
                passed.append(waiter)
                continue
            found = admitted, turn
            self.num_waiting -= 1
            if not admitted.request.has_objectives:
                self._best_effort_turns.began()
        for waiter in passed:
            heapq.heappush(self._waiters, waiter)
        return found

    def wait_s(self, request: TokenizedRequest) -> float:
        """Predicted, in the queue here."""
        earlier = [one.request for one in self.waiting() if one.request.due <= request.due]
        if request.has_objectives:
            return (len(earlier) + 1) * self.service_s / self.max_in_flight
        wait_s = self._best_effort_turns.wait_s(sum([not one.has_objectives for one in earlier]))
        return min(wait_s, max(request.deadline - time.monotonic(), 0.0))

    def turn_s(self) -> float:
        """When the next request behind the queue is likely to have its turn."""
        seconds = (self.num_waiting + 1) * self.service_s / self.max_in_flight
        return min(max(seconds, MIN_RETRY_AFTER_S), MAX_AHEAD_S)
