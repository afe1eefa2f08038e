"""Room for future requests: demand of tenants, and appointments of refused clients."""

from __future__ import annotations

import math
import random

import pytest
from reported_pods import BATCH, SLO, ReportedSystem, request
from still_clock import Clock
from tandem_core.pod_model import Job
from tandem_gateway.admission.reservations import Appointments, Demand, Reservations
from tandem_gateway.errors import MAX_RETRY_AFTER_S
from tandem_gateway.fleet.pods import Role


def ask(demand: Demand, tenant: str, count: int = 1, work_s: float = 1.0, weight: float = 1.0) -> None:
    for _ in range(count):
        demand.ask(tenant, weight, work_s, has_objectives=True)


def use(demand: Demand, tenant: str, work_s: float, weight: float = 1.0) -> None:
    demand.ask(tenant, weight, work_s, has_objectives=False)
    demand.charge(tenant, work_s)


@pytest.fixture
def demand(clock: Clock) -> Demand:
    return Demand()


class TestShares:
    def test_a_tenant_alone_is_never_ahead(self, demand):
        for _ in range(100):
            use(demand, "noisy", 5.0)
        assert demand.ahead_s("noisy") == 0
        assert not demand.is_quieter("noisy")
        assert demand.before("noisy", has_objectives=True) == 0

    def test_a_tenant_above_its_share_is_ahead_by_the_excess(self, demand, clock):
        use(demand, "quiet", 0.1)
        for _ in range(10):
            use(demand, "noisy", 1.0)
        assert demand.ahead_s("quiet") == 0
        assert demand.ahead_s("noisy") == pytest.approx(18.9), "ten seconds at half of the fleet, less one"
        clock.now += 9
        assert demand.ahead_s("noisy") == pytest.approx(10.0)
        clock.now += 2
        assert demand.ahead_s("noisy") == 0, "the other one is no longer active"

    def test_weights_are_shares(self, demand):
        for _ in range(10):
            use(demand, "small", 1.0)
            use(demand, "large", 3.0, weight=3.0)
        ask(demand, "idle")
        assert demand.ahead_s("small") > 10
        assert demand.ahead_s("small") == pytest.approx(demand.ahead_s("large"), rel=0.15)

    def test_share_that_was_not_used_is_no_credit(self, demand, clock):
        use(demand, "late", 0.1)
        clock.now += 8
        use(demand, "other", 0.1)
        use(demand, "late", 5.0)
        assert demand.ahead_s("late") == pytest.approx(10.0 - 1 - 0.2)

    def test_tenants_with_equal_use_are_not_ahead_on_a_busy_fleet(self, demand):
        for _ in range(100):
            for tenant in ("a", "b", "c"):
                use(demand, tenant, 1.0)
        assert [demand.ahead_s(tenant) for tenant in ("a", "b", "c")] == pytest.approx([0, 0, 1], abs=1)

    def test_tenants_that_left_are_forgotten(self, demand, clock):
        for number in range(1000):
            use(demand, f"t{number}", 1.0)
        clock.now += 11
        use(demand, "new", 1.0)
        clock.now += 0.001
        use(demand, "newer", 1.0)
        assert demand.ahead_s("t1") == 0.0
        ask(demand, "noisy", 10)
        assert demand.before("noisy", has_objectives=True) == 0


