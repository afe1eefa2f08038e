"""The laws that benchmarks/scaling.py compares, and that it can tell a good one from a bad one."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import mean, stdev

import pytest
import scaling
from tandem_cli.plan.simulate import FleetPlan


@pytest.mark.parametrize(
    ("signal", "wanted", "ready", "expected"),
    [
        (0.50, 10, 10, 10),  # between .40 and .55 nothing changes
        (0.60, 10, 10, 11),  # 10 + ceil(10 (.60 / .55 - 1))
        (9.00, 2, 2, 6),  # clamped to 2: 2 + ceil(2 (2 / .55 - 1)) = 8, at most 4 more in a minute
        (1.00, 10, 5, 10),  # five are starting: the credit halves the signal
        (0.10, 10, 10, 10),  # fewer only after 180 s at the lowest ask
    ],
)
def test_llm_ds_law_is_the_published_one(signal: float, wanted: int, ready: int, expected: int) -> None:
    law = scaling.LlmD()
    assert law.decide(15.0, signal, wanted, ready) == wanted, "30 s of this signal are needed"
    law.decide(30.0, signal, wanted, ready)
    assert law.decide(45.0, signal, wanted, ready) == expected


def test_llm_ds_law_takes_one_pod_away_in_two_minutes() -> None:
    law, wanted, counts = scaling.LlmD(), 10, []
    for tick in range(1, 41):
        wanted = law.decide(15.0 * tick, 0.1, wanted, wanted)
        counts.append(wanted)
    assert counts[11] == 10, "180 s of it are needed"
    assert counts[-1] < 9
    falls = [15 * tick for tick, (one, other) in enumerate(pairwise(counts)) if one > other]
    assert all(later - earlier >= 120 for earlier, later in pairwise(falls))


def test_hpa_follows_the_share_of_busy_time() -> None:
    hpa = scaling.Hpa(300.0)
    assert hpa.decide(15.0, 2 * 15.0, 2, 2) == 3  # 100 % of two pods: ceil(2 / .7)
    assert hpa.decide(30.0, 2 * 15.0 + 3 * 15.0 * 0.7, 3, 3) == 3


@pytest.mark.parametrize("cv", [1.0, 2.0])
def test_arrivals_have_the_rate_and_the_spread_that_is_asked_for(cv: float) -> None:
    times = scaling.arrivals(lambda at: 5.0, 4000.0, cv, random.Random(1))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) == pytest.approx(20_000, rel=0.06)
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.08)


def test_arrivals_follow_a_rate_that_changes() -> None:
    times = scaling.arrivals(lambda at: 2.0 if at < 500 else 20.0, 1000.0, 1.0, random.Random(1))
    assert sum(at < 500 for at in times) == pytest.approx(1000, rel=0.1)
    assert sum(at >= 500 for at in times) == pytest.approx(10_000, rel=0.05)


def test_on_rising_load_tandems_law_keeps_more_than_a_fleet_that_stays_and_pays_less_than_its_peak() -> None:
    rng = random.Random(2)
    times = scaling.arrivals(lambda at: 4 + 12 * scaling.day(at, 1200), 1200.0, 1.0, rng)
    workload = scaling.Workload(
        "rise", scaling.requests_of(times, 1200, 150, rng), scaling.SloTarget("", ttft_s=1.0, tpot_s=0.06)
    )
    plan = FleetPlan(scaling.costs(), 1, 1)
    first = scaling.needed(plan, workload, 4.0)
    tandem = scaling.Tandem(plan, workload.slo, 60.0)
    ours = scaling.run("tandem", tandem, plan, workload, first, 60.0)
    stays = scaling.run("stays", scaling.Fixed(*first), plan, workload, first, 60.0)
    assert ours.attainment > 0.97
    assert stays.attainment < 0.9
    peak = sum(scaling.needed(plan, workload, scaling.busiest(workload.requests))) * 1200 / 3600
    assert ours.prefill_hours + ours.decode_hours < peak * 1.1
