"""Percentiles, goodput and attainment against values computed by hand."""

from __future__ import annotations

import pytest
from tandem_cli.bench.record import OK, RequestRecord, Speculation
from tandem_cli.bench.stats import Percentiles, meets, percentile, summarise
from tandem_core.slo import SLO_CLASSES

INTERACTIVE, CHAT, BATCH = SLO_CLASSES["interactive"], SLO_CLASSES["chat"], SLO_CLASSES["batch"]


def record(
    *,
    ttft_s: float | None = 1.0,
    e2e_s: float = 2.0,
    tokens: int = 11,
    status: str = OK,
    sent_s: float = 0.0,
    gaps_s: tuple[float, ...] = (),
    speculation: Speculation | None = None,
) -> RequestRecord:
    return RequestRecord(0, "d", status, "", sent_s, ttft_s, e2e_s, gaps_s, 100, tokens, "", speculation)


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (99, 3.97), (100, 4.0)])
def test_percentiles_are_linear_between_neighbours(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(value)


def test_percentiles_of_one_value_are_that_value_and_of_none_are_none() -> None:
    assert Percentiles.of([7.0]) == Percentiles(7.0, 7.0, 7.0, 7.0)
    assert Percentiles.of([]) is None


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    assert record(ttft_s=1.0, e2e_s=2.0, tokens=11).tpot_s == pytest.approx(0.1)
    assert record(tokens=1).tpot_s is None
    assert record(ttft_s=None).tpot_s is None


@pytest.mark.parametrize(
    ("ttft_s", "e2e_s", "is_met"), [(2.5, 5.0, True), (2.51, 5.0, False), (2.5, 5.01, False)]
)
def test_interactive_bounds_the_first_token_and_the_whole(ttft_s: float, e2e_s: float, is_met: bool) -> None:
    assert meets(record(ttft_s=ttft_s, e2e_s=e2e_s), INTERACTIVE) is is_met


def test_chat_bounds_the_time_per_token() -> None:
    assert meets(record(ttft_s=0.5, e2e_s=0.5 + 10 * 0.149), CHAT)
    assert not meets(record(ttft_s=0.5, e2e_s=0.5 + 10 * 0.151), CHAT)


def test_a_failure_meets_nothing_and_an_empty_answer_counts_by_its_end() -> None:
    assert not meets(record(status="UNAVAILABLE"), BATCH)
    assert meets(record(ttft_s=None, e2e_s=2.4, tokens=0), INTERACTIVE)
    assert not meets(record(ttft_s=None, e2e_s=2.6, tokens=0), INTERACTIVE)


def test_attainment_counts_all_sent_and_goodput_only_what_met_the_objective() -> None:
    records = [
        record(sent_s=0.0, ttft_s=1.0, e2e_s=3.0, tokens=20),  # met
        record(sent_s=1.0, ttft_s=3.0, e2e_s=4.0, tokens=40),  # first token too late
        record(sent_s=2.0, ttft_s=1.0, e2e_s=8.0, tokens=60),  # too long; ends last, at 10 s
        record(sent_s=2.0, ttft_s=None, e2e_s=0.1, tokens=0, status="RESOURCE_EXHAUSTED"),
    ]
    summary = summarise(records, INTERACTIVE)
    assert summary.num_sent == 4
    assert summary.num_ok == 3
    assert summary.failures == {"RESOURCE_EXHAUSTED": 1}
    assert summary.duration_s == pytest.approx(10.0)
    assert summary.requests_per_s == pytest.approx(0.3)
    assert summary.output_tokens_per_s == pytest.approx(12.0)
    assert summary.attainment == pytest.approx(0.25)
    assert summary.goodput_requests_per_s == pytest.approx(0.1)
    assert summary.goodput_tokens_per_s == pytest.approx(2.0)
    assert summary.e2e_s is not None
    assert summary.e2e_s.p50 == pytest.approx(4.0)


def test_accepted_length_pools_steps_and_leaves_out_the_prefills_token() -> None:
    records = [
        record(tokens=11, speculation=Speculation(5, 20, 5, {"prompt": 3, "global": 2}, 3)),
        record(tokens=21, speculation=Speculation(10, 40, 10, {"prompt": 10}, 6)),
        record(tokens=99),
    ]
    summary = summarise(records, BATCH)
    assert summary.drafts is not None
    assert summary.drafts.mean_accepted_length == pytest.approx((10 + 20) / 15)
    assert summary.drafts.iteration_hit_rate == pytest.approx(9 / 15)
    assert summary.drafts.token_hit_rate == pytest.approx(15 / 60)
    assert summary.drafts.accepted_by_source == {"global": 2, "prompt": 13}


def test_without_a_receipt_or_a_step_nothing_is_said_of_drafts() -> None:
    assert summarise([record()], BATCH).drafts is None
    assert summarise([record(tokens=1, speculation=Speculation())], BATCH).drafts is None


def test_no_guesses_are_no_hits() -> None:
    drafts = summarise([record(speculation=Speculation(decode_steps=10))], BATCH).drafts
    assert drafts is not None
    assert (drafts.mean_accepted_length, drafts.iteration_hit_rate, drafts.token_hit_rate) == (1.0, 0.0, 0.0)


def test_a_run_without_a_success_has_no_latencies_but_a_report() -> None:
    summary = summarise([record(status="UNAVAILABLE", e2e_s=0.0, tokens=0, ttft_s=None)], INTERACTIVE)
    assert summary.ttft_s is None
    assert summary.attainment == 0.0
    assert summary.requests_per_s == 0.0
