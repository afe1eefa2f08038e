"""Shares of tenants and slots of refused clients, with a clock that stands still."""

from __future__ import annotations

import random

import pytest
from still_clock import Clock
from tandem_core.sampling import SamplingParams
from tandem_core.slo import NO_OBJECTIVES
from tandem_gateway.admission import shares
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.shares import _DEVIATIONS, _MOST_BOOKED, MAX_AHEAD_S, Bookings, FairShares
from tandem_gateway.request import TokenizedRequest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shares, "time", clock)
    return clock


def ask_and_get(shares: FairShares, tenant: str, seconds: float, weight: float = 1.0) -> None:
    shares.ask(tenant, weight, 1.0)
    shares.charge(tenant, seconds)


def test_a_tenant_alone_is_never_ahead(clock: Clock) -> None:
    shares = FairShares()
    for _ in range(100):
        ask_and_get(shares, "noisy", 5.0)
    assert shares.ahead_s("noisy") == 0
    assert shares.room_for_others("noisy", 5.0, {}, 1.0) == 0


def test_who_used_more_than_its_share_is_ahead_by_that(clock: Clock) -> None:
    shares = FairShares()
    ask_and_get(shares, "quiet", 0.1)
    for _ in range(10):
        ask_and_get(shares, "noisy", 1.0)
    assert shares.ahead_s("quiet") == 0
    assert shares.ahead_s("noisy") == pytest.approx(18.9), "ten seconds at half of the fleet, less one"
    clock.now += 9
    assert shares.ahead_s("noisy") == pytest.approx(10.0)
    clock.now += 2
    assert shares.ahead_s("noisy") == 0, "the other one has not asked for ten seconds"


def test_weights_are_shares(clock: Clock) -> None:
    shares = FairShares()
    for _ in range(10):
        ask_and_get(shares, "small", 1.0)
        ask_and_get(shares, "large", 3.0, weight=3.0)
    shares.ask("idle", 1.0, 1.0)
    assert shares.ahead_s("small") > 10
    assert shares.ahead_s("small") == pytest.approx(shares.ahead_s("large"), rel=0.15)


def test_who_uses_as_much_as_all_others_is_not_ahead_however_busy_the_fleet_is(clock: Clock) -> None:
    shares = FairShares()
    for _ in range(100):
        for tenant in ("a", "b", "c"):
            ask_and_get(shares, tenant, 1.0)
    assert [shares.ahead_s(tenant) for tenant in ("a", "b", "c")] == pytest.approx([0, 0, 1], abs=1)


def test_room_is_kept_for_those_that_ask_for_much_less(clock: Clock) -> None:
    shares = FairShares()
    for _ in range(400):
        clock.now += 0.1
        shares.ask("noisy", 1.0, 1.0)
        if int(clock.now * 10) % 20 == 0:
            shares.ask("quiet", 1.0, 1.0)
    # Half a request per second, of which each stays for eight: four, and two as the standard deviation.
    usual = 4 + _DEVIATIONS * 2
    assert shares.room_for_others("noisy", 8.0, {"quiet": 0}, 1.0) == pytest.approx(usual, abs=2)
    assert shares.room_for_others("noisy", 8.0, {"quiet": 4}, 1.0) == pytest.approx(usual - 4, abs=2)
    assert shares.room_for_others("noisy", 8.0, {"quiet": 15, "noisy": 40}, 1.0) == 0
    assert shares.room_for_others("quiet", 8.0, {}, 1.0) == 0
    for _ in range(30):
        shares.ask("large", 20.0, 1.0)
    assert shares.room_for_others("large", 8.0, {}, 1.0) == 0
    assert shares.room_for_others("noisy", 8.0, {}, 1.0) > 40, "by weight the large one asks for less"


