"""The table of metrics, and names that are served from other names' data."""

from __future__ import annotations

import dataclasses

import pytest
from metric_names import differences
from prometheus_client import CollectorRegistry, generate_latest
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_service import metric_table as table
from tandem_service.metric_rows import CounterRow, Process, Unit
from tandem_service.metric_table import TABLE
from tandem_service.metric_twins import serve_twins
from tandem_service.metrics import new_registry


def test_each_name_is_unique_and_described() -> None:
    series = [name for row in TABLE for name in row.series]
    assert len(series) == len(set(series))
    for row in TABLE:
        assert row.help and row.served_by and row.name.startswith(("tandem_", "vllm:")), row.name
        ends = {Unit.SECONDS: "_seconds", Unit.BYTES: "_bytes", Unit.RATIO: "_ratio"}
        if row.unit in ends and row.name.startswith("tandem_"):
            assert row.name.removesuffix("_total").endswith(ends[row.unit]), row.name
        assert row.kind == "histogram" or not row.name.endswith(("_bucket", "_sum", "_count", "_created"))


def test_a_counters_name_must_end_with_total() -> None:
    with pytest.raises(ValueError, match="tandem_things: a counter's name ends with _total"):
        CounterRow("tandem_things", "Things", (), Unit.COUNT, (Process.GATEWAY,))


def test_every_objective_of_a_class_is_an_edge() -> None:
    for slo in DEFAULT_SLO_CLASSES.values():
        for target_s, row in (
            (slo.ttft_s, table.TTFT_SECONDS), (slo.ttft_s, table.VLLM_TTFT), (slo.e2e_s, table.E2E_SECONDS),
            (slo.tpot_s, table.TPOT_SECONDS), (slo.tpot_s, table.VLLM_ITL),
        ):  # fmt: skip
            assert not target_s or target_s in row.buckets, (slo.name, row.name)


def test_a_twin_has_its_sources_labels_and_is_served_where_they_are() -> None:
    twins = [row for row in TABLE if row.sources]
    assert len(twins) > 15
    for row in twins:
        assert row.labels[: len(table.VLLM_LABELS)] == table.VLLM_LABELS
        assert set(row.labels[len(table.VLLM_LABELS) :]) == row.label_of.keys()
        for source in row.sources:
            assert source.row.kind == row.kind
            assert {*row.label_of.values(), *source.where} <= set(source.row.labels), row.name
        for process in row.served_by:
            assert any(process in source.row.served_by for source in row.sources), row.name


def test_gateways_alone_serve_vllms_names() -> None:
    """vLLM's dashboards take job and instance from num_requests_running, for all their panels."""
    assert {row.served_by for row in TABLE if row.name.startswith("vllm:")} == {(Process.GATEWAY,)}


def test_a_twin_adds_up_what_its_source_counts_and_never_counts_itself() -> None:
    registry = CollectorRegistry()
    stages = table.STAGE_SECONDS.make(registry)
    finished = table.FINISHED.make(registry)
    serve_twins(registry, model_name="m")
    stages.labels("chat", "prefill").observe(0.3)
    stages.labels("batch", "prefill").observe(0.04)
    stages.labels("batch", "decode").observe(7.0)
    finished.labels("stop").inc(2)
    one = {"model_name": "m", "engine": "0"}
    prefill = "vllm:request_prefill_time_seconds"
    value = registry.get_sample_value
    assert value(f"{prefill}_count", one) == 2
    assert value(f"{prefill}_sum", one) == pytest.approx(0.34)
    assert [value(f"{prefill}_bucket", {**one, "le": le}) for le in ("0.025", "0.05", "0.5", "+Inf")] == [
        0, 1, 2, 2,
    ]  # fmt: skip
    assert value("vllm:request_decode_time_seconds_count", one) == 1
    assert value("vllm:request_success_total", {**one, "finished_reason": "stop"}) == 2
    finished.labels("stop").inc()
    assert value("vllm:request_success_total", {**one, "finished_reason": "stop"}) == 3


def test_a_twin_has_its_sources_exemplars_and_counts_from_zero_on() -> None:
    registry = new_registry()
    ttft = table.TTFT_SECONDS.make(registry)
    prompt = table.PROMPT_TOKENS.make(registry)
    serve_twins(registry, model_name="m")
    one = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:prompt_tokens_total", one) == 0, "before any tenant is known"
    prompt.labels("chat", "acme").inc(7)
    assert registry.get_sample_value("vllm:prompt_tokens_total", one) == 7
    ttft.labels("chat").observe(0.3, {"trace_id": "abc"})
    samples = [
        sample
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "vllm:time_to_first_token_seconds_bucket" and sample.exemplar is not None
    ]
    assert [sample.exemplar.labels for sample in samples] == [{"trace_id": "abc"}]


def test_a_served_name_that_the_table_does_not_have_is_found() -> None:
    """The check that the processes' tests use can fail."""
    registry = new_registry()
    renamed = dataclasses.replace(table.LOCAL_PREFILLS, name="tandem_decode_prefills_here_total")
    renamed.make(registry).labels("short").inc()
    table.DECODE_REQUESTS.make(registry).labels("ok").inc()
    faults = differences(generate_latest(registry).decode(), Process.DECODE)
    served = "tandem_decode_prefills_here_total is served, but the table has no such row for the decode"
    assert [fault for fault in faults if "is served" in fault] == [served]
    assert "tandem_decode_local_prefills_total is in the table, but not served" in faults
    assert not any("tandem_decode_requests_total" in fault for fault in faults)
