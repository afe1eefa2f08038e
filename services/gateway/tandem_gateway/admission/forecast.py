"""Predicts when a request will get its first token and its last one, and how certain that is.

    timelines of the pods ──router──> Route: times by the model of costs
    measured / predicted times ──> error windows ──> quantiles ──> Forecast

The errors of the last predictions of a class tell the error of the next one: conformal prediction over a
window. A class with few measurements shares those of the other classes of its kind.

A receipt has a median and a 90th percentile. Admission uses other windows, of times in which every later
request is accounted for: it refuses requests that would make this one late.
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

#: Measurements of a class that count, and those with which a class needs no others.
_WINDOW, _ENOUGH = 128, 16
#: Older measurements do not count: while a class is refused nothing is measured of it, and the cause of its
#: errors, such as costs that pods did not know yet, may be over.
MEMORY_S = 30.0
#: Logarithms of measured over predicted times that count in addition to measured ones. They keep a margin
#: for the first moments of an overload after a quiet time, in which predictions are right.
_PRIOR = tuple(math.log(ratio) for ratio in (0.8, 0.9, 1.0, 1.05, 1.15, 1.3))
#: A remaining time is wrong by a share of it, and by a step or two however short it is. With this many more
#: tokens on both sides one factor describes both errors.
_OFFSET_TOKENS = 10
_P90 = 0.9


class Quantiles(NamedTuple):
    """Quantiles of a duration in seconds."""

    p50: float
    #: At the level of its window.
    high: float


@dataclass(frozen=True)
class Group:
    """Requests whose predictions have similar errors."""

    slo_class: str
    has_objectives: bool
    #: Whether a prefill pod computes the prompt. On cores that it shares with busy decode pods that takes
    #: many times as long.
    is_remote: bool

    @classmethod
    def of(cls, request: TokenizedRequest, route: Route) -> Group:
        return cls(request.slo.name, request.has_objectives, not route.is_local)

    @property
    def pool(self) -> Group:
        """This class and the others of its kind."""
        return Group("", self.has_objectives, self.is_remote)


class ErrorWindow:
    """The last errors of predictions, by group. `level`: of the upper quantile."""

    def __init__(self, level: float = _P90) -> None:
        self._level = level
        #: In order of arrival: monotonic seconds, and logarithm of measured over predicted time.
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
    """The prediction for one request, from now."""

    route: Route
    #: Before it is sent to its pods.
    queue_s: float
    #: For the receipt: median and 90th percentile.
    ttft: Quantiles
    e2e: Quantiles
    #: If no other request comes before it: median and the gateway's confidences.
    first: Quantiles
    end: Quantiles
    #: Whether the first token comes with the last one, as in a beam search.
    begins_at_end: bool = False

    @property
    def tpot(self) -> Quantiles:
        """Seconds per output token after the first, undisturbed."""
        num_tokens = max(self.route.num_output - 1, 1)
        first_s = self.queue_s + self.route.first_s
        return Quantiles(*(max(end_s - first_s, 0.0) / num_tokens for end_s in self.end))

    @property
    def alone(self) -> dict[str, float]:
        """Seconds that it takes without load by the model of costs, by the names of the objectives."""
        alone = self.route.alone
        return {**alone, "ttft": alone["e2e"]} if self.begins_at_end else alone

    def misses(self, slo: SloTarget, waited_s: float, *, is_likely: bool = False) -> str:
        """The objective that it may miss, or with `is_likely` in the median; "" if none."""
        for name, predicted, since_s, limit in self._measures(slo, waited_s):
            if limit and since_s + (predicted.p50 if is_likely else predicted.high) > limit:
                return name
        return ""

    def share_of_slack(self, slo: SloTarget, waited_s: float) -> float:
        """Share of the time that the objectives leave beyond what it takes without load which load may take,
        at most 1. 0 without objectives."""
        shares, alone = [0.0], self.alone
        for name, predicted, since_s, limit in self._measures(slo, waited_s):
            if limit > alone[name]:
                shares.append((since_s + predicted.high - alone[name]) / (limit - alone[name]))
        return min(max(shares), 1.0)

    def _measures(self, slo: SloTarget, waited_s: float) -> Iterator[tuple[str, Quantiles, float, float]]:
        """Name of the objective, its prediction, the part that has passed, and the limit, in seconds."""
        yield "ttft", self.first, waited_s, slo.ttft_s
        yield "tpot", self.tpot, 0.0, slo.tpot_s
        yield "e2e", self.end, waited_s, slo.e2e_s


class Forecaster:
    """Belongs to one event loop."""

    def __init__(
        self, router: Router, lengths: OutputLengths, *, first_confidence: float, end_confidence: float
    ) -> None:
        """The share of the predictions used by admission that is to hold, of first tokens and of ends. An
        overload admits every request that just fits, so lower confidences make more of them late."""
        self.router = router
        self.first_confidence, self.end_confidence = first_confidence, end_confidence
        self._lengths = lengths
        self._ttft, self._e2e = ErrorWindow(), ErrorWindow()
        self._first, self._end = ErrorWindow(first_confidence), ErrorWindow(end_confidence)

    def on_route(self, request: TokenizedRequest, route: Route, queue_s: float = 0.0) -> Forecast:
        """`queue_s`: before it is sent to its pods."""
        group, first_s, end_s = Group.of(request, route), queue_s + route.first_s, queue_s + route.end_s
        ttft, e2e = self._ttft.quantiles(group, first_s), self._e2e.quantiles(group, end_s)
        # The windows are apart, and no answer ends before it begins.
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
        """Whether a prediction made at these monotonic seconds tells nothing of later errors, since a pod has
        failed. Otherwise a class would be refused for as long as that is remembered."""
        return self.router.has_failed_since(predicted_at)

    def first_of(self, placed: Placed, seconds: float) -> Quantiles:
        """The time to the first token of a request that runs, if nothing else comes."""
        assert placed.route is not None
        return self._of(self._first, Group.of(placed.request, placed.route), placed.route, seconds)

    def end_of(self, placed: Placed, seconds: float) -> Quantiles:
        """The time to its end."""
        assert placed.route is not None
        return self._of(self._end, Group.of(placed.request, placed.route), placed.route, seconds)

    def started(self, placed: Placed, forecast: Forecast, ttft_s: float, undisturbed_s: float | None) -> None:
        """The first token came `ttft_s` after the forecast, `undisturbed_s` after the request was sent."""
        group = Group.of(placed.request, forecast.route)
        self._ttft.observe(group, forecast.queue_s + forecast.route.first_s, ttft_s)
        if undisturbed_s is not None and placed.first is not None:
            self._observe(self._first, group, forecast.route, placed.first.model_s, undisturbed_s)

    def ended(self, placed: Placed, forecast: Forecast, e2e_s: float) -> None:
        """The request ended, `e2e_s` after the forecast."""
        group = Group.of(placed.request, forecast.route)
        self._e2e.observe(group, forecast.queue_s + forecast.route.end_s, e2e_s)

    def took(self, placed: Placed, model_s: float, measured_s: float) -> None:
        """A span until the end of a request took `measured_s`; the model of costs had `model_s`."""
        assert placed.route is not None
        group = Group.of(placed.request, placed.route)
        self._observe(self._end, group, placed.route, model_s, measured_s)

    def was_long(self, request: TokenizedRequest, num_tokens: int, *, is_cut: bool) -> None:
        """An answer ended, at its max_tokens or before."""
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
