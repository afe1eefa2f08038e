"""Snapshots from the metrics of gateways and pods."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest
from scaler_fleet import Served, ServedGateway, ServedPod
from tandem_cli.scaler.exposition import Exposition
from tandem_cli.scaler.law import Kept, Pods, Snapshot
from tandem_cli.scaler.readings import Readings, Scrapes
from tandem_cli.scaler.totals import Totals
from tandem_service import metric_table as table

PODS = Pods(1, 1)


class Fleet:
    def __init__(self) -> None:
        self.gateway, self.prefill, self.decode = ServedGateway(), ServedPod(), ServedPod()
        self.readings = Readings(window_s=60.0)
        self.now = 0.0

    def scrape(self, seconds: float = 15.0) -> Snapshot:
        def of(served: Served) -> dict[str, Exposition]:
            return {served.target: Exposition(generate_latest(served.registry).decode())}

        self.now += seconds
        self.readings.add(
            self.now, Scrapes(of(self.gateway), of(self.prefill), of(self.decode), is_complete=True)
        )
        return self.readings.snapshot(self.now, PODS, PODS)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    made.scrape()
    yield made
    for served in (made.gateway, made.prefill, made.decode):
        served.close()


def test_arrivals_are_counted_in_a_recent_and_an_earlier_window(fleet: Fleet) -> None:
    assert not fleet.readings.is_known
    for received in [15] * 6 + [60] * 2:
        fleet.gateway.receive(received)
        seen = fleet.scrape()
    assert fleet.readings.is_known
    assert seen.traffic.received_per_s == pytest.approx(120 / 30)
    assert seen.traffic.received_per_s_before == pytest.approx(210 / 120)
    assert seen.traffic.seconds_between == pytest.approx(45.0)


def test_lengths_and_costs_give_the_work_of_a_request(fleet: Fleet) -> None:
    fleet.gateway.receive(10)
    fleet.gateway.finish(10, prompt=1500, output=200, cached=400)
    fleet.prefill.compute(5, tokens=2000)
    fleet.prefill.backlog.set(1.25)
    fleet.decode.requests.labels("running").set(7)
    fleet.decode.requests.labels("waiting").set(2)
    seen = fleet.scrape()
    assert (seen.traffic.prompt_tokens, seen.traffic.output_tokens) == (1500, 200)
    assert seen.prefill.work_s == pytest.approx(0.5 * 2000 * 1e-4), "every other prompt, of 2,000 tokens"
    assert seen.prefill.queue_s == 1.25
    assert seen.decode.local_prompt_s == pytest.approx((1500 - 400 - 1000) * 1e-4)
    assert (seen.decode.cost.per_step, seen.decode.cost.per_token) == (0.02, 0.0005)
    assert (seen.decode.max_batch, seen.decode.kv_tokens, seen.decode.sequences) == (64, 4000 * 64, 9)
    assert seen.decode.kv_use == 0.25


def test_objectives_are_those_of_classes_with_traffic_and_refusals_miss_them(fleet: Fleet) -> None:
    fleet.gateway.receive(30)
    fleet.gateway.finish(10)
    fleet.gateway.finish(4, ttft_s=1.2)
    fleet.gateway.finish(3, tpot_s=0.2)
    fleet.gateway.refuse(2, "ttft")
    fleet.gateway.refuse(1, "pod full")
    fleet.gateway.refuse(7, "tenant tokens")
    traffic = fleet.scrape().traffic
    assert (traffic.ttft_s, traffic.tpot_s) == (1.0, 0.15)
    assert traffic.ttft_kept == Kept(17 + 2, 13)
    assert traffic.tpot_kept == Kept(17 + 1, 14)


def test_an_e2e_objective_gives_a_limit_per_token(fleet: Fleet) -> None:
    fleet.gateway.receive(4, "interactive")
    fleet.gateway.finish(2, output=101, name="interactive", tpot_s=0.02)
    fleet.gateway.finish(1, output=101, name="interactive", tpot_s=0.06)
    fleet.gateway.finish(1, output=101, name="interactive", tpot_s=0.02, ttft_s=4.0)
    traffic = fleet.scrape().traffic
    assert traffic.tpot_s == pytest.approx((5.0 - 2.5) / 100)
    assert traffic.ttft_kept == Kept(4, 3)
    assert traffic.tpot_kept == Kept(4, 3), "the answer that began late is not late by its tokens"


def test_lengths_and_costs_stay_known_without_pods(fleet: Fleet) -> None:
    fleet.gateway.receive(5)
    fleet.gateway.finish(5)
    fleet.prefill.compute(5)
    before = fleet.scrape()
    fleet.readings.add(
        1000.0,
        Scrapes(
            {"g": Exposition(generate_latest(fleet.gateway.registry).decode())}, {}, {}, is_complete=True
        ),
    )
    after = fleet.readings.snapshot(1000.0, Pods(0, 0), Pods(0, 0))
    assert after.prefill.work_s == before.prefill.work_s > 0
    assert after.decode.cost == before.decode.cost
    assert after.traffic.output_tokens == before.traffic.output_tokens


def test_totals_continue_over_restarts_and_new_processes() -> None:
    totals = Totals(keep_s=100.0)
    for now, processes in (
        (0.0, {"a": 10.0}),
        (10.0, {"a": 30.0}),
        (20.0, {"a": 5.0}),  # restarted
        (30.0, {"a": 6.0, "b": 1000.0}),  # b is new to the scaler, so its counts may be old
        (40.0, {"b": 1003.0}),  # a did not answer
        (50.0, {"a": 9.0, "b": 1003.0}),
    ):
        totals.add(now, {target: {"x": value} for target, value in processes.items()})
    assert totals.increase("x", 1000) == 20 + 5 + 1 + 3 + 3
    assert totals.increase("x", 20) == 6
    assert totals.rate("x", 20) == pytest.approx(0.3)
    assert totals.covered(1000) == 50
    for now in range(60, 400, 10):
        totals.add(float(now), {})
    assert totals.increase("x", 1000) == 0
    assert totals.covered(1000) == pytest.approx(100.0, abs=10.0)


def test_unknown_values_of_pods_do_not_count() -> None:
    pod = ServedPod()
    try:
        pod.backlog.set(float("nan"))
        exposition = Exposition(generate_latest(pod.registry).decode())
        assert exposition.sum(table.PROMPT_BACKLOG) == 0.0
        assert exposition.sum(table.KV_BLOCKS, state="used") == 1000.0
    finally:
        pod.close()
