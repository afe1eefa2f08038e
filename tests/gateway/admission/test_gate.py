"""The gate: which requests are admitted, wait or are refused, by predictions from the pods' costs."""

import math
from dataclasses import replace

import pytest
from reported_pods import BATCH, HIGH, MEDIAN, SLO, ReportedSystem, again, request
from tandem_core.beams import BeamParams
from tandem_core.contracts import DEFAULT_DUE_S, RefusalReason
from tandem_core.sampling import SamplingParams
from tandem_core.slo import SloTarget
from tandem_gateway.errors import OverloadedError, UnavailableError
from tandem_gateway.request import TenantLimits

#: Objectives that are met next to anything that these tests run.
LOOSE = SloTarget("chat", ttft_s=50.0, e2e_s=100.0)
STRICT = replace(SLO, is_strict=True)


def refusal(system: ReportedSystem, *given: object) -> OverloadedError:
    with pytest.raises(OverloadedError) as info:
        system.decide(*given)
    return info.value


class TestOwnObjectives:
    async def test_a_request_that_will_meet_its_objectives_is_admitted(self, system):
        async with system.running(request(LOOSE), num_tokens=1):
            admitted = system.decide(request())
        assert (admitted.is_widened, admitted.request.slo, admitted.request.due_s) == (False, SLO, None)
        # A chunk next to a sequence takes .102 s, after half a step of it; a token of both takes 12 ms.
        first_s = 0.005 + 0.102
        assert admitted.forecast.route.first_s == pytest.approx(first_s)
        assert admitted.forecast.route.end_s == pytest.approx(first_s + 97 * 0.012 + 2 * 0.010)
        assert admitted.forecast.ttft.p50 == pytest.approx(MEDIAN * first_s)

    @pytest.mark.parametrize(
        ("slo", "reason", "words"),
        [
            (SloTarget("chat", ttft_s=1.3), RefusalReason.TTFT, r"first token .* objective of 1\.3 s"),
            (SloTarget("chat", e2e_s=2.6), RefusalReason.E2E, r"the end .* objective of 2\.6 s"),
            (SloTarget("chat", tpot_s=0.016), RefusalReason.TPOT, r"a token .* objective of 16 ms"),
        ],
    )
    async def test_a_request_that_will_miss_one_is_refused_with_the_prediction(
        self, system, slo, reason, words
    ):
        async with system.running(request(LOOSE, num_prompt=1000, due_s=0.5)):
            error = refusal(system, request(slo))
        assert error.reason is reason
        assert error.retry_after_s > 0
        assert str(error).startswith("refused: ") and str(error).endswith("; try again later")
        with pytest.raises(OverloadedError, match=words):
            raise error

    async def test_the_prediction_in_the_text_is_the_median_and_the_quantile_of_the_confidence(
        self, make_system
    ):
        system = make_system(first_confidence=0.9)
        async with system.running(request(LOOSE, num_prompt=1000, due_s=0.5)):
            asked = request(SloTarget("chat", ttft_s=1.3))
            route = system.plan(asked).route
            assert route.first_s == pytest.approx(0.95 + 0.102)
            offset_s = 10 * route.token_s
            p50, p90 = (ratio * (route.first_s + offset_s) - offset_s for ratio in (MEDIAN, HIGH))
            text = str(refusal(system, asked))
        assert f"predicted after {p50:.2f} s (p90 {p90:.2f} s); p90 exceeds its objective of 1.3 s" in text

    async def test_time_since_arrival_counts(self, system, clock):
        async with system.running(request(LOOSE), num_tokens=1):
            asked = request()
            clock.now += 0.9
            with pytest.raises(
                OverloadedError, match=r"the 0\.90 s since its arrival exceeds its objective of 1 s"
            ):
                system.decide(asked)

    async def test_a_first_token_waits_for_a_batch_slot_in_a_full_batch(self, system):
        """A token of two sequences takes 12 ms, so that 99 take 1.2 s."""
        system.report(system.pods[0], max_batch=2)
        due_in_1_s = SloTarget("chat", ttft_s=1.0)
        async with (
            system.running(request(due_in_1_s), num_tokens=1),
            system.running(request(due_in_1_s), num_tokens=1),
        ):
            error = refusal(system, request(SloTarget("chat", ttft_s=1.1)))
            assert error.reason is RefusalReason.TTFT
            urgent = system.decide(request(SloTarget("chat", ttft_s=0.5)))
            assert urgent.forecast.route.first_s < 0.2, "it pauses one that is due later"
            patient = system.decide(request(LOOSE))
            assert 1.2 < patient.forecast.route.first_s < 1.4

    async def test_a_beam_search_waits_for_a_batch_slot_for_each_beam(self, system):
        system.report(system.pods[0], max_batch=2)
        async with system.running(request(SloTarget("chat", ttft_s=1.0)), num_tokens=1):
            one, both = (system.decide(request(LOOSE), num_beams) for num_beams in (1, 2))
        assert one.forecast.route.first_s < 0.2, "the second slot"
        assert 1.0 < both.forecast.route.first_s < 1.2, "when the one that runs has ended"

    async def test_the_first_token_of_a_beam_search_comes_with_its_last_one(self, system):
        search = SamplingParams(max_tokens=100, ignore_eos=True, beam_search=BeamParams(2))
        async with system.running(request(LOOSE), num_tokens=1):
            asked = replace(request(SloTarget("chat", ttft_s=1.6)), sampling=search)
            assert refusal(system, asked, 2).reason is RefusalReason.TTFT
            system.decide(request(SloTarget("chat", ttft_s=1.6)), 2)

    async def test_the_longest_of_several_prompts_is_predicted_after_the_others(self, system):
        async with system.running(request(LOOSE), num_tokens=1):
            system.decide(request(), 2, 100)
            # Nine chunks of .102 s.
            with pytest.raises(OverloadedError, match=r"first token is predicted after 0\.9\d s"):
                system.decide(request(), 2, 800)

    async def test_the_predicted_wait_is_for_a_place_per_choice(self, make_system):
        system = make_system(max_in_flight=4)
        async with system.running(request(LOOSE)), system.running(request(LOOSE), 2):
            one, two = (system.decide(request(LOOSE), num_places) for num_places in (1, 2))
        assert one.forecast.queue_s == 0
        assert two.forecast.queue_s == pytest.approx(0.25), "requests of a second each, four places"

    async def test_a_resumed_answer_is_admitted(self, system):
        async with system.running(request(LOOSE), num_tokens=1):
            hopeless = SloTarget("chat", ttft_s=0.01, is_strict=True)
            refusal(system, request(hopeless))
            admitted = system.decide(request(hopeless, is_repeated=True))
        assert admitted.forecast is None


