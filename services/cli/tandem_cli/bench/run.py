"""A benchmark from its options to its report.

dataset, trace -> requests -> transport, schedule -> records -> summary -> terminal, JSON lines, Markdown, PNG
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tandem_cli.bench.arrivals import Schedule
from tandem_cli.bench.loadgen import run_load
from tandem_cli.bench.options import BenchError, BenchOptions
from tandem_cli.bench.plot import draw, draw_curves
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.records_file import RecordsWriter, read_runs
from tandem_cli.bench.report import describe, group_table, has_groups, latency_table, rate_table
from tandem_cli.bench.requests import Request
from tandem_cli.bench.stats import Run, summarise
from tandem_cli.bench.transports import GrpcTransport, HttpTransport, Transport
from tandem_cli.bench.workload import RequestMaker


def run_bench(options: BenchOptions) -> list[Run]:
    """Runs, prints and writes the files. Raises BenchError before the first request."""
    points = options.points()
    if options.plot is not None and len(points) > 1 and any(point.rate is None for point in points):
        raise BenchError("--plot shows one run, or curves over several of --rate; leave it out")
    _check_files(options.output, options.plot, options.report)
    maker = RequestMaker(options)
    # Prompts differ between points, or drafts would find the answers of earlier ones.
    cases = [
        (point, maker.make(point.workload, number * maker.num_requests))
        for number, point in enumerate(points)
    ]
    if maker.num_cut:
        print(
            f"{maker.num_cut} of {maker.num_requests} requests of the trace are shortened to --input-tokens "
            f"or --max-tokens ({options.max_tokens})"
        )
    writer = RecordsWriter(options.output, options.described()) if options.output is not None else None
    runs: list[Run] = []
    for point, requests in cases:
        records = asyncio.run(_load(options, requests, maker.schedule(point)))
        runs.append(Run(point, 0, "Tandem", summarise(records), tuple(records)))
        if writer is not None:
            writer.add(runs[-1])
        if len(points) > 1:
            Console(stderr=True).print(_progress(runs[-1]), highlight=False)
    title = f"{options.model}: {maker.num_requests} requests a run"
    report_runs(runs, title, plot=options.plot, report=options.report)
    return runs


def report_file(records: Path, *, plot: Path | None, report: Path | None) -> list[Run]:
    """Prints what `run_bench` printed, from the file that it wrote. Raises BenchError."""
    _check_files(None, plot, report)
    runs = read_runs(records)
    if plot is not None and len(runs) > 1 and any(run.point.rate is None for run in runs):
        raise BenchError("--plot shows one run, or curves over several of --rate; this file has others")
    report_runs(runs, records.name, plot=plot, report=report)
    return runs


def report_runs(runs: Sequence[Run], title: str, *, plot: Path | None, report: Path | None) -> None:
    """One run in detail, several as tables."""
    if len(runs) == 1:
        _print_run(runs[0])
        text = rate_table(runs)
    else:
        text = _table(runs)
        print(text)
    if has_groups([record for run in runs for record in run.records]):
        groups = group_table(runs)
        print(f"\n{groups}")
        text += f"\n\n{groups}"
    if report is not None:
        report.write_text(f"{text}\n", encoding="utf-8")
    if plot is not None and len(runs) == 1:
        draw(plot, runs[0].records, f"{title}, {runs[0].point.load()}")
    elif plot is not None:
        draw_curves(plot, runs, title)


def _check_files(output: Path | None, plot: Path | None, report: Path | None) -> None:
    """Raises BenchError."""
    for file in (output, plot, report):
        if file is not None and not file.parent.is_dir():
            raise BenchError(f"{file}: the folder {file.parent} does not exist; make it first")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install 'tandem[plot]', or -e '.[plot]'")


async def _load(
    options: BenchOptions, requests: Sequence[Request], schedule: Schedule
) -> list[RequestRecord]:
    if options.transport == "http":
        transport: Transport = HttpTransport(options.target or "http://127.0.0.1:8000", options)
    else:
        transport = GrpcTransport(options.target or "127.0.0.1:50051", options)
    console = Console()
    num_done = 0

    def on_done(record: RequestRecord) -> None:
        nonlocal num_done
        num_done += 1
        if console.is_terminal:
            console.print(f"{num_done}/{len(requests)} {record.status}", end="\r", highlight=False)

    try:
        return await run_load(
            transport,
            requests,
            schedule,
            timeout_s=options.timeout,
            on_done=on_done,
            max_retries=options.honour_retry_after,
        )
    finally:
        await transport.close()


def _progress(run: Run) -> str:
    summary = run.summary
    return (
        f"{run.point.workload}, {run.point.load()}: {summary.num_ok} of {summary.num_sent} in "
        f"{summary.duration_s:.1f} s"
    )


def _print_run(run: Run) -> None:
    console = Console()
    console.print(latency_table(run.summary))
    text = describe(run.records, run.summary)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    for record in [record for record in run.records if not record.is_ok][:3]:
        message = f"request {record.index}: {record.status}: {record.error}"
        console.print(message, markup=False, soft_wrap=True)


def _table(runs: Sequence[Run]) -> str:
    first = runs[0]
    names = ", ".join(dict.fromkeys(record.slo.name or "-" for record in first.records))
    most_tokens = max(record.max_tokens for record in first.records)
    about = f"{len(first.records)} requests a run, at most {most_tokens} tokens each, SLO {names}"
    return f"{about}.\n\n{rate_table(runs)}"
