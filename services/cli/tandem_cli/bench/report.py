"""Runs as tables and lines for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from rich.table import Table

from tandem_cli.bench.stats import Percentiles, Run, Summary, draft_figures


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


def describe(summary: Summary) -> str:
    """All figures that are not latencies, in lines."""
    failures = ", ".join(f"{status} {count}" for status, count in sorted(summary.failures.items()))
    lines = [
        f"sent {summary.num_sent}, succeeded {summary.num_ok}"
        + (f", failed: {failures}" if failures else "")
        + f"; {summary.duration_s:.1f} s",
        f"throughput  {summary.requests_per_s:.3g} requests/s, {summary.output_tokens_per_s:.4g} output and"
        f" {summary.input_tokens_per_s:.4g} input tokens/s",
        f"goodput     {summary.goodput_requests_per_s:.3g} requests/s, {summary.goodput_tokens_per_s:.4g}"
        f" output tokens/s within the SLO",
        f"attainment  {summary.attainment:.1%} of all sent ({summary.slo})",
    ]
    if summary.drafts is not None:
        drafts = summary.drafts
        sources = ", ".join(f"{name} {count}" for name, count in drafts.accepted_by_source.items())
        lines.append(
            f"speculation {drafts.mean_accepted_length:.2f} tokens per step; a guess accepted in "
            f"{drafts.iteration_hit_rate:.0%} of steps, {drafts.token_hit_rate:.0%} of {drafts.drafted} "
            f"guesses; accepted: {sources or 'none'}"
        )
    return "\n".join(lines)


_HEAD = (
    "workload", "concurrency", "speculation", "TTFT s", "TPOT ms", "MAT", "token hit rate", "tokens/s",
    "goodput tokens/s", "TPOT ratio", "goodput ratio", "same text", "succeeded",
)  # fmt: skip


def comparison_table(runs: Sequence[Run]) -> str:
    """A row for each mode at each point, in the order of the first round."""
    rows: list[Sequence[str]] = []
    for point in dict.fromkeys(run.point for run in runs):
        here = [run for run in runs if run.point == point]
        modes = [run.mode for run in here if run.round == 0]
        first = {run.round: run for run in here if run.mode == modes[0]}
        rows += [_row([run for run in here if run.mode == mode], first) for mode in modes]
    lines = [_HEAD, ["---"] * len(_HEAD), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(runs: Sequence[Run], first: dict[int, Run]) -> list[str]:
    summaries = [run.summary for run in runs]
    drafts = draft_figures([record for run in runs for record in run.records if record.is_ok])
    num_ok = sum(summary.num_ok for summary in summaries)
    return [
        runs[0].point.workload,
        "-" if runs[0].point.concurrency is None else str(runs[0].point.concurrency),
        runs[0].mode or "default",
        _median((summary.ttft_s.p50 for summary in summaries if summary.ttft_s), ".2f"),
        _median((tpot for summary in summaries if (tpot := _tpot_ms(summary)) is not None), ".1f"),
        "-" if drafts is None else f"{drafts.mean_accepted_length:.2f}",
        "-" if drafts is None else f"{drafts.token_hit_rate:.3f}",
        _median((summary.output_tokens_per_s for summary in summaries), ".1f"),
        _median((summary.goodput_tokens_per_s for summary in summaries), ".1f"),
        _ratio(runs, first, _tpot_ms),
        _ratio(runs, first, lambda summary: summary.goodput_tokens_per_s),
        f"{sum(_num_same(run, first[run.round]) for run in runs)} of {num_ok}",
        f"{num_ok} of {sum(summary.num_sent for summary in summaries)}",
    ]


def _tpot_ms(summary: Summary) -> float | None:
    return 1e3 * summary.tpot_s.p50 if summary.tpot_s else None


def _num_same(run: Run, first: Run) -> int:
    texts = {record.index: record.text for record in first.records if record.is_ok}
    return sum(record.is_ok and texts.get(record.index) == record.text for record in run.records)


def _median(values: Iterable[float], form: str) -> str:
    known = list(values)
    return format(median(known), form) if known else "-"


def _ratio(runs: Sequence[Run], first: dict[int, Run], figure: Callable[[Summary], float | None]) -> str:
    """Over the rounds in which both figures exist and the first mode's is not 0."""
    pairs = [(figure(run.summary), figure(first[run.round].summary)) for run in runs]
    ratios = [mine / base for mine, base in pairs if mine is not None and base]
    return f"{median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
