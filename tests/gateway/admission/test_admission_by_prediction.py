"""Who is admitted, widened or refused by what is predicted, and in which order those that wait begin."""

import asyncio
import contextlib
import itertools
import math
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from fixed_forecaster import SLO, FixedForecaster, request
from still_clock import Clock
from tandem_core.beams import BeamParams
from tandem_core.sampling import SamplingParams
from tandem_core.slo import NO_OBJECTIVES, SloTarget
from tandem_gateway.admission import judge as judge_module
from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.batch_plan import BatchPlan
from tandem_gateway.errors import OverloadedError, RefusalReason, UnavailableError
from tandem_gateway.request import DEFAULT_DUE_S, TenantLimits, TokenizedRequest
from tandem_gateway.settings import Policy
from waiting import run_ready_tasks


def judge(forecaster: FixedForecaster, *, slack: float = 0.0, asked: TokenizedRequest | None = None):
    admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=slack)
    return admission.judge.decide(asked or request())


def asks(admission: Admission, tenant: str, count: int = 1) -> None:
    """A tenant of weight 1, for so many requests like those of `request`."""
    work_s = admission._forecaster.forecast(request()).route.work_s
    for _ in range(count):
        admission.judge._shares.ask(tenant, 1.0, work_s)


def full_of_two() -> Admission:
    """On a pod that computes two sequences at once, a token of each in .2 s."""
    forecaster = FixedForecaster(ttft=0.3, token_s=0.5)
    forecaster.pod.load = replace(forecaster.pod.load, max_batch=2)
    return Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)


def due_in(seconds: float) -> TokenizedRequest:
    return request(SloTarget("chat", ttft_s=seconds))


def test_relative_objectives_are_multiples_of_what_a_request_takes_without_load():
    mail = SloTarget("mail", ttft_slowdown=5.0, e2e_s=9.0, tpot_slowdown=4.0)
    admitted = judge(FixedForecaster(ttft=0.4), asked=request(mail))
    assert admitted.request.slo == replace(mail, ttft_s=0.5, tpot_s=0.16)
    assert admitted.request.has_objectives
    assert not admitted.is_widened
    with pytest.raises(OverloadedError, match=r"first token .* is over the 0\.5 s of its objective"):
        judge(FixedForecaster(ttft=0.6), asked=request(mail))
    longer = judge(FixedForecaster(ttft=0.6), asked=request(replace(mail, ttft_s=0.7)))
    assert longer.request.slo.ttft_s == 0.7, "the longer of both counts"


def test_relative_objectives_are_not_widened_further():
    mail = SloTarget("mail", ttft_slowdown=5.0, e2e_s=0.01)
    forecaster = FixedForecaster(ttft=0.4)
    admitted = judge(forecaster, slack=20.0, asked=request(mail))
    assert admitted.request.slo.ttft_s == pytest.approx(0.5), "5 times, and not 20"
    alone_s = forecaster.forecast(request()).alone["e2e"]
    assert admitted.request.slo.e2e_s == pytest.approx(20 * alone_s)
    assert admitted.is_widened


def test_while_no_cost_is_known_there_are_no_relative_objectives():
    mail = SloTarget("mail", ttft_slowdown=5.0)
    admitted = judge(FixedForecaster(ttft=9.0, is_known=False), asked=request(mail))
    assert admitted.request.slo == mail
    assert not admitted.request.has_objectives


def test_requests_without_objectives_are_as_many_as_pods_compute_at_once_and_a_few():
    gate = full_of_two()
    batch = SloTarget("batch")
    fits = []
    for _ in range(4):
        fits.append(gate.places.fits(request(batch)))
        gate.places.take(Admitted(request(batch)))
    assert fits == [True, True, False, False], "2.5 for two sequences at once"
    assert gate.places.fits(request()), "those with objectives have a place"
    gate.places.refused()
    assert gate.places.best_effort_limit.value == pytest.approx(0.7 * 2.5, rel=1e-3), (
        "not from the gateway's places"
    )


