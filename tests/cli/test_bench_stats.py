"""Percentiles, goodput and attainment against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tandem_cli.bench.record import OK, Attempt, Promise, RequestRecord, Speculation
from tandem_cli.bench.report import describe
from tandem_cli.bench.stats import (
    Percentiles,
    by_class,
    by_tenant,
    calibration,
    fair_shares,
    fairness,
    jain,
    percentile,
    refusals,
    summarise,
)
from tandem_core.slo import DEFAULT_SLO_CLASSES, SloTarget

INTERACTIVE, CHAT, BATCH = (
    DEFAULT_SLO_CLASSES["interactive"],
    DEFAULT_SLO_CLASSES["chat"],
    DEFAULT_SLO_CLASSES["batch"],
)


def record(
    *,
    ttft_s: float | None = 1.0,
    e2e_s: float = 2.0,
    tokens: int = 11,
    status: str = OK,
    sent_s: float = 0.0,
    gaps_s: tuple[float, ...] = (),
    speculation: Speculation | None = None,
    slo: SloTarget = DEFAULT_SLO_CLASSES["batch"],
    tenant: str = "",
    attempts: tuple[Attempt, ...] = (),
    promise: Promise | None = None,
) -> RequestRecord:
    return RequestRecord(
        0, "d", status, "", sent_s, ttft_s, e2e_s, gaps_s, 100, tokens, "", speculation,
        slo=slo, tenant=tenant, attempts=attempts, promise=promise,
    )  # fmt: skip


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (99, 3.97), (100, 4.0)])
def test_percentiles_are_linear_between_neighbours(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(value)


def test_one_value_is_every_percentile_and_no_value_has_none() -> None:
    assert Percentiles.of([7.0]) == Percentiles(7.0, 7.0, 7.0, 7.0)
    assert Percentiles.of([]) is None


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    assert record(ttft_s=1.0, e2e_s=2.0, tokens=11).tpot_s == pytest.approx(0.1)
    assert record(tokens=1).tpot_s is None
    assert record(ttft_s=None).tpot_s is None


def test_relative_objectives_take_their_seconds_from_the_receipt() -> None:
    mail = SloTarget("mail", ttft_slowdown=5.0)
    promise = Promise(0.5, 9.0, 0.0, replace(mail, ttft_s=0.6), met=True)
    assert record(ttft_s=0.59, slo=mail, promise=promise).is_met()
    assert not record(ttft_s=0.61, slo=mail, promise=promise).is_met()
    both = replace(mail, e2e_s=2.0)
    wider = replace(promise, slo=replace(both, ttft_s=0.6, e2e_s=3.0), widened=True)
    assert not record(ttft_s=0.5, e2e_s=2.5, slo=both, promise=wider).is_met(), "by what was asked for"


@pytest.mark.parametrize(
    ("ttft_s", "e2e_s", "is_met"), [(2.5, 5.0, True), (2.51, 5.0, False), (2.5, 5.01, False)]
)
def test_interactive_limits_ttft_and_e2e(ttft_s: float, e2e_s: float, is_met: bool) -> None:
    assert record(ttft_s=ttft_s, e2e_s=e2e_s, slo=INTERACTIVE).is_met() is is_met


def test_chat_limits_tpot() -> None:
    assert record(ttft_s=0.5, e2e_s=0.5 + 10 * 0.149, slo=CHAT).is_met()
    assert not record(ttft_s=0.5, e2e_s=0.5 + 10 * 0.151, slo=CHAT).is_met()


def test_a_failure_meets_no_objective_and_an_empty_answers_ttft_is_its_end() -> None:
    assert not record(status="UNAVAILABLE", slo=BATCH).is_met()
    assert record(ttft_s=None, e2e_s=2.4, tokens=0, slo=INTERACTIVE).is_met()
    assert not record(ttft_s=None, e2e_s=2.6, tokens=0, slo=INTERACTIVE).is_met()


def test_attainment_counts_all_sent_and_goodput_only_requests_in_time() -> None:
    records = [
        record(slo=INTERACTIVE, sent_s=0.0, ttft_s=1.0, e2e_s=3.0, tokens=20),  # met
        record(slo=INTERACTIVE, sent_s=1.0, ttft_s=3.0, e2e_s=4.0, tokens=40),  # first token too late
        record(slo=INTERACTIVE, sent_s=2.0, ttft_s=1.0, e2e_s=8.0, tokens=60),  # too long; ends last, at 10 s
        record(sent_s=2.0, ttft_s=None, e2e_s=0.1, tokens=0, status="RESOURCE_EXHAUSTED"),
    ]
    summary = summarise(records)
    assert summary.num_sent == 4
    assert summary.num_ok == 3
    assert summary.failures == {"RESOURCE_EXHAUSTED": 1}
    assert summary.duration_s == pytest.approx(10.0)
    assert summary.requests_per_s == pytest.approx(0.3)
    assert summary.output_tokens_per_s == pytest.approx(12.0)
    assert summary.attainment == pytest.approx(0.25)
    assert (summary.num_refused, summary.attainment_of_admitted) == (1, pytest.approx(1 / 3))
    assert summary.goodput_requests_per_s == pytest.approx(0.1)
    assert summary.goodput_tokens_per_s == pytest.approx(2.0)
    assert summary.e2e_s is not None
    assert summary.e2e_s.p50 == pytest.approx(4.0)


def test_accepted_length_pools_steps_without_the_first_token() -> None:
    records = [
        record(tokens=11, speculation=Speculation(5, 20, 5, {"prompt": 3, "global": 2}, 3)),
        record(tokens=21, speculation=Speculation(10, 40, 10, {"prompt": 10}, 6)),
        record(tokens=99),
    ]
    summary = summarise(records)
    assert summary.drafts is not None
    assert summary.drafts.mean_accepted_length == pytest.approx((10 + 20) / 15)
    assert summary.drafts.iteration_hit_rate == pytest.approx(9 / 15)
    assert summary.drafts.token_hit_rate == pytest.approx(15 / 60)
    assert summary.drafts.accepted_by_source == {"global": 2, "prompt": 13}


def test_without_a_receipt_or_a_step_there_are_no_draft_figures() -> None:
    assert summarise([record()]).drafts is None
    assert summarise([record(tokens=1, speculation=Speculation())]).drafts is None


def test_without_guesses_the_hit_rates_are_zero() -> None:
    drafts = summarise([record(speculation=Speculation(decode_steps=10))]).drafts
    assert drafts is not None
    assert (drafts.mean_accepted_length, drafts.iteration_hit_rate, drafts.token_hit_rate) == (1.0, 0.0, 0.0)


def test_a_run_without_a_success_has_a_report_without_latencies() -> None:
    summary = summarise([record(status="UNAVAILABLE", e2e_s=0.0, tokens=0, ttft_s=None)])
    assert summary.ttft_s is None
    assert summary.attainment == 0.0
    assert summary.requests_per_s == 0.0


def test_classes_and_tenants_share_the_run_s_duration() -> None:
    records = [
        record(sent_s=0.0, e2e_s=2.0, slo=CHAT, tenant="a", ttft_s=0.5, tokens=30),
        record(sent_s=8.0, e2e_s=2.0, slo=BATCH, tenant="b", ttft_s=0.5, tokens=10),
        record(sent_s=8.0, e2e_s=0.1, slo=CHAT, tenant="b", ttft_s=None, tokens=0, status="HTTP 429"),
    ]
    classes, tenants = by_class(records), by_tenant(records)
    assert {name: summary.duration_s for name, summary in (classes | tenants).items()} == dict.fromkeys(
        ("chat", "batch", "a", "b"), pytest.approx(10.0)
    )
    assert (classes["chat"].attainment, classes["chat"].attainment_of_admitted) == (0.5, 1.0)
    assert tenants["b"].num_refused == 1
    assert tenants["a"].goodput_tokens_per_s == pytest.approx(3.0)


def test_refusals_count_attempts_and_later_admissions() -> None:
    refused = Attempt(0.0, 0.002, "RESOURCE_EXHAUSTED", 1.0)
    records = [
        record(ttft_s=2.0, e2e_s=3.0, slo=CHAT, tokens=21, attempts=(refused, Attempt(1.5, 3.0, OK))),
        record(
            status="RESOURCE_EXHAUSTED",
            attempts=(refused, Attempt(1.0, 1.004, "RESOURCE_EXHAUSTED", 1.0)),
        ),
        record(status="UNAVAILABLE", attempts=(Attempt(0.0, 0.5, "UNAVAILABLE", 2.0),)),
        record(ttft_s=0.5, slo=CHAT, tokens=21, attempts=(Attempt(0.0, 2.0, OK),)),
    ]
    counted = refusals(records)
    assert (counted.count, counted.num_honoured, counted.num_then_admitted) == (3, 2, 1)
    assert counted.latency_s is not None
    assert (counted.latency_s.p50, counted.latency_s.p99) == (
        pytest.approx(0.002),
        pytest.approx(0.004, rel=0.02),
    )
    assert counted.ttft_from_last_s is not None
    assert counted.ttft_from_last_s.p50 == pytest.approx(0.5)
    assert [summarise(records).attainment, counted.attainment_from_last] == [0.25, 0.5]


def test_jain_is_one_for_equal_values_and_1_over_n_for_a_single_one() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("total", "asked", "shares"),
    [
        (9.0, {"a": 10, "b": 10, "c": 10}, {"a": 3, "b": 3, "c": 3}),
        (10.0, {"a": 100, "b": 2, "c": 4}, {"a": 4, "b": 2, "c": 4}),
        (50.0, {"a": 10, "b": 5}, {"a": 10, "b": 5}),
    ],
)
def test_a_fair_share_gives_unused_shares_to_other_tenants(
    total: float, asked: dict[str, float], shares: dict[str, float]
) -> None:
    assert fair_shares(total, asked) == pytest.approx(shares)


def test_a_noisy_tenant_may_take_unused_shares_but_not_those_of_others() -> None:
    def sent(tenant: str, met: int, missed: int) -> list[RequestRecord]:
        return [record(tenant=tenant)] * met + [record(tenant=tenant, status="HTTP 429")] * missed

    fair = fairness(sent("noisy", 6, 54) + sent("a", 2, 0) + sent("b", 4, 0))
    unfair = fairness(sent("noisy", 11, 49) + sent("a", 1, 1) + sent("b", 0, 4))
    assert fair is not None
    assert unfair is not None
    assert fair.jain_of_fair_share == pytest.approx(1.0)
    assert fair.jain_of_goodput == pytest.approx(144 / 3 / 56)
    assert unfair.jain_of_fair_share < 0.7
    assert fairness(sent("alone", 5, 0)) is None
    assert fairness(sent("a", 0, 5) + sent("b", 0, 5)) is None


def test_the_report_warns_of_a_late_client() -> None:
    in_time, late = [replace(record(), late_s=0.01)] * 60, [replace(record(), late_s=0.5)] * 2
    assert "too busy" not in describe(in_time, summarise(in_time))
    assert "up to 0.50 s (p99) later than planned" in describe(in_time + late, summarise(in_time + late))


def test_predictions_are_compared_with_the_gateways_times() -> None:
    def predicted(ttft_s: float, p90_s: float | None) -> RequestRecord:
        return record(promise=Promise(ttft_s, 9.0, 0.0, CHAT, met=True, ttft_p90_s=p90_s, e2e_p50_s=8.0))

    shares = calibration(
        [predicted(1.0, 1.0), predicted(1.1, 1.0), predicted(0.2, 0.3), predicted(0.2, 9.0), record()]
    )
    assert shares is not None
    assert (shares.count, shares.ttft_p90, shares.e2e_p50) == (4, 0.75, 0.0)
    assert shares.ttft_p50 is None
    assert calibration([record()]) is None
