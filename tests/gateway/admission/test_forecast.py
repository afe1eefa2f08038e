"""Predictions: quantiles of their errors, by group of requests."""

import random
from dataclasses import replace

import pytest
from reported_pods import BATCH, HIGH, MEDIAN, request
from tandem_core.beams import BeamParams
from tandem_core.sampling import SamplingParams
from tandem_core.slo import SloTarget
from tandem_gateway.admission.forecast import MEMORY_S, ErrorWindow, Group, Quantiles
from tandem_gateway.fleet.load import Placed, Track
from tandem_gateway.fleet.pods import Role

CHAT, VOICE = Group("chat", True, False), Group("voice", True, False)
NIGHTLY = Group("nightly", False, False)


def observe(window: ErrorWindow, ratio: float, count: int = 1, group: Group = CHAT) -> None:
    for _ in range(count):
        window.observe(group, 1.0, ratio)


class TestErrorWindow:
    def test_without_measurements_the_prior_keeps_a_margin(self, clock):
        quantiles = ErrorWindow(0.99).quantiles(CHAT, 2.0)
        assert quantiles == pytest.approx(Quantiles(2.0 * MEDIAN, 2.0 * HIGH))

    def test_the_prior_counts_next_to_measurements(self, clock):
        window = ErrorWindow(0.99)
        observe(window, 1.0, 50)
        assert window.quantiles(CHAT, 1.0) == pytest.approx((1.0, HIGH)), "right for long, it is kept"
        assert ErrorWindow(0.9).quantiles(CHAT, 1.0).high == pytest.approx(HIGH)

    @pytest.mark.parametrize("level", [0.75, 0.9, 0.95])
    def test_upper_quantiles_hold_for_the_share_of_their_level(self, clock, level):
        window, rng, held = ErrorWindow(level), random.Random(7), 0
        for _ in range(3000):
            measured = rng.lognormvariate(0.0, 0.4)
            held += measured <= window.quantiles(CHAT, 1.0).high
            window.observe(CHAT, 1.0, measured)
        assert held / 3000 == pytest.approx(level, abs=0.02)

    def test_a_median_holds_half_of_the_time(self, clock):
        window, rng, held = ErrorWindow(), random.Random(7), 0
        for _ in range(3000):
            measured = rng.lognormvariate(0.5, 0.4)
            held += measured <= window.quantiles(CHAT, 1.0).p50
            window.observe(CHAT, 1.0, measured)
        assert held / 3000 == pytest.approx(0.5, abs=0.03)

    def test_a_class_with_few_measurements_shares_those_of_its_kind(self, clock):
        window = ErrorWindow()
        observe(window, 4.0, 50)
        observe(window, 20.0, 50, NIGHTLY)
        observe(window, 1.0, 15, VOICE)
        assert window.quantiles(VOICE, 1.0).p50 == pytest.approx(4.0)
        assert window.quantiles(Group("weekly", False, False), 1.0).p50 == pytest.approx(20.0)
        observe(window, 1.0, 1, VOICE)
        assert window.quantiles(VOICE, 1.0).p50 == pytest.approx(1.0), "with 16 it needs no others"
        assert window.quantiles(CHAT, 1.0).p50 == pytest.approx(4.0)

    def test_prompts_of_prefill_pods_count_apart(self, clock):
        window = ErrorWindow()
        observe(window, 9.0, 50)
        remote = replace(CHAT, is_remote=True)
        assert window.quantiles(remote, 1.0) == ErrorWindow().quantiles(remote, 1.0)

    def test_a_change_of_the_machine_replaces_the_window(self, clock):
        window = ErrorWindow()
        observe(window, 1.0, 300)
        observe(window, 2.0, 128)
        assert window.quantiles(CHAT, 1.0).p50 == pytest.approx(2.0)

    def test_the_last_128_measurements_count(self, clock):
        window = ErrorWindow(0.99)
        observe(window, 8.0)
        observe(window, 1.0, 127)
        assert window.quantiles(CHAT, 1.0).high == pytest.approx(8.0)
        observe(window, 1.0)
        assert window.quantiles(CHAT, 1.0).high == pytest.approx(HIGH)

    def test_old_measurements_do_not_count(self, clock):
        """Otherwise a class that is refused for its late requests would always be refused."""
        window = ErrorWindow()
        observe(window, 8.0, 100)
        clock.now += MEMORY_S - 1
        assert window.quantiles(CHAT, 1.0).p50 == pytest.approx(8.0)
        clock.now += 2
        assert window.quantiles(CHAT, 1.0) == ErrorWindow().quantiles(CHAT, 1.0)

    def test_times_of_zero_raise_no_error(self, clock):
        window = ErrorWindow()
        window.observe(CHAT, 0.0, 0.0)
        assert window.quantiles(CHAT, 0.0) == (0.0, 0.0)