class TestJudgement:
    def test_what_will_meet_its_objectives_is_admitted(self):
        admitted = judge(FixedForecaster(ttft=0.9))
        assert (admitted.is_widened, admitted.request.slo) == (False, SLO)
        assert admitted.forecast is not None

    @pytest.mark.parametrize(
        ("forecast", "slo", "reason", "words"),
        [
            (
                {"ttft": 1.5},
                SLO,
                RefusalReason.TTFT,
                r"first token is predicted after 1\.50 s .*over the 1 s",
            ),
            (
                {"ttft": 0.9},
                replace(SLO, e2e_s=1.5),
                RefusalReason.E2E,
                r"end is predicted after 1\.90 s .*over the 1\.5 s",
            ),
            (
                {"ttft": 0.9},
                replace(SLO, tpot_s=0.1),
                RefusalReason.TPOT,
                "111 ms per token .*over the 100 ms",
            ),
        ],
    )
    def test_what_will_miss_one_is_refused_with_what_was_predicted(self, forecast, slo, reason, words):
        with pytest.raises(OverloadedError, match=words) as info:
            judge(FixedForecaster(**forecast), asked=request(slo))
        assert info.value.reason is reason
        assert info.value.retry_after_s > 0

    def test_the_retry_after_is_the_time_until_the_objective_would_be_met(self):
        with pytest.raises(OverloadedError) as info:
            judge(FixedForecaster(ttft=4.0))
        assert info.value.retry_after_s == pytest.approx(3.0, abs=0.1)

    @pytest.mark.parametrize(("e2e_s", "share"), [(1.7, 0.25), (1.5, 0.5), (1.2, 0.75), (1.0, 1.0)])
    def test_of_an_end_that_is_late_until_enough_sequences_have_ended(self, e2e_s, share):
        forecaster = FixedForecaster(ttft=0.9, token_s=0.2)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        admission.places.service_s = 10.0
        # 1.9 s are predicted, .66 of the route's .9 s and ten tokens of .04 s for each of five sequences.
        with pytest.raises(OverloadedError) as info:
            admission.judge.decide(request(SloTarget("chat", e2e_s=e2e_s)))
        assert info.value.retry_after_s == pytest.approx(10 * share)

    def test_a_request_without_objectives_is_never_refused(self):
        assert judge(FixedForecaster(ttft=1000.0), asked=request(SloTarget("batch"))).request.due_s is None

    async def test_a_first_token_waits_for_a_place_in_a_full_batch(self):
        """A step of two takes .2 s, so that ten tokens take two seconds."""
        gate = full_of_two()
        async with gate.slot(due_in(1.0)) as one, gate.slot(due_in(1.0)) as other:
            for admitted in (one, other):
                admitted.num_tokens, admitted.first_at = 1, time.monotonic()
            with pytest.raises(OverloadedError, match=r"first token is predicted after 1\.\d+ s") as info:
                gate.judge.decide(due_in(1.1))
            assert info.value.reason is RefusalReason.TTFT
            urgent = gate.judge.decide(due_in(0.5))
            assert urgent.route.place_s == 0, "it is due earlier than those that run, which pause"
            patient = gate.judge.decide(due_in(10.0))
            assert 1 < patient.route.place_s < 3

    async def test_a_beam_search_waits_for_a_place_for_each_beam(self):
        gate = full_of_two()
        async with gate.slot(due_in(1.0)) as one:
            one.num_tokens, one.first_at = 1, time.monotonic()
            assert gate.judge.decide(due_in(10.0)).route.place_s == 0, "the second place"
            search = SamplingParams(beam_search=BeamParams(2))
            both = gate.judge.decide(replace(due_in(10.0), sampling=search))
            assert 1 < both.route.place_s < 3, "when the one that runs has ended"

    async def test_who_is_due_earlier_takes_no_place_that_another_needs_for_its_first_token(self):
        gate = full_of_two()
        async with gate.slot(due_in(0.9)), gate.slot(due_in(1.0)):
            with pytest.raises(OverloadedError) as info:
                gate.judge.decide(due_in(0.5))
            assert info.value.reason is RefusalReason.OTHERS
        async with gate.slot(due_in(0.9)), gate.slot(due_in(5.0)):
            assert gate.judge.decide(due_in(0.5)).route.place_s == 0, "the other one can wait"

    async def test_each_request_that_may_come_as_well_has_a_place_and_a_prompt_of_its_own(self, monkeypatch):
        """Of four places two are taken, each for two seconds."""
        plans = []

        class Kept(BatchPlan):
            def __init__(self, pod, turns, context):
                super().__init__(pod, turns, context)
                plans.append(self)

        monkeypatch.setattr("tandem_gateway.admission.neighbours.BatchPlan", Kept)
        gate = full_of_two()
        pod = gate.judge._forecaster.pod
        pod.load = replace(pod.load, max_batch=4)
        async with gate.slot(due_in(0.9)), gate.slot(due_in(1.0)) as waits:
            is_late = partial(gate.judge.neighbours.would_be_late, due_in(0.5), waits.route, due_back=[])
            assert [is_late(room=room) for room in range(4)] == [False, False, True, True]
        with_four = max(plans, key=lambda plan: plan.prompts(0.0, math.inf))
        assert with_four.prompts(0.0, math.inf) == (6, pytest.approx(0.6)), "a tenth of a second each"

    def test_an_idle_system_refuses_nobody_whose_objectives_it_meets_alone(self):
        """Also who is strict: else costs measured with load would never be corrected."""
        forecaster = FixedForecaster(ttft=1.5)
        forecaster.pod.is_idle = True
        judge(forecaster)
        judge(forecaster, asked=request(replace(SLO, is_strict=True)))

    def test_on_an_idle_system_a_strict_request_shows_now_and_then_what_it_takes(self, monkeypatch):
        clock = Clock()
        monkeypatch.setattr(judge_module, "time", clock)
        forecaster = FixedForecaster(ttft=1.5, alone_ttft=1.2)
        forecaster.pod.is_idle = True
        gate = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        asked = replace(request(replace(SLO, is_strict=True)), arrived=clock.now, deadline=clock.now + 600)
        gate.judge.decide(asked)
        with pytest.raises(OverloadedError, match=r"predicted after 1\.50 s") as info:
            gate.judge.decide(asked)
        assert info.value.retry_after_s == pytest.approx(30)
        clock.now += 30
        gate.judge.decide(replace(asked, arrived=clock.now))
        forecaster.alone_ttft = 2.5
        clock.now += 30
        with pytest.raises(OverloadedError, match="cannot be met here even without load"):
            gate.judge.decide(replace(asked, arrived=clock.now))

    def test_without_a_pod_who_is_strict_is_refused(self):
        forecaster = FixedForecaster(ttft=0.5)
        forecaster.forecast = lambda request: None
        assert judge(forecaster).forecast is None
        with pytest.raises(UnavailableError, match="no decode pod"):
            judge(forecaster, asked=request(replace(SLO, is_strict=True)))

    async def test_what_a_lost_pod_delayed_is_no_measure_of_predictions(self):
        """Else one pod's death would have its class refused for as long as that is remembered."""
        forecaster = FixedForecaster(ttft=0.5)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        async with admission.slot(request()) as before:
            forecaster.failed_at = time.monotonic()
            async with admission.slot(request(prompt=(4, 5))) as after:
                admission.started(before, ttft_s=9.0)
                admission.ended(before, e2e_s=10.0, num_tokens=7, met=False)
                assert forecaster.observed == [("tokens", 7)]
                admission.started(after, ttft_s=0.5)
                admission.ended(after, e2e_s=1.0, num_tokens=8, met=True)
        assert [name for name, *_ in forecaster.observed] == ["tokens", "ttft", "tokens", "e2e", "took"]

    async def test_without_reports_those_that_leave_late_lower_the_limit(self):
        forecaster = FixedForecaster(ttft=0.5, is_known=False)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        late = request(replace(SLO, ttft_s=0.02))
        async with admission.slot(late):
            await asyncio.sleep(0.03)
        assert admission.places.blind_limit.value < 8
        lowered = admission.places.blind_limit.value
        async with admission.slot(request(SloTarget("batch"))) as one:
            admission.ended(one, e2e_s=1.0, num_tokens=1, met=True)
        assert admission.places.blind_limit.value == lowered, "who has no objectives says nothing"

    async def test_a_tenant_with_all_its_places_is_told_when_one_will_be_free(self):
        forecaster = FixedForecaster(ttft=0.1, token_s=0.2)
        admission = Admission(forecaster, max_in_flight=128, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        limited = replace(request(SloTarget("batch")), limits=TenantLimits(places=1))
        async with admission.slot(limited) as running:
            with pytest.raises(OverloadedError, match="limit 1") as info:
                async with admission.slot(limited):
                    pass
            # 1.1 s are predicted.
            assert info.value.retry_after_s == pytest.approx(running.route.e2e_s, abs=0.1)
            running.admitted_at -= 8.0
            running.changed_at -= 8.0
            with pytest.raises(OverloadedError, match="limit 1") as info:
                async with admission.slot(limited):
                    pass
            assert info.value.retry_after_s == pytest.approx(2.0, abs=0.1), "it takes longer than predicted"

    def test_how_much_of_the_time_that_objectives_leave_goes_to_load(self):
        forecaster = FixedForecaster(ttft=0.55)  # .1 s without load, of 1 s
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        assert admission.judge.slack_used == 0
        admission.judge.decide(request(SloTarget("batch")))
        assert admission.judge.slack_used == 0
        admission.judge.decide(request())
        assert admission.judge.slack_used == pytest.approx(0.5, abs=0.01)
        forecaster.ttft = 3.0
        with pytest.raises(OverloadedError):
            admission.judge.decide(request())
        assert admission.judge.slack_used == pytest.approx(0.75, abs=0.01)

    def test_who_strictly_wants_what_no_time_can_give_is_told_so(self):
        """It neither keeps requests without objectives away nor is it expected back."""
        forecaster = FixedForecaster(ttft=2.5, alone_ttft=2.2)
        gate = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=3.0)
        limit = gate.places.best_effort_limit.value
        with pytest.raises(OverloadedError, match=r"ttft of 1 s cannot be met .* it takes 2\.2 s") as info:
            gate.judge.decide(request(replace(SLO, is_strict=True)))
        assert info.value.reason is RefusalReason.TTFT
        assert info.value.retry_after_s is None
        assert gate.places.best_effort_limit.value == limit
        assert not gate.judge._bookings._order

    def test_who_is_not_strict_is_told_when_to_come_back_whatever_the_slack(self):
        forecaster = FixedForecaster(ttft=1.5, alone_ttft=1.2)
        with pytest.raises(OverloadedError, match="first token is predicted") as info:
            judge(forecaster, slack=0.5)
        assert info.value.retry_after_s < 10

    def test_objectives_that_cannot_be_met_alone_are_widened(self):
        forecaster = FixedForecaster(ttft=2.0, alone_ttft=1.5)
        admitted = judge(forecaster, slack=3.0, asked=request(replace(SLO, tpot_s=0.1)))
        assert admitted.is_widened
        slo = admitted.request.slo
        assert (slo.ttft_s, slo.tpot_s, slo.e2e_s) == pytest.approx((4.5, 0.12, 5.7))
        forecaster.ttft = 5.0
        with pytest.raises(OverloadedError, match="over the 4\\.5 s"):
            judge(forecaster, slack=3.0)

    def test_or_are_the_best_effort_where_they_are_taken_as_they_are(self):
        admitted = judge(FixedForecaster(ttft=100.0, alone_ttft=1.5))
        assert not admitted.is_widened
        assert admitted.request.due_s == 60.0
        with pytest.raises(OverloadedError):
            judge(FixedForecaster(ttft=100.0, alone_ttft=1.5), asked=request(replace(SLO, is_strict=True)))

    def test_nobody_is_admitted_who_makes_another_one_late(self):
        forecaster = FixedForecaster(ttft=0.5)
        now = time.monotonic()
        forecaster.pod.backlog.add("other", now + 10, 9.95, limit=now + 10)
        with pytest.raises(OverloadedError, match="admitted before") as info:
            judge(forecaster)
        assert info.value.reason is RefusalReason.OTHERS

    @pytest.mark.parametrize(("num_decoding", "is_late"), [(4, False), (6, True)])
    def test_nor_where_sequences_decode_in_the_steps_of_both_prompts(self, num_decoding, is_late):
        forecaster = FixedForecaster(ttft=0.5)
        forecaster.pod.num_decoding = num_decoding
        now = time.monotonic()
        # Prompts of 9.8 and .1 s, and .01 s in the step of each for each sequence.
        forecaster.pod.backlog.add("other", now + 10, 9.8, limit=now + 10)
        if not is_late:
            judge(forecaster)
            return
        with pytest.raises(OverloadedError, match="admitted before"):
            judge(forecaster)

    async def test_nor_who_slows_the_tokens_of_another_one_too_much(self):
        forecaster = FixedForecaster(ttft=0.1, token_s=0.2)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        slo = SloTarget("chat", e2e_s=2.0)
        async with admission.slot(request(slo)) as running:
            # Ten tokens of .2 s with it, and of .16 s without it, since four sequences run.
            with pytest.raises(OverloadedError, match="admitted before"):
                admission.judge.decide(request(slo, prompt=(4, 5)))
            admission.judge.decide(request(SloTarget("batch")))
            running.num_tokens = 5
            admission.judge.decide(request(slo, prompt=(4, 5)))
        assert not admission.judge.neighbours.running

    async def test_nor_beyond_its_objective_per_token(self):
        forecaster = FixedForecaster(ttft=0.1, token_s=0.2)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        asked = request(SloTarget("chat", e2e_s=9.0), prompt=(4, 5))
        for tpot_s in (0.3, 0.19):
            # Without the second one it ends after .1 + 10 * .16 s, with it after .1 + 10 * .2 s.
            async with admission.slot(request(SloTarget("chat", tpot_s=tpot_s))):
                if tpot_s == 0.3:
                    admission.judge.decide(asked)
                    continue
                with pytest.raises(OverloadedError, match="admitted before"):
                    admission.judge.decide(asked)

    async def test_one_without_objectives_waits_while_it_would_make_another_one_late(self):
        forecaster = FixedForecaster(ttft=0.1, token_s=0.2)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)

        async def run(asked: TokenizedRequest) -> None:
            async with admission.slot(asked):
                pass

        async with admission.slot(request(SloTarget("chat", e2e_s=2.0))):
            waiting = asyncio.create_task(run(request(SloTarget("batch"))))
            await run_ready_tasks()
            assert admission.places.num_waiting == 1
            overdue = replace(request(SloTarget("batch")), arrived=time.monotonic() - 100)
            await run(overdue)
        await asyncio.wait_for(waiting, 5.0)

    async def test_who_may_still_be_in_time_is_kept_so(self):
        """Also one that is late by the 90th percentile, and not by the median."""
        forecaster = FixedForecaster(ttft=0.1, token_s=0.01)
        forecaster.high_of_left = 100.0
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        async with admission.slot(request()):
            with pytest.raises(OverloadedError, match="admitted before"):
                admission.judge.decide(request(prompt=(4, 5)))

    async def test_what_it_took_in_all_and_since_the_last_one_came_is_compared_with_the_model(self):
        forecaster = FixedForecaster(ttft=0.1, token_s=0.05)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        async with admission.slot(request()) as running:
            assert running.left_then_s == pytest.approx(0.1 + 10 * 0.05)
            running.num_tokens = 6
            async with admission.slot(request(prompt=(4, 5))):
                pass
            # Half of the step that runs, three tokens, each beside one more sequence, and a prompt of .1 s.
            assert running.left_then_s == pytest.approx(3.5 * 0.05 + 0.1)
            running.num_tokens = 9
            async with admission.slot(request(prompt=(6, 7))):
                assert running.left_then_s == pytest.approx(0.5 * 0.05), "the prompt is not in that step"
            e2e_s = running.admitted_at + 1.4 - running.request.arrived
            admission.ended(running, e2e_s=e2e_s, num_tokens=10, met=True)
        # What was left when each came, without it, was not done yet; without it, steps have a sequence less.
        done_s = (0.6 - 3.5 * 0.04) + (3.5 * 0.05 + 0.1 - 0.5 * 0.04)
        left_s = running.request.arrived + e2e_s - running.changed_at
        assert forecaster.observed[-2:] == [
            ("took", pytest.approx(done_s + 0.5 * 0.05), pytest.approx(1.4)),
            ("took", pytest.approx(0.5 * 0.05), pytest.approx(left_s)),
        ]
        assert left_s < 1.4

    async def test_after_a_wait_it_is_predicted_anew_when_it_will_end_and_where(self):
        forecaster = FixedForecaster(ttft=0.1, token_s=0.05)
        admission = Admission(forecaster, max_in_flight=1, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        admission.places._best_effort_turns = SimpleNamespace(
            first_waits=lambda: None, began=lambda: None, wait_s=lambda num_earlier: 100.0
        )
        release = asyncio.Event()

        async def first() -> None:
            async with admission.slot(request(SloTarget("batch"))):
                await release.wait()

        running = asyncio.create_task(first())
        await asyncio.sleep(0)
        other = SimpleNamespace(**vars(forecaster.pod))

        def end() -> None:
            forecaster.pod = other
            release.set()

        asyncio.get_running_loop().call_later(0.1, end)
        async with admission.slot(request(SloTarget("batch"))) as waited:
            assert waited.queued_s > 0.09
            assert waited.forecast.queue_s == 100.0, "as was predicted when it came"
            assert waited.left_then_s == pytest.approx(0.1 + 10 * 0.05)
            assert waited.first_expected_at == pytest.approx(time.monotonic() + 0.1, abs=0.05)
            assert list(admission.judge.neighbours.on(other)) == [waited]
        await running

    async def test_who_would_make_another_one_late_is_predicted_to_wait_for_its_turn(self):
        forecaster = FixedForecaster(ttft=0.1, token_s=0.2)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        waits: list[float] = []

        async def batch(number: int) -> None:
            async with admission.slot(request(SloTarget("batch"), prompt=(number,))) as admitted:
                waits.append(admitted.forecast.queue_s)

        async with contextlib.AsyncExitStack() as running:
            # Ten tokens of .2 s with another one, and of .16 s without it, since four sequences run.
            await running.enter_async_context(admission.slot(request(SloTarget("chat", e2e_s=2.0))))
            waiting = [asyncio.create_task(batch(number)) for number in range(3)]
            await asyncio.sleep(0.05)
            assert admission.places.num_waiting == 3, "though there are places"
        await asyncio.gather(*waiting)
        assert waits == pytest.approx([1.0, 2.0, 3.0], abs=0.1), "a turn takes a second until it is measured"
        assert admission.places._best_effort_turns.wait_s(0) < 0.9

    @pytest.mark.parametrize("is_refused", [False, True])
    async def test_what_waits_while_others_are_refused_tells_nothing_of_predictions(self, is_refused):
        forecaster = FixedForecaster(ttft=0.1)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        async with admission.slot(request()) as chat, admission.slot(request(SloTarget("batch"))) as batch:
            if is_refused:
                admission.places.refused()
            admission.started(batch, ttft_s=0.1)
            assert len(forecaster.observed) == 1 - is_refused
            admission.started(chat, ttft_s=0.1)
            assert len(forecaster.observed) == 2 - is_refused, "one with objectives does not wait for that"

    async def test_several_choices_are_judged_as_so_many_sequences(self):
        forecaster = FixedForecaster(ttft=0.1, token_s=0.2)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        slo = SloTarget("chat", e2e_s=2.2)
        async with admission.slot(request(slo)):
            admission.judge.decide(request(slo, prompt=(4, 5)))
            with pytest.raises(OverloadedError, match="admitted before"):
                admission.judge.decide(request(slo, prompt=(4, 5)), num_places=4)

    async def test_who_leaves_because_it_is_late_is_measured_too(self):
        forecaster = FixedForecaster(ttft=0.1)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)

        async def leave(slo: SloTarget) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05), admission.slot(request(slo)):
                    await asyncio.sleep(10)

        await leave(SloTarget("chat", ttft_s=0.02, e2e_s=0.03))
        # From when it was judged, and from when it began.
        assert forecaster.observed == [
            ("ttft", pytest.approx(0.05, abs=0.03)),
            ("took", pytest.approx(0.1 + 10 * 0.05), pytest.approx(0.05, abs=0.03)),
        ]
        forecaster.observed.clear()
        await leave(SloTarget("chat", ttft_s=9.0, e2e_s=9.0))
        assert not forecaster.observed, "it was not late yet"

    async def test_places_that_are_free_at_once_are_given_one_after_the_other(self):
        """The work of a request counts on its pod one turn of the loop after it has its place."""
        admission = Admission(
            FixedForecaster(ttft=0.1), max_in_flight=3, max_queue=8, policy=Policy.PREDICT, slack=0.0
        )
        done = asyncio.Event()

        async def waits() -> None:
            async with admission.slot(request(SloTarget("batch"))):
                await done.wait()

        async with contextlib.AsyncExitStack() as running:
            for _ in range(3):
                await running.enter_async_context(admission.slot(request()))
            waiting = [asyncio.create_task(waits()) for _ in range(3)]
            await asyncio.sleep(0)
            assert admission.places.num_waiting == 3
        # All three ended within one turn.
        assert admission.places.num_waiting == 2
        assert not admission.judge.may_begin(request(SloTarget("batch")))
        for _ in range(4):
            await asyncio.sleep(0)
        assert admission.places.num_waiting == 1, "they have three quarters of the places"
        done.set()
        await asyncio.gather(*waiting)

    async def test_room_that_no_end_makes_is_found_by_looking(self):
        """A text that goes on, or a client that was expected back and did not come."""
        forecaster = FixedForecaster(ttft=0.1, token_s=0.2)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        async with admission.slot(request()):
            forecaster.high_of_left = 100.0

            async def waits() -> None:
                async with admission.slot(request(SloTarget("batch"))):
                    pass

            waiting = asyncio.create_task(waits())
            await run_ready_tasks()
            assert admission.places.num_waiting == 1
            forecaster.high_of_left = 0.1
            async with asyncio.timeout(5):
                await waiting
        assert admission.places.num_waiting == 0

    def test_the_longest_of_several_prompts_waits_for_the_others(self):
        forecaster = FixedForecaster(ttft=0.5)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        admission.judge.decide(request(prompt=(1, 2)), 2, 6)
        # Each of its two tokens takes .05 s.
        with pytest.raises(OverloadedError, match=r"first token is predicted after 1\.70 s"):
            admission.judge.decide(request(prompt=(1, 2)), 2, 24)

    async def test_what_several_prompts_took_is_no_measure_of_predictions(self):
        forecaster = FixedForecaster(ttft=0.1)
        admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        async with admission.slot(request(), 2, 5) as admitted:
            admission.started(admitted, ttft_s=0.5)
            admission.ended(admitted, e2e_s=1.0, num_tokens=8, met=True)
        assert [name for name, *_ in forecaster.observed] == ["tokens"]

    async def test_requests_without_objectives_make_way_while_others_are_refused(self):
        forecaster = FixedForecaster(ttft=0.5)
        admission = Admission(forecaster, max_in_flight=16, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        fits = [admission.places.fits(request(SloTarget("batch")))]
        async with contextlib.AsyncExitStack() as running:
            for _ in range(4):
                await running.enter_async_context(admission.slot(request(SloTarget("batch"))))
            forecaster.ttft = 1.5
            for _ in range(6):
                with pytest.raises(OverloadedError):
                    admission.judge.decide(request())
                admission.places.best_effort_limit._lowered_at = 0.0  # more than a second later
            fits.append(admission.places.fits(request(SloTarget("batch"))))
            assert admission.places.fits(request()), "those with objectives have a place"
        assert fits == [True, False]
        assert admission.places.fits(request(SloTarget("batch"))), "one at least, once the others are done"

    def test_refused_clients_come_back_one_after_the_other(self):
        forecaster = FixedForecaster(ttft=1.5)
        gate = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        retries = []
        for number in range(3):
            with pytest.raises(OverloadedError) as info:
                gate.judge.decide(request(prompt=(number,)))
            retries.append(info.value.retry_after_s)
        # A request takes its prompt, and of ten steps of the batch its part.
        work_s = forecaster.forecast(request()).route.work_s
        gaps = [b - a for a, b in itertools.pairwise(retries)]
        assert gaps == pytest.approx([work_s, work_s], abs=0.02), "half come back, for half of all work"

    def test_new_requests_leave_room_for_who_is_due_back(self):
        # The fifth sequence takes .2 s per token, and .24 s beside a sixth one.
        forecaster = FixedForecaster(ttft=1.5, token_s=0.2)
        gate = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        gate.judge._bookings.returning = 1.0
        refused = request(SloTarget("chat", ttft_s=1.0, e2e_s=3.2), prompt=(9,))
        with pytest.raises(OverloadedError, match="first token"):
            gate.judge.decide(refused)
        forecaster.ttft = 0.1
        with pytest.raises(OverloadedError) as info:
            gate.judge.decide(request())
        assert info.value.reason is RefusalReason.OTHERS
        gate.judge.decide(refused)
        gate.judge.decide(request())

    def test_the_same_prompt_of_another_class_does_not_take_its_slot(self):
        forecaster = FixedForecaster(ttft=1.5)
        gate = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        with pytest.raises(OverloadedError):
            gate.judge.decide(request())
        gate.judge._bookings._order[0].slot = time.monotonic()
        gate.judge.decide(request(SloTarget("batch")))
        with pytest.raises(OverloadedError, match="refused: the first token"):
            gate.judge.decide(request(replace(SLO, name="voice")))
        with pytest.raises(OverloadedError, match="refused again"):
            gate.judge.decide(request())

    def test_nobody_leaves_room_for_a_tenant_that_asks_for_much_more(self):
        forecaster = FixedForecaster(ttft=1.5, token_s=0.2)
        gate = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
        gate.judge._bookings.returning = 1.0
        slo = SloTarget("chat", ttft_s=1.0, e2e_s=3.2)
        for number in range(8):
            with pytest.raises(OverloadedError, match="first token") as info:
                gate.judge.decide(request(slo, prompt=(number,)))
        noisy_s = info.value.retry_after_s
        quiet = replace(request(slo, prompt=(9,)), tenant="quiet")
        with pytest.raises(OverloadedError) as info:
            gate.judge.decide(quiet)
        assert info.value.retry_after_s < 0.5 * noisy_s, "it need not wait until the others have come back"
        forecaster.ttft = 0.1
        gate.judge.decide(quiet)
        gate.judge.decide(replace(request(), tenant="quiet"))
        with pytest.raises(OverloadedError):
            gate.judge.decide(request())

    def test_without_reports_nobody_is_refused(self):
        admitted = judge(FixedForecaster(ttft=100.0, is_known=False))
        assert admitted.forecast is None

    def test_an_answer_that_goes_on_is_not_refused(self):
        judge(FixedForecaster(ttft=100.0), asked=replace(request(), is_repeated=True))


def due_s(admission: Admission, asked: TokenizedRequest) -> float:
    admitted = admission.judge.decide(asked).request
    return round(admitted.due - admitted.arrived, 3)


async def test_who_asks_for_less_than_a_noisy_tenant_is_refused_only_if_it_is_likely_to_be_late():
    forecaster = FixedForecaster(ttft=0.1, token_s=0.01)
    admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
    quiet = replace(request(), tenant="quiet")
    async with admission.slot(request()):
        # By the upper quantile the one that runs would be late beside another one, by the median not.
        forecaster.high_of_left = 100.0
        asks(admission, "quiet")
        with pytest.raises(OverloadedError, match="admitted before"):
            admission.judge.decide(quiet)
        asks(admission, "default", 10)
        # Another prompt: it does not come back at the time that the first one was told.
        admission.judge.decide(replace(quiet, prompt_token_ids=(4, 5)))
        with pytest.raises(OverloadedError, match="admitted before"):
            admission.judge.decide(request())


def test_who_asks_for_much_has_time_for_the_prompts_of_others_that_come_first():
    forecaster = FixedForecaster(ttft=0.9)
    admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
    asks(admission, "quiet", 10)
    admission.judge.decide(request())
    asks(admission, "default", 30)
    # One request per second: in the second until the first token is due two prompts of .1 s may come.
    with pytest.raises(OverloadedError, match="leave others too little room") as info:
        admission.judge.decide(request())
    assert info.value.reason is RefusalReason.SHARE
    admission.judge.decide(replace(request(), tenant="quiet"))
    admission.judge.decide(request(replace(SLO, ttft_s=1.3)))
    forecaster.ttft = 0.7
    admission.judge.decide(request(replace(SLO, name="voice")))


def test_as_long_as_a_prompt_waits_more_of_the_others_prompts_come_before_it():
    forecaster = FixedForecaster(ttft=0.3)
    admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
    for name, count in (("quiet", 60), ("default", 150)):
        asks(admission, name, count)
    # Six requests per second: 8.4 prompts of .1 s in the second until it is due.
    with pytest.raises(OverloadedError, match="leave others too little room"):
        admission.judge.decide(request())
    with pytest.raises(OverloadedError, match="leave others too little room"):
        admission.judge.decide(request(replace(SLO, name="slower", ttft_s=1.1)))
    admission.judge.decide(request(replace(SLO, ttft_s=2.0)))
    forecaster.ttft = 0.1
    admission.judge.decide(request(replace(SLO, name="voice")))


async def test_who_asks_for_much_comes_behind_others_and_leaves_them_room():
    forecaster = FixedForecaster(ttft=0.1, token_s=0.2)
    admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
    slo = SloTarget("chat", ttft_s=1.0, e2e_s=2.0)
    quiet = replace(request(slo), tenant="quiet")
    async with admission.slot(quiet) as running:
        running.num_tokens = 4
        admission.judge.decide(request(slo))
        asks(admission, "quiet", 10)
        asks(admission, "default", 50)
        admission.judge._shares.charge("default", 9.0)
        with pytest.raises(OverloadedError, match="leave others too little room") as info:
            admission.judge.decide(request(slo))
        assert info.value.reason is RefusalReason.SHARE
        admission.judge.decide(quiet)
        running.num_tokens = 0
        with pytest.raises(OverloadedError) as info:
            admission.judge.decide(request(slo))
        assert info.value.reason is RefusalReason.OTHERS, "without others' requests it would be late too"
        running.num_tokens = 4
    assert due_s(admission, quiet) == 0.25, "its first tokens come before the other's"
    assert due_s(admission, request(slo)) == 1.0, "it is promised in time, and so not due later"
    for ttft_s, early_s in ((4.0, 1.0), (20.0, 15.0), (300.0, 300.0)):
        asked = replace(quiet, slo=replace(slo, ttft_s=ttft_s, e2e_s=0.0))
        assert due_s(admission, asked) == early_s, "no other request's blocks are taken for it"
    async with admission.slot(quiet) as running:
        running.num_tokens = 4
        assert due_s(admission, quiet) == 0.25, "also where it has its share of what runs"
    asks(admission, "quiet", 20)
    assert due_s(admission, quiet) == 1.0, "both ask for as much"
    behind = admission.judge.decide(request(NO_OBJECTIVES)).request
    assert behind.due - behind.arrived > DEFAULT_DUE_S + 3