class TestKindsOfObjectives:
    async def test_relative_objectives_are_multiples_of_the_time_without_load(self, system):
        mail = SloTarget("mail", ttft_slowdown=5.0, e2e_s=9.0, tpot_slowdown=4.0)
        admitted = system.decide(request(mail))
        assert (admitted.request.slo.ttft_s, admitted.request.slo.tpot_s) == pytest.approx(
            (0.5, 0.04), rel=0.01
        )
        assert admitted.request.slo.e2e_s == 9.0
        assert admitted.request.has_objectives and not admitted.is_widened
        async with system.running(request(LOOSE, num_prompt=1000, due_s=0.4)):
            with pytest.raises(OverloadedError, match=r"first token .* exceeds its objective of 0\.5 s"):
                system.decide(request(mail))

    async def test_objectives_that_cannot_be_met_without_load_are_widened(self, make_system):
        system = make_system(slack=3.0)
        admitted = system.decide(request(replace(SLO, ttft_s=0.05)))
        assert admitted.is_widened
        assert admitted.request.slo == replace(SLO, ttft_s=pytest.approx(0.3))
        async with system.running(request(LOOSE, num_prompt=1000, due_s=0.2)):
            with pytest.raises(OverloadedError, match=r"objective of 0\.3 s"):
                system.decide(request(replace(SLO, ttft_s=0.05)))

    async def test_without_widening_a_request_that_cannot_meet_its_objectives_is_best_effort(
        self, make_system
    ):
        system = make_system(slack=0.0)
        async with system.running(request(LOOSE, num_prompt=1000)):
            admitted = system.decide(request(replace(SLO, ttft_s=0.05)))
            assert (admitted.is_widened, admitted.request.due_s) == (False, DEFAULT_DUE_S)
            refusal(system, request(replace(STRICT, ttft_s=0.05)))

    async def test_a_best_effort_request_is_never_refused_by_prediction(self, system):
        async with system.running(request(SloTarget("chat", ttft_s=11.0), num_prompt=10_000)):
            assert system.decide(request(BATCH)).request.due_s == DEFAULT_DUE_S

    async def test_a_strict_request_that_needs_more_than_an_idle_system_gets_no_retry_after(
        self, make_system
    ):
        system = make_system(slack=3.0)
        asked = request(replace(STRICT, ttft_s=0.04))
        with pytest.raises(
            OverloadedError, match=r"takes 0\.1 s and cannot meet the objective ttft of 0\.04 s"
        ) as info:
            system.decide(asked)
        assert info.value.reason is RefusalReason.TTFT
        assert info.value.retry_after_s is None

    async def test_a_request_that_is_not_strict_always_gets_a_retry_after(self, make_system):
        system = make_system(slack=0.5)
        async with system.running(request(LOOSE, num_prompt=1000, due_s=0.05)):
            error = refusal(system, request(replace(SLO, ttft_s=0.06)))
        assert error.reason is RefusalReason.TTFT
        assert 0 < error.retry_after_s < 10