def test_many_small_tenants_are_kept_no_more_room_than_one_that_asks_for_as_much(clock: Clock) -> None:
    def room(num_small: int, running: int) -> int:
        shares = FairShares()
        for step in range(800):
            clock.now += 0.05
            shares.ask("noisy", 1.0, 1.0)
            if step % 8 == 0:
                shares.ask(f"small-{step // 8 % num_small}", 1.0, 1.0)
        places = {f"small-{number}": running for number in range(num_small)}
        return shares.room_for_others("noisy", 4.0, places, 1.0)

    assert room(20, 0) == pytest.approx(room(1, 0), abs=2)
    assert room(20, 1) == pytest.approx(room(1, 20), abs=2), "what each of them runs counts for all"


def test_a_tenant_that_begins_to_ask_for_much_outdoes_others_within_its_next_requests(clock: Clock) -> None:
    shares = FairShares()

    def pass_s(seconds: float, of_b: int) -> None:
        for _ in range(round(10 * seconds)):
            clock.now += 0.1
            for tenant in ("a", *["b"] * of_b):
                shares.ask(tenant, 1.0, 1.0)

    pass_s(20.0, of_b=1)
    assert not shares.asks_much_less("a", "b")
    pass_s(0.5, of_b=4)
    assert not shares.asks_much_less("a", "b"), "of its last 32 requests, b sent 20 in this time"
    pass_s(0.2, of_b=4)
    assert shares.asks_much_less("a", "b")
    pass_s(3.0, of_b=4)
    assert shares.asks_much_less("a", "b")
    assert shares.is_outdone("a", 1.0, {"a": 1, "b": 3})
    assert shares.room_for_others("b", 1.0, {}, 1.0) == pytest.approx(10 + _DEVIATIONS * 10**0.5, abs=2)


def test_who_is_quiet_may_send_several_at_once(clock: Clock) -> None:
    shares = FairShares()
    for step in range(200):
        clock.now += 0.1
        for tenant in ("a" * (step % 4 == 0), "b", "b"):
            if tenant:
                shares.ask(tenant, 1.0, 1.0)
    for _ in range(40):
        clock.now += 0.001
        shares.ask("a", 1.0, 1.0)
    assert not shares.asks_much_less("b", "a"), "in ten seconds it asked for less than b"
    assert shares.room_for_others("a", 1.0, {}, 1.0) == 0
    clock.now += 1.0
    for _ in range(20):
        shares.ask("b", 1.0, 1.0)
    assert not shares.comes_first("b")


def test_what_is_not_remembered_of_a_tenant_is_not_taken_for_little(clock: Clock) -> None:
    shares = FairShares()
    for step in range(4000):
        clock.now += 0.005
        shares.ask("often", 1.0, 0.01)
        if step % 50 == 0:
            shares.ask("large", 1.0, 0.6)
    assert not shares.asks_much_less("often", "large"), "2 and 2.4 s of work per second"


def test_tenants_that_ask_for_the_same_seldom_differ_by_much(clock: Clock) -> None:
    shares, chance, num_less = FairShares(), random.Random(0), 0
    for _ in range(3000):
        clock.now += chance.expovariate(20.0)
        shares.ask(chance.choice("ab"), 1.0, 1.0)
        num_less += shares.asks_much_less("a", "b")
    assert num_less < 0.03 * 3000


def test_who_asks_rarely_is_compared_over_ten_seconds(clock: Clock) -> None:
    shares = FairShares()
    for second in range(60):
        clock.now += 1.0
        for _ in range(2 if second < 50 else 1):
            shares.ask("a", 1.0, 1.0)
        if second % 4 == 0:
            shares.ask("b", 1.0, 1.0)
    assert shares.asks_much_less("b", "a"), "three requests, and ten"
    clock.now += 4.0
    for _ in range(4):
        shares.ask("b", 1.0, 1.0)
    assert not shares.asks_much_less("b", "a"), "five, and six"


def test_chance_lets_nobody_outdo_others(clock: Clock) -> None:
    shares = FairShares()
    for _ in range(30):
        clock.now += 1
        for tenant in ("a", "b"):
            shares.ask(tenant, 1.0, 1.0)
    for _ in range(6):
        shares.ask("a", 1.0, 1.0)
    assert not shares.asks_much_less("b", "a")
    assert not shares.is_outdone("b", 1.0, {"a": 6})
    for _ in range(6):
        shares.ask("a", 1.0, 1.0)
    assert shares.asks_much_less("b", "a")


