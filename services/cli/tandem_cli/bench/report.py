"""A run as a table for people and as a JSON file for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.stats import Percentiles, Summary


def write_json(path: Path, config: object, summary: Summary, records: Sequence[RequestRecord]) -> None:
    """{"config": ..., "summary": ..., "requests": [...]}; `config` is a dataclass."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError("config must be a dataclass instance")
    document = {
        "config": dataclasses.asdict(config),
        "summary": dataclasses.asdict(summary),
        "requests": [{**dataclasses.asdict(record), "tpot_s": record.tpot_s} for record in records],
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def latency_table(summary: Summary) -> Table:
    table = Table("", "mean", "p50", "p90", "p99", box=None, pad_edge=False)
    rows: tuple[tuple[str, Percentiles | None, float, str], ...] = (
        ("TTFT", summary.ttft_s, 1.0, "s"),
        ("TPOT", summary.tpot_s, 1000.0, "ms"),
        ("ITL", summary.itl_s, 1000.0, "ms"),
        ("E2E", summary.e2e_s, 1.0, "s"),
    )
    for name, values, scale, unit in rows:
        if values is None:
            table.add_row(f"{name} ({unit})", "-", "-", "-", "-")
        else:
            figures = (values.mean, values.p50, values.p90, values.p99)
            table.add_row(f"{name} ({unit})", *(f"{figure * scale:.3g}" for figure in figures))
    return table


def describe(summary: Summary) -> str:
    """Everything that is no latency, in lines."""
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
        sources = ", ".join(
            f"{name} {count} (in {drafts.iteration_hit_rate_by_source.get(name, 0.0):.0%} of steps, "
            f"{drafts.token_hit_rate_by_source.get(name, 0.0):.0%} of its guesses)"
            for name, count in drafts.accepted_by_source.items()
        )
        lines.append(
            f"speculation {drafts.mean_accepted_length:.2f} tokens per step; a guess accepted in "
            f"{drafts.iteration_hit_rate:.0%} of steps, {drafts.token_hit_rate:.0%} of {drafts.drafted} "
            f"guesses; accepted: {sources or 'none'}"
        )
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
