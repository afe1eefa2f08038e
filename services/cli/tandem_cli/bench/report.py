"""The report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.stats import (
    Percentiles,
    Run,
    Summary,
    by_class,
    by_tenant,
    calibration,
    fairness,
    percentile,
    refusals,
)

#: A client that sends later than this distorts the load.
_LATE_S = 0.1
#: Failed requests whose errors are shown.
_NUM_ERRORS = 3


def run_report(run: Run) -> str:
    """The figures of a run as text."""
    records = run.records
    text = f"{run.point.workload}, {run.point.load()}, {run.system}\n\n"
    text += f"{_latency_table(run.summary)}\n\n" if run.summary.num_ok else ""
    text += describe(records, run.summary)
    failed = [record for record in records if not record.is_ok][:_NUM_ERRORS]
    text += "".join(f"\nrequest {record.index}: {record.status}: {record.error}" for record in failed)
    if len({record.slo.name for record in records}) > 1 or len({record.tenant for record in records}) > 1:
        text += f"\n\n{_group_table(records)}"
    return text


def _latency_table(summary: Summary) -> str:
    rows: tuple[tuple[str, Percentiles | None, float], ...] = (
        ("TTFT (s)", summary.ttft_s, 1.0),
        ("TPOT (ms)", summary.tpot_s, 1000.0),
        ("ITL (ms)", summary.itl_s, 1000.0),
        ("E2EL (s)", summary.e2e_s, 1.0),
    )
    cells = [
        [name, *(f"{figure * scale:.3g}" for figure in astuple(values))] if values else [name, *"----"]
        for name, values, scale in rows
    ]
    return _table([["", "mean", "p50", "p90", "p99"], *cells])


def describe(records: Sequence[RequestRecord], summary: Summary) -> str:
    """All other figures, one line each."""
    failures = ", ".join(f"{status} {count}" for status, count in sorted(summary.failures.items()))
    classes = ", ".join(dict.fromkeys(record.slo.name or "no class" for record in records))
    lines = [
        f"sent {summary.num_sent}, succeeded {summary.num_ok}"
        + (f", failed: {failures}" if failures else "")
        + f"; {summary.duration_s:.1f} s",
        f"throughput  {summary.requests_per_s:.3g} requests/s, {summary.output_tokens_per_s:.4g} output and"
        f" {summary.input_tokens_per_s:.4g} input tokens/s",
        f"goodput     {summary.goodput_requests_per_s:.3g} requests/s, {summary.goodput_tokens_per_s:.4g}"
        f" output tokens/s within the SLO",
        f"attainment  {summary.attainment:.1%} of all sent ({classes})"
        + (
            f", {summary.attainment_of_admitted:.1%} of those not refused"
            if summary.num_refused and summary.attainment_of_admitted is not None
            else ""
        ),
        *_refusal_lines(records),
    ]
    late_s = percentile(sorted(record.late_s for record in records), 99)
    if late_s > _LATE_S:
        lines.append(
            f"late        the client was too busy: it sent requests up to {late_s:.2f} s (p99) later than "
            "planned and measured from then; use fewer requests/s or another machine"
        )
    if (fair := fairness(records)) is not None:
        lines.append(
            f"fairness    Jain's index over tenants {fair.jain_of_fair_share:.3f} of the fair share, "
            f"{fair.jain_of_goodput:.3f} of goodput"
        )
    if (calibrated := calibration(records)) is not None:
        shares = (
            ("TTFT p50", calibrated.ttft_p50), ("TTFT p90", calibrated.ttft_p90),
            ("E2E p50", calibrated.e2e_p50), ("E2E p90", calibrated.e2e_p90),
        )  # fmt: skip
        held = ", ".join(f"{name} {share:.0%}" for name, share in shares if share is not None)
        lines.append(f"predictions that held, of {calibrated.count}: {held}")
    if summary.drafts is not None:
        drafts = summary.drafts
        sources = ", ".join(f"{name} {count}" for name, count in drafts.accepted_by_source.items())
        lines.append(
            f"speculation {drafts.mean_accepted_length:.2f} tokens per step; a draft token accepted in "
            f"{drafts.iteration_hit_rate:.0%} of steps, {drafts.token_hit_rate:.0%} of {drafts.drafted} "
            f"draft tokens; accepted: {sources or 'none'}"
        )
    return "\n".join(lines)


def _refusal_lines(records: Sequence[RequestRecord]) -> list[str]:
    refused = refusals(records)
    lines = []
    if refused.latency_s is not None:
        lines.append(
            f"refusals    {refused.count}, answered after {1e3 * refused.latency_s.p50:.1f} ms (p50), "
            f"{1e3 * refused.latency_s.p99:.1f} ms (p99)"
        )
        if refused.num_honoured:
            share = refused.num_then_admitted / refused.num_honoured
            lines[-1] += f"; retry-after honoured {refused.num_honoured} times, then admitted {share:.0%}"
    if refused.ttft_from_last_s is not None:
        lines.append(
            f"sent again  TTFT from the last attempt {refused.ttft_from_last_s.p50:.3g} s (p50), "
            f"{refused.ttft_from_last_s.p99:.3g} s (p99); attainment {refused.attainment_from_last:.1%}"
        )
    return lines


def _group_table(records: Sequence[RequestRecord]) -> str:
    """A row for each class and, if there are several, for each tenant."""
    classes, tenants = by_class(records), by_tenant(records)
    groups = {f"class {name or '-'}": summary for name, summary in classes.items()}
    if len(tenants) > 1:
        groups |= {f"tenant {name or '-'}": summary for name, summary in tenants.items()}
    return _table([_GROUP_HEAD, *([name, *_group_cells(summary)] for name, summary in groups.items())])


_GROUP_HEAD = (
    "class or tenant", "sent", "succeeded", "refused", "TTFT s p50 / p99", "TPOT ms p50 / p99", "attainment",
    "of admitted", "goodput requests/s", "goodput tokens/s",
)  # fmt: skip


def _group_cells(summary: Summary) -> list[str]:
    admitted = summary.attainment_of_admitted
    return [
        str(summary.num_sent),
        str(summary.num_ok),
        str(summary.num_refused),
        _pair(summary.ttft_s, 1.0, ".2f"),
        _pair(summary.tpot_s, 1e3, ".1f"),
        f"{summary.attainment:.3f}",
        "-" if admitted is None else f"{admitted:.3f}",
        f"{summary.goodput_requests_per_s:.3g}",
        f"{summary.goodput_tokens_per_s:.3g}",
    ]


def _pair(values: Percentiles | None, scale: float, form: str) -> str:
    return f"{values.p50 * scale:{form}} / {values.p99 * scale:{form}}" if values else "-"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    lines = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