def book(
    bookings: Bookings,
    key: int,
    earliest: float,
    work_s: float = 0.5,
    tenant: str = "",
    gives_way: tuple[str, ...] = (),
) -> float:
    def expected(at: float) -> Admitted:
        request = TokenizedRequest(str(key), tenant, (key,), SamplingParams(), NO_OBJECTIVES, at, at + 60)
        return Admitted(request, judged_at=at)

    return bookings.book(key, earliest, work_s, expected, gives_way.__contains__)


def due_back(bookings: Bookings) -> list[str]:
    return [one.request.request_id for one in bookings.due_back()]


def test_who_comes_back_in_time_is_admitted_if_that_is_likely_to_do(clock: Clock) -> None:
    bookings = Bookings()
    assert book(bookings, 7, 1005.0, 2.0) == 1005.0
    assert book(bookings, 7, 1004.0, 2.0) == 1007.0, "a second client with the same request"
    assert book(bookings, 8, 1020.0, 2.0) == 1020.0
    assert not bookings.redeem(7), "five seconds too early"
    clock.now = 1004.5
    assert bookings.redeem(7)
    assert not bookings.redeem(7)
    assert not bookings.redeem(9)
    clock.now = 1007.5
    assert bookings.redeem(7)
    clock.now = 1021.5
    assert not bookings.redeem(8), "too late"


def test_a_slot_far_ahead_delays_nobody_who_may_come_earlier(clock: Clock) -> None:
    bookings = Bookings()
    assert book(bookings, 1, 1090.0, 2.0) == 1090.0
    assert book(bookings, 2, 1001.0, 2.0) == 1001.0
    assert book(bookings, 3, 1001.0, 2.0) == 1003.0
    assert book(bookings, 4, 1089.0, 2.0) == 1092.0, "the time before the first one's slot is too short"
    assert book(bookings, 1, 1005.0, 2.0) == 1005.0, "the same request, from a client that may come earlier"
    clock.now = 1005.0
    assert bookings.redeem(1)
    assert not bookings.redeem(1), "the other one's slot has not come"
    clock.now = 1090.0
    assert bookings.redeem(1)


def test_slots_of_a_tenant_that_asks_for_much_delay_no_others(clock: Clock) -> None:
    bookings = Bookings()
    for number in range(50):
        last = book(bookings, number, 1001.0, tenant="noisy")
    assert book(bookings, 100, 1001.0, tenant="quiet", gives_way=("noisy",)) == 1001.0
    assert book(bookings, 101, 1001.0, tenant="quiet", gives_way=("noisy",)) == 1001.5
    assert book(bookings, 102, 1001.0, tenant="noisy") > last


def test_so_many_are_expected_at_most(clock: Clock) -> None:
    bookings = Bookings()
    for number in range(1000):
        book(bookings, number, 1001.0)
    assert len(bookings._order) == 2 * (MAX_AHEAD_S - 1), "the later ones are not expected"
    bookings = Bookings()
    for number in range(_MOST_BOOKED + 100):
        assert book(bookings, number, 1001.0, 0.0) == 1001.0
    assert len(bookings._order) == sum(map(len, bookings._open.values())) == _MOST_BOOKED
    clock.now = 1010.0
    assert not bookings.redeem(0)
    assert not bookings._order
    assert not bookings._open


def test_slots_of_clients_that_do_not_come_back_are_given_to_others(clock: Clock) -> None:
    bookings = Bookings()
    for number in range(50):
        book(bookings, number, clock.now)
    clock.now += 100
    first = book(bookings, 100, clock.now)
    assert book(bookings, 101, clock.now) - first < 0.01
    for number in range(100, 140):
        clock.now += 0.01
        book(bookings, number, clock.now, 0.0)
        assert bookings.redeem(number)
    first = book(bookings, 200, clock.now)
    assert book(bookings, 201, clock.now) - first > 0.9