class TestQuieterTenants:
    def test_a_tenant_with_less_than_half_the_demand_is_quieter(self, demand, clock):
        assert not demand.is_quieter("small"), "nothing is asked for"
        for name, count in (("large", 20), ("half", 11), ("small", 2)):
            ask(demand, name, count)
        assert demand.is_quieter("small") and demand.is_quieter("new")
        assert not demand.is_quieter("half") and not demand.is_quieter("large")
        clock.now += 11.0
        assert not demand.is_quieter("small"), "the noisy one is no longer active"

    def test_a_few_requests_make_no_tenant_noisy(self, demand):
        ask(demand, "large", 4)
        assert not demand.is_quieter("new")
        ask(demand, "large")
        assert demand.is_quieter("new")

    def test_demand_is_work_and_not_the_number_of_requests(self, demand):
        ask(demand, "long", 6, work_s=20.0)
        ask(demand, "short", 30, work_s=0.05)
        assert demand.is_quieter("short") and not demand.is_quieter("long")
        assert demand.before("short", has_objectives=True) == 0
        assert demand.before("long", has_objectives=True) == pytest.approx(30 * 0.05 / 2)

    def test_a_tenant_with_more_weight_may_ask_for_more(self, demand):
        ask(demand, "large", 30, weight=20.0)
        ask(demand, "small", 6)
        assert not demand.is_quieter("small")
        assert demand.is_quieter("large")
        ask(demand, "large", 120, weight=20.0)
        assert not demand.is_quieter("small"), "7.5 times 20, next to 6"
        ask(demand, "large", weight=10.0)
        assert demand.is_quieter("small"), "a new weight counts at once"

    @pytest.mark.parametrize("rate", [4.0, 20.0])
    def test_tenants_with_equal_demand_rarely_differ_by_much(self, demand, clock, rate):
        chance, num_quieter = random.Random(0), 0
        for _ in range(3000):
            clock.now += chance.expovariate(rate)
            ask(demand, chance.choice("ab"))
            num_quieter += demand.is_quieter("a")
        assert num_quieter < 0.03 * 3000

    @pytest.mark.parametrize(("period_s", "within_s"), [(0.1, 6.0), (0.03, 0.9)])
    def test_a_sudden_rise_in_demand_makes_a_tenant_noisy_soon(self, demand, clock, period_s, within_s):
        def pass_s(seconds: float, of_b: int) -> None:
            for _ in range(round(seconds / period_s)):
                clock.now += period_s
                ask(demand, "a")
                ask(demand, "b", of_b)

        pass_s(20.0, of_b=1)
        assert not demand.is_quieter("a")
        pass_s(within_s, of_b=4)
        assert demand.is_quieter("a"), "the more it asks, the sooner"

    def test_a_burst_does_not_make_a_tenant_with_less_demand_noisy(self, demand, clock):
        for _ in range(200):
            clock.now += 0.1
            ask(demand, "large")
        ask(demand, "small", 60)
        assert not demand.is_quieter("large")

    def test_requests_with_objectives_have_priority_over_best_effort(self, demand, clock):
        for _ in range(600):
            clock.now += 0.1
            ask(demand, "a", work_s=0.5)
            use(demand, "b", 0.5)
        assert demand.before("a", has_objectives=False) == pytest.approx(5.0, rel=0.03)
        assert demand.before("b", has_objectives=False) == pytest.approx(5.0, rel=0.03)
        assert demand.before("a", has_objectives=True) == 0