class TestIdleSystem:
    async def test_a_strict_request_that_an_idle_system_serves_in_time_is_admitted(self, system):
        tight = replace(SLO, ttft_s=0.12)  # the upper quantile is .16 s
        system.decide(request(tight))
        system.decide(request(replace(tight, is_strict=True)))
        async with system.running(request(LOOSE), num_tokens=1):
            assert refusal(system, request(tight)).reason is RefusalReason.TTFT

    async def test_one_strict_request_per_period_measures_the_costs_again(self, system):
        asked = request(replace(STRICT, ttft_s=0.08))
        system.decide(asked)
        with pytest.raises(OverloadedError, match=r"first token is predicted after 0\.11 s") as info:
            system.decide(asked)
        assert info.value.retry_after_s == pytest.approx(30)
        await system.pass_s(30)
        system.decide(again(asked))


class TestWithoutPredictions:
    async def test_without_pods_only_strict_requests_are_refused(self, make_system):
        system = make_system(num_pods=0)
        assert system.decide(request()).forecast is None
        with pytest.raises(UnavailableError, match="no decode pod"):
            system.decide(request(STRICT))

    async def test_nothing_is_refused_before_pods_know_their_costs(self, system):
        system.report(system.pods[0], is_known=False)
        mail = SloTarget("mail", ttft_slowdown=5.0)
        async with system.running(request(LOOSE, num_prompt=10_000)):
            assert system.decide(request()).forecast is None
            admitted = system.decide(request(mail))
        assert admitted.request.slo == mail
        assert not admitted.request.has_objectives

    async def test_nothing_is_refused_by_old_reports(self, system, clock):
        async with system.running(request(LOOSE, num_prompt=10_000, due_s=0.1)):
            refusal(system, request())
            clock.now += 6.0
            assert system.decide(request()).forecast is None

    async def test_without_predictions_at_most_the_pods_batch_slots_run(self, system):
        system.report(system.pods[0], is_known=False, max_batch=2)
        system.decide(request())
        queue = system.admission.queue
        async with system.running(request()):
            assert queue.fits(request())
            async with system.running(request()):
                assert not queue.fits(request())
                system.report(system.pods[0], max_batch=2)
                system.decide(request(LOOSE))
                assert queue.fits(request()), "predictions limit them now"


