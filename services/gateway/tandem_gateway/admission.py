"""Admission control: limits the requests in flight and the queue in front of them.

    request arrives  it is predicted to miss an objective,
                     or to make another one miss its own    -> OverloadedError: what was predicted, and when
                                                               to come back; room is kept for it then
                     a slot is free and the queue is empty  -> admitted
                     the queue has room                     -> waits, earliest deadline first
                     the queue is full, or the tenant has
                     its places already                     -> OverloadedError with a computed retry-after
    request ends     the first request of the queue is admitted

Objectives of less than a few times what a request takes without load are widened to that, and the receipt
says so, unless the request is strict. So an idle system refuses nobody else. While nothing can be predicted,
because no pod has computed anything yet or their reports are old, requests are not refused; how many run at
once adapts.

A request that is cancelled or passes its deadline while it waits leaves the queue immediately.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from tandem_core.errors import InvalidRequestError
from tandem_core.sampling import SamplingParams
from tandem_core.slo import NO_OBJECTIVES, SloTarget

from tandem_gateway.admitted import Admitted
from tandem_gateway.errors import DeadlineError, OverloadedError, RefusalReason, UnavailableError
from tandem_gateway.fleet import Pod
from tandem_gateway.forecast import MEMORY_S, Forecast, Forecaster
from tandem_gateway.limits import AdaptiveLimit, RecentMean, Turns
from tandem_gateway.neighbours import Neighbours, decoding_beside_s
from tandem_gateway.request import DEFAULT_DUE_S, TokenizedRequest
from tandem_gateway.routing import Route
from tandem_gateway.settings import Policy
from tandem_gateway.shares import MAX_AHEAD_S, Bookings, FairShares

_MIN_RETRY_AFTER_S = 0.05
#: While requests wait, room that no end of another one makes is looked for as often as this: that of answers
#: that go on, and of clients that were expected back and did not come.
_LOOK_EVERY_S = 0.5
#: A wait in the gateway that changes nothing of what was predicted.
_NO_WAIT_S = 0.05
#: Requests without objectives take at most this share of the places, so that others find one; and fewer after
#: each second in which a request with objectives was refused. Ten seconds after the last one their limit
#: begins to grow by this factor in a second, and so from one to a full batch of sixteen in about twelve.
_BEST_EFFORT_SHARE, _RECOVERY = 0.75, 1.25
#: What would take so many times as long as an objective without load surely misses it: costs that were
#: measured beside other programs of a machine are too high by less.
_SURELY = 2.0
#: First tokens of a tenant that asks for much less than another one are due after this part of the time that
#: was asked for, so that its prompts come before the other's; but not much earlier than that, since pods take
#: the blocks of requests that are due 10 s later.
_EARLY, _MOST_EARLY_S = 0.25, 5.0
#: Weight of the newest request in the exponentially weighted mean; about the last twenty count.
_ALPHA = 0.1


class Admission:
    """Assigns slots to requests. Belongs to one event loop."""

    def __init__(
        self, forecaster: Forecaster, *, max_in_flight: int, max_queue: int, policy: Policy, slack: float
    ) -> None:
        self._forecaster = forecaster
        self._policy = policy
        self._slack = slack
        self.num_waiting = 0
        self.num_in_flight = 0
        #: Mean seconds from arrival to the end of a request.
        self.service_s = 1.0
        self._blind_limit = AdaptiveLimit(max_in_flight)
        #: Whether the last request came while no pod's report said enough to predict anything.
        self._is_blind = False
        self._shares = FairShares()
        self._slack_used = RecentMean()
        self._bookings = Bookings()
        self._neighbours = Neighbours(forecaster)
        self.max_in_flight = max_in_flight
        self._max_queue = max_queue
        #: Requests by tenant, in flight and waiting.
        self._of_tenant: Counter[str] = Counter()
        #: Of the requests in flight, those that may wait.
        self._num_best_effort = 0
        self._best_effort_limit = AdaptiveLimit(
            max(1, int(_BEST_EFFORT_SHARE * max_in_flight)), recovery=_RECOVERY
        )
        self._best_effort_turns = Turns()
        #: Heap of (deadline, arrival order, admitted, future). Cancelled futures stay in it and are skipped.
        self._waiters: list[tuple[float, int, Admitted, asyncio.Future[None]]] = []
        self._order = itertools.count()
        #: When a strict request was last admitted to see whether it would be late.
        self._tried_at = -math.inf
        #: Whether one of these was admitted and is on its way to its pod. Until its work counts there, one
        #: turn of the loop later, the next one would be judged as if it were not there.
        self._is_placing = False
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
        if places is not None and self._of_tenant[tenant] + num_places > places:
            raise OverloadedError(
                f"tenant {tenant} has {self._of_tenant[tenant]} requests here already, limit {places}; send "
                "the next one when one has ended",
                self._free_places_s(tenant, self._of_tenant[tenant] + num_places - places),
                RefusalReason.TENANT_REQUESTS,
            )
        if request.deadline <= time.monotonic():
            raise DeadlineError("the deadline had passed before the request could start")
        admitted = self._judge(request, num_places, num_others)
        admitted.num_places, admitted.has_other_prompts = num_places, num_others > 0
        self._of_tenant[tenant] += num_places
        try:
            await self._enter(admitted)
            try:
                yield admitted
            finally:
                if not admitted.has_ended:
                    self._gave_up(admitted)
                self._leave(admitted)
        finally:
            self._of_tenant[tenant] -= num_places
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

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
        self.service_s += _ALPHA * (e2e_s - self.service_s)
        request, forecast = admitted.request, admitted.forecast
        if request.has_objectives:
            self._blind_limit.ended(met=met)
        else:
            self._best_effort_limit.ended(met=True)
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
        last one, and that of a call with several prompts may be any one's."""
        is_search = admitted.request.sampling.beam_search is not None
        if admitted.forecast is None or is_search or admitted.has_other_prompts:
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
            self._blind_limit.ended(met=False)
        if is_late_start:
            self.started(admitted, ttft_s=passed_s)
        if is_late_end and self._is_measured(admitted):
            self._compare(admitted, now)

    @property
    def slack_used(self) -> float:
        """Of the time that objectives leave beyond what requests take without load, the share that load was
        predicted to take: the mean of the last ten seconds' requests, of which refused ones count as 1."""
        return self._slack_used.value

    def open_requests(self) -> list[Admitted]:
        """Those in flight, and those that wait."""
        return [*self._neighbours.running, *self._waiting()]

    def _waiting(self) -> Iterator[Admitted]:
        return (one for _, _, one, turn in self._waiters if not turn.done())

    # -- whether its objectives will be met -----------------------------------------------------------

    def _judge(self, request: TokenizedRequest, num_places: int = 1, num_others: int = 0) -> Admitted:
        """Raises OverloadedError for one that will miss its objectives."""
        if self._policy is not Policy.PREDICT:
            return Admitted(replace(request, due_s=0.0))
        due_s, is_outdone = request.due - request.arrived, False
        if request.has_objectives:
            is_outdone = self._shares.is_outdone(request.tenant, request.limits.weight, self._promised())
            if self._shares.comes_first(request.tenant) and due_s < DEFAULT_DUE_S:
                # Those of the noisy tenant are not due later: they would miss what they were promised.
                early_s = min((1 - _EARLY) * due_s, _MOST_EARLY_S)
                request = replace(request, due_s=due_s - early_s)
        elif ahead_s := self._shares.ahead_s(request.tenant):
            request = replace(request, due_s=due_s + ahead_s)
        # Who resumes an answer had been admitted.
        if request.is_repeated:
            return Admitted(request)
        forecast = self._forecast(request, num_others)
        if forecast is None and request.slo.is_strict:
            raise UnavailableError("no decode pod is there to meet the request's objectives; try again later")
        self._is_blind = forecast is not None and not forecast.route.is_known
        if forecast is None or self._is_blind:
            return Admitted(request)
        work_s = num_places * forecast.route.work_s
        self._shares.ask(request.tenant, request.limits.weight, work_s)
        is_widened = False
        slo = request.slo
        if not slo.is_strict and self._slack:
            slo = request.slo.widened(
                **{f"{name}_s": self._slack * seconds for name, seconds in forecast.alone.items()}
            )
            is_widened = slo != request.slo
            if is_widened:
                request = replace(request, slo=slo)
                forecast = self._forecast(request, num_others) or forecast
        elif not slo.is_strict and forecast.misses_alone(slo):
            self._shares.charge(request.tenant, work_s)
            return Admitted(replace(request, due_s=DEFAULT_DUE_S), forecast=forecast)
        if not request.has_objectives and not self._may_begin(request):
            forecast = self._forecaster.forecast(request, self._wait_s(request)) or forecast
        is_returning = request.has_objectives and self._bookings.redeem(_content(request))
        waited_s = time.monotonic() - request.arrived
        is_idle = forecast.route.computes_prompt.backlog.is_empty and forecast.route.decode.is_idle
        # Others have left room for it.
        is_likely = is_outdone or is_returning
        missed = forecast.misses(slo, waited_s, is_likely=is_likely)
        if not missed and request.has_objectives and not is_idle:
            room, num_more = self._room_for_others(request, forecast.route), num_places - 1
            is_late = partial(
                self._neighbours.would_be_late,
                request,
                forecast.route,
                is_likely=is_likely,
                due_back=[] if is_returning else self._due_back_on(forecast.route.decode, request.tenant),
            )
            if is_late(num_more):
                missed = "others"
            elif (room and is_late(num_more + room)) or (
                not is_returning and self._is_overtaken_too_long(request, forecast, waited_s)
            ):
                missed = "share"
        if request.has_objectives and not (missed and (is_idle or forecast.misses_alone(slo))):
            self._slack_used.add(1.0 if missed else forecast.share_of_slack(slo, waited_s))
        if not missed or (is_idle and (not slo.is_strict or self._may_try(slo, forecast))):
            self._shares.charge(request.tenant, work_s)
            return Admitted(request, is_widened, forecast)
        if slo.is_strict and (hopeless := forecast.misses_alone(slo, _SURELY)):
            # It would be refused whenever it came back.
            limit_s, takes_s = getattr(slo, f"{hopeless}_s"), forecast.alone[hopeless]
            raise OverloadedError(
                f"refused: the objective {hopeless} of {limit_s:g} s cannot be met here even without load, "
                f"where it takes {takes_s:.3g} s; ask for more time, or do not ask for strict",
                None,
                RefusalReason(hopeless),
            )
        self._best_effort_limit.ended(met=False)
        # Of an idle system no end of the load is to be waited for, but of what was measured with load.
        least_s = MEMORY_S if is_idle else _MIN_RETRY_AFTER_S
        raise self._refusal(request, forecast, missed, waited_s, least_s, is_returning=is_returning)

    def _may_try(self, slo: SloTarget, forecast: Forecast) -> bool:
        """Whether a strict request may run on an idle system, where what was measured with load says little.
        If the costs say that it would be late even so, now and then one shows whether they still hold: where
        all requests are strict, nothing else would."""
        if not forecast.misses_alone(slo):
            return True
        now = time.monotonic()
        if forecast.misses_alone(slo, _SURELY) or now - self._tried_at < MEMORY_S:
            return False
        self._tried_at = now
        return True

    def _room_for_others(self, request: TokenizedRequest, route: Route) -> float:
        """Requests that other tenants may send to the route's decode pod meanwhile."""
        room = self._shares.room_for_others(request.tenant, route.e2e_s, self._of_tenant, route.work_s)
        return room / route.num_decode

    def _is_overtaken_too_long(self, request: TokenizedRequest, forecast: Forecast, waited_s: float) -> bool:
        """Whether the first token would be late, in the median, behind all prompts that tenants which ask for
        much less may send until it is due. These come first: as long as it waits more of them overtake it,
        and once it is late it delays those that come after them."""
        route = forecast.route
        limit_s = request.slo.ttft_s - waited_s
        if not request.slo.ttft_s or limit_s <= 0:
            return False
        number = self._shares.num_overtaking(request.tenant, limit_s, route.work_s) / route.num_decode
        prompts_s = number * (route.prefill_s + decoding_beside_s(route))
        return limit_s < forecast.ttft_undisturbed.p50 + prompts_s

    def _due_back_on(self, pod: Pod, tenant: str) -> list[Admitted]:
        """Without those of tenants that ask for so much more that they leave room for this one."""
        return [
            one
            for one in self._bookings.due_back()
            if one.route is not None
            and one.route.decode is pod
            and not self._shares.asks_much_less(tenant, one.request.tenant)
        ]

    def _promised(self) -> Counter[str]:
        """Places of requests with objectives, by tenant."""
        places: Counter[str] = Counter()
        for one in self.open_requests():
            if one.request.has_objectives:
                places[one.request.tenant] += one.num_places
        return places

    def _refusal(
        self,
        request: TokenizedRequest,
        forecast: Forecast,
        missed: str,
        waited_s: float,
        least_s: float,
        *,
        is_returning: bool,
    ) -> OverloadedError:
        """Tells when it will be admitted, and keeps room for it then."""
        slo, route = request.slo, forecast.route
        over = {
            "ttft": forecast.ttft_undisturbed.high + waited_s - slo.ttft_s,
            # Until enough of the sequences that run have ended.
            "e2e": forecast.share_to_end(slo, waited_s) * self.service_s,
            "tpot": forecast.share_to_end(slo, waited_s) * self.service_s,
            "others": route.computes_prompt.backlog.seconds(math.inf),
            "share": max(self._shares.ahead_s(request.tenant), self.service_s),
        }[missed]
        now = time.monotonic()
        over_s = min(max(over, least_s), MAX_AHEAD_S)

        def returning(at: float) -> Admitted:
            # Without the prompt and what else is large: many may be expected.
            again = TokenizedRequest(
                request.request_id,
                request.tenant,
                (),
                SamplingParams(),
                slo,
                at,
                math.inf,
                due_s=request.due_s,
            )
            first_at = at + min(route.ttft_s, slo.ttft_s or math.inf)
            return Admitted(again, forecast=forecast, judged_at=at, first_at=first_at)

        gives_way = partial(self._shares.asks_much_less, request.tenant)
        slot = self._bookings.book(_content(request), now + over_s, route.work_s, returning, gives_way)
        retry_s = min(slot - now, MAX_AHEAD_S)
        p_first = f"p{100 * self._forecaster.first_confidence:g}"
        p_end = f"p{100 * self._forecaster.end_confidence:g}"
        first, end, token = forecast.ttft_undisturbed, forecast.e2e_undisturbed, forecast.tpot
        first_text = f"the first token is predicted after {first.p50:.2f} s ({p_first} {first.high:.2f} s)"
        end_text = f"the end is predicted after {end.p50:.2f} s ({p_end} {end.high:.2f} s)"
        token_text = f"{token.p50 * 1000:.0f} ms per token are predicted ({p_end} {token.high * 1000:.0f} ms)"
        after = f", after {waited_s:.2f} s that have passed," if waited_s >= _NO_WAIT_S else ""
        what = {
            "ttft": f"{first_text}; {p_first}{after} is over the {slo.ttft_s:g} s of its objective",
            "e2e": f"{end_text}; {p_end}{after} is over the {slo.e2e_s:g} s of its objective",
            "tpot": f"{token_text}; {p_end} is over the {slo.tpot_s * 1000:g} ms of its objective",
            "others": "it would make a request that was admitted before miss its objective; of its own, "
            f"{first_text}, and {end_text}",
            "share": f"tenant {request.tenant} asks for much, and would leave others too little room; "
            f"{first_text}, and {end_text}",
        }[missed]
        again = " again" if is_returning else ""
        return OverloadedError(f"refused{again}: {what}; try again later", retry_s, RefusalReason(missed))

    def _forecast(self, request: TokenizedRequest, num_others: int = 0) -> Forecast | None:
        queue_s = 0.0 if self._fits(request) else self._wait_s(request)
        forecast = self._forecaster.forecast(request, queue_s)
        if forecast is None or not num_others:
            return forecast
        others_s = forecast.route.prefill_s * num_others / len(request.prompt_token_ids)
        return self._forecaster.forecast(request, queue_s + others_s)

    def _wait_s(self, request: TokenizedRequest) -> float:
        """Predicted, in the queue here."""
        earlier = [one.request for one in self._waiting() if one.request.due <= request.due]
        if request.has_objectives:
            return (len(earlier) + 1) * self.service_s / self.max_in_flight
        wait_s = self._best_effort_turns.wait_s(sum([not one.has_objectives for one in earlier]))
        return min(wait_s, max(request.deadline - time.monotonic(), 0.0))

    def predicted_ttft_s(self, num_prompt_tokens: int) -> float:
        """The median for a new prompt of so many tokens that has a place; NaN without a decode pod."""
        now = time.monotonic()
        prompt = (0,) * num_prompt_tokens
        request = TokenizedRequest("", "", prompt, SamplingParams(), NO_OBJECTIVES, now, now)
        forecast = self._forecaster.forecast(request, 0.0)
        return math.nan if forecast is None else forecast.ttft.p50

    # -- places ---------------------------------------------------------------------------------------

    async def _enter(self, admitted: Admitted) -> None:
        request = admitted.request
        # After this, those that still wait have no place, though this one may have one.
        self._admit_waiting()
        if self._fits(request, admitted.num_places) and self._may_begin(request):
            self._take(admitted)
            return
        if self.num_waiting >= self._max_queue:
            raise OverloadedError(
                f"the queue is full ({self.num_waiting} waiting, limit {self._max_queue}); try again later",
                self._turn_s(),
                RefusalReason.QUEUE_FULL,
            )
        if not request.has_objectives and all(one.request.has_objectives for one in self._waiting()):
            self._best_effort_turns.first_waits()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (request.due, next(self._order), admitted, turn))
        self.num_waiting += 1
        self._look_later()
        expires = request.deadline
        if self._policy is Policy.TTL and request.slo.ttft_s:
            expires = min(expires, request.arrived + request.slo.ttft_s)
        try:
            async with asyncio.timeout_at(expires):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave(admitted)  # admitted at the same moment: give the slot to the next request
            else:
                turn.cancel()
                self.num_waiting -= 1
                self._forget_cancelled()
            if isinstance(error, TimeoutError) and expires < request.deadline:
                raise OverloadedError(
                    f"it waited longer than the {request.slo.ttft_s:g} s of its objective; try again later",
                    self._turn_s(),
                    RefusalReason.WAITED,
                ) from None
            if isinstance(error, TimeoutError):
                raise DeadlineError("the deadline passed while the request waited for its turn") from None
            raise

    def _forget_cancelled(self) -> None:
        """Else those that gave up would be kept, with their prompts, for as long as no place is free."""
        if len(self._waiters) > 2 * self.num_waiting + 16:
            self._waiters = [waiter for waiter in self._waiters if not waiter[3].done()]
            heapq.heapify(self._waiters)

    def _leave(self, admitted: Admitted) -> None:
        self.num_in_flight -= admitted.num_places
        self._neighbours.running.discard(admitted)
        self._num_best_effort -= admitted.num_places * (not admitted.request.has_objectives)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """The one that has a place and the earliest deadline, then the next one; one that has none lets later
        ones pass."""
        if self._is_placing:
            return
        passed, holds_best_effort = [], False
        while self._waiters and self.num_in_flight < self._limit:
            waiter = heapq.heappop(self._waiters)
            _, _, admitted, turn = waiter
            if turn.done():
                continue
            if not self._fits(admitted.request, admitted.num_places):
                passed.append(waiter)
                if admitted.num_places > 1 and not self._has_room(admitted.num_places):
                    break  # else single requests would take each place that it waits for
                continue
            if holds_best_effort or not self._may_begin(admitted.request):
                holds_best_effort = True
                passed.append(waiter)
                continue
            self.num_waiting -= 1
            if not admitted.request.has_objectives:
                self._best_effort_turns.began()
            self._take(admitted)
            turn.set_result(None)
            self._is_placing = True
            asyncio.get_running_loop().call_soon(self._placed)
            break
        for waiter in passed:
            heapq.heappush(self._waiters, waiter)

    def _look_later(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._admit_waiting()
        if self.num_waiting:
            self._look_later()

    def _placed(self) -> None:
        """The work of the one that was admitted counts on its pod now."""
        self._is_placing = False
        self._admit_waiting()

    def _take(self, admitted: Admitted) -> None:
        admitted.admitted_at = admitted.changed_at = now = time.monotonic()
        # After a wait, what was predicted when it came is of no use: neither the time nor the pod.
        forecast = self._forecast(admitted.request) if now > admitted.judged_at + _NO_WAIT_S else None
        if forecast is not None and admitted.route is not None:
            admitted.plan(forecast.route, now)
        self._neighbours.add(admitted, now)
        self.num_in_flight += admitted.num_places
        self._num_best_effort += admitted.num_places * (not admitted.request.has_objectives)

    def _fits(self, request: TokenizedRequest, num_places: int = 1) -> bool:
        """Whether it may have so many places now."""
        if request.has_objectives or self._policy is not Policy.PREDICT or not self._num_best_effort:
            return self._has_room(num_places)
        is_over = self._num_best_effort + num_places > int(self._best_effort_limit.value)
        return not is_over and self._has_room(num_places)

    def _has_room(self, num_places: int) -> bool:
        """Whether so many places are free; who needs more than there are gets all of them."""
        return not self.num_in_flight or self.num_in_flight + num_places - 1 < self._limit

    def _may_begin(self, request: TokenizedRequest) -> bool:
        """One without objectives waits while it would make another one late, but not for longer than others
        with its deadline."""
        if request.has_objectives or not self._neighbours.running or request.due < time.monotonic():
            return True
        if self._policy is not Policy.PREDICT:
            return True
        if self._is_placing:
            return False
        forecast = self._forecast(request)
        if forecast is None:
            return True
        room = self._room_for_others(request, forecast.route)
        due_back = self._due_back_on(forecast.route.decode, request.tenant)
        return not self._neighbours.would_be_late(request, forecast.route, room, due_back)

    @property
    def _limit(self) -> float:
        return self._blind_limit.value if self._is_blind else self.max_in_flight

    def _free_places_s(self, tenant: str, num_places: int) -> float:
        """When so many places of the tenant are likely to be free, as its requests are expected to end."""
        now, left = time.monotonic(), []
        for one in self._neighbours.running:
            if one.request.tenant == tenant:
                began = one.admitted_at or now
                ends_s = self.service_s + began - now
                if one.route is not None:
                    ends_s = one.left_then_s + one.changed_at - now
                # One that should have ended takes a quarter more, as in Route.tokens_left.
                left += [max(ends_s, (now - began) / 4, _MIN_RETRY_AFTER_S)] * one.num_places
        left.sort()
        # Those that wait here have places too, and begin when others end.
        seconds = left[min(num_places, len(left)) - 1] if left else self._turn_s()
        return min(seconds, MAX_AHEAD_S)

    def _turn_s(self) -> float:
        """When the next request behind the queue is likely to have its turn."""
        seconds = (self.num_waiting + 1) * self.service_s / self.max_in_flight
        return min(max(seconds, _MIN_RETRY_AFTER_S), MAX_AHEAD_S)


def _content(request: TokenizedRequest) -> int:
    """By which a refused request is known when it comes back."""
    return hash((request.tenant, request.slo.name, request.prompt_token_ids))
