"""Predicts when a request will get its first token and its last one, and how sure that is.

    pods' reports, backlogs --router--> Route: times as if the model of costs were exact
    times measured at the first token and at the end / those times --> quantiles of the ratio --> Forecast

The ratio is kept for each class and for predictions of about the same size: a prediction of 20 ms is wrong by
another factor than one of 2 s. Where a class has few, classes count together: those with objectives that can
be met, and the others, which wait for them and are late by factors that say nothing of them. This is
conformal prediction over a window. Because load changes faster than a window, the level that is read from it
moves with each prediction that held or did not (adaptive conformal inference, Gibbs and Candes 2021).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from tandem_core.slo import SloTarget

from tandem_gateway.request import DEFAULT_DUE_S, TokenizedRequest
from tandem_gateway.routing import OutputLengths, Route, Router

#: Ratios kept of one class and size.
_WINDOW = 128
#: Older ones do not count: while a class is refused nothing is measured of it, and what made its requests
#: late, such as costs that pods did not know yet, may be over.
_MEMORY_S = 15.0
#: With fewer, those of other classes count too.
_ENOUGH = 16
#: By how much a level moves: to where half of the predictions fail, in about 20 requests.
_LEVEL_RATE = 0.05
_LOWEST_LEVEL, _HIGHEST_LEVEL = 0.02, 1.5
#: Ratios that count before any measurement.
_PRIOR = (0.7, 0.9, 1.0, 1.1, 1.3, 1.6)


@dataclass(frozen=True)
class Quantiles:
    """Of a duration in seconds."""

    p50: float
    #: The one that admission compares with an objective. Most requests are predicted well below it, so that
    #: far less than a tenth of those admitted is late.
    p90: float


@dataclass(frozen=True)
class Forecast:
    """Of one request, from now."""

    route: Route
    #: Before its own place in the gateway's queue.
    queue_s: float
    ttft: Quantiles
    e2e: Quantiles

    @property
    def token_s(self) -> float:
        return self.route.token_s

    def misses(self, slo: SloTarget, waited_s: float, *, is_likely: bool = False) -> str:
        """The name of the objective that may be missed, or is likely to be; "" if none."""
        ttft_s, e2e_s = (self.ttft.p50, self.e2e.p50) if is_likely else (self.ttft.p90, self.e2e.p90)
        for name, value, limit in (
            ("ttft", waited_s + ttft_s, slo.ttft_s),
            ("tpot", self.token_s, slo.tpot_s),
            ("e2e", waited_s + e2e_s, slo.e2e_s),
        ):
            if limit and value > limit:
                return name
        return ""

    def share_to_end(self, slo: SloTarget, waited_s: float) -> float:
        """Of the sequences on its decode pod, the share that must end before it would meet its objectives."""
        route = self.route
        load, running = route.decode.load, max(route.num_running, 1)
        scale = self.e2e.p90 / max(self.queue_s + route.e2e_s, 1e-6)
        for fewer in range(1, running):
            token_s = load.token_seconds(running - fewer + 1, route.context)
            e2e_s = waited_s + scale * (self.queue_s + route.ttft_s + route.num_output * token_s)
            if not (0 < slo.e2e_s < e2e_s or 0 < slo.tpot_s < token_s):
                return fewer / running
        return 1.0

    def misses_alone(self, slo: SloTarget) -> bool:
        """Whether an objective would be missed without any load."""
        return any(
            limit and value > limit
            for value, limit in (
                (self.route.alone_prefill_s, slo.ttft_s),
                (self.route.alone_token_s, slo.tpot_s),
                (self.route.alone_e2e_s, slo.e2e_s),
            )
        )


@dataclass(frozen=True)
class Group:
    """Requests whose predictions are wrong by like factors."""

    slo_class: str
    #: Whether it comes after those that have objectives which can be met.
    is_last: bool = False

    @classmethod
    def of(cls, request: TokenizedRequest) -> Group:
        is_last = (request.due_s or 0.0) >= DEFAULT_DUE_S or not request.has_objectives
        return cls(request.slo.name, is_last)

    @property
    def pool(self) -> str:
        """Of this and other classes together."""
        return "\0last" if self.is_last else "\0"


class _Ratios:
    """The last ratios, in order of arrival and sorted."""

    def __init__(self) -> None:
        #: With the monotonic seconds at which each was measured.
        self._recent: deque[tuple[float, float]] = deque()
        self.sorted: list[float] = []

    def add(self, ratio: float) -> None:
        if len(self._recent) == _WINDOW:
            self._forget_oldest()
        self._recent.append((time.monotonic(), ratio))
        insort(self.sorted, ratio)

    def forget_old(self) -> None:
        oldest = time.monotonic() - _MEMORY_S
        while self._recent and self._recent[0][0] < oldest:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        del self.sorted[bisect_left(self.sorted, self._recent.popleft()[1])]


class Calibration:
    """Measured over predicted durations, by group and size of the prediction."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[Group | str, int], _Ratios] = {}
        #: By group; those of the window from which p50 and p90 are read, and when they were moved.
        self._levels: dict[Group, tuple[float, float, float]] = {}

    def observe(self, group: Group, predicted_s: float, said: Quantiles, measured_s: float) -> None:
        """`predicted_s` as given to `quantiles`, and what that said."""
        p50, p90 = self._levels_of(group)
        self._levels[group] = (
            _moved(p50, 0.5, held=measured_s <= said.p50),
            _moved(p90, 0.9, held=measured_s <= said.p90),
            time.monotonic(),
        )
        for name in (group, group.pool):
            key = (name, _size(predicted_s))
            self._ratios.setdefault(key, _Ratios()).add(measured_s / max(predicted_s, 1e-6))

    def quantiles(self, group: Group, predicted_s: float) -> Quantiles:
        levels = self._levels_of(group)
        p50, p90 = (predicted_s * ratio for ratio in self._quantiles(group, predicted_s, levels))
        return Quantiles(p50, max(p50, p90))

    def _levels_of(self, group: Group) -> tuple[float, float]:
        p50, p90, moved_at = self._levels.get(group, (0.5, 0.9, math.inf))
        return (0.5, 0.9) if moved_at < time.monotonic() - _MEMORY_S else (p50, p90)

    def _quantiles(self, group: Group, predicted_s: float, levels: tuple[float, ...]) -> list[float]:
        size, pool = _size(predicted_s), group.pool
        for name in (group, pool):
            known = self._ratios.get((name, size))
            if known is not None:
                known.forget_old()
                if len(known.sorted) >= _ENOUGH:
                    return [_quantile(known.sorted, level) for level in levels]
        nearest = next(
            (self._ratios[key] for near in (0, -1, 1) if (key := (pool, size + near)) in self._ratios), None
        )
        few = sorted([*_PRIOR, *(nearest.sorted if nearest is not None else ())])
        return [_quantile(few, level) for level in levels]


