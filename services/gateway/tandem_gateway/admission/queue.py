"""Limits how many requests run at once, and holds the others in a queue, the earliest deadline first. `Gate`
decides which of them may begin."""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from tandem_core.contracts import RefusalReason

from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.errors import OverloadedError
from tandem_gateway.request import TokenizedRequest

MIN_RETRY_AFTER_S = 0.05
#: Maximum prompt tokens in the queue (about 50 bytes each); a tenant may have half of them.
MAX_QUEUED_TOKENS = 8 << 20
#: Best-effort requests take at most this share of the places, so that requests with objectives find one, and
#: at most this multiple of the pods' batch slots, because requests on pods compete with later ones and queued
#: ones do not.
_BEST_EFFORT_SHARE, _BEST_EFFORT_OF_SLOTS = 0.75, 1.25
#: Weight of the newest request in the mean duration, which reflects about the last twenty.
_ALPHA = 0.1


class Waiter(NamedTuple):
    """A queued request. Waiters are ordered by their first two fields, a unique pair."""

    #: Deadline by the objectives, in monotonic seconds.
    due: float
    number: int
    admitted: Admitted
    #: Has a result when the request may begin.
    turn: asyncio.Future[None]


class Queue:
    """The places and the queue of a gateway. Belongs to one event loop."""

    def __init__(self, *, max_in_flight: int, max_queue: int, num_batch_slots: Callable[[], int]) -> None:
        """`num_batch_slots` returns the batch slots of the decode pods; 0 without pods."""
        self.max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._num_batch_slots = num_batch_slots
        #: In order of admission.
        self.running: dict[Admitted, None] = {}
        self.num_in_flight = 0
        self._num_best_effort = 0
        #: Places by tenant, of requests in flight and waiting.
        self.of_tenant: Counter[str] = Counter()
        #: Mean seconds from arrival to the end of a request.
        self.service_s = 1.0
        #: Whether the pods' reports allow no prediction. Then no more run than the pods have batch slots.
        self.is_blind = False
        #: Waiters with objectives, and best-effort ones, each in order.
        self._first: list[Waiter] = []
        self._last: list[Waiter] = []
        self._order = itertools.count()

    @property
    def num_waiting(self) -> int:
        return len(self._first) + len(self._last)

    def waiting(self) -> Iterator[Admitted]:
        waiters = itertools.chain(self._first, self._last)
        return (waiter.admitted for waiter in waiters if not waiter.turn.done())

    def ended(self, e2e_s: float) -> None:
        """Adds a request that ended `e2e_s` after its arrival to the mean."""
        self.service_s += _ALPHA * (e2e_s - self.service_s)

    def opened(self, admitted: Admitted) -> None:
        """Counts a request that will wait or run."""
        self._count(admitted, admitted.num_places)

    def closed(self, admitted: Admitted) -> None:
        self._count(admitted, -admitted.num_places)

    def _count(self, admitted: Admitted, num_places: int) -> None:
        tenant = admitted.request.tenant
        self.of_tenant[tenant] += num_places
        if not self.of_tenant[tenant]:
            del self.of_tenant[tenant]

    # -- places ---------------------------------------------------------------------------------------

    def take(self, admitted: Admitted) -> None:
        self.running[admitted] = None
        self._take(admitted, admitted.num_places)

    def leave(self, admitted: Admitted) -> None:
        del self.running[admitted]
        self._take(admitted, -admitted.num_places)

    def _take(self, admitted: Admitted, num_places: int) -> None:
        self.num_in_flight += num_places
        self._num_best_effort += num_places * (not admitted.request.has_objectives)

    def fits(self, request: TokenizedRequest, num_places: int = 1) -> bool:
        """Whether this many places are free for the request now."""
        if request.has_objectives or not self._num_best_effort:
            return self._has_room(num_places)
        of_slots = _BEST_EFFORT_OF_SLOTS * self._num_batch_slots() or math.inf
        most = max(1, min(_BEST_EFFORT_SHARE * self.max_in_flight, of_slots))
        return self._num_best_effort + num_places <= int(most) and self._has_room(num_places)

    def _has_room(self, num_places: int) -> bool:
        """Whether this many places are free; a request that needs more than the limit gets all of them."""
        most = self.max_in_flight
        if self.is_blind:
            most = min(most, self._num_batch_slots() or most)
        return not self.num_in_flight or self.num_in_flight + num_places <= most

    # -- the queue ------------------------------------------------------------------------------------

    def wait(self, admitted: Admitted) -> Waiter:
        """Adds the request to the queue; the caller awaits its turn, or calls `give_up`. Raises
        OverloadedError if the queue is full."""
        if self.num_waiting >= self._max_queue or not self._has_room_for_tokens(admitted):
            raise OverloadedError(
                f"the queue is full ({self.num_waiting} waiting, limit {self._max_queue} with "
                f"{MAX_QUEUED_TOKENS} prompt tokens); try again later",
                self.turn_s(),
                RefusalReason.QUEUE_FULL,
            )
        turn = asyncio.get_running_loop().create_future()
        waiter = Waiter(admitted.request.due, next(self._order), admitted, turn)
        insort(self._queue_of(admitted), waiter)
        return waiter

    def _has_room_for_tokens(self, admitted: Admitted) -> bool:
        of_tenant: Counter[str] = Counter()
        for one in (*self.waiting(), admitted):
            of_tenant[one.request.tenant] += len(one.request.prompt_token_ids) + one.other_tokens
        share = 1 if admitted.request.limits.places is None else 2
        most = MAX_QUEUED_TOKENS
        return of_tenant[admitted.request.tenant] <= most // share and of_tenant.total() <= most

    def give_up(self, waiter: Waiter) -> None:
        """Removes a waiter that does not wait for its turn any longer."""
        waiter.turn.cancel()
        self._remove(waiter)

    def _remove(self, waiter: Waiter) -> None:
        queue = self._queue_of(waiter.admitted)
        at = bisect_left(queue, waiter)
        if queue[at : at + 1] == [waiter]:
            del queue[at]

    def _queue_of(self, admitted: Admitted) -> list[Waiter]:
        return self._first if admitted.request.has_objectives else self._last

    def is_behind_others(self, admitted: Admitted) -> bool:
        """Whether the request would take the place of a waiting request with an earlier deadline: one of its
        kind (with objectives, or best effort), or one for which too few places are free."""
        own = self._queue_of(admitted)
        for queue in (self._first, self._last):
            first = _first(queue)
            if first is None or first.due > admitted.request.due:
                continue
            if queue is own or not self._has_room(first.admitted.num_places):
                return True
        return False

    def next_waiting(self, may_begin: Callable[[Admitted], bool]) -> Waiter | None:
        """Removes the next request that may begin from the queue; None: there is none.

        The earliest deadline goes first. A request for which too few places are free blocks all others,
        because requests for one place would take each place that it waits for. A request that may not begin
        blocks those of its kind."""
        firsts = [_first(queue) for queue in (self._first, self._last)]
        for waiter in sorted([waiter for waiter in firsts if waiter is not None]):
            admitted = waiter.admitted
            if not self._has_room(admitted.num_places):
                return None
            if self.fits(admitted.request, admitted.num_places) and may_begin(admitted):
                self._remove(waiter)
                return waiter
        return None

    def wait_s(self, request: TokenizedRequest) -> float:
        """Predicted seconds until a request with objectives gets a place."""
        num_before = sum([bisect_right(queue, request.due, key=_due) for queue in (self._first, self._last)])
        return (num_before + 1) * self.service_s / self.max_in_flight

    def turn_s(self) -> float:
        """Expected seconds until a request at the end of the queue has its turn."""
        return max((self.num_waiting + 1) * self.service_s / self.max_in_flight, MIN_RETRY_AFTER_S)


_due = attrgetter("due")


def _first(queue: list[Waiter]) -> Waiter | None:
    """Returns the first waiter that was not cancelled; a cancelled one stays queued for a moment."""
    return next((waiter for waiter in queue if not waiter.turn.done()), None)