class TestOthers:
    async def test_a_request_that_makes_the_first_token_of_another_one_late_is_refused(self, system):
        """The other request has five chunks of .1 s left; the first one is half done."""
        async with system.running(request(SloTarget("chat", ttft_s=0.72), num_prompt=500)):
            with pytest.raises(OverloadedError, match="make an admitted request miss an objective") as info:
                system.decide(request(SloTarget("chat", ttft_s=0.7)))
            assert info.value.reason is RefusalReason.OTHERS
            system.decide(request(SloTarget("chat", ttft_s=5.0)))
        async with system.running(request(SloTarget("chat", ttft_s=0.8), num_prompt=500)):
            system.decide(request(SloTarget("chat", ttft_s=0.7)))

    @pytest.mark.parametrize(("e2e_s", "is_late"), [(1.6, True), (1.8, False)])
    async def test_a_request_that_makes_the_end_of_another_one_late_is_refused(self, system, e2e_s, is_late):
        """Its remaining time is .985 s, and 1.27 s next to another request."""
        async with system.running(request(SloTarget("chat", e2e_s=e2e_s)), num_tokens=1):
            if is_late:
                assert refusal(system, request(LOOSE)).reason is RefusalReason.OTHERS
            else:
                system.decide(request(LOOSE))

    @pytest.mark.parametrize(("tpot_s", "is_late"), [(0.016, True), (0.018, False)])
    async def test_a_request_that_slows_the_tokens_of_another_one_too_much_is_refused(
        self, system, tpot_s, is_late
    ):
        async with system.running(request(SloTarget("chat", tpot_s=tpot_s)), num_tokens=1):
            if is_late:
                assert refusal(system, request(LOOSE)).reason is RefusalReason.OTHERS
            else:
                system.decide(request(LOOSE))

    async def test_a_request_that_is_late_anyway_causes_no_refusal(self, system):
        async with system.running(request(SloTarget("chat", e2e_s=1.15)), num_tokens=1) as running:
            assert refusal(system, request(LOOSE)).reason is RefusalReason.OTHERS
            await system.pass_s(0.5)
            running.placed.gained(2, running.first_at)
            system.decide(request(LOOSE))

    async def test_received_tokens_shorten_the_prediction(self, system):
        async with system.running(request(SloTarget("chat", e2e_s=1.3)), num_tokens=1) as running:
            refusal(system, request(LOOSE))
            running.placed.gained(60, running.first_at)
            system.decide(request(LOOSE))

    async def test_an_urgent_request_takes_no_batch_slot_that_another_first_token_needs(self, system):
        system.report(system.pods[0], max_batch=2)
        soon, later = SloTarget("chat", ttft_s=1.0), SloTarget("chat", ttft_s=5.0)
        urgent = SloTarget("chat", ttft_s=0.5)
        async with system.running(request(soon)), system.running(request(soon)):
            assert refusal(system, request(urgent)).reason is RefusalReason.OTHERS
        async with system.running(request(soon)), system.running(request(later)):
            system.decide(request(urgent))

    async def test_several_choices_count_as_several_sequences(self, system):
        async with system.running(request(SloTarget("chat", e2e_s=1.9)), num_tokens=1):
            system.decide(request(LOOSE))
            assert refusal(system, request(LOOSE), 4).reason is RefusalReason.OTHERS

    async def test_prompts_of_one_call_delay_others_together(self, system):
        async with system.running(request(SloTarget("chat", e2e_s=2.5)), num_tokens=1):
            system.decide(request(LOOSE), 2)
            assert refusal(system, request(LOOSE), 2, 10_000).reason is RefusalReason.OTHERS


