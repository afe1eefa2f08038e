"""What a request would do to those that were admitted before it: to their first tokens, and to their ends."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.batch_plan import BatchPlan, Turn
from tandem_gateway.admission.forecast import Forecaster
from tandem_gateway.fleet.pods import Pod
from tandem_gateway.fleet.routing import Route
from tandem_gateway.request import TokenizedRequest


class Neighbours:
    """The requests in flight, by the pods on which they run. Belongs to one event loop."""

    def __init__(self, forecaster: Forecaster) -> None:
        self._forecaster = forecaster
        #: In order of admission.
        self.running: dict[Admitted, None] = {}

    def on(self, pod: Pod) -> list[Admitted]:
        """Those that decode there."""
        return [one for one in self.running if one.route is not None and one.route.decode is pod]

    def add(self, admitted: Admitted, now: float) -> None:
        """It has a place in flight; what is left of those beside it is predicted anew."""
        route = admitted.route
        if route is not None:
            admitted.left_then_s = route.e2e_s
            others = self.on(route.decode)
            coming = _turn(admitted.request, route, admitted.num_places)
            before, after = _Beside(route, others), _Beside(route, others, [coming])
            for other in others:
                other.done_s += other.left_then_s - before.left_s(other, 0)
                other.changed_at, other.left_then_s = now, after.left_s(other, 1)
                other.is_overtaken |= admitted.request.due < other.request.due
        self.running[admitted] = None

    def with_place(self, request: TokenizedRequest, route: Route) -> Route:
        """With the wait for a place in the batch, and what runs beside the request from then on."""
        beams = request.sampling.beam_search
        turn = _turn(request, route, 1 if beams is None else beams.width)
        turns = [one.turn() for one in self.on(route.decode)]
        plan = BatchPlan(route.decode, [*turns, turn], route.context)
        if not plan.is_full:
            return route
        begin_s, end_s = plan.times(turn)
        num_prompts, prompts_s = plan.prompts(begin_s, end_s)
        return replace(
            route,
            place_s=begin_s,
            beside_s=max(prompts_s - turn.prompt_s, 0.0),
            prompts_beside=max(num_prompts - bool(turn.prompt_s), 0),
            num_beside=min(route.num_beside, plan.num_places - 1),
        )

    def would_be_late(
        self,
        request: TokenizedRequest,
        route: Route,
        room: float,
        due_back: Sequence[Admitted],
        *,
        is_likely: bool = False,
    ) -> bool:
        """Whether, if this request came, an earlier one's first token would come too late, or its end, or
        that of one which was refused and is `due_back`. `room`: such requests that may come as well;
        `is_likely`: whether its end would be too late in the median, and its first token even if nothing
        decoded meanwhile."""
        beside_s = 0.0 if is_likely else decoding_beside_s(route)
        if route.computes_prompt.backlog.slack(request.due, beside_s) < route.prefill_s + beside_s:
            return True
        now, num_coming = time.monotonic(), 1 + room
        others = self.on(route.decode)
        coming = [_turn(request, route) for _ in range(max(round(num_coming), 1))]
        with_it = _Beside(route, [*others, *due_back], coming)
        # Few need these.
        without = cache(lambda: _Beside(route, others))
        with_these = cache(lambda: _Beside(route, [*others, *due_back]))
        # Each with how many come in either case: all that are due back, or of these those before it.
        judged = [(other, without, 0, num_coming + len(due_back)) for other in others]
        judged += [(one, with_these, number, number + num_coming) for number, one in enumerate(due_back)]
        for other, beside, num_without, num_with in judged:
            if with_it.first_by(other) > other.starts_by - now >= beside().first_by(other):
                return True
            limit_s = other.ends_by - now
            if limit_s == math.inf or other.route is None:
                continue
            left = partial(self._forecaster.left, other.request, other.route)
            later = left(with_it.left_s(other, num_with))
            is_late = limit_s < (later.p50 if is_likely else later.high)
            # Those that are likely to be late even if nothing else comes do not count.
            if is_late and left(beside().left_s(other, num_without)).p50 <= limit_s:
                return True
        return False


class _Beside:
    """What is left of the requests on a route's decode pod, if some more come there."""

    def __init__(self, route: Route, others: Sequence[Admitted], coming: Sequence[Turn] = ()) -> None:
        """`others`: those that are there, or are due back; `coming`: requests like the one that is to take
        this route."""
        self._route, self._pod = route, route.decode
        self._num_beside = self._pod.beside()
        self._turns = {other: other.turn() for other in others}
        self._plan = BatchPlan(self._pod, [*self._turns.values(), *coming], route.context)

    def first_by(self, other: Admitted) -> float:
        """Seconds until its first token, as far as it waits for a place; 0 if it does not."""
        turn = self._turns[other]
        if not self._plan.is_full or not turn.prompt_s:
            return 0.0
        begin_s, _ = self._plan.times(turn)
        return begin_s + turn.prompt_s if begin_s else 0.0

    def left_s(self, other: Admitted, num_coming: float) -> float:
        """Seconds to its end by the model of costs. `num_coming`: how many come before."""
        route, backlog, turn = self._route, self._pod.backlog, self._turns[other]
        num_left = other.tokens_left
        together = max(self._num_beside(num_left), 1.0) + (other.admitted_at is None)
        together += num_coming * min(route.num_output / num_left, 1.0)
        if self._plan.is_full:
            begin_s, end_s = self._plan.times(turn)
            num_prompts, prompts_s = self._plan.prompts(begin_s, end_s)
            first_s = begin_s + turn.prompt_s if begin_s else 0.0
            together = min(together, self._plan.num_places)
            return other.left_s(first_s, together, route.context, num_prompts, prompts_s)
        num_later = num_coming * route.is_local
        return other.left_s(
            0.0,
            together,
            route.context,
            backlog.num_own + num_later,
            backlog.present_s + num_later * route.prefill_s,
        )


def _turn(request: TokenizedRequest, route: Route, num_places: int = 1) -> Turn:
    """Of one that takes this route."""
    return Turn(request.due, num_places, route.prefill_s if route.is_local else 0.0, route.num_output)


def decoding_beside_s(route: Route) -> float:
    """By how much the sequences that decode there prolong the step of a prompt."""
    computes = route.computes_prompt
    return computes.load.decode_seconds(0, computes.num_decoding, route.context)
