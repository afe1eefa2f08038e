"""Admission control: limits the requests in flight and the queue in front of them.

    request arrives  it is predicted to miss an objective,
                     or to make another one miss its own    -> OverloadedError: what was predicted, and when
                     (`Judge`)                                 to come back; room is kept for it then
                     a slot is free and the queue is empty  -> admitted
                     the queue has room (`Places`)          -> waits, earliest deadline first
                     the queue is full, or the tenant has
                     its places already                     -> OverloadedError with a computed retry-after
    request ends     the first request of the queue is admitted

While nothing can be predicted, how many run at once adapts to whether objectives are met.

A request that is cancelled or passes its deadline while it waits leaves the queue immediately.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem_core.errors import InvalidRequestError

from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.forecast import Forecaster
from tandem_gateway.admission.judge import Judge
from tandem_gateway.admission.places import MIN_RETRY_AFTER_S, Places
from tandem_gateway.admission.shares import MAX_AHEAD_S
from tandem_gateway.errors import DeadlineError, OverloadedError, RefusalReason
from tandem_gateway.request import TokenizedRequest
from tandem_gateway.settings import Policy

#: While requests wait, room that no end of another one makes is looked for as often as this: that of answers
#: that go on, and of clients that were expected back and did not come.
_LOOK_EVERY_S = 0.5


class Admission:
    """Assigns slots to requests. Belongs to one event loop."""

    def __init__(
        self, forecaster: Forecaster, *, max_in_flight: int, max_queue: int, policy: Policy, slack: float
    ) -> None:
        self._forecaster = forecaster
        self._policy = policy
        self.places = Places(
            max_in_flight=max_in_flight,
            max_queue=max_queue,
            policy=policy,
            num_batch_places=forecaster.num_batch_places,
        )
        self.judge = Judge(forecaster, self.places, policy=policy, slack=slack)
        #: The next look at those that wait; None: nobody waits.
        self._look: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def slot(
        self, request: TokenizedRequest, num_places: int = 1, num_others: int = 0
    ) -> AsyncIterator[Admitted]:
        """Holds so many places for the length of the block. `num_others`: tokens of the call's other prompts,
        which are computed before this one. Raises OverloadedError, or DeadlineError when the request's
        deadline passes before it is admitted."""
        tenant, places = request.tenant, request.limits.places
        if places is not None and num_places > max(places, 1):
            raise InvalidRequestError(
                "n" if request.sampling.beam_search is None else "beam_width",
                f"makes {num_places} sequences, but tenant {tenant} may have {places}; ask for fewer",
            )
        num_open = self.places.of_tenant[tenant]
        if places is not None and num_open + num_places > places:
            raise OverloadedError(
                f"tenant {tenant} has {num_open} requests here already, limit {places}; send the next one "
                "when one has ended",
                self._free_places_s(tenant, num_open + num_places - places),
                RefusalReason.TENANT_REQUESTS,
            )
        if request.deadline <= time.monotonic():
            raise DeadlineError("the deadline had passed before the request could start")
        admitted = self.judge.decide(request, num_places, num_others)
        admitted.num_places, admitted.has_other_prompts = num_places, num_others > 0
        self.places.opened(admitted)
        try:
            await self._enter(admitted)
            try:
                yield admitted
            finally:
                if not admitted.has_ended:
                    self._gave_up(admitted)
                self._leave(admitted)
        finally:
            self.places.closed(admitted)

    def started(self, admitted: Admitted, *, ttft_s: float) -> None:
        """The first token came, so many seconds after the request's arrival; that of a beam search comes with
        its last one."""
        if self._is_measured(admitted) and admitted.forecast is not None:
            judged_s = admitted.judged_at - admitted.request.arrived
            self._forecaster.started(
                admitted.request,
                admitted.forecast,
                ttft_s - judged_s,
                is_overtaken=admitted.is_overtaken,
            )

    def ended(self, admitted: Admitted, *, e2e_s: float, num_tokens: int, met: bool) -> None:
        """A request ended, so many seconds after its arrival."""
        admitted.has_ended = True
        self.places.ended(e2e_s)
        request, forecast = admitted.request, admitted.forecast
        if request.has_objectives:
            self.places.blind_limit.ended(met=met)
        else:
            self.places.best_effort_limit.ended(met=True)
        if forecast is not None and request.sampling.beam_search is None:
            is_cut = num_tokens >= request.sampling.max_tokens
            self._forecaster.was_long(request, num_tokens, is_cut=is_cut)
        if self._is_measured(admitted) and forecast is not None:
            ended_at = request.arrived + e2e_s
            self._forecaster.ended(request, forecast, ended_at - admitted.judged_at)
            self._compare(admitted, ended_at)

    def _compare(self, admitted: Admitted, ended_at: float) -> None:
        """With the model of costs: its whole time, and what was left when the last other one came to its pod.
        With only one of them more are late, see docs/decisions/admission-by-prediction.md."""
        request, route = admitted.request, admitted.route
        if route is None:
            return
        began = admitted.admitted_at or admitted.judged_at
        self._forecaster.took(request, route, admitted.model_s, ended_at - began)
        if admitted.changed_at > began:
            self._forecaster.took(request, route, admitted.left_then_s, ended_at - admitted.changed_at)

    def _is_measured(self, admitted: Admitted) -> bool:
        """Whether its times tell how wrong predictions are. The first token of a beam search comes with its
        last one, and that of a call with several prompts may be any one's. One without objectives waits for
        the end of an overload, here or on its pod, which is in no prediction from before."""
        forecast, is_search = admitted.forecast, admitted.request.sampling.beam_search is not None
        if forecast is None or forecast.is_open_ended or is_search or admitted.has_other_prompts:
            return False
        if not admitted.request.has_objectives and self.places.overload.was_since(admitted.judged_at):
            return False
        return not self._forecaster.is_void(admitted.judged_at)

    def _gave_up(self, admitted: Admitted) -> None:
        """It failed, or its client left. If it was late by then, it would have taken longer than until now.
        Else, where clients wait no longer than their objectives, only those in time would be measured."""
        request, now = admitted.request, time.monotonic()
        passed_s = now - request.arrived
        is_late_start = admitted.first_at is None and 0 < request.slo.ttft_s < passed_s
        is_late_end = 0 < request.slo.e2e_s < passed_s
        if is_late_start or is_late_end:
            self.places.blind_limit.ended(met=False)
        if is_late_start:
            self.started(admitted, ttft_s=passed_s)
        if is_late_end and self._is_measured(admitted):
            self._compare(admitted, now)

    # -- places ---------------------------------------------------------------------------------------

    async def _enter(self, admitted: Admitted) -> None:
        request, places = admitted.request, self.places
        self._admit_waiting()
        is_next = not places.is_behind_others(admitted)
        if is_next and places.fits(request, admitted.num_places) and self.judge.may_begin(request):
            self._take(admitted)
            return
        waiter = places.wait(admitted)
        self._look_later()
        expires = request.deadline
        if self._policy is Policy.TTL and request.slo.ttft_s:
            expires = min(expires, request.arrived + request.slo.ttft_s)
        try:
            async with asyncio.timeout_at(expires):
                await waiter.turn
        except BaseException as error:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self._leave(admitted)  # admitted at the same moment: give the slot to the next request
            else:
                places.give_up(waiter)
            if isinstance(error, TimeoutError) and expires < request.deadline:
                raise OverloadedError(
                    f"it waited longer than the {request.slo.ttft_s:g} s of its objective; try again later",
                    places.turn_s(),
                    RefusalReason.WAITED,
                ) from None
            if isinstance(error, TimeoutError):
                raise DeadlineError("the deadline passed while the request waited for its turn") from None
            raise

    def _take(self, admitted: Admitted) -> None:
        self.judge.began(admitted)
        self.places.take(admitted)

    def _leave(self, admitted: Admitted) -> None:
        self.places.leave(admitted)
        self.judge.neighbours.running.pop(admitted, None)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """The one that is next, then in the next turn of the loop the one after it."""
        if self.places.is_placing:
            return
        waiter = self.places.next_waiting(self.judge.may_begin)
        if waiter is None:
            return
        self._take(waiter.admitted)
        waiter.turn.set_result(None)
        self.places.is_placing = True
        asyncio.get_running_loop().call_soon(self._placed)

    def _placed(self) -> None:
        """The work of the one that was admitted counts on its pod now."""
        self.places.is_placing = False
        self._admit_waiting()

    def _look_later(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._admit_waiting()
        if self.places.num_waiting:
            self._look_later()

    def _free_places_s(self, tenant: str, num_places: int) -> float:
        """When so many places of the tenant are likely to be free, as its requests are expected to end."""
        now, left = time.monotonic(), []
        for one in self.judge.neighbours.running:
            if one.request.tenant == tenant:
                began = one.admitted_at or now
                ends_s = self.places.service_s + began - now
                if one.route is not None:
                    ends_s = one.left_then_s + one.changed_at - now
                # One that should have ended takes a quarter more, as in Route.tokens_left.
                left += [max(ends_s, (now - began) / 4, MIN_RETRY_AFTER_S)] * one.num_places
        left.sort()
        # Those that wait here have places too, and begin when others end.
        seconds = left[min(num_places, len(left)) - 1] if left else self.places.turn_s()
        return min(seconds, MAX_AHEAD_S)