class TestBestEffort:
    async def test_a_best_effort_request_waits_while_it_would_make_another_late(self, system):
        gate = system.admission.gate
        async with system.running(request(SloTarget("chat", e2e_s=1.6)), num_tokens=1) as running:
            waits = system.decide(request(BATCH))
            assert not gate.may_begin(waits)
            running.placed.gained(60, running.first_at)
            assert gate.may_begin(waits)
        assert gate.may_begin(waits)

    async def test_a_best_effort_request_does_not_wait_beyond_its_deadline(self, system):
        may_begin, slo = system.admission.gate.may_begin, SloTarget("chat", e2e_s=120.0)
        async with system.running(request(slo, max_tokens=10_000), num_tokens=1) as running:
            waits = system.decide(request(BATCH))
            assert not may_begin(waits)
            await system.pass_s(DEFAULT_DUE_S + 0.1)
            running.placed.gained(5000, running.first_at)
            assert not may_begin(system.decide(request(BATCH)))
            assert may_begin(waits)

    async def test_a_best_effort_request_waits_for_expected_requests(self, system):
        """The running request ends in time next to one more, but not next to several."""
        async with system.running(request(SloTarget("chat", e2e_s=2.4)), num_tokens=1):
            waits = system.decide(request(BATCH))
            assert system.admission.gate.may_begin(waits)
            for _ in range(60):
                system.decide(request(LOOSE))
            assert not system.admission.gate.may_begin(waits)

    async def test_a_noisy_tenant_is_due_later(self, system):
        for tenant in ("quiet", *["noisy"] * 50):
            admitted = system.decide(request(BATCH, tenant=tenant))
            system.admission.gate.began(admitted)
            admitted.placed.leave()
        noisy, quiet = (system.decide(request(BATCH, tenant=tenant)).request for tenant in ("noisy", "quiet"))
        assert noisy.due - noisy.arrived > DEFAULT_DUE_S + 1
        assert quiet.due - quiet.arrived == DEFAULT_DUE_S


class TestWaitingClasses:
    WAITING = replace(SLO, name="standard", e2e_s=1.4, waits=True)
    TIGHT = SloTarget("chat", e2e_s=1.6)

    async def test_a_request_in_time_is_admitted_and_protected_like_others(self, system):
        loose = replace(LOOSE, waits=True)
        async with system.running(request(LOOSE), num_tokens=1):
            admitted, same = system.decide(request(loose)), system.decide(request(LOOSE))
        assert admitted.request.has_objectives and not admitted.request.is_late
        assert admitted.request.due - admitted.request.arrived == same.request.due - same.request.arrived
        assert admitted.forecast.route.end_s == same.forecast.route.end_s
        async with system.running(request(replace(self.TIGHT, waits=True)), num_tokens=1):
            assert refusal(system, request(LOOSE)).reason is RefusalReason.OTHERS

    @pytest.mark.parametrize("slo", [WAITING, replace(LOOSE, waits=True)], ids=["late itself", "others"])
    async def test_a_late_request_waits_as_best_effort_and_keeps_its_objectives_for_the_receipt(
        self, system, slo
    ):
        gate = system.admission.gate
        async with system.running(request(self.TIGHT), num_tokens=1) as running:
            refusal(system, request(replace(slo, waits=False)))
            late = system.decide(request(slo))
            assert (late.request.slo, late.request.is_late) == (slo, True)
            assert late.request.due - late.request.arrived == DEFAULT_DUE_S
            assert not late.request.has_objectives
            assert not gate.may_begin(late), "the running request would be late"
            running.placed.gained(60, running.first_at)
            assert gate.may_begin(late)

    async def test_a_late_request_that_runs_causes_no_refusal(self, system):
        async with (
            system.running(request(LOOSE), num_tokens=1),
            system.running(request(replace(self.WAITING, e2e_s=1.2)), num_tokens=1) as late,
        ):
            assert late.request.is_late
            assert late.placed.starts_by == late.placed.ends_by(0.0) == math.inf
            system.decide(request(LOOSE))

    async def test_a_late_request_counts_as_used_slack(self, system):
        async with system.running(request(self.TIGHT), num_tokens=1):
            used = system.admission.gate.slack_used
            system.decide(request(self.WAITING))
            assert system.admission.gate.slack_used == pytest.approx((used + 1) / 2)

    async def test_a_strict_request_of_such_a_class_is_refused(self, system):
        strict = self.WAITING.overridden(SloTarget("", is_strict=True))
        async with system.running(request(LOOSE), num_tokens=1):
            assert refusal(system, request(strict)).reason is RefusalReason.E2E

    async def test_objectives_of_a_request_do_not_change_whether_its_class_waits(self, system):
        slo = replace(LOOSE, waits=True).overridden(SloTarget("", e2e_s=1.4))
        async with system.running(request(LOOSE), num_tokens=1):
            assert system.decide(request(slo)).request.is_late

    @pytest.mark.parametrize("is_strict", [False, True])
    async def test_a_refusal_names_the_class_that_waits(self, system, is_strict):
        limits = TenantLimits(waiting_class="standard")
        asked = request(replace(SLO, e2e_s=1.4, is_strict=is_strict), limits=limits)
        async with system.running(request(LOOSE), num_tokens=1):
            text = str(refusal(system, asked))
        strict = " without strict" * is_strict
        assert text.endswith(f'; try again later, or send slo_class: "standard"{strict} to wait')


