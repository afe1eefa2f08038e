"""Limits that follow what happens: how many requests may run, and how long the others wait."""

import pytest
from still_clock import Clock
from tandem_gateway import limits
from tandem_gateway.limits import AdaptiveLimit, Turns


def test_the_adaptive_limit_rises_by_one_a_round_and_falls_by_a_share(monkeypatch):
    now = 100.0
    monkeypatch.setattr(limits.time, "monotonic", lambda: now)
    limit = AdaptiveLimit(100)
    limit.ended(met=False)
    limit.ended(met=False)
    assert limit.value == pytest.approx(70), "once a second"
    for _ in range(70):
        limit.ended(met=True)
    assert limit.value == pytest.approx(71, abs=0.1)
    for _ in range(100):
        now += 2
        limit.ended(met=False)
    assert limit.value == 1


def test_a_limit_that_recovers_grows_while_it_is_not_lowered(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    limit = AdaptiveLimit(96, recovery=1.25)
    for _ in range(40):
        clock.now += 1.1
        limit.ended(met=False)
    assert limit.value == pytest.approx(1.0)
    clock.now += 10
    assert limit.value == pytest.approx(1.0), "the next burst may come"
    clock.now += 5
    assert limit.value == pytest.approx(1.25**5)
    clock.now += 7
    assert limit.value == pytest.approx(1.25**12)
    clock.now += 1e9
    assert limit.value == 96


def test_turns_are_expected_to_take_as_long_as_they_did_lately(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    turns = Turns()
    turns.first_waits()
    for _ in range(100):
        clock.now += 3.0
        turns.began()
    assert turns.wait_s(0) == pytest.approx(3.0, rel=0.01)
    assert turns.wait_s(4) == pytest.approx(5 * 3.0, rel=0.01)
    clock.now += 7.0
    assert turns.wait_s(1) == pytest.approx(2 * 7.0, rel=0.01), "it takes longer than before"
    turns.first_waits()
    assert turns.wait_s(1) == pytest.approx(2 * 3.0, rel=0.01), "nobody waited meanwhile"
    clock.now += 31
    turns.first_waits()
    assert turns.wait_s(1) < 3.0, "that was long ago"
