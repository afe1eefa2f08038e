"""Whether the objectives of a request will be met, by what is predicted of it and of those beside it.

    it will miss an objective                        refused: what was predicted, and when to come
    it would make another one miss its own           back; room is kept for it then
    its tenant would leave others too little room
    anything else                                    admitted, when it has a place

Objectives of less than a few times what a request takes without load are widened to that, and the receipt
says so, unless the request is strict. So an idle system refuses nobody else. While nothing can be predicted,
because no pod has computed anything yet or their reports are old, requests are not refused.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cache, partial

from tandem_core.sampling import SamplingParams
from tandem_core.slo import NO_OBJECTIVES, SloTarget

from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.forecast import MEMORY_S, NO_QUEUE, Forecast, Forecaster, Quantiles
from tandem_gateway.admission.limits import RecentMean
from tandem_gateway.admission.neighbours import Neighbours, decoding_beside_s
from tandem_gateway.admission.places import MIN_RETRY_AFTER_S, Places
from tandem_gateway.admission.shares import MAX_AHEAD_S, Bookings, FairShares
from tandem_gateway.errors import OverloadedError, RefusalReason, UnavailableError
from tandem_gateway.fleet.pods import Pod
from tandem_gateway.fleet.routing import Route
from tandem_gateway.request import DEFAULT_DUE_S, TokenizedRequest
from tandem_gateway.settings import Policy

#: A wait in the gateway that changes nothing of what was predicted.
_NO_WAIT_S = 0.05
#: What would take so many times as long as an objective without load surely misses it: costs that were
#: measured beside other programs of a machine are too high by less.
_SURELY = 2.0
#: First tokens of a tenant that asks for much less than another one are due after this part of the time that
#: was asked for, so that its prompts come before the other's; but not much earlier than that, since pods take
#: the blocks of requests that are due 10 s later.
_EARLY, _MOST_EARLY_S = 0.25, 5.0


class Judge:
    """Belongs to one event loop."""

    def __init__(self, forecaster: Forecaster, places: Places, *, policy: Policy, slack: float) -> None:
        self._forecaster = forecaster
        self._places = places
        self._policy = policy
        self._slack = slack
        self.neighbours = Neighbours(forecaster)
        self._shares = FairShares()
        self._bookings = Bookings()
        self._slack_used = RecentMean()
        #: When a strict request was last admitted to see whether it would be late.
        self._tried_at = -math.inf

    @property
    def slack_used(self) -> float:
        """Of the time that objectives leave beyond what requests take without load, the share that load was
        predicted to take: the mean of the last ten seconds' requests, of which refused ones count as 1."""
        return self._slack_used.value

    def open_requests(self) -> list[Admitted]:
        """Those in flight, and those that wait."""
        return [*self.neighbours.running, *self._places.waiting()]

    def decide(self, request: TokenizedRequest, num_places: int = 1, num_others: int = 0) -> Admitted:
        """`num_others`: tokens of the call's other prompts, which are computed before this one. Raises
        OverloadedError for one that will miss its objectives."""
        if self._policy is not Policy.PREDICT:
            return Admitted(replace(request, due_s=0.0))
        content = _content(request, num_places)
        request = self._resolved(request, num_others)
        is_outdone = request.has_objectives and self._shares.is_outdone(
            request.tenant, request.limits.weight, self._places.promised
        )
        request = self._due_by_share(request)
        # Who resumes an answer had been admitted.
        if request.is_repeated:
            return Admitted(request)
        forecast = self.forecast(request, num_others)
        if forecast is None and request.slo.is_strict:
            raise UnavailableError("no decode pod is there to meet the request's objectives; try again later")
        self._places.is_blind = forecast is not None and not forecast.route.is_known
        if forecast is None or self._places.is_blind:
            return Admitted(request)
        work_s = num_places * forecast.route.work_s
        self._shares.ask(request.tenant, request.limits.weight, work_s)
        if not self._slack and not request.slo.is_strict and forecast.misses_alone(request.slo):
            self._shares.charge(request.tenant, work_s)
            return Admitted(replace(request, due_s=DEFAULT_DUE_S), forecast=forecast)
        slo = self._widened(request.slo, forecast)
        is_widened = slo != request.slo
        if is_widened:
            request = replace(request, slo=slo)
            forecast = self.forecast(request, num_others) or forecast
        if not request.has_objectives and not self.may_begin(request):
            queue = self._places.queued(request, forecast.route.work_s)
            forecast = self._after(request, forecast, queue)
        is_returning = request.has_objectives and self._bookings.redeem(content)
        waited_s = time.monotonic() - request.arrived
        is_idle = forecast.route.computes_prompt.backlog.is_empty and forecast.route.decode.is_idle
        # Others have left room for it.
        is_likely = is_outdone or is_returning
        missed = forecast.misses(slo, waited_s, is_likely=is_likely)
        if not missed and request.has_objectives and not is_idle:
            missed = self._missed_by_others(
                request, forecast, waited_s, num_places - 1, is_likely=is_likely, is_returning=is_returning
            )
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
        self._places.refused()
        # Of an idle system no end of the load is to be waited for, but of what was measured with load.
        least_s = MEMORY_S if is_idle else MIN_RETRY_AFTER_S
        over_s = max(self._over_s(request, forecast, missed, waited_s), least_s)
        retry_s = self._book(request, content, forecast, over_s)
        again, why = " again" if is_returning else "", self._why(request, forecast, missed, waited_s)
        raise OverloadedError(f"refused{again}: {why}; try again later", retry_s, RefusalReason(missed))

    def _resolved(self, request: TokenizedRequest, num_others: int) -> TokenizedRequest:
        """With relative objectives in seconds. While nobody knows what it takes without load, it has none."""
        forecast = self.forecast(request, num_others) if request.slo.is_relative else None
        if forecast is None or not forecast.route.is_known:
            return request
        alone = {f"{name}_s": seconds for name, seconds in forecast.alone.items()}
        return replace(request, slo=request.slo.resolved(**alone))

    def _due_by_share(self, request: TokenizedRequest) -> TokenizedRequest:
        """Due earlier or later than it asks for, by what its tenant and the others ask for."""
        due_s = request.due - request.arrived
        if not request.has_objectives:
            ahead_s = self._shares.ahead_s(request.tenant)
            return replace(request, due_s=due_s + ahead_s) if ahead_s else request
        if self._shares.comes_first(request.tenant) and due_s < DEFAULT_DUE_S:
            # Those of the noisy tenant are not due later: they would miss what they were promised.
            early_s = min((1 - _EARLY) * due_s, _MOST_EARLY_S)
            return replace(request, due_s=due_s - early_s)
        return request

    def _widened(self, slo: SloTarget, forecast: Forecast) -> SloTarget:
        """To a few times what the request takes without load, unless it is strict. Relative objectives say
        themselves to how many times that."""
        if slo.is_strict or not self._slack:
            return slo
        least = {
            f"{name}_s": 0.0 if getattr(slo, f"{name}_slowdown") else self._slack * seconds
            for name, seconds in forecast.alone.items()
        }
        return slo.widened(**least)

    def _missed_by_others(
        self,
        request: TokenizedRequest,
        forecast: Forecast,
        waited_s: float,
        num_more: int,
        *,
        is_likely: bool,
        is_returning: bool,
    ) -> str:
        """ "others": beside it another one would be late; "share": it leaves other tenants too little
        room; "": neither. `num_more`: sequences besides its own."""
        route = forecast.route
        is_late = partial(
            self.neighbours.would_be_late,
            request,
            route,
            is_likely=is_likely,
            due_back=[] if is_returning else self._due_back_on(route.decode, request.tenant),
        )
        if is_late(num_more):
            return "others"
        room = self._room_for_others(request, route)
        if (room and is_late(num_more + room)) or (
            not is_returning and self._is_overtaken_too_long(request, forecast, waited_s)
        ):
            return "share"
        return ""

    def may_begin(self, request: TokenizedRequest) -> bool:
        """One without objectives waits while it would make another one late, but not for longer than others
        with its deadline."""
        if request.has_objectives or not self.neighbours.running or request.due < time.monotonic():
            return True
        if self._policy is not Policy.PREDICT:
            return True
        if self._places.is_placing:
            return False
        forecast = self.forecast(request)
        if forecast is None:
            return True
        room = self._room_for_others(request, forecast.route)
        due_back = self._due_back_on(forecast.route.decode, request.tenant)
        return not self.neighbours.would_be_late(request, forecast.route, room, due_back)

    def forecast(self, request: TokenizedRequest, num_others: int = 0) -> Forecast | None:
        """From now, with its waits in the queue here and for a place on its pod. `num_others` as of `decide`;
        None: there is no decode pod."""
        forecast = self._forecaster.forecast(request)
        if forecast is None:
            return None
        route, queue = forecast.route, NO_QUEUE
        if not self._places.fits(request):
            queue = self._places.queued(request, route.work_s)
        if num_others:
            others_s = route.prefill_s * num_others / len(request.prompt_token_ids)
            queue = queue.longer(others_s, others_s)
        return self._after(request, forecast, queue)

    def _after(self, request: TokenizedRequest, forecast: Forecast, queue: Quantiles) -> Forecast:
        """The same after a wait in the gateway, and beside those that have places by then."""
        route = self.neighbours.with_place(request, forecast.route)
        if route is forecast.route and queue is NO_QUEUE:
            return forecast
        return self._forecaster.on_route(request, route, queue)

    def predicted_ttft_s(self, num_prompt_tokens: int) -> float:
        """The median for a new prompt of so many tokens that has a place; NaN without a decode pod."""
        now = time.monotonic()
        prompt = (0,) * num_prompt_tokens
        request = TokenizedRequest("", "", prompt, SamplingParams(), NO_OBJECTIVES, now, now)
        forecast = self._forecaster.forecast(request)
        return math.nan if forecast is None else forecast.ttft.p50

    def began(self, admitted: Admitted) -> None:
        """It has a place now."""
        admitted.admitted_at = admitted.changed_at = now = time.monotonic()
        # After a wait, what was predicted when it came is of no use: neither the time nor the pod.
        forecast = self.forecast(admitted.request) if now > admitted.judged_at + _NO_WAIT_S else None
        if forecast is not None and admitted.route is not None:
            admitted.plan(forecast.route, now)
        self.neighbours.add(admitted, now)

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
        room = self._shares.room_for_others(request.tenant, route.e2e_s, self._places.of_tenant, route.work_s)
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
        asks_much_less = cache(partial(self._shares.asks_much_less, tenant))
        return [
            one
            for one in self._bookings.due_back()
            if one.route is not None and one.route.decode is pod and not asks_much_less(one.request.tenant)
        ]

    def _over_s(self, request: TokenizedRequest, forecast: Forecast, missed: str, waited_s: float) -> float:
        """Seconds after which it would be admitted."""
        slo = request.slo
        match missed:
            case "ttft":
                return forecast.ttft_undisturbed.high + waited_s - slo.ttft_s
            case "e2e" | "tpot":
                # Until enough of the sequences that run have ended.
                return forecast.share_to_end(slo, waited_s) * self._places.service_s
            case "others":
                return forecast.route.computes_prompt.backlog.seconds(math.inf)
            case _:
                return max(self._shares.ahead_s(request.tenant), self._places.service_s)

    def _book(self, request: TokenizedRequest, content: int, forecast: Forecast, over_s: float) -> float:
        """Keeps room for it from so many seconds on, or as soon as there is; returns seconds until then."""
        slo, route, now = request.slo, forecast.route, time.monotonic()

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
        over_s = min(over_s, MAX_AHEAD_S)
        slot = self._bookings.book(content, now + over_s, route.work_s, returning, gives_way)
        return min(slot - now, MAX_AHEAD_S)

    def _why(self, request: TokenizedRequest, forecast: Forecast, missed: str, waited_s: float) -> str:
        """What is predicted, and which objective it misses."""
        slo, token = request.slo, forecast.tpot
        first, end = forecast.ttft_undisturbed, forecast.e2e_undisturbed
        p_first = f"p{100 * self._forecaster.first_confidence:g}"
        p_end = f"p{100 * self._forecaster.end_confidence:g}"
        first_text = f"the first token is predicted after {first.p50:.2f} s ({p_first} {first.high:.2f} s)"
        end_text = f"the end is predicted after {end.p50:.2f} s ({p_end} {end.high:.2f} s)"
        token_text = f"{token.p50 * 1000:.0f} ms per token are predicted ({p_end} {token.high * 1000:.0f} ms)"
        after = f", after {waited_s:.2f} s that have passed," if waited_s >= _NO_WAIT_S else ""
        return {
            "ttft": f"{first_text}; {p_first}{after} is over the {slo.ttft_s:g} s of its objective",
            "e2e": f"{end_text}; {p_end}{after} is over the {slo.e2e_s:g} s of its objective",
            "tpot": f"{token_text}; {p_end} is over the {slo.tpot_s * 1000:g} ms of its objective",
            "others": "it would make a request that was admitted before miss its objective; of its own, "
            f"{first_text}, and {end_text}",
            "share": f"tenant {request.tenant} asks for much, and would leave others too little room; "
            f"{first_text}, and {end_text}",
        }[missed]


def _content(request: TokenizedRequest, num_places: int) -> int:
    """By which a refused request is known when it comes back."""
    return hash((request.tenant, request.slo, num_places, request.prompt_token_ids))
