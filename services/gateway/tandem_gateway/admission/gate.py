"""Decides whether a request may run: its objectives and those of running requests must be predicted to hold.

    it will miss an objective                        refused with the prediction and a retry-after;
    it would make another request miss an objective  room is kept for it at that time. If its class waits,
    it takes room that quieter tenants will need     admitted as a best-effort request instead
    anything else                                    admitted; a best-effort request waits in the queue
                                                     while it would make another request late

An idle system refuses no request that it can serve in time. Without a prediction, because the pods have not
reported step costs yet or their reports are old, requests are admitted.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from tandem_core.contracts import DEFAULT_DUE_S, RefusalReason
from tandem_core.pod_model import Job
from tandem_core.sampling import SamplingParams
from tandem_core.slo import NO_OBJECTIVES

from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.forecast import MEMORY_S, Forecast, Forecaster
from tandem_gateway.admission.objectives import missed_alone, resolve
from tandem_gateway.admission.queue import MIN_RETRY_AFTER_S, Queue
from tandem_gateway.admission.reservations import Appointment, Reservations
from tandem_gateway.errors import OverloadedError, UnavailableError
from tandem_gateway.fleet.load import Track
from tandem_gateway.fleet.routing import Effects
from tandem_gateway.request import TokenizedRequest

#: A refusal names the seconds that passed since the arrival if they are at least this.
_NO_WAIT_S = 0.05
#: A strict request is hopeless if it needs more than this multiple of its objective on an idle system. Costs
#: that were measured while other programs ran are too high by a smaller factor.
_HOPELESS = 2.0
#: Seconds over which the used slack of requests is averaged, and the most requests in the mean.
_SLACK_S, _MAX_SLACKS = 10.0, 1024


class Gate:
    """Applies the rule above. Belongs to one event loop."""

    def __init__(self, forecaster: Forecaster, queue: Queue, *, slack: float) -> None:
        """`slack`: objectives are widened to at least this multiple of the time without load; 0: never."""
        self._forecaster = forecaster
        self._router = forecaster.router
        self._queue = queue
        self._slack = slack
        self._reservations = Reservations()
        #: Monotonic seconds and used share of the slack, by recent request.
        self._slacks_used: deque[tuple[float, float]] = deque(maxlen=_MAX_SLACKS)
        #: Monotonic seconds at which a strict request was last admitted to measure the costs again.
        self._tried_at = -math.inf

    @property
    def slack_used(self) -> float:
        """Predicted share of the objectives' slack that load takes (`Forecast.share_of_slack`): the mean over
        the requests of the last ten seconds. A refused or late one counts as 1. Any thread may read it."""
        oldest = time.monotonic() - _SLACK_S
        shares = [share for at, share in self._slacks_used.copy() if at >= oldest]
        return sum(shares) / len(shares) if shares else 0.0

    def decide(self, request: TokenizedRequest, num_places: int = 1, other_tokens: int = 0) -> Admitted:
        """Admits the request, to run or to wait. `other_tokens`: tokens of the call's other prompts, which
        are computed before this one. Raises OverloadedError to refuse it, and UnavailableError for a strict
        request without pods."""
        unjudged = Admitted(request, num_places=num_places, other_tokens=other_tokens)
        # A resumed answer was admitted before.
        if request.is_repeated:
            return unjudged
        effects = self._plan(unjudged)
        if effects is None and request.slo.is_strict:
            raise UnavailableError("no decode pod is available to meet the objectives; try again later")
        self._queue.is_blind = effects is not None and not effects.route.is_known
        if effects is None or self._queue.is_blind:
            return unjudged
        alone = self._forecast(effects).alone
        slo, is_widened = resolve(request.slo, alone, self._slack)
        key, request = _key(request, num_places), replace(request, slo=slo)
        demand, work_s = self._reservations.demand, num_places * effects.route.work_s
        demand.ask(request.tenant, request.limits.weight, work_s, has_objectives=request.has_objectives)
        is_judged = request.has_objectives
        if not request.has_objectives:
            request = replace(request, due_s=DEFAULT_DUE_S + demand.ahead_s(request.tenant))
        elif not self._slack and not slo.is_strict and missed_alone(slo, alone):
            is_judged, request = False, replace(request, due_s=DEFAULT_DUE_S)
        admitted = Admitted(request, is_widened, num_places=num_places, other_tokens=other_tokens)
        admitted.effects = effects = self._with_due(admitted, effects)
        if is_judged and self._is_late(admitted, effects, key):
            due_s = DEFAULT_DUE_S + demand.ahead_s(request.tenant)
            request = replace(request, is_late=True, due_s=due_s)
            admitted = Admitted(request, is_widened, num_places=num_places, other_tokens=other_tokens)
            admitted.effects = effects = self._with_due(admitted, effects)
        admitted.forecast = self._forecast(effects)
        return admitted

    def _with_due(self, admitted: Admitted, effects: Effects) -> Effects:
        """The plan of the request, which may be due at another time than in this plan of it."""
        if admitted.request.due == effects.request.due:
            return replace(effects, request=admitted.request)
        return self._plan(admitted) or effects

    def may_begin(self, admitted: Admitted) -> bool:
        """Whether a queued request may begin. A best-effort request waits while it would make another request
        late, but not beyond the time at which it is due."""
        request = admitted.request
        if request.has_objectives or not self._queue.running or request.due < time.monotonic():
            return True
        effects = self._plan(admitted)
        if effects is None or not effects.route.is_known:
            return True
        if self._makes_late(effects) or self._leaves_too_little(
            effects,
            self._reservations.due_back(effects.request.tenant, effects.route),
            self._reservations.expected(request, effects.route),
        ):
            return False
        admitted.effects = effects
        return True

    def began(self, admitted: Admitted) -> None:
        """Sends a request that has got its places to its pods, and updates the predictions of the others."""
        admitted.admitted_at = now = time.monotonic()
        effects, placed = admitted.effects or self._plan(admitted), admitted.placed
        admitted.effects = None
        if effects is None:
            return
        placed.first = Track(now, now, effects.route.first_s)
        placed.end = Track(now, now, effects.route.end_s)
        for other, (before, after) in effects.others.items():
            if other.first is not None and other.first_at is None and after.first_s > -math.inf:
                other.first.change(now, before.first_s, after.first_s)
            if other.end is not None and after.end_s > -math.inf:
                other.end.change(now, before.end_s, after.end_s)
        placed.move(effects.route)
        work_s = admitted.num_places * effects.route.work_s
        self._reservations.demand.charge(admitted.request.tenant, work_s)

    def predicted_ttft_s(self, num_prompt_tokens: int) -> float:
        """The median TTFT of a new prompt of this length that gets a place at once; NaN without a decode
        pod."""
        now, prompt = time.monotonic(), (0,) * num_prompt_tokens
        request = TokenizedRequest("", "", prompt, SamplingParams(), NO_OBJECTIVES, now, now)
        effects = self._router.plan(request)
        return math.nan if effects is None else self._forecaster.on_route(request, effects.route).ttft.p50

    # -- the rule -------------------------------------------------------------------------------------

    def _is_late(self, admitted: Admitted, effects: Effects, key: int) -> bool:
        """Whether the request must wait because it would be late or make others late. Raises OverloadedError
        to refuse it instead."""
        request, route, slo = admitted.request, effects.route, admitted.request.slo
        forecast, waited_s = self._forecast(effects), time.monotonic() - request.arrived
        appointments = self._reservations.appointments
        is_returning = appointments.keep(key)
        # Room was kept for it with a margin, so the median decides.
        is_likely = is_returning or self._reservations.demand.is_quieter(request.tenant)
        is_idle = route.decode.is_idle and not route.computes_prompt.works.has_prompts
        missed = forecast.misses(slo, waited_s, is_likely=is_likely)
        if not missed and not is_idle:
            missed = self._missed_by_others(effects, is_likely=is_likely, is_returning=is_returning)
        if not (missed and (is_idle or missed_alone(slo, forecast.alone))):
            share = 1.0 if missed else forecast.share_of_slack(slo, waited_s)
            self._slacks_used.append((time.monotonic(), share))
        if not missed or (is_idle and (not slo.is_strict or self._may_try(admitted, forecast))):
            return False
        if slo.waits:
            return True
        if slo.is_strict and (hopeless := missed_alone(slo, forecast.alone, _HOPELESS)):
            # It would be refused at any load, so it gets no retry-after.
            limit_s, takes_s = getattr(slo, f"{hopeless}_s"), forecast.alone[hopeless]
            raise OverloadedError(
                f"refused: an idle system takes {takes_s:.3g} s and cannot meet the objective {hopeless} of "
                f"{limit_s:g} s; ask for more time, or leave out strict",
                None,
                RefusalReason(hopeless),
            )
        # On an idle system no request is about to end; the errors measured under load expire instead.
        after_s = MEMORY_S if is_idle else self._room_after_s(effects)
        retry_s = appointments.make(key, request, route, admitted.num_places, after_s)
        again = " again" if is_returning else ""
        why = self._why(request, forecast, missed, waited_s, is_widened=admitted.is_widened)
        wait = ""
        if name := request.limits.waiting_class:
            wait = f', or send slo_class: "{name}"{" without strict" * slo.is_strict} to wait'
        raise OverloadedError(f"refused{again}: {why}; try again later{wait}", retry_s, RefusalReason(missed))

    def _missed_by_others(self, effects: Effects, *, is_likely: bool, is_returning: bool) -> str:
        """Returns "others" if the request would make another one late, "share" if it would leave quieter
        tenants too little room, else ""."""
        if self._makes_late(effects, is_likely=is_likely):
            return "others"
        due_back = [] if is_returning else self._reservations.due_back(effects.request.tenant, effects.route)
        if self._leaves_too_little(effects, due_back, [], is_likely=is_likely):
            return "others"
        expected = self._reservations.expected(effects.request, effects.route)
        if self._leaves_too_little(effects, due_back, expected, is_likely=is_likely):
            return "share"
        return ""

    def _makes_late(self, effects: Effects, *, is_likely: bool = False) -> bool:
        """Whether the request makes another one miss an objective. With the request the other's upper
        quantile must miss it (with `is_likely` the median); without the request the other's median must meet
        it."""
        now = time.monotonic()
        for other, (before, after) in effects.others.items():
            for predict, first_s, then_s, by in (
                (self._forecaster.first_of, before.first_s, after.first_s, other.starts_by),
                (self._forecaster.end_of, before.end_s, after.end_s, other.ends_by(now)),
            ):
                limit_s = by - now
                if limit_s == math.inf or then_s <= first_s:
                    continue
                later = predict(other, then_s)
                if limit_s < later[not is_likely] and predict(other, first_s).p50 <= limit_s:
                    return True
        return False

    def _leaves_too_little(
        self,
        effects: Effects,
        due_back: Sequence[Appointment],
        expected: Sequence[Job],
        *,
        is_likely: bool = False,
    ) -> bool:
        """Whether a timeline that also contains `due_back` and `expected` has a late request: a running one
        or one that is due back and would be in time without this request, or, with `expected`, this
        request."""
        if not due_back and not expected:
            return False
        now = time.monotonic()
        back = {one.job(now): one for one in due_back}
        found = self._router.reconsider(effects, [*back, *expected])
        if self._makes_late(found, is_likely=is_likely):
            return True
        if expected and effects.request.has_objectives:
            waited_s = now - effects.request.arrived
            if self._forecast(found).misses(effects.request.slo, waited_s, is_likely=True):
                return True
        before = self._router.times_without(effects, list(back)) if back else {}
        for job, one in back.items():
            slo, times = one.slo, found.coming[job]
            for limit_s, without_s, with_s in (
                (slo.ttft_s, before[job].first_s, times.first_s),
                (slo.e2e_s, before[job].end_s, times.end_s),
            ):
                if limit_s and with_s - job.ready_s > limit_s >= without_s - job.ready_s:
                    return True
        return False

    def _may_try(self, admitted: Admitted, forecast: Forecast) -> bool:
        """Whether a strict request may run on an idle system. If the costs predict a miss, one request per
        `MEMORY_S` runs to measure the costs again: if all requests are strict, no other request does."""
        slo = admitted.request.slo
        if not missed_alone(slo, forecast.alone):
            return True
        now = time.monotonic()
        if missed_alone(slo, forecast.alone, _HOPELESS) or now - self._tried_at < MEMORY_S:
            return False
        self._tried_at = now
        return True

    # -- refusals -------------------------------------------------------------------------------------

    def _room_after_s(self, effects: Effects) -> float:
        """Seconds until half of the requests on the decode pod are predicted to have ended."""
        ends = sorted(times.end_s for times in self._router.times(effects).values())
        return max(ends[len(ends) // 2], MIN_RETRY_AFTER_S) if ends else self._queue.service_s

    def _why(
        self,
        request: TokenizedRequest,
        forecast: Forecast,
        missed: str,
        waited_s: float,
        *,
        is_widened: bool,
    ) -> str:
        """The text of a refusal: the prediction, and the objective that would be missed."""
        slo, token, first, end = request.slo, forecast.tpot, forecast.first, forecast.end
        p_first = f"p{100 * self._forecaster.first_confidence:g}"
        p_end = f"p{100 * self._forecaster.end_confidence:g}"
        first_text = f"the first token is predicted after {first.p50:.2f} s ({p_first} {first.high:.2f} s)"
        end_text = f"the end is predicted after {end.p50:.2f} s ({p_end} {end.high:.2f} s)"
        token_text = (
            f"a token is predicted to take {token.p50 * 1000:.0f} ms ({p_end} {token.high * 1000:.0f} ms)"
        )
        widened = " (widened to what an idle system needs)" if is_widened else ""
        passed = f" plus the {waited_s:.2f} s since its arrival" if waited_s >= _NO_WAIT_S else ""
        return {
            "ttft": f"{first_text}; {p_first}{passed} exceeds its objective of {slo.ttft_s:.3g} s{widened}",
            "e2e": f"{end_text}; {p_end}{passed} exceeds its objective of {slo.e2e_s:.3g} s{widened}",
            "tpot": f"{token_text}; {p_end} exceeds its objective of {slo.tpot_s * 1000:.3g} ms{widened}",
            "others": "it would make an admitted request miss an objective; for this request "
            f"{first_text}, and {end_text}",
            "share": f"tenant {request.tenant} asks for more work than others and would leave them too "
            f"little room; for this request {first_text}, and {end_text}",
        }[missed]

    def _plan(self, admitted: Admitted) -> Effects | None:
        return self._router.plan(
            admitted.request, num_places=admitted.num_places, other_tokens=admitted.other_tokens
        )

    def _forecast(self, effects: Effects) -> Forecast:
        """The forecast, including the wait for places."""
        request = effects.request
        fits = self._queue.fits(request, effects.job.num_places)
        queue_s = 0.0 if fits else self._queue.wait_s(request)
        return self._forecaster.on_route(request, effects.route, queue_s)


def _key(request: TokenizedRequest, num_places: int) -> int:
    """Identifies a refused request when it comes back."""
    return hash((request.tenant, request.slo, num_places, request.prompt_token_ids))
