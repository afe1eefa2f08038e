"""Runs as tables and lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from rich.table import Table

from tandem_cli.bench.options import Point
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

#: A client that is later than this changes the load that it should make.
_LATE_S = 0.1


def latency_table(summary: Summary) -> Table:
    table = Table("", "mean", "p50", "p90", "p99", box=None, pad_edge=False)
    rows: tuple[tuple[str, Percentiles | None, float, str], ...] = (
        ("TTFT", summary.ttft_s, 1.0, "s"),
        ("TPOT", summary.tpot_s, 1000.0, "ms"),
        ("ITL", summary.itl_s, 1000.0, "ms"),
        ("E2EL", summary.e2e_s, 1.0, "s"),
    )
    for name, values, scale, unit in rows:
        figures = (values.mean, values.p50, values.p90, values.p99) if values else ()
        cells = [f"{figure * scale:.3g}" for figure in figures] or ["-"] * 4
        table.add_row(f"{name} ({unit})", *cells)
    return table


def describe(records: Sequence[RequestRecord], summary: Summary) -> str:
    """All figures that are not latencies, in lines."""
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
            "planned, and measured from then; use fewer requests/s or another machine"
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
        told = ", ".join(f"{name} {share:.0%}" for name, share in shares if share is not None)
        lines.append(f"predictions that held, of {calibrated.count}: {told}")
    if summary.drafts is not None:
        drafts = summary.drafts
        sources = ", ".join(f"{name} {count}" for name, count in drafts.accepted_by_source.items())
        lines.append(
            f"speculation {drafts.mean_accepted_length:.2f} tokens per step; a guess accepted in "
            f"{drafts.iteration_hit_rate:.0%} of steps, {drafts.token_hit_rate:.0%} of {drafts.drafted} "
            f"guesses; accepted: {sources or 'none'}"
        )
    return "\n".join(lines)


def _refusal_lines(records: Sequence[RequestRecord]) -> list[str]:
    told = refusals(records)
    lines = []
    if told.latency_s is not None:
        lines.append(
            f"refusals    {told.count}, answered after {1e3 * told.latency_s.p50:.1f} ms (p50), "
            f"{1e3 * told.latency_s.p99:.1f} ms (p99)"
        )
        if told.num_honoured:
            share = told.num_then_admitted / told.num_honoured
            lines[-1] += f"; retry-after honoured {told.num_honoured} times, then admitted {share:.0%}"
    if told.ttft_from_last_s is not None:
        lines.append(
            f"sent again  TTFT from the last sending {told.ttft_from_last_s.p50:.3g} s (p50), "
            f"{told.ttft_from_last_s.p99:.3g} s (p99); attainment so counted {told.attainment_from_last:.1%}"
        )
    return lines


def has_groups(records: Sequence[RequestRecord]) -> bool:
    """Whether there are several classes or tenants."""
    return len({record.slo.name for record in records}) > 1 or len({record.tenant for record in records}) > 1


_GROUP_HEAD = (
    "load", "system", "class or tenant", "sent", "succeeded", "refused", "TTFT s p50 / p99",
    "TPOT ms p50 / p99", "attainment", "of admitted", "goodput requests/s", "goodput tokens/s",
)  # fmt: skip


def group_table(runs: Sequence[Run]) -> str:
    """Rows for each class and each tenant, and for both, of each system at each point; rounds are pooled."""
    rows: list[Sequence[str]] = []
    for point, system in _points_and_systems(runs):
        rounds = [run for run in runs if (run.point, run.system) == (point, system)]
        for name, summary in _groups(pooled_records(rounds)).items():
            cells = _group_cells(summary)
            rows.append([point.load(), system, name, *cells])
    return markdown([_GROUP_HEAD, *rows])


def _points_and_systems(runs: Sequence[Run]) -> Iterator[tuple[Point, str]]:
    """Each that was measured; the systems of every point in the order of the first one."""
    measured = {(run.point, run.system) for run in runs}
    systems = list(dict.fromkeys(run.system for run in runs))
    for point in dict.fromkeys(run.point for run in runs):
        yield from ((point, system) for system in systems if (point, system) in measured)


def pooled_records(rounds: Sequence[Run]) -> list[RequestRecord]:
    """Of several rounds, as if each had begun when the one before it ended."""
    records: list[RequestRecord] = []
    for run in rounds:
        shift_s = max((record.sent_s + record.e2e_s for record in records), default=0.0)
        records += [replace(record, sent_s=record.sent_s + shift_s) for record in run.records]
    return records


def _groups(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    classes, tenants = by_class(records), by_tenant(records)
    groups = {f"class {name or '-'}": summary for name, summary in classes.items()}
    if len(tenants) > 1:
        groups |= {f"tenant {name or '-'}": summary for name, summary in tenants.items()}
    return groups


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


_RATE_HEAD = (
    "workload", "load", "system", "TTFT s p50 / p99", "TPOT ms p50 / p99", "requests/s", "goodput requests/s",
    "goodput tokens/s", "attainment", "of admitted", "refused", "succeeded",
)  # fmt: skip


def rate_table(runs: Sequence[Run]) -> str:
    """A row for each system at each rate: medians over rounds; counts are of all rounds."""
    rows: list[Sequence[str]] = []
    for point, system in _points_and_systems(runs):
        here = [run.summary for run in runs if (run.point, run.system) == (point, system)]
        admitted = [s.attainment_of_admitted for s in here if s.attainment_of_admitted is not None]
        ttfts = [summary.ttft_s for summary in here if summary.ttft_s]
        tpots = [summary.tpot_s for summary in here if summary.tpot_s]
        num_sent = sum(summary.num_sent for summary in here)
        rows.append(
            [
                point.workload,
                point.load(),
                system,
                f"{_median((ttft.p50 for ttft in ttfts), '.2f')} / {_median((t.p99 for t in ttfts), '.2f')}",
                f"{_median((1e3 * t.p50 for t in tpots), '.1f')} / "
                f"{_median((1e3 * t.p99 for t in tpots), '.1f')}",
                _median((summary.requests_per_s for summary in here), ".3g"),
                _median((summary.goodput_requests_per_s for summary in here), ".3g"),
                _median((summary.goodput_tokens_per_s for summary in here), ".3g"),
                _median((summary.attainment for summary in here), ".3f"),
                _median(admitted, ".3f"),
                f"{sum(summary.num_refused for summary in here)} of {num_sent}",
                f"{sum(summary.num_ok for summary in here)} of {num_sent}",
            ]
        )
    return markdown([_RATE_HEAD, *rows])


def _pair(values: Percentiles | None, scale: float, form: str) -> str:
    return f"{values.p50 * scale:{form}} / {values.p99 * scale:{form}}" if values else "-"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _median(values: Iterable[float], form: str) -> str:
    known = list(values)
    return format(median(known), form) if known else "-"
