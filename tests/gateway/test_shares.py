"""Shares of tenants and slots of refused clients, with a clock that stands still."""

from __future__ import annotations

import pytest
from still_clock import Clock
from tandem_gateway import shares
from tandem_gateway.shares import Bookings, FairShares


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shares, "time", clock)
    return clock


def ask_and_get(shares: FairShares, tenant: str, seconds: float, weight: float = 1.0) -> None:
    shares.ask(tenant, weight)
    shares.charge(tenant, seconds)


def test_a_tenant_alone_is_never_ahead(clock: Clock) -> None:
    shares = FairShares()
    for _ in range(100):
        ask_and_get(shares, "noisy", 5.0)
    assert shares.ahead_s("noisy") == 0
    assert shares.room_for_others("noisy", 5.0, {}) == 0


def test_who_used_more_than_its_share_is_ahead_by_that(clock: Clock) -> None:
    shares = FairShares()
    ask_and_get(shares, "quiet", 0.1)
    for _ in range(10):
        ask_and_get(shares, "noisy", 1.0)
    assert shares.ahead_s("quiet") == 0
    assert shares.ahead_s("noisy") == pytest.approx(19.0), "ten seconds at half of the fleet, less one"
    clock.now += 9
    assert shares.ahead_s("noisy") == pytest.approx(10.0)
    clock.now += 2
    assert shares.ahead_s("noisy") == 0, "the other one has not asked for ten seconds"


def test_weights_are_shares(clock: Clock) -> None:
    shares = FairShares()
    for _ in range(10):
        ask_and_get(shares, "small", 1.0)
        ask_and_get(shares, "large", 3.0, weight=3.0)
    assert shares.ahead_s("small") == pytest.approx(shares.ahead_s("large"), rel=0.15)


def test_room_is_kept_for_those_that_ask_for_much_less(clock: Clock) -> None:
    shares = FairShares()
    for _ in range(400):
        clock.now += 0.1
        shares.ask("noisy", 1.0)
        if int(clock.now * 10) % 20 == 0:
            shares.ask("quiet", 1.0)
    # Half a request per second, of which each stays for eight: four, and two as the standard deviation.
    assert shares.room_for_others("noisy", 8.0, {"quiet": 0}) == pytest.approx(6, abs=1)
    assert shares.room_for_others("noisy", 8.0, {"quiet": 4}) == pytest.approx(2, abs=1)
    assert shares.room_for_others("noisy", 8.0, {"quiet": 9}) == 0
    assert shares.room_for_others("quiet", 8.0, {}) == 0
    for _ in range(60):
        shares.ask("large", 20.0)
    assert shares.room_for_others("large", 8.0, {}) == 0
    assert shares.room_for_others("noisy", 8.0, {}) > 40, "by weight the large one asks for less"


def test_who_comes_back_in_time_is_admitted_if_that_is_likely_to_do(clock: Clock) -> None:
    bookings = Bookings()
    assert bookings.book(7, 1005.0, 2.0) == 1005.0
    assert bookings.book(7, 1003.0, 2.0) == 1006.0, "a second client with the same request"
    assert bookings.book(8, 1020.0, 2.0) == 1020.0
    assert not bookings.redeem(7), "five seconds too early"
    clock.now = 1004.5
    assert bookings.redeem(7)
    assert not bookings.redeem(7)
    assert not bookings.redeem(9)
    clock.now = 1006.5
    assert bookings.redeem(7)
    clock.now = 1021.5
    assert not bookings.redeem(8), "too late"


def test_slots_of_clients_that_do_not_come_back_are_given_to_others(clock: Clock) -> None:
    bookings = Bookings()
    for number in range(50):
        bookings.book(number, clock.now, 1.0)
    clock.now += 100
    first = bookings.book(100, clock.now, 1.0)
    assert bookings.book(101, clock.now, 1.0) - first < 0.01
    for number in range(100, 140):
        clock.now += 0.01
        bookings.book(number, clock.now, 0.0)
        assert bookings.redeem(number)
    first = bookings.book(200, clock.now, 1.0)
    assert bookings.book(201, clock.now, 1.0) - first > 0.9