class TestGroups:
    async def test_requests_are_grouped_by_class_objectives_and_pod_of_the_prompt(self, system):
        asked = request()
        here = system.plan(asked).route
        assert Group.of(asked, here) == CHAT
        assert Group.of(request(BATCH), here) == Group("batch", False, False)
        system.add_pod("p:1", Role.PREFILL)
        assert Group.of(asked, system.plan(asked).route) == Group("chat", True, True)


def placed_on(system, asked, first_s: float = 0.0, end_s: float = 0.0) -> Placed:
    """A request on its pods with these times in the pod model."""
    placed = Placed(asked, route=system.plan(asked).route)
    placed.first, placed.end = Track(0.0, 0.0, first_s), Track(0.0, 0.0, end_s)
    return placed


class TestForecaster:
    async def test_a_forecast_has_the_times_of_the_route_and_the_wait(self, system):
        asked = request()
        route = system.plan(asked).route
        forecast = system.forecaster.on_route(asked, route, 0.5)
        assert (route.first_s, route.end_s, route.token_s) == pytest.approx((0.1, 1.09, 0.01))
        assert forecast.ttft == pytest.approx((MEDIAN * 0.6, HIGH * 0.6))
        assert forecast.e2e == pytest.approx((MEDIAN * 1.59, HIGH * 1.59))
        # Ten tokens on both sides.
        assert forecast.first == pytest.approx((MEDIAN * 0.7 - 0.1, HIGH * 0.7 - 0.1))
        assert forecast.end == pytest.approx((MEDIAN * 1.69 - 0.1, HIGH * 1.69 - 0.1))
        assert forecast.tpot.p50 == pytest.approx((MEDIAN * 1.69 - 0.1 - 0.6) / 99)
        assert forecast.alone == pytest.approx({"ttft": 0.1, "tpot": 0.01, "e2e": 1.1}, rel=0.01)

    async def test_no_answer_is_predicted_to_end_before_it_begins(self, system):
        asked = request(max_tokens=1)
        forecaster, route = system.forecaster, system.plan(asked).route
        placed, forecast = placed_on(system, asked), forecaster.on_route(asked, route)
        for _ in range(50):
            forecaster.started(placed, forecast, 3.0, None)
        forecast = forecaster.on_route(asked, route)
        assert forecast.e2e >= forecast.ttft > (2.0, 2.0)

    async def test_errors_of_a_few_tokens_hardly_change_long_predictions(self, system):
        asked, rng = request(), random.Random(5)
        placed = placed_on(system, asked)
        for _ in range(20):
            system.forecaster.took(placed, 0.02, 0.02 + 0.1 * rng.random())
        # A factor alone would be up to six.
        assert system.forecaster.end_of(placed, 3.0).high < 2 * 3.0
        assert system.forecaster.end_of(placed, 0.02).high > 0.05

    async def test_a_short_rest_is_never_negative(self, system):
        placed = placed_on(system, request())
        for _ in range(20):
            system.forecaster.took(placed, 5.0, 1.0)
        assert system.forecaster.end_of(placed, 0.01).p50 == 0.0

    async def test_receipts_and_admission_have_separate_windows(self, system):
        """Receipts include the delay by later requests, admission's predictions do not."""
        asked = request()
        forecaster, route = system.forecaster, system.plan(asked).route
        forecast = forecaster.on_route(asked, route)
        for _ in range(60):
            placed = placed_on(system, asked, first_s=0.4, end_s=2.9)
            forecaster.started(placed, forecast, 0.4, 0.4)
            forecaster.ended(placed, forecast, 3.0)
            forecaster.took(placed, 2.9, 2.9)
        forecast = forecaster.on_route(asked, route)
        assert forecast.ttft.p50 == pytest.approx(0.4)
        assert forecast.e2e.p50 == pytest.approx(3.0)
        assert forecast.first.p50 == pytest.approx(0.1)
        assert forecast.end.p50 == pytest.approx(1.09)

    async def test_a_request_without_a_place_adds_no_error_to_admission(self, system):
        asked = request()
        forecaster, route = system.forecaster, system.plan(asked).route
        forecast = forecaster.on_route(asked, route)
        for _ in range(60):
            forecaster.started(Placed(asked, route=route), forecast, 5.0, None)
        assert forecaster.on_route(asked, route).first == forecast.first

    async def test_confidences_are_the_levels_at_which_admission_decides(self, make_system):
        asked, high = request(), {}
        for first, end in ((0.6, 0.99), (0.99, 0.6)):
            system, rng = make_system(first_confidence=first, end_confidence=end), random.Random(5)
            route = system.plan(asked).route
            for _ in range(100):
                placed = placed_on(system, asked, first_s=0.1)
                forecast = system.forecaster.on_route(asked, route)
                took_s = rng.uniform(0.05, 0.15)
                system.forecaster.started(placed, forecast, took_s, took_s)
                system.forecaster.took(placed, 1.0, rng.uniform(0.6, 1.4))
            high[first] = system.forecaster.on_route(asked, route)
        assert high[0.6].first.high < 0.12 < high[0.99].first.high
        assert high[0.99].end.high < 1.3 < high[0.6].end.high
        assert high[0.6].ttft == high[0.99].ttft, "receipts have the median and the 90th percentile"

    async def test_the_first_token_of_a_beam_search_is_predicted_with_its_last_one(self, system):
        asked = request()
        route = system.plan(asked).route
        search = replace(
            asked, sampling=SamplingParams(max_tokens=100, ignore_eos=True, beam_search=BeamParams(4))
        )
        plain, found = (system.forecaster.on_route(one, route) for one in (asked, search))
        assert plain.ttft.p50 < plain.e2e.p50 == found.e2e.p50 == found.ttft.p50
        assert found.first == found.end == plain.end
        assert found.alone["ttft"] == found.alone["e2e"] > plain.alone["ttft"]

    async def test_predictions_from_before_a_pod_failed_are_void(self, system, clock):
        before = clock.now
        clock.now += 1.0
        system.fleet.mark_dead(system.pods[0], "lost")
        assert system.forecaster.is_void(before)
        assert not system.forecaster.is_void(clock.now)


