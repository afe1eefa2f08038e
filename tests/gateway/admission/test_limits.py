"""Limits that follow what happens: how many requests may run, and how long the others wait."""

import asyncio
from dataclasses import replace

import pytest
from fixed_forecaster import request
from still_clock import Clock
from tandem_core.slo import SloTarget
from tandem_gateway.admission import limits
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.forecast import Quantiles
from tandem_gateway.admission.limits import AdaptiveLimit, Overload, Turns
from tandem_gateway.admission.places import Places
from tandem_gateway.settings import Policy


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


def test_an_overload_lasts_until_ten_seconds_without_a_refusal_have_passed(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    overload = Overload()
    assert overload.lasted_s == 0.0
    for _ in range(5):
        overload.refused()
        clock.now += 4.0
    assert overload.lasted_s == pytest.approx(20.0)
    clock.now += 7.0
    assert overload.lasted_s == 0.0
    overload.refused()
    clock.now += 1.0
    assert overload.lasted_s == pytest.approx(1.0), "a new one"


async def test_who_waits_for_an_overload_to_end_is_told_how_long_it_has_lasted(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    places = Places(max_in_flight=8, max_queue=64, policy=Policy.PREDICT, num_batch_places=lambda: 16)
    batch = request(SloTarget("batch"))
    later = replace(batch, arrived=batch.arrived + 1.0)
    waiters = [places.wait(Admitted(batch)) for _ in range(2)]
    clock.now += 6.0
    as_lately = Quantiles(18.0, 18.0)
    assert places.queued(later, 0.1) == as_lately, "the third one's turn, and each takes six seconds or more"
    places.refused()
    clock.now += 2.0
    said = places.queued(later, 0.1)
    assert said.p50 == pytest.approx(8.0 + 0.3), "as long again as nobody had a turn, then three answers"
    assert said.high == pytest.approx(3 * 8.0), "turns come sooner than its end may"
    for waiter in waiters:
        places.give_up(waiter)
    places.refused()
    clock.now += 5.0
    first = places.queued(later, 0.1)
    assert first.p50 == first.high == 1.0, "nobody waits: the next turn is its own"
    waiters = [places.wait(Admitted(batch)) for _ in range(40)]
    clock.now += 0.5
    said = places.queued(later, 0.1)
    assert said.p50 == pytest.approx(7.5 + 4.1), "the overload has lasted for so long"
    assert said.high == pytest.approx(41.0), "a second for each turn"
    for waiter in waiters:
        places.give_up(waiter)
    await asyncio.sleep(0)
    assert places.num_waiting == 0