def test_those_that_are_due_back_are_known_shortly_before(clock: Clock) -> None:
    bookings = Bookings()
    bookings.returning = 1.0
    for number, earliest in enumerate((1001.0, 1002.5, 1004.5, 1030.0)):
        book(bookings, number, earliest)
    assert due_back(bookings) == ["0"]
    clock.now = 1001.5
    assert due_back(bookings) == ["0", "1"]
    assert bookings.redeem(0)
    clock.now = 1003.0
    assert due_back(bookings) == ["1", "2"]
    bookings.returning = 0.5
    assert due_back(bookings) == ["1"], "half of them come, as far as is known"
    bookings.returning = 1.0
    clock.now = 1004.0
    assert due_back(bookings) == ["2"], "the other one is too late"


def test_a_tenant_is_outdone_by_a_noisy_one_until_it_has_its_share_of_what_runs(clock: Clock) -> None:
    shares = FairShares()
    assert not shares.is_outdone("small", 1.0, {}), "nobody asks for anything"
    for name, count in (("large", 20), ("small", 2), ("half", 10)):
        for _ in range(count):
            shares.ask(name, 1.0, 1.0)
    assert shares.is_outdone("small", 1.0, {"large": 5, "small": 2})
    assert not shares.is_outdone("small", 1.0, {"large": 4, "small": 2}), "it has a third, its share"
    assert not shares.is_outdone("small", 1.0, {"half": 4, "large": 2}), "the noisy one has no more"
    assert shares.is_outdone("new", 1.0, {"large": 5, "new": 1}), "it has asked for nothing yet"
    assert not shares.is_outdone("new", 1.0, {"large": 5, "new": 2}), "a quarter would be its share"
    assert shares.is_outdone("new", 3.0, {"large": 5, "new": 4}), "a half"
    assert not shares.is_outdone("large", 1.0, {"half": 5})
    assert not shares.is_outdone("half", 1.0, {"large": 5}), "chance makes equal ones differ by less"
    for _ in range(6):
        shares.ask("heavy", 3.0, 1.0)
    assert shares.is_outdone("heavy", 3.0, {"large": 6, "heavy": 5})
    assert not shares.is_outdone("heavy", 3.0, {"large": 5, "heavy": 5}), "half of all weights is its own"


def test_who_asks_for_much_less_comes_first_whatever_runs(clock: Clock) -> None:
    shares = FairShares()
    assert not shares.comes_first("small"), "nobody asks for anything"
    for name, count in (("large", 20), ("half", 10), ("small", 2)):
        for _ in range(count):
            shares.ask(name, 1.0, 1.0)
    assert shares.comes_first("small") and shares.comes_first("new")
    assert not shares.comes_first("half") and not shares.comes_first("large")
    clock.now += 11.0
    assert not shares.comes_first("small"), "the noisy one is no longer active"


def test_a_tenant_that_asked_a_few_times_outdoes_nobody(clock: Clock) -> None:
    shares = FairShares()
    for _ in range(4):
        shares.ask("large", 1.0, 1.0)
    assert not shares.comes_first("new") and not shares.is_outdone("new", 1.0, {"large": 4})
    shares.ask("large", 1.0, 1.0)
    assert shares.is_outdone("new", 1.0, {"large": 4})


def test_who_asks_for_much_work_is_the_noisy_one_however_few_its_requests():
    shares = FairShares()
    for _ in range(6):
        shares.ask("long", 1.0, 20.0)
    for _ in range(30):
        shares.ask("short", 1.0, 0.05)
    assert shares.comes_first("short")
    assert not shares.comes_first("long")
    assert shares.asks_much_less("short", "long")
    assert shares.room_for_others("short", 5.0, {}, 0.05) == 0
    # About 3 requests a second of .05 s each, on average and four deviations more, are 30 of these: less than
    # a tenth of one of 20 s.
    assert 0 < shares.room_for_others("long", 5.0, {}, 20.0) < 0.15
    assert 0 < shares.num_overtaking("long", 5.0, 20.0) < 0.1