class TestExpectedRequests:
    """A request takes 1.09 s alone, and .35 s of the pod in a full batch."""

    @staticmethod
    def expected(
        system: ReportedSystem, reservations: Reservations, tenant: str, slo=SLO, **fields: object
    ) -> list[Job]:
        asked = request(slo, tenant=tenant, **fields)
        return reservations.expected(asked, system.plan(asked).route)

    def number(self, *args: object, **fields: object) -> int:
        return sum(job.num_places for job in self.expected(*args, **fields))

    async def test_a_noisy_tenants_request_expects_quieter_tenants_until_it_is_due(self, system, clock):
        reservations = Reservations()
        work_s = system.plan(request()).route.work_s
        for number in range(600):
            clock.now += 0.05
            ask(reservations.demand, "noisy", 2, work_s)
            if number % 5 == 0:
                ask(reservations.demand, "quiet", 1, work_s)
                use(reservations.demand, "quiet", 0.2 * work_s)
        system.report(system.pods[0])
        assert self.expected(system, reservations, "quiet") == []
        # Four per second, and a standard deviation.
        for due_s in (1.5, 3.0):
            jobs = self.expected(system, reservations, "noisy", due_s=due_s)
            assert len(jobs) == pytest.approx(4 * due_s + math.sqrt(4 * due_s), abs=1)
            assert [job.due - clock.now for job in jobs] == pytest.approx([job.ready_s for job in jobs])
            ready_s = [job.ready_s for job in jobs]
            assert ready_s == sorted(ready_s)
            assert ready_s[0] < 0.1 and ready_s[-1] == pytest.approx(due_s, abs=0.3)

    async def test_many_small_tenants_count_as_one_with_their_total_demand(self, system, clock):
        def number(num_small: int) -> int:
            reservations = Reservations()
            for number in range(600):
                clock.now += 0.05
                ask(reservations.demand, "noisy", 2, 0.2)
                if number % 5 == 0:
                    ask(reservations.demand, f"small {number // 5 % num_small}", 1, 0.2)
            system.report(system.pods[0])
            return self.number(system, reservations, "noisy", due_s=2.0)

        assert number(20) == pytest.approx(number(1), abs=2) and number(1) > 5

    async def test_each_of_several_pods_expects_its_part(self, make_system):
        numbers = []
        for num_pods in (1, 2):
            system = make_system(num_pods=num_pods)
            reservations, asked = Reservations(), request(tenant="noisy", due_s=4.0)
            route = system.plan(asked).route
            ask(reservations.demand, "noisy", 60, route.work_s)
            ask(reservations.demand, "quiet", 20, route.work_s)
            numbers.append(sum(job.num_places for job in reservations.expected(asked, route)))
        assert numbers == [pytest.approx(40 + 6, abs=2), pytest.approx(20 + 4, abs=2)]

    async def test_many_expected_requests_become_few_jobs(self, system, clock):
        reservations = Reservations()
        work_s = system.plan(request()).route.work_s
        ask(reservations.demand, "noisy", 300, work_s)
        ask(reservations.demand, "quiet", 40, work_s)
        jobs = self.expected(system, reservations, "noisy", due_s=4.0)
        assert len(jobs) <= 16
        assert sum(job.num_places for job in jobs) == pytest.approx(80 + 9, abs=6)
        assert {job.stop - job.start for job in jobs} == {100 * jobs[0].num_places}
        ask(reservations.demand, "quiet", work_s=100_000 * work_s)
        ask(reservations.demand, "noisy", work_s=900_000 * work_s)
        jobs = self.expected(system, reservations, "noisy", due_s=4.0)
        assert [job.num_places for job in jobs] == [16] * 16, "a job never takes more than a batch"

    async def test_best_effort_requests_expect_those_with_objectives_while_they_run(self, system):
        reservations = Reservations()
        work_s = system.plan(request()).route.work_s
        assert self.expected(system, reservations, "default", BATCH) == []
        # Two per second, each for 1.09 s: two, and one standard deviation.
        ask(reservations.demand, "default", 4, work_s)
        assert self.number(system, reservations, "default", BATCH) == pytest.approx(4, abs=1)
        assert self.expected(system, reservations, "default") == []

    async def test_clients_are_due_back_at_their_pod(self, make_system):
        system = make_system(num_pods=2)
        reservations, asked = Reservations(), request()
        route = system.plan(asked).route
        reservations.appointments.returning = 1.0
        reservations.appointments.make(1, asked, route, 1, 0.0)
        assert len(reservations.due_back("default", route)) == 1
        route.decode.healthy = False
        elsewhere = system.plan(asked).route
        assert elsewhere.decode is not route.decode
        assert reservations.due_back("default", elsewhere) == []

    async def test_a_quieter_tenant_leaves_room_for_its_own_returning_clients_only(self, system):
        reservations, route = Reservations(), system.plan(request()).route
        reservations.appointments.returning = 1.0
        for tenant in ("noisy", "quiet"):
            reservations.appointments.make(1, request(tenant=tenant), route, 1, 0.0)
        ask(reservations.demand, "quiet", 2)
        ask(reservations.demand, "noisy", 20)
        assert [one.tenant for one in reservations.due_back("quiet", route)] == ["quiet"]
        assert [one.tenant for one in reservations.due_back("noisy", route)] == ["noisy", "quiet"]

    async def test_future_requests_of_a_prefill_pod_bring_no_prompt_to_their_decode_pod(self, system):
        system.add_pod("p:0", Role.PREFILL)
        reservations, asked = Reservations(), request(tenant="noisy")
        route = system.plan(asked).route
        ask(reservations.demand, "noisy", 60, route.work_s)
        ask(reservations.demand, "quiet", 20, route.work_s)
        reservations.appointments.returning = 1.0
        reservations.appointments.make(1, asked, route, 1, 0.0)
        due_back = reservations.due_back("noisy", route)
        jobs = [*reservations.expected(asked, route), *(one.job(asked.arrived) for one in due_back)]
        assert len(jobs) > 1
        assert all(job.start == job.stop for job in jobs)


class Diary:
    """Appointments of one system. Half of the clients return, and may use half of the time."""

    def __init__(self, system: ReportedSystem, clock: Clock) -> None:
        self.appointments = Appointments()
        self._clock, self._began = clock, clock.now
        self._asked = request()
        self.route = system.plan(self._asked).route

    @property
    def length_s(self) -> float:
        """Initial time between two clients."""
        return self.route.work_s

    def make(self, key: int, after_s: float, num_places: int = 1) -> float:
        """Returns when the client is due, in seconds since the beginning."""
        asked = request(request_id=str(key), num_prompt=1)
        retry_s = self.appointments.make(key, asked, self.route, num_places, after_s)
        return self._clock.now - self._began + retry_s

    def keep(self, key: int) -> bool:
        return self.appointments.keep(key)

    def near(self) -> list[str]:
        return [str(one.key) for one in self.appointments.near()]


@pytest.fixture
async def diary(system: ReportedSystem, clock: Clock) -> Diary:
    return Diary(system, clock)