class TestRefusedClients:
    async def test_the_retry_after_is_when_half_of_the_requests_of_the_pod_have_ended(self, system):
        async with system.running(request(LOOSE), num_tokens=1):
            error = refusal(system, request(replace(SLO, e2e_s=1.2)))
        assert error.retry_after_s == pytest.approx(99 * 0.010 - 0.005)

    async def test_refused_clients_come_back_one_after_the_other(self, system):
        asked = [request(replace(SLO, e2e_s=1.2)) for _ in range(3)]
        async with system.running(request(LOOSE), num_tokens=1):
            first, second, third = (refusal(system, one).retry_after_s for one in asked)
            work_s = system.plan(asked[0]).route.work_s
        assert second - first == pytest.approx(work_s), "half come back, for half of all work"
        assert third - second == pytest.approx(work_s)

    async def test_a_client_that_comes_back_is_judged_by_the_median(self, system):
        """Next to another request the model's end is 1.29 s: median 1.36 s, upper quantile 1.7 s."""
        asked = request(replace(SLO, e2e_s=1.45))
        async with system.running(request(LOOSE, max_tokens=1000), num_tokens=1):
            retry_s = refusal(system, asked).retry_after_s
            assert "refused:" in str(refusal(system, request(replace(SLO, e2e_s=1.45))))
            await system.pass_s(retry_s)
            refusal(system, again(asked, slo=replace(asked.slo, name="voice")))
            system.decide(again(asked))
            with pytest.raises(OverloadedError, match="refused: "):
                system.decide(again(asked))

    async def test_the_refusal_of_a_returning_client_says_again(self, system):
        asked = request(replace(SLO, e2e_s=1.2))
        async with system.running(request(LOOSE, max_tokens=1000), num_tokens=1):
            retry_s = refusal(system, asked).retry_after_s
            await system.pass_s(retry_s)
            with pytest.raises(OverloadedError, match="refused again: the end"):
                system.decide(again(asked))

    async def test_new_requests_leave_room_for_clients_that_are_due_back(self, system):
        # Next to the running request it ends after 1.29 s, next to two after 1.6 s.
        asked = request(SloTarget("chat", e2e_s=1.45))
        async with system.running(request(LOOSE, max_tokens=200), num_tokens=1):
            for _ in range(30):  # clients that came back
                one = request(SloTarget("chat", e2e_s=1.45))
                retry_s = refusal(system, one).retry_after_s
                await system.pass_s(retry_s)
                system.decide(again(one))
            retry_s = refusal(system, asked).retry_after_s
            system.decide(request(LOOSE))
            await system.pass_s(retry_s - 0.1)
            assert refusal(system, request(LOOSE)).reason is RefusalReason.OTHERS
            waits = system.decide(request(BATCH))
            assert not system.admission.gate.may_begin(waits)
            await system.pass_s(0.1)
            system.decide(again(asked))
            system.decide(request(LOOSE))
            assert system.admission.gate.may_begin(waits)


