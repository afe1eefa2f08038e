"""Admission: the life of a request from its arrival to its end, and the measurements."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from reported_pods import BATCH, SLO, ReportedSystem, request
from tandem_core.beams import BeamParams
from tandem_core.contracts import RefusalReason
from tandem_core.errors import InvalidRequestError
from tandem_core.sampling import SamplingParams
from tandem_core.slo import SloTarget
from tandem_gateway.errors import DeadlineError, OverloadedError, UnavailableError
from tandem_gateway.request import TenantLimits, TokenizedRequest
from waiting import run_ready_tasks

LOOSE = SloTarget("chat", ttft_s=50.0, e2e_s=100.0)


class Line:
    """Requests in front of an admission; `entered` is the order in which they got their places."""

    def __init__(self, system: ReportedSystem) -> None:
        self.admission = system.admission
        self.entered: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def arrive(
        self, name: str, slo: SloTarget = SLO, num_places: int = 1, **fields: object
    ) -> asyncio.Task[None]:
        asked = request(slo, request_id=name, **fields)
        self._leave[name] = asyncio.Event()
        task = asyncio.create_task(self._stay(asked, num_places))
        self._tasks.append(task)
        await run_ready_tasks()
        return task

    async def _stay(self, asked: TokenizedRequest, num_places: int) -> None:
        async with self.admission.slot(asked, num_places):
            self.entered.append(asked.request_id)
            await self._leave[asked.request_id].wait()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._leave[name].set()
            await run_ready_tasks()

    @property
    def counts(self) -> tuple[int, int]:
        return self.admission.queue.num_in_flight, self.admission.queue.num_waiting

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self.counts == (0, 0), "every place is free again"
        assert not self.admission.queue.of_tenant


@pytest.fixture
async def make_line(make_system) -> AsyncIterator[object]:
    """Without pods, so without predictions."""
    async with contextlib.AsyncExitStack() as made:

        def make(**given: object) -> Line:
            line = Line(make_system(num_pods=0, **{"max_in_flight": 1, **given}))
            made.push_async_callback(line.close)
            return line

        yield make


class TestQueue:
    async def test_places_are_passed_on(self, make_line):
        line = make_line(max_in_flight=2)
        for name in "abc":
            await line.arrive(name)
        assert (line.entered, line.counts) == (["a", "b"], (2, 1))
        await line.leave("b")
        assert line.entered == ["a", "b", "c"]
        await line.leave("a", "c")
        assert line.counts == (0, 0)

    async def test_the_earliest_deadline_goes_first_in_any_order_of_arrival(self, make_line):
        line = make_line()
        interactive = SloTarget("interactive", ttft_s=2.5)
        for name, slo in (("r", SLO), ("b", BATCH), ("i", interactive), ("c", SLO), ("i2", interactive)):
            await line.arrive(name, slo)
        await line.leave("r", "c", "i", "i2", "b")
        assert line.entered == ["r", "c", "i", "i2", "b"]

    async def test_a_request_with_objectives_passes_best_effort_ones(self, make_line):
        line = make_line(max_in_flight=4, max_queue=2)
        for name in "abcde":
            await line.arrive(name, BATCH)
        assert (line.entered, line.counts) == (["a", "b", "c"], (3, 2)), "three quarters of four"
        await line.arrive("chat")
        assert line.entered[-1] == "chat", "though the queue is full"
        await line.leave("a")
        assert line.entered[-1] == "d"

    async def test_a_full_queue_refuses(self, make_line):
        line = make_line(max_queue=1)
        *_, last = [await line.arrive(name) for name in "abc"]
        with pytest.raises(OverloadedError, match="1 waiting, limit 1") as info:
            await last
        assert info.value.reason is RefusalReason.QUEUE_FULL

    async def test_a_request_that_is_cancelled_while_it_waits_leaves_at_once(self, make_line):
        line = make_line()
        _, gone, _ = [await line.arrive(name) for name in ("running", "gone", "last")]
        gone.cancel()
        await run_ready_tasks()
        assert line.counts == (1, 1)
        await line.leave("running")
        assert line.entered == ["running", "last"]

    async def test_a_place_given_to_a_request_cancelled_in_the_same_moment_is_passed_on(self, make_line):
        line = make_line()
        running, gone, _ = [await line.arrive(name) for name in ("running", "gone", "last")]
        running.cancel()
        await asyncio.sleep(0)  # one iteration of the loop: "gone" has the place but has not run yet
        gone.cancel()
        await run_ready_tasks()
        assert line.entered == ["running", "last"]

    async def test_a_deadline_ends_the_wait(self, make_line, clock):
        line = make_line()
        await line.arrive("running")
        late = await line.arrive("late", deadline=clock.now + 5.0)
        clock.now += 4.9
        await run_ready_tasks()
        assert not late.done()
        clock.now += 0.2
        await run_ready_tasks()
        with pytest.raises(DeadlineError, match="waited in the queue"):
            await late
        assert line.counts == (1, 0)

    async def test_a_deadline_that_has_passed_is_an_error_at_once(self, make_line, clock):
        line = make_line()
        with pytest.raises(DeadlineError, match="before the request could start"):
            await (await line.arrive("dead", deadline=clock.now - 1.0))

    async def test_a_request_for_several_places_is_not_overtaken(self, make_line):
        line = make_line(max_in_flight=8)  # six of them for best-effort requests
        for name in "abcde":
            await line.arrive(name, BATCH)
        await line.arrive("four", BATCH, num_places=4)
        await line.arrive("later", BATCH)
        assert line.entered == [*"abcde"], "one place is free, for which it would have to wait again"
        await line.arrive("chat")
        assert line.entered[-1] == "chat", "of another kind"
        await line.leave("a", "b", "c")
        assert line.entered[-1] == "four"
        await line.leave("d")
        assert line.entered[-1] == "later"

    async def test_requests_that_begin_in_one_moment_are_planned_next_to_each_other(self, make_system):
        system = make_system(max_in_flight=1)
        line = Line(system)
        async with system.running(request(LOOSE)):
            for name in "abc":
                await line.arrive(name, LOOSE)
            system.admission.queue.max_in_flight = 4
        await run_ready_tasks()
        times = system.router.times(system.plan(request()))
        ends = {work.placed: one.end_s for work, one in times.items()}
        assert line.entered == ["a", "b", "c"]
        for admitted in system.admission.open_requests():
            assert admitted.placed.end.left_s == pytest.approx(ends[admitted.placed], abs=0.05)
        await line.close()

    async def test_an_arrival_starts_waiting_requests_before_it_is_planned(self, system):
        """The best-effort request waited for tokens that have arrived since."""
        line = Line(system)
        async with system.running(request(SloTarget("chat", e2e_s=1.6)), num_tokens=1) as running:
            await line.arrive("batch", BATCH)
            running.placed.gained(90, running.first_at)
            await line.arrive("chat", LOOSE)
            names = [admitted.request.request_id for admitted in system.admission.open_requests()]
            assert names[1:] == ["batch", "chat"]
            times = system.router.times(system.plan(request()))
            ends = {work.placed: one.end_s for work, one in times.items()}
            for admitted in system.admission.open_requests()[1:]:
                assert admitted.placed.end.left_s == pytest.approx(ends[admitted.placed], abs=0.05)
        await line.close()

    async def test_free_room_is_found_without_the_end_of_a_request(self, system):
        async def run_batch() -> None:
            async with system.admission.slot(request(BATCH)):
                pass

        async with system.running(request(SloTarget("chat", e2e_s=1.6)), num_tokens=1) as running:
            waiting = asyncio.create_task(run_batch())
            await run_ready_tasks()
            assert system.admission.queue.num_waiting == 1
            running.placed.gained(90, running.first_at)
            await system.pass_s(0.6)
            assert waiting.done()

    async def test_a_best_effort_request_that_waits_has_no_prediction(self, system):
        queue, line = system.admission.queue, Line(system)
        async with system.running(request(SloTarget("chat", e2e_s=1.6)), num_tokens=1):
            await line.arrive("batch", BATCH)
            assert [admitted.forecast for admitted in queue.waiting()] == [None]
            assert [one.request.request_id for one in system.admission.open_requests()][1:] == ["batch"]
        await line.close()

    async def test_after_a_wait_a_request_is_planned_anew(self, make_system, clock):
        system = make_system(num_pods=2, max_in_flight=1)
        first, second = system.pods
        second.healthy = False
        entered: list[object] = []

        async def wait() -> None:
            async with system.admission.slot(request(LOOSE)) as admitted:
                entered.append(admitted)

        async with system.running(request(LOOSE)):
            waiting = asyncio.create_task(wait())
            await run_ready_tasks()
            await system.pass_s(3.0)
            first.healthy, second.healthy = False, True
        await waiting
        (admitted,) = entered
        assert admitted.placed.route.decode is second
        assert admitted.queued_s == pytest.approx(3.0)
        assert admitted.forecast.route.decode is first, "as it was predicted when it came"


class TestTenantLimits:
    async def test_a_tenant_at_its_limit_is_refused_with_a_retry_after(self, system, clock):
        limited = request(BATCH, limits=TenantLimits(places=1))
        async with system.running(limited, num_tokens=1):
            with pytest.raises(OverloadedError, match="has 1 requests here already, limit 1") as info:
                await system.admission.slot(request(BATCH, limits=TenantLimits(places=1))).__aenter__()
            assert info.value.reason is RefusalReason.TENANT_REQUESTS
            assert info.value.retry_after_s == pytest.approx(0.1 + 0.99), "its predicted end"
            clock.now += 8.0
            with pytest.raises(OverloadedError) as info:
                await system.admission.slot(request(BATCH, limits=TenantLimits(places=1))).__aenter__()
            assert info.value.retry_after_s == pytest.approx(2.0), "a quarter of the time that it has taken"
        async with system.admission.slot(request(BATCH, limits=TenantLimits(places=1))):
            pass

    async def test_other_tenants_are_not_limited_by_it(self, system):
        limits = TenantLimits(places=1)
        async with (
            system.admission.slot(request(BATCH, limits=limits)),
            system.admission.slot(request(BATCH, tenant="other", limits=limits)),
        ):
            pass

    async def test_more_choices_than_a_tenant_has_places_are_an_error(self, system):
        with pytest.raises(InvalidRequestError, match="makes 3 sequences, but tenant default may have 2"):
            await system.admission.slot(request(limits=TenantLimits(places=2)), 3).__aenter__()


class Observed:
    """Whether measurements reached the forecaster. They are many times the predicted time, and so raise the
    upper quantiles of later predictions."""

    def __init__(self, system: ReportedSystem) -> None:
        self._system = system
        self._asked = request()

    def _forecast(self):
        return self._system.forecaster.on_route(self._asked, self._system.plan(self._asked).route)

    @property
    def first(self) -> bool:
        """Whether a much later first token was measured."""
        return self._forecast().ttft.high > 2 * 0.1

    @property
    def end(self) -> bool:
        return self._forecast().e2e.high > 2 * 1.1

    @property
    def undisturbed_end(self) -> bool:
        return self._forecast().end.high > 2 * 1.1


class TestMeasurements:
    async def test_the_first_token_and_the_end_are_measured(self, system, clock):
        observed = Observed(system)
        async with system.running(request(LOOSE)) as running:
            clock.now += 3.0
            running.placed.gained(1, clock.now)
            system.admission.started(running)
            assert (observed.first, observed.undisturbed_end) == (True, False)
            system.admission.ended(running, e2e_s=9.0, num_tokens=100)
        assert observed.end and observed.undisturbed_end

    async def test_times_count_from_the_prediction(self, system, clock):
        """Ten seconds passed before the request was decided on."""
        asked = request(LOOSE)
        clock.now += 10.0
        await system.pass_s(0)
        observed = Observed(system)
        async with system.running(asked) as running:
            clock.now += 0.1
            running.placed.gained(1, clock.now)
            system.admission.started(running)
            system.admission.ended(running, e2e_s=11.09, num_tokens=100)
        assert not observed.first and not observed.end

    async def test_delays_by_later_requests_are_no_model_errors(self, system, clock):
        """Alone it ends after 1.09 s, with the other one after about 2.1 s."""
        observed = Observed(system)
        long_prompt = request(LOOSE, num_prompt=1000, max_tokens=1)
        async with system.running(request(LOOSE), num_tokens=1) as running, system.running(long_prompt):
            e2e_s = running.placed.end.model_s
            assert 1.9 < e2e_s < 2.2
            for _ in range(4):
                system.admission.ended(running, e2e_s=e2e_s, num_tokens=100)
        forecast = system.forecaster.on_route(request(), system.plan(request()).route)
        assert forecast.e2e.high > 1.5, "the receipt's prediction counts it"
        assert not observed.undisturbed_end

    async def test_the_rest_is_measured_from_the_last_arrival_on(self, system, clock):
        """Half a second is 5 % of the whole answer, but much of the rest."""
        async with system.running(request(LOOSE, max_tokens=1000), num_tokens=1) as running:
            clock.now += 9.8
            running.placed.gained(970, running.first_at)
            async with system.running(request(LOOSE, max_tokens=1)):
                rest_s = running.placed.end.left_s
                assert 0.3 < rest_s < 0.5
                e2e_s = clock.now + rest_s + 0.5 - running.request.arrived
                for _ in range(8):
                    system.admission.ended(running, e2e_s=e2e_s, num_tokens=1000)
                assert system.forecaster.end_of(running.placed, rest_s).high == pytest.approx(rest_s + 0.5)

    async def test_delays_by_a_lost_pod_are_not_measured(self, system, clock):
        observed = Observed(system)
        async with system.running(request(LOOSE)) as before:
            clock.now += 3.0
            system.fleet.mark_dead(system.pods[0], "lost")
            system.pods[0].healthy = True
            clock.now += 0.1
            before.placed.gained(1, clock.now)
            system.admission.started(before)
            system.admission.ended(before, e2e_s=9.0, num_tokens=100)
            assert not observed.first and not observed.end
        async with system.running(request(LOOSE)) as after:
            clock.now += 3.0
            after.placed.gained(1, clock.now)
            system.admission.started(after)
        assert observed.first

    async def test_calls_with_several_prompts_are_not_measured(self, system, clock):
        observed = Observed(system)
        async with system.admission.slot(request(LOOSE), 2, 5) as running:
            clock.now += 3.0
            running.placed.gained(1, clock.now)
            system.admission.started(running)
            system.admission.ended(running, e2e_s=9.0, num_tokens=100)
        assert not (observed.first or observed.end or observed.undisturbed_end)

    async def test_beam_searches_are_not_measured(self, system, clock):
        observed = Observed(system)
        search = SamplingParams(max_tokens=100, ignore_eos=True, beam_search=BeamParams(2))
        async with system.admission.slot(replace(request(LOOSE), sampling=search), 2) as running:
            clock.now += 3.0
            running.placed.gained(100, clock.now)
            system.admission.started(running)
            system.admission.ended(running, e2e_s=9.0, num_tokens=100)
        assert not (observed.first or observed.end or observed.undisturbed_end)

    @pytest.mark.parametrize(("objective_s", "is_measured"), [(1.9, True), (9.0, False)])
    async def test_a_client_that_leaves_is_measured_if_it_was_late(
        self, system, clock, objective_s, is_measured
    ):
        observed = Observed(system)
        slo = SloTarget("chat", ttft_s=objective_s, e2e_s=objective_s)
        with contextlib.suppress(ConnectionError):
            async with system.running(request(slo)):
                clock.now += 5.0
                raise ConnectionError
        assert (observed.first, observed.undisturbed_end) == (is_measured, is_measured)

    async def test_a_first_token_that_came_in_time_is_not_measured_again(self, system, clock):
        observed = Observed(system)
        with contextlib.suppress(ConnectionError):
            async with system.running(request(SloTarget("chat", ttft_s=1.0))) as running:
                clock.now += 0.1
                running.placed.gained(1, clock.now)
                system.admission.started(running)
                clock.now += 5.0
                raise ConnectionError
        assert not observed.first

    async def test_the_length_of_an_answer_is_remembered(self, system):
        plain = SamplingParams(max_tokens=100)
        asked = replace(request(LOOSE), sampling=plain)
        assert system.plan(asked).route.num_output == 100
        for _ in range(4):
            async with system.running(asked) as running:
                system.admission.ended(running, e2e_s=1.0, num_tokens=7)
        assert system.plan(asked).route.num_output == 7


@pytest.mark.parametrize("seed", range(4))
async def test_no_place_or_work_is_left_behind(make_system, clock, seed):
    """Requests of all kinds arrive, end, are cancelled and reach deadlines, while pods come and go."""
    system, rng = make_system(num_pods=2, max_in_flight=8), random.Random(seed)
    objectives = (
        SLO,
        BATCH,
        LOOSE,
        replace(SLO, ttft_s=0.3, is_strict=True),
        SloTarget("mail", e2e_slowdown=4),
    )
    outcomes = []

    async def send(asked: TokenizedRequest, num_places: int, takes_s: float) -> None:
        try:
            async with system.running(asked, num_places) as running:
                await asyncio.sleep(takes_s / 2)
                running.placed.computed()
                running.placed.gained(1, clock.now)
                system.admission.started(running)
                await asyncio.sleep(takes_s / 2)
                system.admission.ended(running, e2e_s=clock.now - asked.arrived, num_tokens=100)
            outcomes.append("ok")
        except (OverloadedError, UnavailableError, DeadlineError) as error:
            outcomes.append(type(error).__name__)

    tasks = []
    for _ in range(400):
        pod, chance = rng.choice(system.pods), rng.random()
        if chance < 0.6:
            asked = request(
                rng.choice(objectives),
                num_prompt=rng.choice((10, 100, 800)),
                tenant=rng.choice("aab"),
                deadline=clock.now + rng.choice((0.5, 60.0)),
                limits=TenantLimits(places=12),
            )
            tasks.append(asyncio.create_task(send(asked, rng.choice((1, 1, 4)), rng.uniform(0.05, 2.0))))
        elif chance < 0.7 and tasks:
            rng.choice(tasks).cancel()
        elif chance < 0.75:
            pod.healthy = not pod.healthy
            system.fleet.note_failure()
        elif chance < 0.8:
            system.report(pod, is_known=rng.random() < 0.7)
        await system.pass_s(rng.choice((0.0, 0.01, 0.1, 0.3)))
    for _ in range(200):
        await system.pass_s(0.5)
    queue = system.admission.queue
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert {"ok", "OverloadedError", "DeadlineError"} <= set(outcomes)
    assert (queue.num_in_flight, queue.num_waiting, system.admission.open_requests()) == (0, 0, [])
    assert not queue.of_tenant
    assert not any(pod.works.all for pod in system.pods)