def _moved(level: float, wanted: float, *, held: bool) -> float:
    return min(max(level + _LEVEL_RATE * (wanted - held), _LOWEST_LEVEL), _HIGHEST_LEVEL)


def _size(seconds: float) -> int:
    """Neighbours differ by a factor of two."""
    return round(math.log2(max(seconds, 1e-3)))


def _quantile(ordered: list[float], level: float) -> float:
    """The smallest value that at least this share, and one more, do not exceed; beyond 1 the largest one,
    increased in proportion, for a load that is higher than any in the window."""
    if level > 1:
        return ordered[-1] * level
    return ordered[min(math.ceil(level * (len(ordered) + 1)) - 1, len(ordered) - 1)]


class Forecaster:
    """Belongs to one event loop."""

    def __init__(self, router: Router, lengths: OutputLengths) -> None:
        self._router = router
        self._lengths = lengths
        self._ttft, self._e2e = Calibration(), Calibration()

    def forecast(self, request: TokenizedRequest, queue_s: float) -> Forecast | None:
        """None: there is no decode pod. `queue_s`: what the request will wait before it is sent to one."""
        route = self._router.plan(request)
        if route is None:
            return None
        group = Group.of(request)
        ttft = self._ttft.quantiles(group, queue_s + route.ttft_s)
        e2e = self._e2e.quantiles(group, queue_s + route.e2e_s)
        # They are learned apart, and no answer ends before it begins.
        e2e = Quantiles(max(e2e.p50, ttft.p50), max(e2e.p90, ttft.p90))
        return Forecast(route=route, queue_s=queue_s, ttft=ttft, e2e=e2e)

    def started(self, request: TokenizedRequest, forecast: Forecast, ttft_s: float) -> None:
        """Of a request that has its first token, the time until then from when the forecast was made."""
        predicted_s = forecast.queue_s + forecast.route.ttft_s
        self._ttft.observe(Group.of(request), predicted_s, forecast.ttft, ttft_s)

    def ended(self, request: TokenizedRequest, forecast: Forecast, e2e_s: float, num_tokens: int) -> None:
        """Of a request that ended, the time until then from when the forecast was made."""
        self._e2e.observe(Group.of(request), forecast.queue_s + forecast.route.e2e_s, forecast.e2e, e2e_s)
        self._lengths.observe(request, num_tokens)
