"""Predicts when a request will get its first token and its last one, and how sure that is.

    pods' reports, backlogs --router--> Route: times as if the model of costs were exact
    times measured at the first token and at the end / those times --> factors --> quantiles --> Forecast

The factors of the last predictions of about the same length, of each class, tell how wrong the next one may
be: conformal prediction over a window. A step or two is much of a short time and little of a long one; and
where much is going on that the model cannot know, such as requests that come later, long predictions come
out shorter than predicted and short ones longer. A class that has few counts together with others: those
with objectives that can be met, and the rest, which wait for them and are late by factors that say nothing
of them.

A receipt has a median and a 90th percentile; admission uses others, see `Forecast`. Because load changes
faster than a window, the level at which each is read moves with each one that held or did not (adaptive
conformal inference, Gibbs and Candes 2021).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from tandem_core.slo import SloTarget

from tandem_gateway.fleet.routing import OutputLengths, Route, Router
from tandem_gateway.request import DEFAULT_DUE_S, TokenizedRequest

#: Measurements kept of one class.
_WINDOW = 128
#: Older ones do not count: while a class is refused nothing is measured of it, and what made its requests
#: late, such as costs that pods did not know yet, may be over.
MEMORY_S = 30.0
#: So many predictions of about the same length tell by what factors the next one may be wrong. With fewer in
#: a class, those of other classes count too.
_NUM_NEAR = 16
#: By how much a level moves: to where half of the predictions fail, in about 20 requests.
_LEVEL_RATE = 0.05
_LOWEST_LEVEL, _HIGHEST_LEVEL = 0.02, 1.5
#: Logarithms of measured over predicted times that count besides the measured ones. Else a quiet time, in
#: which predictions are right, would leave no margin for the first moments of an overload.
_PRIOR = tuple(math.log(ratio) for ratio in (0.8, 0.9, 1.0, 1.05, 1.15, 1.3))
#: What is left of an answer is off by some share, but by a step or two however little it is; with so many
#: more tokens both are about equal. Else long ones were said to take up to twice as long, as short ones may.
_NUM_STEPS_OFF = 10


@dataclass(frozen=True)
class Quantiles:
    """Of a duration in seconds."""

    p50: float
    #: The upper one, at the level of its calibration.
    high: float

    def longer(self, seconds: float, high: float) -> Quantiles:
        """By so much, the upper one by `high`."""
        return Quantiles(self.p50 + seconds, self.high + high)


NO_QUEUE = Quantiles(0.0, 0.0)


@dataclass(frozen=True)
class Forecast:
    """Of one request, from now."""

    route: Route
    #: Before its own place in the gateway's queue.
    queue_s: float
    ttft: Quantiles
    e2e: Quantiles
    #: The same if no other request comes before it, with the upper quantile at the gateway's confidences.
    #: Admission compares these with the objectives, since it refuses those that would make this request late.
    ttft_undisturbed: Quantiles
    e2e_undisturbed: Quantiles
    #: Whether the first token comes with the last one, as that of a beam search does.
    begins_at_end: bool = False
    #: Whether nobody knows how long it waits, so that its times tell nothing of how wrong predictions are.
    is_open_ended: bool = False

    @property
    def model_s(self) -> float:
        """The end as the model of costs has it."""
        return self.queue_s + self.route.e2e_s

    @property
    def tpot(self) -> Quantiles:
        """Seconds per output token after the first, with the prompts that are computed meanwhile."""
        num_tokens = max(self.route.num_output - 1, 1)
        p50, high = (
            max(end_s - self.queue_s - self.route.ttft_s, 0.0) / num_tokens
            for end_s in (self.e2e_undisturbed.p50, self.e2e_undisturbed.high)
        )
        return Quantiles(p50, high)

    @property
    def alone(self) -> dict[str, float]:
        """What it takes without load by the model of costs, in seconds, by the names of the objectives."""
        route = self.route
        ttft_s = route.alone_e2e_s if self.begins_at_end else route.alone_prefill_s
        return {"ttft": ttft_s, "tpot": route.alone_token_s, "e2e": route.alone_e2e_s}

    def misses(self, slo: SloTarget, waited_s: float, *, is_likely: bool = False) -> str:
        """The name of the objective that may be missed, or is likely to be; "" if none."""
        for name, said, since_s, limit in self._measures(slo, waited_s):
            if limit and since_s + (said.p50 if is_likely else said.high) > limit:
                return name
        return ""

    def share_of_slack(self, slo: SloTarget, waited_s: float) -> float:
        """Of the time that the objectives leave beyond what it takes without load, the share that may go to
        load, at most 1. 0 without objectives."""
        shares = [0.0]
        for name, said, since_s, limit in self._measures(slo, waited_s):
            if limit > self.alone[name]:
                shares.append((since_s + said.high - self.alone[name]) / (limit - self.alone[name]))
        return min(max(shares), 1.0)

    def share_to_end(self, slo: SloTarget, waited_s: float) -> float:
        """Of the sequences on its decode pod, the share that must end before it would meet its objectives."""
        route = self.route
        load, running = route.decode.load, max(round(route.num_beside), 1)
        scale = self.e2e_undisturbed.high / max(self.model_s, 1e-6)
        for fewer in range(1, running):
            token_s = load.token_seconds(running - fewer + 1, route.context)
            e2e_s = waited_s + scale * (self.queue_s + route.e2e_beside_s(running - fewer))
            if not (0 < slo.e2e_s < e2e_s or 0 < slo.tpot_s < token_s):
                return fewer / running
        return 1.0

    def misses_alone(self, slo: SloTarget, times: float = 1.0) -> str:
        """The name of the objective that would be missed without any load, also if it were so many times as
        long; "" if none."""
        for name, limit in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2e", slo.e2e_s)):
            if 0 < times * limit < self.alone[name]:
                return name
        return ""

    def _measures(self, slo: SloTarget, waited_s: float) -> Iterator[tuple[str, Quantiles, float, float]]:
        """Name of the objective, what is predicted, what has passed of it, and the objective; seconds."""
        yield "ttft", self.ttft_undisturbed, waited_s, slo.ttft_s
        yield "tpot", self.tpot, 0.0, slo.tpot_s
        yield "e2e", self.e2e_undisturbed, waited_s, slo.e2e_s


@dataclass(frozen=True)
class Group:
    """Requests whose predictions are wrong by like factors."""

    slo_class: str
    #: Whether it comes after those that have objectives which can be met.
    is_last: bool = False
    #: Whether a prefill pod computes the prompt. Where it shares its cores with decode pods, that takes many
    #: times as long while they are busy.
    is_remote: bool = False

    @classmethod
    def of(cls, request: TokenizedRequest, route: Route) -> Group:
        is_last = (request.due_s or 0.0) >= DEFAULT_DUE_S or not request.has_objectives
        return cls(request.slo.name, is_last, route.computes_prompt is not route.decode)

    @property
    def pool(self) -> Group:
        """Of this and other classes together."""
        return replace(self, slo_class="")


class _Window:
    """The last measurements: by how much predictions were wrong, also by how long they were."""

    def __init__(self) -> None:
        #: In order of arrival: monotonic seconds of the measurement; logarithms of the predicted time, and of
        #: the measured one over that.
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)
        #: The last two in order of the predicted time, as two lists; None: to be sorted anew.
        self._by_length: tuple[list[float], list[float]] | None = None
        #: Results of `near` by the first of their factors: admission asks for each request that runs.
        self._near: dict[int, list[float]] = {}

    def __len__(self) -> int:
        self._forget_old()
        return len(self._recent)

    def add(self, log_predicted: float, log_measured: float) -> None:
        self._recent.append((time.monotonic(), log_predicted, log_measured - log_predicted))
        self._by_length = None

    def near(self, log_predicted: float) -> list[float]:
        """The factors of the predictions nearest to this length, and the prior, in order."""
        self._forget_old()
        if self._by_length is None:
            ordered = sorted(self._recent, key=itemgetter(1))
            self._by_length = [length for _, length, _ in ordered], [factor for *_, factor in ordered]
            self._near.clear()
        lengths, factors = self._by_length
        count = min(_NUM_NEAR, len(lengths))

        def is_near_enough(first: int) -> bool:
            """Whether the next stretch has no nearer end; of equal lengths the newest count."""
            end = lengths[first + count]
            return end > log_predicted and log_predicted - lengths[first] <= end - log_predicted

        begin = bisect_left(range(len(lengths) - count), True, key=is_near_enough)
        if begin not in self._near:
            self._near[begin] = sorted([*_PRIOR, *factors[begin : begin + count]])
        return self._near[begin]

    def _forget_old(self) -> None:
        oldest = time.monotonic() - MEMORY_S
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
            self._by_length = None


class Calibration:
    """Measured against predicted durations, by group. `high`: the level of the upper quantile."""

    def __init__(self, *, high: float = 0.9) -> None:
        self._high = high
        self._windows: defaultdict[Group, _Window] = defaultdict(_Window)
        #: By group; at which the quantiles are read, and when they were moved.
        self._levels: dict[Group, tuple[float, float, float]] = {}

    def observe(self, group: Group, predicted_s: float, said: Quantiles, measured_s: float) -> None:
        """`predicted_s` as given to `quantiles`, and what that said."""
        p50, high = self._levels_of(group)
        self._levels[group] = (
            _moved(p50, 0.5, held=measured_s <= said.p50),
            _moved(high, self._high, held=measured_s <= said.high),
            time.monotonic(),
        )
        for name in (group, group.pool):
            self._windows[name].add(_log(predicted_s), _log(measured_s))

    def quantiles(self, group: Group, predicted_s: float) -> Quantiles:
        log_predicted, window = _log(predicted_s), self._windows[group]
        if len(window) < _NUM_NEAR:
            window = self._windows[group.pool]
        factors = window.near(log_predicted)
        p50, high = (math.exp(log_predicted + _quantile(factors, level)) for level in self._levels_of(group))
        return Quantiles(p50, max(p50, high))

    def _levels_of(self, group: Group) -> tuple[float, float]:
        p50, high, moved_at = self._levels.get(group, (0.5, self._high, math.inf))
        return (0.5, self._high) if moved_at < time.monotonic() - MEMORY_S else (p50, high)


def _moved(level: float, wanted: float, *, held: bool) -> float:
    return min(max(level + _LEVEL_RATE * (wanted - held), _LOWEST_LEVEL), _HIGHEST_LEVEL)


def _log(seconds: float) -> float:
    return math.log(max(seconds, 1e-3))


def _quantile(ordered: Sequence[float], level: float) -> float:
    """The smallest of these logarithms that at least this share, and one more, do not exceed; beyond 1 the
    largest one and more, for a load that is higher than any in the window."""
    if level > 1:
        return ordered[-1] + math.log(level)
    return ordered[min(math.ceil(level * (len(ordered) + 1)) - 1, len(ordered) - 1)]


class Forecaster:
    """Belongs to one event loop."""

    def __init__(
        self, router: Router, lengths: OutputLengths, *, first_confidence: float, end_confidence: float
    ) -> None:
        """The shares of the predictions that admission judges by, of first tokens and of ends, that are to
        hold. Under overload each request is admitted that just fits, so that with less more are late."""
        self.first_confidence, self.end_confidence = first_confidence, end_confidence
        self._router = router
        self._lengths = lengths
        self._ttft, self._e2e = Calibration(), Calibration()
        self._first, self._left = Calibration(high=first_confidence), Calibration(high=end_confidence)

    def forecast(self, request: TokenizedRequest) -> Forecast | None:
        """Of one that does not wait. None: there is no decode pod."""
        route = self._router.plan(request)
        return None if route is None else self.on_route(request, route, NO_QUEUE)

    def on_route(self, request: TokenizedRequest, route: Route, queue: Quantiles) -> Forecast:
        """`queue`: what the request will wait before it is sent to its pods."""
        queue_s, more_s = queue.p50, queue.high - queue.p50
        group, model_s = Group.of(request, route), queue_s + route.e2e_s
        ttft = self._ttft.quantiles(group, queue_s + route.ttft_s).longer(0.0, more_s)
        e2e = self._e2e.quantiles(group, model_s).longer(0.0, more_s)
        # They are learned apart, and no answer ends before it begins.
        e2e = Quantiles(max(e2e.p50, ttft.p50), max(e2e.high, ttft.high))
        undisturbed = self.left(request, route, model_s)
        is_search = request.sampling.beam_search is not None
        return Forecast(
            route=route,
            queue_s=queue_s,
            ttft=e2e if is_search else ttft,
            e2e=e2e,
            ttft_undisturbed=undisturbed
            if is_search
            else _apart(self._first, group, route, queue_s + route.ttft_s),
            e2e_undisturbed=undisturbed,
            begins_at_end=is_search,
            is_open_ended=more_s > 0,
        )

    def num_batch_places(self) -> int:
        """Sequences that the decode pods compute at once; 0 without one."""
        return self._router.num_batch_places()

    def is_void(self, predicted_at: float) -> bool:
        """Whether what was predicted then, in monotonic seconds, tells nothing of how wrong predictions are,
        since a pod has failed. Else a class would be refused for as long as that is remembered."""
        return self._router.has_failed_since(predicted_at)

    def left(self, request: TokenizedRequest, route: Route, model_s: float) -> Quantiles:
        """Of the time to the end of a request that runs, if no other one comes. `model_s`: as the model of
        costs has it."""
        return _apart(self._left, Group.of(request, route), route, model_s)

    def started(
        self, request: TokenizedRequest, forecast: Forecast, ttft_s: float, *, is_overtaken: bool
    ) -> None:
        """Of a request that has its first token, the time until then from when the forecast was made.
        `is_overtaken`: whether one came later that was due earlier."""
        group, predicted_s = Group.of(request, forecast.route), forecast.queue_s + forecast.route.ttft_s
        self._ttft.observe(group, predicted_s, forecast.ttft, ttft_s)
        if not is_overtaken:
            _observe_apart(self._first, group, forecast.route, predicted_s, ttft_s)

    def was_long(self, request: TokenizedRequest, num_tokens: int, *, is_cut: bool) -> None:
        """Of an answer that ended, at its max_tokens or before."""
        self._lengths.observe(request, num_tokens, is_cut=is_cut)

    def ended(self, request: TokenizedRequest, forecast: Forecast, e2e_s: float) -> None:
        """Of a request that ended, the time until then from when the forecast was made."""
        self._e2e.observe(Group.of(request, forecast.route), forecast.model_s, forecast.e2e, e2e_s)

    def took(self, request: TokenizedRequest, route: Route, model_s: float, measured_s: float) -> None:
        """Of a request that ended, how long it took from some moment on, and what the model of costs says of
        that: the sum over the times between two requests that came to its pod."""
        _observe_apart(self._left, Group.of(request, route), route, model_s, measured_s)


def _apart(calibration: Calibration, group: Group, route: Route, model_s: float) -> Quantiles:
    """Of a time that is off by some share, and by some steps."""
    steps_s = _NUM_STEPS_OFF * route.token_s
    said = calibration.quantiles(group, model_s + steps_s)
    return Quantiles(max(said.p50 - steps_s, 0.0), max(said.high - steps_s, 0.0))


def _observe_apart(
    calibration: Calibration, group: Group, route: Route, model_s: float, measured_s: float
) -> None:
    steps_s = _NUM_STEPS_OFF * route.token_s
    said = calibration.quantiles(group, model_s + steps_s)
    calibration.observe(group, model_s + steps_s, said, measured_s + steps_s)