class TestAppointments:
    async def test_clients_come_one_after_the_other(self, diary):
        due = [diary.make(key, 5.0) for key in range(3)]
        assert due == pytest.approx([5.0, 5.0 + diary.length_s, 5.0 + 2 * diary.length_s])

    async def test_several_choices_take_longer(self, diary):
        diary.make(1, 5.0, num_places=4)
        assert diary.make(2, 5.0) == pytest.approx(5.0 + 4 * diary.length_s)

    async def test_an_appointment_is_kept_once_around_its_time(self, diary, clock):
        diary.make(7, 5.0)
        clock.now += 3.9
        assert not diary.keep(7), "1.1 s too early"
        clock.now += 0.2
        assert not diary.keep(9)
        assert diary.keep(7)
        assert not diary.keep(7)

    async def test_an_appointment_is_kept_until_a_second_late(self, diary, clock):
        diary.make(7, 5.0)
        diary.make(8, 5.0)
        clock.now += 5.9
        assert diary.keep(7)
        clock.now += 0.5
        assert not diary.keep(8)

    async def test_equal_requests_have_an_appointment_each(self, diary, clock):
        assert diary.make(1, 50.0) == 50.0
        assert diary.make(1, 5.0) == 5.0, "the same request, of a client that may come earlier"
        clock.now += 5.0
        assert diary.keep(1)
        assert not diary.keep(1), "the other one's time has not come"
        clock.now += 45.0
        assert diary.keep(1)

    async def test_a_late_appointment_does_not_delay_earlier_ones(self, diary):
        length_s = diary.length_s
        assert diary.make(1, 50.0) == 50.0
        assert diary.make(2, 1.0) == 1.0
        assert diary.make(3, 1.0) == pytest.approx(1.0 + length_s)
        between = diary.make(4, 50.0 - length_s / 2)
        assert between == pytest.approx(50.0 + length_s), "the time before the first one is too short"

    async def test_near_appointments_are_as_many_as_clients_are_likely_to_return(self, diary, clock):
        for number in range(40):  # so all are likely to come
            diary.make(number, 0.0)
            assert diary.keep(number)
            clock.now += 3.0
        for number, after_s in ((100, 1.0), (101, 2.5), (102, 4.5), (103, 30.0)):
            diary.make(number, after_s)
        assert diary.near() == ["100"]
        clock.now += 1.0
        assert diary.near() == ["100", "101"]
        assert diary.keep(100)
        clock.now += 2.0
        assert diary.near() == ["101", "102"]
        clock.now += 1.0
        assert diary.near() == ["102"], "the other one is too late"

    async def test_half_of_the_clients_are_expected_at_first(self, diary):
        for number in range(4):
            diary.make(number, 0.0)
        assert diary.near() == ["0", "1"]

    async def test_missed_appointments_leave_room_for_other_clients(self, diary, clock):
        for number in range(50):
            diary.make(number, 0.0)
        clock.now += 100
        first = diary.make(100, 0.0)
        assert diary.make(101, 0.0) - first < 0.1 * diary.length_s
        assert diary.near() == []

    async def test_a_flood_of_clients_that_do_not_return_delays_others_for_a_moment_only(self, diary, clock):
        for number in range(1000):
            diary.make(number, 1.0)
        assert diary.make(1000, 1.0) == MAX_RETRY_AFTER_S
        clock.now += 10.0
        assert diary.make(1001, 1.0) < 10.0 + 2.0

    async def test_no_appointment_is_later_than_the_longest_retry_after(self, diary, clock):
        assert diary.make(0, 1e9) == MAX_RETRY_AFTER_S
        for number in range(5000):
            due = diary.make(number, 0.0, num_places=10)
        assert due == MAX_RETRY_AFTER_S

    async def test_appointments_are_bounded(self, diary, clock):
        for number in range(4200):
            diary.make(number, 1.5, num_places=0)  # takes no time
        near = diary.appointments.near()
        assert len(near) == 2048, "half of 4096"
        assert not diary.appointments.keep(4150)
        clock.now += 10
        assert diary.near() == []

    async def test_appointments_of_a_tenant_do_not_delay_another_tenants(self, diary):
        for number in range(500):
            diary.make(number, 1.0)
        asked = request(tenant="other", num_prompt=1)
        retry_s = diary.appointments.make(1000, asked, diary.route, 1, 1.0)
        assert retry_s == 1.0

    async def test_a_missed_appointment_is_forgotten(self, diary, clock):
        diary.make(1, 5.0)
        clock.now += 6.5
        assert diary.near() == []
        assert not diary.keep(1)
        assert diary.make(2, 0.0) == pytest.approx(6.5), "nothing is in its way"
