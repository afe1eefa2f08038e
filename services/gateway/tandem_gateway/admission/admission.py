"""Admission control: decides which requests run, which wait, and which are refused.

    request arrives  `Gate` refuses it, because it would be -> OverloadedError with the prediction and a
                     late and its class does not wait          retry-after, when room is kept for it
                     a place is free and the queue is empty -> admitted
                     the queue has room (`Queue`)           -> waits, earliest deadline first
                     the queue is full, or the tenant has
                     all its places                         -> OverloadedError with a computed retry-after
    request ends     the first request of the queue is admitted

A request that is cancelled or passes its deadline while it waits leaves the queue immediately.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem_core.contracts import RefusalReason
from tandem_core.errors import InvalidRequestError

from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.forecast import Forecaster
from tandem_gateway.admission.gate import Gate
from tandem_gateway.admission.queue import MIN_RETRY_AFTER_S, Queue
from tandem_gateway.errors import DeadlineError, OverloadedError
from tandem_gateway.request import TokenizedRequest

#: Interval of checks of the queue: running answers free capacity before they end.
_LOOK_EVERY_S = 0.5
#: Most waiting requests that begin in one turn of the event loop; planning one takes a millisecond or two.
_MOST_AT_ONCE = 4
#: Late times count up to this multiple of the objective. How late a late request is depends on what came
#: after it, because it gives way on its pod, and on the length of its answer, which others do not have.
_LATE = 1.25


class Admission:
    """Assigns places to requests. Belongs to one event loop."""

    def __init__(self, forecaster: Forecaster, *, max_in_flight: int, max_queue: int, slack: float) -> None:
        self._forecaster = forecaster
        self.queue = Queue(
            max_in_flight=max_in_flight,
            max_queue=max_queue,
            num_batch_slots=forecaster.router.num_batch_slots,
        )
        self.gate = Gate(forecaster, self.queue, slack=slack)
        #: Timer of the next check of the queue; None: no check is due.
        self._look: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def slot(
        self,
        request: TokenizedRequest,
        num_places: int = 1,
        other_tokens: int = 0,
        on_accepted: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Admitted]:
        """Holds the request's places for the length of the block. `other_tokens`: tokens of the call's other
        prompts, which are computed before this one. `on_accepted` is called when admission can no
        longer refuse the request: it begins or waits in the queue. Raises OverloadedError, or DeadlineError
        if the request's deadline passes before it is admitted."""
        tenant, places = request.tenant, request.limits.places
        if places is not None and num_places > max(places, 1):
            raise InvalidRequestError(
                "n" if request.sampling.beam_search is None else "beam_width",
                f"makes {num_places} sequences, but tenant {tenant} may have {places}; ask for fewer",
            )
        num_open = self.queue.of_tenant[tenant]
        if places is not None and num_open + num_places > places:
            raise OverloadedError(
                f"tenant {tenant} has {num_open} requests here already, limit {places}; send the next one "
                "when one has ended",
                self._free_places_s(tenant, num_open + num_places - places),
                RefusalReason.TENANT_REQUESTS,
            )
        if request.deadline <= time.monotonic():
            raise DeadlineError("the deadline had passed before the request could start")
        admitted = self.gate.decide(request, num_places, other_tokens)
        self.queue.opened(admitted)
        try:
            await self._enter(admitted, on_accepted)
            try:
                yield admitted
            finally:
                if not admitted.has_ended:
                    self._gave_up(admitted)
                self._leave(admitted)
        finally:
            self.queue.closed(admitted)

    def open_requests(self) -> list[Admitted]:
        """Lists the requests in flight, then those that wait."""
        return [*self.queue.running, *self.queue.waiting()]

    # -- measurements ---------------------------------------------------------------------------------

    def started(self, admitted: Admitted) -> None:
        """Measures a request whose first token came. A beam search sends all its tokens at its end."""
        if admitted.first_at is not None and self._is_measured(admitted):
            self._started(admitted, admitted.first_at)

    def _started(self, admitted: Admitted, at: float) -> None:
        track, by = admitted.placed.first, _late_at(admitted, admitted.request.promised.ttft_s)
        if admitted.forecast is not None:
            undisturbed_s = None if track is None or by <= track.since else min(at, by) - track.since
            self._forecaster.started(
                admitted.placed, admitted.forecast, at - admitted.judged_at, undisturbed_s
            )

    def ended(self, admitted: Admitted, *, e2e_s: float, num_tokens: int) -> None:
        """Measures a request that ended `e2e_s` after its arrival."""
        admitted.has_ended = True
        self.queue.ended(e2e_s)
        request = admitted.request
        if request.sampling.beam_search is None:
            is_cut = num_tokens >= request.sampling.max_tokens
            self._forecaster.was_long(request, num_tokens, is_cut=is_cut)
        if self._is_measured(admitted):
            ended_at = request.arrived + e2e_s
            if admitted.forecast is not None:
                self._forecaster.ended(admitted.placed, admitted.forecast, ended_at - admitted.judged_at)
            self._compare(admitted, ended_at)

    def _compare(self, admitted: Admitted, ended_at: float) -> None:
        """Compares two spans with the pod model: the whole request, and its rest after the last arrival at
        its pod. With only one of them more requests are late. A span that begins when the request is late
        already does not count."""
        placed, end = admitted.placed, admitted.placed.end
        if end is None or placed.route is None:
            return
        ended_at = min(ended_at, _late_at(admitted, admitted.request.promised.e2e_s))
        if end.since < ended_at:
            self._forecaster.took(placed, end.model_s, ended_at - end.since)
        if end.since < end.changed_at < ended_at:
            self._forecaster.took(placed, end.left_s, ended_at - end.changed_at)

    def _is_measured(self, admitted: Admitted) -> bool:
        """Whether the request's times measure prediction errors. A beam search has no separate first token,
        and the first token of a call with several prompts may belong to any of them."""
        is_search = admitted.request.sampling.beam_search is not None
        return not (is_search or admitted.other_tokens or self._forecaster.is_void(admitted.judged_at))

    def _gave_up(self, admitted: Admitted) -> None:
        """Measures a request that failed or whose client left. If it is late already, its time until now
        counts as a lower bound. Otherwise, if clients leave when an objective is missed, the gateway would
        measure only requests in time."""
        request, now = admitted.request, time.monotonic()
        passed_s = now - request.arrived
        if not self._is_measured(admitted):
            return
        if admitted.first_at is None and 0 < request.promised.ttft_s < passed_s:
            self._started(admitted, now)
        if 0 < request.promised.e2e_s < passed_s:
            self._compare(admitted, now)

    # -- places ---------------------------------------------------------------------------------------

    async def _enter(self, admitted: Admitted, on_accepted: Callable[[], None]) -> None:
        request, queue = admitted.request, self.queue
        if self._admit_waiting():
            admitted.effects = None  # its plan does not include the requests that just began
        is_next = not queue.is_behind_others(admitted)
        if is_next and queue.fits(request, admitted.num_places) and self.gate.may_begin(admitted):
            self._take(admitted)
            on_accepted()
            return
        waiter = queue.wait(admitted)
        on_accepted()
        admitted.effects = None
        if not request.has_objectives:
            admitted.forecast = None  # the wait of a best-effort request is not predicted
        self._look_later()
        try:
            async with asyncio.timeout_at(request.deadline):
                await waiter.turn
        except BaseException as error:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self._leave(admitted)  # admitted at the same moment: its place goes to the next request
            else:
                queue.give_up(waiter)
            if isinstance(error, TimeoutError):
                raise DeadlineError("the deadline passed while the request waited in the queue") from None
            raise

    def _take(self, admitted: Admitted) -> None:
        self.gate.began(admitted)
        self.queue.take(admitted)

    def _leave(self, admitted: Admitted) -> None:
        self.queue.leave(admitted)
        admitted.placed.leave()
        self._admit_waiting()

    def _admit_waiting(self) -> bool:
        """Admits waiting requests, at most `_MOST_AT_ONCE` per turn of the event loop. Returns whether one
        began."""
        for number in range(_MOST_AT_ONCE):
            waiter = self.queue.next_waiting(self.gate.may_begin)
            if waiter is None:
                return number > 0
            self._take(waiter.admitted)
            waiter.turn.set_result(None)
        asyncio.get_running_loop().call_soon(self._admit_waiting)
        return True

    def _look_later(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        try:
            self._admit_waiting()
        finally:
            if self.queue.num_waiting:
                self._look_later()

    def _free_places_s(self, tenant: str, num_places: int) -> float:
        """Expected seconds until the tenant's requests have released this many places."""
        now, left = time.monotonic(), []
        for one in self.queue.running:
            if one.request.tenant == tenant:
                end = one.placed.end
                began = one.admitted_at or now
                ends_at = began + self.queue.service_s if end is None else end.changed_at + end.left_s
                # A request that exceeds its prediction is expected to take a quarter longer.
                left += [max(ends_at - now, (now - began) / 4, MIN_RETRY_AFTER_S)] * one.num_places
        left.sort()
        # If all of the tenant's places belong to waiting requests, the queue decides.
        return left[min(num_places, len(left)) - 1] if left else self.queue.turn_s()


def _late_at(admitted: Admitted, objective_s: float) -> float:
    """When the request counts as late for this objective, in monotonic seconds; inf without one."""
    return admitted.request.arrived + _LATE * objective_s if objective_s else math.inf
