"""Objectives: relative ones in seconds, widened ones, and those that cannot be met without load."""

from dataclasses import replace

import pytest
from tandem_core.slo import SloTarget
from tandem_gateway.admission.objectives import missed_alone, resolve

ALONE = {"ttft": 0.1, "tpot": 0.01, "e2e": 1.1}


def test_objectives_that_the_system_can_meet_stay():
    slo = SloTarget("chat", ttft_s=1.0, tpot_s=0.05, e2e_s=5.0)
    assert resolve(slo, ALONE, 3.0) == (slo, False)


def test_tight_objectives_are_widened_to_a_multiple_of_the_time_without_load():
    slo, is_widened = resolve(SloTarget("chat", ttft_s=0.2, tpot_s=0.02, e2e_s=5.0), ALONE, 3.0)
    assert is_widened
    assert (slo.ttft_s, slo.tpot_s, slo.e2e_s) == pytest.approx((0.3, 0.03, 5.0))


def test_an_unset_objective_stays_unset():
    assert resolve(SloTarget("batch"), ALONE, 3.0) == (SloTarget("batch"), False)


def test_strict_objectives_and_all_without_slack_stay():
    tight = SloTarget("chat", ttft_s=0.01)
    assert resolve(tight, ALONE, 0.0) == (tight, False)
    strict = replace(tight, is_strict=True)
    assert resolve(strict, ALONE, 3.0) == (strict, False)


def test_relative_objectives_are_multiples_of_the_time_without_load():
    slo, is_widened = resolve(SloTarget("mail", ttft_slowdown=5.0, tpot_slowdown=4.0, e2e_s=9.0), ALONE, 0.0)
    assert not is_widened
    assert (slo.ttft_s, slo.tpot_s, slo.e2e_s) == pytest.approx((0.5, 0.04, 9.0))


def test_an_absolute_and_relative_objective_takes_the_longer_time():
    slo, _ = resolve(SloTarget("mail", ttft_slowdown=5.0, ttft_s=0.7), ALONE, 0.0)
    assert slo.ttft_s == 0.7


def test_relative_objectives_are_not_widened():
    slo, is_widened = resolve(SloTarget("mail", ttft_slowdown=5.0, e2e_s=0.01), ALONE, 20.0)
    assert slo.ttft_s == pytest.approx(0.5), "5 times, not 20"
    assert slo.e2e_s == pytest.approx(22.0)
    assert is_widened


@pytest.mark.parametrize(
    ("slo", "times", "missed"),
    [
        (SloTarget("", ttft_s=0.09), 1.0, "ttft"),
        (SloTarget("", ttft_s=0.1, tpot_s=0.009), 1.0, "tpot"),
        (SloTarget("", e2e_s=1.0), 1.0, "e2e"),
        (SloTarget("", ttft_s=0.1, tpot_s=0.01, e2e_s=1.1), 1.0, ""),
        (SloTarget("", ttft_s=0.06), 2.0, ""),
        (SloTarget("", ttft_s=0.04), 2.0, "ttft"),
        (SloTarget("batch"), 1.0, ""),
    ],
)
def test_objectives_missed_without_load_are_found(slo, times, missed):
    assert missed_alone(slo, ALONE, times) == missed
