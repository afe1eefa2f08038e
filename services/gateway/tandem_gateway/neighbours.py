"""What a request would do to those that were admitted before it: to their first tokens, and to their ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tandem_gateway.admitted import Admitted
from tandem_gateway.fleet import Pod
from tandem_gateway.forecast import Forecaster
from tandem_gateway.request import TokenizedRequest
from tandem_gateway.routing import Route


class Neighbours:
    """The requests in flight, by the pods on which they run. Belongs to one event loop."""

    def __init__(self, forecaster: Forecaster) -> None:
        self._forecaster = forecaster
        self.running: set[Admitted] = set()

    def on(self, pod: Pod) -> Iterator[Admitted]:
        """Those that decode there."""
        return (one for one in self.running if one.route is not None and one.route.decode is pod)

    def add(self, admitted: Admitted, now: float) -> None:
        """It has a place; what is left of those beside it is predicted anew."""
        route = admitted.route
        if route is not None:
            admitted.left_then_s = route.e2e_s
            left_s = self._left_beside(route)
            for other in self.on(route.decode):
                other.done_s += other.left_then_s - left_s(other, 0)
                other.changed_at, other.left_then_s = now, left_s(other, 1)
                other.is_overtaken |= admitted.request.due < other.request.due
        self.running.add(admitted)

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
        left_s = self._left_beside(route)
        # Each with how many come in either case: all that are due back, or of these those before it.
        others = [(other, 0, num_coming + len(due_back)) for other in self.on(route.decode)]
        others += [(other, number, number + num_coming) for number, other in enumerate(due_back)]
        for other, num_without, num_with in others:
            limit_s = other.ends_by - now
            if limit_s == math.inf or other.route is None:
                continue
            left = partial(self._forecaster.left, other.request, other.route)
            with_it = left(left_s(other, num_with))
            is_late = limit_s < (with_it.p50 if is_likely else with_it.high)
            # Those that are likely to be late even if nothing else comes do not count.
            if is_late and left(left_s(other, num_without)).p50 <= limit_s:
                return True
        return False

    def _left_beside(self, route: Route) -> Callable[[Admitted, float], float]:
        """Of a request that runs on the route's decode pod, or is due back there: seconds to its end by the
        model of costs, if so many requests like this one come."""
        pod, is_local = route.decode, route.computes_prompt is route.decode
        num_prompts, prompts_s = pod.backlog.num_own, pod.backlog.present_s
        num_beside = pod.beside()

        def left_s(other: Admitted, num_coming: float) -> float:
            num_left = other.tokens_left
            together = max(num_beside(num_left), 1.0) + (other.admitted_at is None)
            num_later = num_coming * is_local
            return other.left_s(
                together + num_coming * min(route.num_output / num_left, 1.0),
                route.context,
                num_prompts + num_later,
                prompts_s + num_later * route.prefill_s,
            )

        return left_s


def decoding_beside_s(route: Route) -> float:
    """By how much the sequences that decode there prolong the step of a prompt."""
    computes = route.computes_prompt
    return computes.load.decode_seconds(0, computes.num_decoding, route.context)
