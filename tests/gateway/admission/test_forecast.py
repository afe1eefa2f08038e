"""Predictions: backlogs and calibrated quantiles."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fixed_forecaster import FixedForecaster, request
from still_clock import Clock
from tandem_core.beams import BeamParams
from tandem_core.sampling import SamplingParams
from tandem_core.slo import NO_OBJECTIVES, SloTarget
from tandem_gateway.admission import forecast
from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.forecast import Calibration, Forecaster, Group, Quantiles
from tandem_gateway.fleet import pod_load
from tandem_gateway.fleet.pod_load import Backlog
from tandem_gateway.fleet.routing import OutputLengths, Route
from tandem_gateway.request import TokenizedRequest
from tandem_gateway.settings import Policy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pod_load, "time", clock)
    return clock


class TestBacklog:
    def test_only_earlier_deadlines_are_waited_for(self, clock):
        backlog = Backlog()
        for name, due, seconds in (("a", 1010.0, 1.0), ("b", 1020.0, 2.0), ("c", 1030.0, 4.0)):
            backlog.add(name, due, seconds)
        assert [backlog.seconds(due) for due in (1005.0, 1015.0, 1025.0, 1035.0)] == [0, 1, 3, 7]
        backlog.remove("b")
        backlog.remove("never added")
        assert backlog.seconds(1035.0) == 5

    def test_the_pod_has_worked_since(self, clock):
        backlog = Backlog()
        backlog.add("a", 1010.0, 1.0)
        backlog.add("b", 1020.0, 2.0)
        clock.now += 0.5
        assert backlog.seconds(1100.0) == 2.5
        clock.now += 10
        assert backlog.seconds(1100.0) == 2.0, "no more than the first: its token is not here"
        backlog.remove("a")
        assert backlog.seconds(1100.0) == 2.0

    def test_a_step_that_runs_is_waited_for_whatever_its_deadline(self, clock):
        backlog = Backlog()
        backlog.add("running", 1020.0, 0.5)
        backlog.add("next", 1010.0, 2.0)
        assert backlog.seconds(1005.0, step_s=1.0) == 0.5
        assert backlog.seconds(1015.0, step_s=1.0) == 2.5
        clock.now += 0.25
        assert backlog.seconds(1005.0, step_s=1.0) == 0.25
        backlog.remove("running")
        assert backlog.seconds(1005.0, step_s=1.0) == 0.5, "half of a step of the long one"
        assert backlog.seconds(1015.0, step_s=1.0) == 2.0

    def test_what_other_gateways_sent_is_in_the_report(self, clock):
        backlog = Backlog()
        backlog.add("own", 1010.0, 1.0)
        backlog.report([("other", 1005.0, 3.0), ("own", 1010.0, 1.0)])
        assert backlog.seconds(1100.0) == 4.0
        assert backlog.seconds(1007.0) == 3.0
        clock.now += 1
        assert backlog.seconds(1007.0) == 2.0
        clock.now += 10
        assert backlog.seconds(1007.0) == 0.0

    def test_own_prompts_count_as_this_gateway_knows_them_whatever_the_pod_says(self, clock):
        backlog = Backlog()
        for name in ("waits", "is computed after the report"):
            backlog.add(name, 1010.0, 1.0)
        backlog.remove("is computed after the report")
        backlog.report([("waits", 1010.0, 50.0), ("is computed after the report", 1010.0, 50.0)])
        assert backlog.seconds(1100.0) == 1.0

    def test_slack_is_the_least_of_those_that_are_later_and_in_time(self, clock):
        backlog = Backlog()
        assert backlog.slack(1001.0) == float("inf")
        backlog.add("early", 1003.0, 1.0, limit=1003.0)
        backlog.add("late", 1010.0, 1.0, limit=1010.0)
        assert backlog.slack(1001.0) == 2.0
        assert backlog.slack(1005.0) == 8.0
        backlog.add("hopeless", 1002.0, 9.0, limit=1002.0)
        assert backlog.slack(1005.0) == float("inf"), "the others are late, whatever comes"

    def test_sequences_that_decode_take_time_in_the_step_of_each_prompt(self, clock):
        backlog = Backlog()
        backlog.add("first", 1003.0, 1.0, limit=1010.0)
        backlog.add("second", 1004.0, 1.0, limit=1010.0)
        assert backlog.slack(1001.0) == 8.0
        assert backlog.slack(1001.0, beside_s=0.5) == 7.0
        assert backlog.slack(1001.0, beside_s=5.0) == 4.0, "the second one is late anyway"

    def test_a_place_behind_others_is_no_permission_to_be_late(self, clock):
        backlog = Backlog()
        backlog.add("of a tenant that is ahead", 1020.0, 1.0, limit=1003.0)
        assert backlog.slack(1001.0) == 2.0


CHAT = Group("chat")


def observe(calibration: Calibration, name: str, predicted: float, measured: float) -> Quantiles:
    """What was said before the measurement."""
    group = Group(name, is_last=name == "batch")
    said = calibration.quantiles(group, predicted)
    calibration.observe(group, predicted, said, measured)
    return said


class TestCalibration:
    def test_without_measurements_the_median_is_the_prediction(self):
        quantiles = Calibration().quantiles(CHAT, 2.0)
        assert quantiles.p50 == pytest.approx(2.0, rel=0.2)
        assert quantiles.p50 < quantiles.high

    @pytest.mark.parametrize("high", [0.75, 0.95, 0.99])
    def test_as_many_upper_quantiles_hold_as_they_are_asked_to(self, high):
        calibration, rng, held = Calibration(high=high), random.Random(7), 0
        for _ in range(3000):
            measured = rng.lognormvariate(0.0, 0.4)
            held += measured <= observe(calibration, "chat", 1.0, measured).high
        assert held / 3000 == pytest.approx(high, abs=0.01)

    def test_predictions_of_about_the_same_length_tell_how_wrong_the_next_one_may_be(self):
        """Short ones are off by a step or two, which of a long one is little."""
        calibration, rng = Calibration(), random.Random(5)
        for _ in range(64):
            observe(calibration, "chat", 0.1, 0.1 * rng.uniform(0.5, 3.0))
            observe(calibration, "chat", 3.0, 3.0 * rng.uniform(0.7, 0.8))
        short, long = calibration.quantiles(CHAT, 0.1), calibration.quantiles(CHAT, 3.0)
        assert short.high > 2 * 0.1
        assert long.p50 == pytest.approx(0.75 * 3.0, rel=0.1)
        assert long.high < 1.2 * 3.0
        longer = calibration.quantiles(CHAT, 9.0)
        assert (longer.p50, longer.high) == pytest.approx((3 * long.p50, 3 * long.high)), (
            "as the nearest ones"
        )

    def test_the_nearest_are_not_those_next_in_order(self):
        calibration, rng = Calibration(), random.Random(5)
        for _ in range(20):
            observe(calibration, "chat", 5.0, 15.0)
        for _ in range(100):
            predicted = rng.uniform(0.08, 0.12)
            observe(calibration, "chat", predicted, predicted * rng.uniform(0.95, 1.05))
        assert calibration.quantiles(CHAT, 0.119).high < 1.4 * 0.119

    def test_quantiles_hold_for_each_class_and_size(self):
        calibration, rng = Calibration(), random.Random(3)

        def measured(name: str, predicted: float) -> float:
            factor = {"chat": 1.0, "batch": 3.0}[name] * (5.0 if predicted < 0.1 else 1.0)
            return predicted * factor * rng.lognormvariate(0.0, 0.3)

        held = dict.fromkeys((("chat", 0.02), ("chat", 2.0), ("batch", 0.02), ("batch", 2.0)), 0)
        for i in range(1000):
            for name, predicted in held:
                actual = measured(name, predicted)
                said = observe(calibration, name, predicted, actual)
                held[name, predicted] += i >= 200 and actual <= said.high
        assert all(0.86 < count / 800 < 0.94 for count in held.values()), held

    def test_where_the_model_knows_little_all_are_expected_to_take_about_the_same(self):
        calibration, rng = Calibration(), random.Random(5)
        for _ in range(128):
            predicted, actual = rng.lognormvariate(0.0, 0.7), rng.lognormvariate(1.0, 0.2)
            observe(calibration, "chat", predicted, actual)
        short, long = calibration.quantiles(CHAT, 0.5), calibration.quantiles(CHAT, 2.0)
        assert (short.p50, long.p50) == (pytest.approx(2.7, rel=0.3), pytest.approx(2.7, rel=0.3))
        assert long.high < 2.0 * 2.7, "a factor for both would be 5.4 at the least"

    def test_a_class_without_measurements_is_as_the_others_with_objectives_are(self):
        calibration = Calibration()
        for _ in range(50):
            observe(calibration, "chat", 1.0, 4.0)
            observe(calibration, "batch", 1.0, 20.0)
        assert calibration.quantiles(Group("voice"), 1.0).p50 == pytest.approx(4.0)
        assert calibration.quantiles(Group("nightly", is_last=True), 1.0).p50 == pytest.approx(20.0)

    def test_those_whose_objectives_cannot_be_met_count_with_those_that_have_none(self):
        asked, here = request(), FixedForecaster(ttft=1.0).forecast(request()).route
        assert Group.of(asked, here) == Group("chat")
        assert Group.of(replace(asked, due_s=2.0), here) == Group("chat")
        assert Group.of(replace(asked, due_s=60.0), here) == Group("chat", is_last=True)
        assert Group.of(replace(asked, slo=NO_OBJECTIVES), here).is_last

    def test_prompts_of_prefill_pods_count_apart(self):
        """On shared cores they take many times as long as those that the decode pod computes."""
        here = FixedForecaster(ttft=1.0).forecast(request()).route
        there = replace(here, computes_prompt=SimpleNamespace())
        assert Group.of(request(), there) == Group("chat", is_remote=True)
        calibration = Calibration()
        for _ in range(50):
            observe(calibration, "chat", 1.0, 1.0)
        remote = Group("voice", is_remote=True)
        assert calibration.quantiles(remote, 1.0) == Calibration().quantiles(remote, 1.0)

    def test_a_change_of_the_machine_is_learned(self):
        calibration, rng = Calibration(), random.Random(6)
        for ratio in [1.0] * 300 + [2.0] * 128:
            observe(calibration, "chat", 1.0, ratio * rng.uniform(0.98, 1.02))
        assert calibration.quantiles(CHAT, 1.0).p50 == pytest.approx(2.0, rel=0.05)

    def test_a_change_of_load_is_followed_before_the_window_has_passed(self):
        calibration, rng = Calibration(), random.Random(4)
        for _ in range(300):
            observe(calibration, "chat", 1.0, rng.lognormvariate(0.0, 0.2))
        held = [
            actual <= observe(calibration, "chat", 1.0, actual).high
            for actual in (rng.lognormvariate(0.25, 0.2) for _ in range(100))
        ]
        assert sum(held) >= 85

    def test_what_nobody_has_measured_for_a_while_is_forgotten(self, clock, monkeypatch):
        """Else a class that is refused for its late requests would be refused for good."""
        monkeypatch.setattr(forecast, "time", clock)
        calibration = Calibration()
        for _ in range(100):
            observe(calibration, "chat", 1.0, 8.0)
        assert calibration.quantiles(CHAT, 1.0).p50 == pytest.approx(8.0)
        clock.now += 29
        assert calibration.quantiles(CHAT, 1.0).p50 == pytest.approx(8.0)
        clock.now += 2
        assert calibration.quantiles(CHAT, 1.0) == Calibration().quantiles(CHAT, 1.0)


def test_a_first_token_that_others_delayed_does_not_count_against_admission():
    route = FixedForecaster(ttft=0.5).forecast(request()).route
    forecaster, rng = forecaster_of(route), random.Random(5)
    for _ in range(60):
        said = forecaster.forecast(request())
        forecaster.started(request(), said, 0.5 * rng.uniform(0.97, 1.03), is_overtaken=False)
        forecaster.started(request(), said, 2.5 * rng.uniform(0.97, 1.03), is_overtaken=True)
    said = forecaster.forecast(request())
    assert said.ttft.high > 2.0
    assert said.ttft_undisturbed.high < 0.81


def test_the_first_token_of_a_beam_search_is_predicted_with_its_last_one():
    route = FixedForecaster(ttft=0.5).forecast(request()).route
    asked = replace(request(), sampling=SamplingParams(beam_search=BeamParams(width=4)))
    forecaster = forecaster_of(route)
    plain, search = forecaster.forecast(request()), forecaster.forecast(asked)
    assert plain.ttft.p50 < plain.e2e.p50 == search.e2e.p50 == search.ttft.p50
    assert search.ttft_undisturbed == search.e2e_undisturbed == plain.e2e_undisturbed
    assert search.alone["ttft"] == search.alone["e2e"] > plain.alone["ttft"]


def test_confidences_are_the_quantiles_at_which_admission_judges():
    route = FixedForecaster(ttft=0.5).forecast(request()).route
    said = {}
    for first, end in ((0.6, 0.99), (0.99, 0.6)):
        forecaster, rng = forecaster_of(route, first, end), random.Random(5)
        for _ in range(100):
            said[first] = forecaster.forecast(request())
            forecaster.started(request(), said[first], rng.uniform(0.3, 0.7), is_overtaken=False)
            forecaster.took(request(), route, 1.0, rng.uniform(0.6, 1.4))
    assert said[0.6].ttft_undisturbed.high < 0.6 < said[0.99].ttft_undisturbed.high
    assert said[0.99].e2e_undisturbed.high < 1.2 < said[0.6].e2e_undisturbed.high
    assert said[0.6].ttft == said[0.99].ttft, "receipts have the median and the 90th percentile"


def forecaster_of(route: Route, first: float = 0.99, end: float = 0.99) -> Forecaster:
    return Forecaster(Unchanging(route), OutputLengths(), first_confidence=first, end_confidence=end)


class Unchanging:
    """A router that predicts the same for each request."""

    def __init__(self, route: Route) -> None:
        self.route = route

    def plan(self, request: TokenizedRequest) -> Route:
        return self.route


def test_what_later_requests_add_is_predicted_and_does_not_count_against_admission():
    route = FixedForecaster(ttft=0.5).forecast(request()).route  # ends after .5 + 10 * .05 s
    forecaster, rng = forecaster_of(route), random.Random(5)
    for _ in range(60):
        said = forecaster.forecast(request())
        forecaster.ended(request(), said, 3.0 * rng.uniform(0.97, 1.03))
        forecaster.took(request(), said.route, 0.5, 0.6 * rng.uniform(0.97, 1.03))
        forecaster.took(request(), said.route, 1.0, 1.2 * rng.uniform(0.97, 1.03))
    said = forecaster.forecast(request())
    assert said.e2e.p50 == pytest.approx(3.0, rel=0.1)
    assert 1.2 < said.e2e_undisturbed.high < 1.5
    assert not said.misses(SloTarget("chat", e2e_s=2.0), 0.0)
    assert 0.6 < forecaster.left(request(), route, 0.5).high < 0.9


def test_what_short_remainders_are_off_by_is_little_of_a_long_one():
    route = FixedForecaster(ttft=0.5).forecast(request()).route
    forecaster, rng = forecaster_of(route), random.Random(5)
    for _ in range(12):
        forecaster.took(request(), route, 0.02, 0.02 + 0.2 * rng.random())
    assert forecaster.left(request(), route, 1.0).high < 2.0, "a factor alone: up to 11"


def test_measured_times_count_from_the_forecast():
    forecaster = FixedForecaster(ttft=0.9)
    admission = Admission(forecaster, max_in_flight=8, max_queue=8, policy=Policy.PREDICT, slack=0.0)
    asked = request()
    admitted = replace(admission.judge.decide(asked), judged_at=asked.arrived + 0.25)
    admission.started(admitted, ttft_s=0.75)
    assert forecaster.observed == [("ttft", 0.5)]
    admission.ended(admitted, e2e_s=1.25, num_tokens=7, met=True)
    assert forecaster.observed[1:3] == [("tokens", 7), ("e2e", 1.0)]
