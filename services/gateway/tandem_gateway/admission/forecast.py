"""Predicts the times of a request's first and last token, with quantiles.

    timelines of the pods ──router──> Route: times by the pod model
    measured / predicted times ──> error windows ──> quantiles ──> Forecast

The errors of a class's last predictions estimate the error of the next one (conformal prediction over a
window). A class with few measurements shares those of the other classes of its kind.

A receipt shows a median and a 90th percentile, which include the effect of later requests. Admission uses
separate windows without that effect, because it refuses later requests that would make an earlier one late.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tandem_core.slo import SloTarget

from tandem_gateway.fleet.load import Placed
from tandem_gateway.fleet.output_lengths import OutputLengths
from tandem_gateway.fleet.routing import Route, Router
from tandem_gateway.request import TokenizedRequest

#: Number of measurements per class, and the number from which a class does not use those of other classes.
_WINDOW, _ENOUGH = 128, 16
#: Older measurements do not count. A class whose requests are all refused yields no measurements, and the
#: cause of its errors, such as step costs that pods had not measured yet, may be over.
MEMORY_S = 30.0
#: Fixed logarithms of measured / predicted time, in addition to the measured ones. They keep a margin at the
#: start of an overload: at low load, before it, predictions are accurate.
_PRIOR = tuple(math.log(ratio) for ratio in (0.8, 0.9, 1.0, 1.05, 1.15, 1.3))
#: A prediction is wrong by a factor, and also by a step or two, however short the time is. With the time of
#: this many tokens added to the predicted and the measured time, one factor describes both errors.
_OFFSET_TOKENS = 10
_P90 = 0.9


class Quantiles(NamedTuple):
    """Quantiles of a duration in seconds."""

    p50: float
    #: The upper quantile, at the level of the window.
    high: float


@dataclass(frozen=True)
class Group:
    """Requests whose predictions have similar errors."""

    slo_class: str
    has_objectives: bool
    #: Whether a prefill pod computes the prompt. On cores shared with busy decode pods this takes several
    #: times as long.
    is_remote: bool

    @classmethod
    def of(cls, request: TokenizedRequest, route: Route) -> Group:
        return cls(request.slo.name, request.has_objectives, not route.is_local)

    @property
    def pool(self) -> Group:
        """The group of this class and all others of its kind."""
        return Group("", self.has_objectives, self.is_remote)


class ErrorWindow:
    """The errors of the last predictions, by group. `level`: the level of the upper quantile."""

    def __init__(self, level: float = _P90) -> None:
        self._level = level
        #: In order of arrival: monotonic seconds, and logarithm of measured / predicted time.
        self._recent: defaultdict[Group, deque[tuple[float, float]]] = defaultdict(deque)
        #: The logarithms in order, with the prior.
        self._ordered: defaultdict[Group, list[float]] = defaultdict(lambda: sorted(_PRIOR))

    def observe(self, group: Group, predicted_s: float, measured_s: float) -> None:
        error = math.log(max(measured_s, 1e-3)) - math.log(max(predicted_s, 1e-3))
        for name in (group, group.pool):
            self._recent[name].append((time.monotonic(), error))
            insort(self._ordered[name], error)
            if len(self._recent[name]) > _WINDOW:
                self._drop(name)

    def quantiles(self, group: Group, predicted_s: float) -> Quantiles:
        self._forget_old(group)
        if len(self._recent[group]) < _ENOUGH:
            group = group.pool
            self._forget_old(group)
        errors = self._ordered[group]
        p50, high = (
            errors[min(math.ceil(level * (len(errors) + 1)), len(errors)) - 1] for level in (0.5, self._level)
        )
        return Quantiles(predicted_s * math.exp(p50), predicted_s * math.exp(high))

    def _forget_old(self, group: Group) -> None:
        oldest, recent = time.monotonic() - MEMORY_S, self._recent[group]
        while recent and recent[0][0] < oldest:
            self._drop(group)

    def _drop(self, group: Group) -> None:
        _, error = self._recent[group].popleft()
        self._ordered[group].remove(error)


@dataclass(frozen=True)
class Forecast:
    """The prediction for one request. Times count from the prediction."""

    route: Route
    #: Seconds in the gateway's queue.
    queue_s: float
    #: For the receipt: median and 90th percentile.
    ttft: Quantiles
    e2e: Quantiles
    #: For admission, without later requests: median and the quantile of the gateway's confidence.
    first: Quantiles
    end: Quantiles
    #: Whether the first token comes with the last one, as in a beam search.
    begins_at_end: bool = False

    @property
    def tpot(self) -> Quantiles:
        """Seconds per output token after the first, without later requests."""
        num_tokens = max(self.route.num_output - 1, 1)
        first_s = self.queue_s + self.route.first_s
        return Quantiles(*(max(end_s - first_s, 0.0) / num_tokens for end_s in self.end))

    @property
    def alone(self) -> dict[str, float]:
        """Seconds that the request takes on an idle system, by objective."""
        alone = self.route.alone
        return {**alone, "ttft": alone["e2e"]} if self.begins_at_end else alone

    def misses(self, slo: SloTarget, waited_s: float, *, is_likely: bool = False) -> str:
        """Names an objective that the upper quantile misses, or with `is_likely` the median; "": none."""
        for name, predicted, since_s, limit in self._measures(slo, waited_s):
            if limit and since_s + (predicted.p50 if is_likely else predicted.high) > limit:
                return name
        return ""

    def share_of_slack(self, slo: SloTarget, waited_s: float) -> float:
        """Predicted share of the slack that load takes, at most 1; 0 without objectives. The slack of an
        objective is its time minus the time on an idle system; the objective with the largest share
        counts."""
        shares, alone = [0.0], self.alone
        for name, predicted, since_s, limit in self._measures(slo, waited_s):
            if limit > alone[name]:
                shares.append((since_s + predicted.high - alone[name]) / (limit - alone[name]))
        return min(max(shares), 1.0)

    def _measures(self, slo: SloTarget, waited_s: float) -> Iterator[tuple[str, Quantiles, float, float]]:
        """Yields for each objective its name, the prediction, the seconds that have passed, and the limit."""
        yield "ttft", self.first, waited_s, slo.ttft_s
        yield "tpot", self.tpot, 0.0, slo.tpot_s
        yield "e2e", self.end, waited_s, slo.e2e_s


class Forecaster:
    """Makes forecasts and learns their errors. Belongs to one event loop."""

    def __init__(
        self, router: Router, lengths: OutputLengths, *, first_confidence: float, end_confidence: float
    ) -> None:
        """`first_confidence`, `end_confidence`: quantiles of the first token and of the end by which
        admission decides. During overload many requests just fit, so lower confidences make more of them
        late."""
        self.router = router
        self.first_confidence, self.end_confidence = first_confidence, end_confidence
        self._lengths = lengths
        self._ttft, self._e2e = ErrorWindow(), ErrorWindow()
        self._first, self._end = ErrorWindow(first_confidence), ErrorWindow(end_confidence)

    def on_route(self, request: TokenizedRequest, route: Route, queue_s: float = 0.0) -> Forecast:
        """Predicts a request on a route. `queue_s`: seconds in the gateway's queue."""
        group, first_s, end_s = Group.of(request, route), queue_s + route.first_s, queue_s + route.end_s
        ttft, e2e = self._ttft.quantiles(group, first_s), self._e2e.quantiles(group, end_s)
        # Separate windows could predict the end before the first token.
        e2e = Quantiles(max(e2e.p50, ttft.p50), max(e2e.high, ttft.high))
        first, end = self._of(self._first, group, route, first_s), self._of(self._end, group, route, end_s)
        is_search = request.sampling.beam_search is not None
        return Forecast(
            route=route,
            queue_s=queue_s,
            ttft=e2e if is_search else ttft,
            e2e=e2e,
            first=end if is_search else first,
            end=end,
            begins_at_end=is_search,
        )

    def is_void(self, predicted_at: float) -> bool:
        """Whether a pod failed after a prediction made at these monotonic seconds. The delay by a failure is
        no prediction error; a class would be refused for as long as the window keeps it."""
        return self.router.has_failed_since(predicted_at)

    def first_of(self, placed: Placed, seconds: float) -> Quantiles:
        """Quantiles of the first token of a running request without later requests. `seconds`: by the
        model."""
        assert placed.route is not None
        return self._of(self._first, Group.of(placed.request, placed.route), placed.route, seconds)

    def end_of(self, placed: Placed, seconds: float) -> Quantiles:
        """Quantiles of the end of a running request without later requests. `seconds`: by the model."""
        assert placed.route is not None
        return self._of(self._end, Group.of(placed.request, placed.route), placed.route, seconds)

    def started(self, placed: Placed, forecast: Forecast, ttft_s: float, undisturbed_s: float | None) -> None:
        """Learns from a first token that came `ttft_s` after the forecast, and `undisturbed_s` after the
        request was sent to its pods."""
        group = Group.of(placed.request, forecast.route)
        self._ttft.observe(group, forecast.queue_s + forecast.route.first_s, ttft_s)
        if undisturbed_s is not None and placed.first is not None:
            self._observe(self._first, group, forecast.route, placed.first.model_s, undisturbed_s)

    def ended(self, placed: Placed, forecast: Forecast, e2e_s: float) -> None:
        """Learns from a request that ended `e2e_s` after the forecast."""
        group = Group.of(placed.request, forecast.route)
        self._e2e.observe(group, forecast.queue_s + forecast.route.end_s, e2e_s)

    def took(self, placed: Placed, model_s: float, measured_s: float) -> None:
        """Learns from a span up to the end of a request, by its time in the pod model and its measured
        time."""
        assert placed.route is not None
        group = Group.of(placed.request, placed.route)
        self._observe(self._end, group, placed.route, model_s, measured_s)

    def was_long(self, request: TokenizedRequest, num_tokens: int, *, is_cut: bool) -> None:
        """Learns the length of an answer. `is_cut`: it ended at its max_tokens."""
        self._lengths.observe(request, num_tokens, is_cut=is_cut)

    @staticmethod
    def _of(window: ErrorWindow, group: Group, route: Route, seconds: float) -> Quantiles:
        offset_s = _OFFSET_TOKENS * route.token_s
        return Quantiles(
            *(max(found - offset_s, 0.0) for found in window.quantiles(group, seconds + offset_s))
        )

    @staticmethod
    def _observe(
        window: ErrorWindow, group: Group, route: Route, predicted_s: float, measured_s: float
    ) -> None:
        offset_s = _OFFSET_TOKENS * route.token_s
        window.observe(group, predicted_s + offset_s, measured_s + offset_s)