class TestForecast:
    async def test_a_miss_names_the_objective(self, system):
        asked = request()
        forecast = system.forecaster.on_route(asked, system.plan(asked).route)
        for slo, waited_s, missed in (
            (SloTarget("", ttft_s=0.15, e2e_s=1.0), 0.0, "ttft"),
            (SloTarget("", ttft_s=0.17, tpot_s=0.013), 0.0, "tpot"),
            (SloTarget("", ttft_s=0.17, e2e_s=1.4), 0.0, "e2e"),
            (SloTarget("", ttft_s=0.17, tpot_s=0.014, e2e_s=1.5), 0.0, ""),
            (SloTarget("", ttft_s=0.17, tpot_s=0.014, e2e_s=1.5), 0.05, "ttft"),
            (SloTarget(""), 900.0, ""),
        ):
            assert forecast.misses(slo, waited_s) == missed
        assert not forecast.misses(SloTarget("", ttft_s=0.12, e2e_s=1.2), 0.0, is_likely=True)

    async def test_the_share_of_the_slack_is_that_of_the_tightest_objective(self, system):
        asked = request()
        forecast = system.forecaster.on_route(asked, system.plan(asked).route)
        of_first = (forecast.first.high + 0.1 - 0.1) / (0.5 - 0.1)
        slo = SloTarget("", ttft_s=0.5, e2e_s=100.0)
        assert forecast.share_of_slack(slo, 0.1) == pytest.approx(of_first)
        assert forecast.share_of_slack(slo, 5.0) == 1.0
        assert forecast.share_of_slack(SloTarget(""), 5.0) == 0.0
