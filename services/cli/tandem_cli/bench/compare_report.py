"""A comparison from its configuration to a Markdown table for people and a JSON file for programs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tandem_cli.bench.compare import ComparisonConfig, Heat, Ratio, Row, run_comparison, tabulate
from tandem_cli.bench.report import markdown_table
from tandem_cli.bench.run import check_folders

_HEAD = (
    "workload", "at a time", "speculation", "TTFT s", "TPOT ms", "MAT", "iteration hit rate",
    "token hit rate", "accepted per step (token hit rate)", "tokens/s", "goodput tokens/s", "TPOT ratio",
    "goodput ratio", "same text", "succeeded",
)  # fmt: skip


def compare(
    config: ComparisonConfig, *, api_key: str | None, output: Path | None, report: Path | None
) -> list[Heat]:
    """Runs, prints and writes the files. Raises BenchError and DatasetError before the first request."""
    check_folders(output, report)
    console = Console(stderr=True)

    def on_heat(heat: Heat) -> None:
        load = "" if heat.concurrency is None else f", {heat.concurrency} at a time"
        console.print(
            f"{heat.workload}{load}, round {heat.round + 1}, {_mode(heat.mode)}: {heat.summary.num_ok} of "
            f"{heat.summary.num_sent} in {heat.summary.duration_s:.1f} s",
            highlight=False,
        )

    heats = asyncio.run(run_comparison(config, api_key, on_heat))
    text = describe_comparison(config, heats)
    print(text)
    if report is not None:
        report.write_text(text + "\n", encoding="utf-8")
    if output is not None:
        write_comparison(output, config, heats)
    return heats


def describe_comparison(config: ComparisonConfig, heats: Sequence[Heat]) -> str:
    base = config.base
    rows = tabulate(heats)
    load = f"{base.num_requests} requests of at most {base.max_tokens} tokens each time"
    return "\n".join(
        [
            f"{config.rounds} rounds, {load}, SLO {base.slo_class}; medians over rounds, MAT and hit rates "
            "over all. Ratios are to "
            f"`{_mode(config.modes[0])}` of the same round: median (lowest to highest). Accepted per step: "
            "guesses, by source. Same text: answers equal to the first mode's. The answers are the served "
            "model's own: a small one repeats itself, and its prompts, more than a large one would.",
            "",
            markdown_table(_HEAD, [_cells(row) for row in rows]),
        ]
    )


def write_comparison(path: Path, config: ComparisonConfig, heats: Sequence[Heat]) -> None:
    """{"config": ..., "rows": [...], "heats": [...]}, a heat with its summary and its requests."""
    document = {
        "config": dataclasses.asdict(config),
        "rows": [dataclasses.asdict(row) for row in tabulate(heats)],
        "heats": [
            {
                **{name: value for name, value in dataclasses.asdict(heat).items() if name != "records"},
                "requests": [
                    {**dataclasses.asdict(record), "tpot_s": record.tpot_s} for record in heat.records
                ],
            }
            for heat in heats
        ],
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _cells(row: Row) -> list[str]:
    drafts = row.drafts
    rates = {} if drafts is None else drafts.token_hit_rate_by_source
    sources = ", ".join(
        f"{name} {count:.2f} ({rates.get(name, 0.0):.2f})" for name, count in row.accepted_per_step.items()
    )
    return [
        row.workload,
        "-" if row.concurrency is None else str(row.concurrency),
        _mode(row.mode),
        _figure(row.ttft_s, ".2f"),
        _figure(row.tpot_s, ".1f", 1000.0),
        _figure(None if drafts is None else drafts.mean_accepted_length, ".2f"),
        _figure(None if drafts is None else drafts.iteration_hit_rate, ".3f"),
        _figure(None if drafts is None else drafts.token_hit_rate, ".3f"),
        sources or "-",
        f"{row.output_tokens_per_s:.1f}",
        f"{row.goodput_tokens_per_s:.1f}",
        _ratio(row.tpot_ratio),
        _ratio(row.goodput_ratio),
        f"{row.num_same} of {row.num_ok}",
        f"{row.num_ok} of {row.num_sent}",
    ]


def _mode(name: str) -> str:
    return name or "as the pods do"


def _figure(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, form)


def _ratio(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.3f} ({ratio.low:.2f} to {ratio.high:.2f})"