class TestNoisyTenants:
    async def test_a_quieter_tenant_is_refused_only_if_it_is_likely_to_be_late(self, system):
        """Next to another request the model's end is 1.29 s: median 1.36 s, upper quantile 1.7 s."""
        slo = SloTarget("chat", e2e_s=1.45)
        async with system.running(request(LOOSE), num_tokens=1):
            refusal(system, request(slo, tenant="quiet"))
            for _ in range(10):
                system.decide(request(LOOSE, tenant="noisy"))
            system.decide(request(slo, tenant="quiet"))
            refusal(system, request(slo, tenant="noisy"))

    async def test_a_quieter_tenant_is_admitted_unless_it_makes_others_likely_late(self, system):
        """The other request's remaining time is 1.27 s by the model: median 1.34 s, upper quantile 1.68 s."""
        async with system.running(request(SloTarget("chat", e2e_s=1.6)), num_tokens=1):
            for number in range(10):
                reason = refusal(system, request(LOOSE, tenant="quiet" if number == 0 else "noisy")).reason
                assert reason is RefusalReason.OTHERS
            system.decide(request(LOOSE, tenant="quiet"))
            refusal(system, request(LOOSE, tenant="noisy"))

    async def test_on_an_idle_system_a_noisy_tenant_is_not_refused(self, system):
        for number in range(100):
            system.decide(request(LOOSE, tenant="quiet" if number % 25 == 0 else "noisy"))
        tight = SloTarget("chat", ttft_s=0.2, e2e_s=1.5)
        system.decide(request(tight, tenant="noisy"))
        async with system.running(request(BATCH), num_tokens=1):
            refusal(system, request(tight, tenant="noisy"))

    async def test_a_noisy_tenant_leaves_room_for_quieter_ones(self, system):
        slo = SloTarget("chat", ttft_s=1.0, e2e_s=2.4)
        async with system.running(request(LOOSE), num_tokens=1):
            system.decide(request(slo, tenant="noisy"))
            for number in range(100):
                system.decide(request(LOOSE, tenant="quiet" if number % 25 == 0 else "noisy"))
            with pytest.raises(OverloadedError, match="tenant noisy asks for more work than others") as info:
                system.decide(request(slo, tenant="noisy"))
            assert info.value.reason is RefusalReason.SHARE
            system.decide(request(slo, tenant="quiet"))
            system.decide(request(LOOSE, tenant="noisy"))


class TestMeasures:
    async def test_slack_used_is_the_mean_share_of_recent_requests(self, system):
        assert system.admission.gate.slack_used == 0
        async with system.running(request(BATCH), num_tokens=1):
            system.decide(request(BATCH))
            assert system.admission.gate.slack_used == 0
            asked = request(SloTarget("chat", ttft_s=1.0))
            route = system.plan(asked).route
            offset_s = 10 * route.token_s
            high_s = HIGH * (route.first_s + offset_s) - offset_s
            system.decide(asked)
            share = (high_s - 0.1) / 0.9
            assert system.admission.gate.slack_used == pytest.approx(share)
            refusal(system, request(SloTarget("chat", e2e_s=1.2)))
            assert system.admission.gate.slack_used == pytest.approx((share + 1) / 2)
            await system.pass_s(11)
            assert system.admission.gate.slack_used == 0

    async def test_a_later_request_changes_the_predictions_of_running_ones(self, system, clock):
        """Five chunks of .1 s; the later request's chunk is computed before the last four."""
        async with system.running(request(LOOSE, num_prompt=500)) as running:
            placed = running.placed
            assert (placed.first.model_s, placed.end.model_s) == pytest.approx((0.5, 0.5 + 0.99))
            clock.now += 0.05
            async with system.running(request(SLO, max_tokens=1)):
                assert placed.first.model_s == pytest.approx(0.6, abs=0.01)
                assert placed.end.model_s == pytest.approx(0.6 + 0.99, abs=0.01)

    async def test_the_ttft_of_a_hypothetical_prompt_is_predicted(self, make_system):
        system = make_system()
        assert system.admission.gate.predicted_ttft_s(200) == pytest.approx(0.2 * MEDIAN)
        empty = make_system(num_pods=0)
        assert math.isnan(empty.admission.gate.predicted_ttft_s(200))
