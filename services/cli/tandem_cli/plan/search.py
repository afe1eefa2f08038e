"""Search for the cheapest fleet that keeps the objectives in the simulation, and its limiting resource."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tandem_core.slo import SloTarget

from tandem_cli.plan.fleet_plan import LIMITS, FleetPlan
from tandem_cli.plan.simulate import Outcome, simulate
from tandem_cli.plan.workload import PlannedRequest

#: Largest number of pods of a role.
_MAX_PODS = 512
#: Makes a fleet of a number of prefill pods and decode pods.
Make = Callable[[int, int], FleetPlan]


@dataclass(frozen=True)
class Result:
    """A fleet and its simulated performance; p50 and p99."""

    plan: FleetPlan
    attainment: float
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    e2e_s: tuple[float, float]
    #: Output tokens of requests in time, per second of the workload.
    goodput: float

    @property
    def per_million_tokens(self) -> float:
        """Cost of a million output tokens of requests in time."""
        per_s = self.plan.num_devices * self.plan.costs.per_hour / 3600
        return per_s / self.goodput * 1e6 if self.goodput else math.inf


def evaluate(plan: FleetPlan, requests: Sequence[PlannedRequest], slo: SloTarget) -> Result:
    return _result(plan, simulate(plan, requests), slo)


def cheapest(
    make: Make, requests: Sequence[PlannedRequest], slo: SloTarget, objective: float
) -> Result | None:
    """The smallest fleet with prefill pods that meets the objective; None if none does.

    Starts with enough pods of both roles, minimises prefill pods, then decode pods. Finally tries to replace
    two pods of a role by one of the other.
    """

    def meets(num_prefill: int, num_decode: int) -> bool:
        return evaluate(make(num_prefill, num_decode), requests, slo).attainment >= objective

    enough = _least(lambda n: meets(n, n))
    if enough is None:
        return None
    prefill = _least(lambda n: meets(n, enough), enough) or enough
    decode = _least(lambda n: meets(prefill, n), enough) or enough
    # Two pods of one role replaced by one of the other are one pod less.
    for other in ((prefill + 1, decode - 2), (prefill - 2, decode + 1)):
        if min(other) >= 1 and meets(*other):
            prefill, decode = other
            break
    return evaluate(make(prefill, decode), requests, slo)


def cheapest_together(
    make: Make, requests: Sequence[PlannedRequest], slo: SloTarget, objective: float
) -> Result | None:
    """The smallest fleet without prefill pods that meets the objective; None if none does."""
    count = _least(lambda n: evaluate(make(0, n), requests, slo).attainment >= objective)
    return None if count is None else evaluate(make(0, count), requests, slo)


def slack(
    result: Result, requests: Sequence[PlannedRequest], slo: SloTarget, objective: float
) -> list[tuple[str, float]]:
    """The smallest share of each limit with which the objective is still met, the tightest limit first."""
    plan = result.plan

    def is_enough(name: str, percent: int) -> bool:
        return evaluate(plan.scaled(name, percent / 100), requests, slo).attainment >= objective

    shares = [(name, (_least(partial(is_enough, name), 100) or 100) / 100) for name in LIMITS]
    return sorted(shares, key=lambda share: -share[1])


def _least(is_enough: Callable[[int], bool], most: int = _MAX_PODS) -> int | None:
    """The smallest number from 1 to `most` that is enough, by bisection; None if `most` is not enough."""
    high = 1
    while not is_enough(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _result(plan: FleetPlan, outcomes: Sequence[Outcome], slo: SloTarget) -> Result:
    met = [outcome for outcome in outcomes if outcome.is_met(slo)]
    duration = outcomes[-1].request.arrival_s or 1.0
    return Result(
        plan=plan,
        attainment=len(met) / len(outcomes),
        ttft_s=_quantiles([outcome.ttft_s for outcome in outcomes]),
        tpot_s=_quantiles([outcome.tpot_s for outcome in outcomes]),
        e2e_s=_quantiles([outcome.e2e_s for outcome in outcomes]),
        goodput=sum(outcome.request.output_tokens for outcome in met) / duration,
    )


def _quantiles(values: list[float]) -> tuple[float, float]:
    """p50 and p99."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
