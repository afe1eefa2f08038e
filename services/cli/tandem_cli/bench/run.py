"""A benchmark from its options to its report.

dataset, trace -> requests -> transport, schedule -> records -> summary -> terminal, JSON lines, Markdown, PNG

Several systems are compared in rounds: Tandem's speculation modes, and other servers (`--peers`). The systems
of a round run directly after each other on the same requests, in another order each round, so that changes of
the machine's speed affect all of them alike:

    round 1    off     local   global
    round 2    local   global  off        the next prompts

What one mode computes can serve the next: KV of its prompts, text of its answers. To prevent that, give each
mode a tenant, that is a key, of its own (`--api-key bench-{speculation}`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from tandem_core.slo import SloTarget

from tandem_cli.bench.arrivals import ClosedLoop, Schedule
from tandem_cli.bench.loadgen import run_load
from tandem_cli.bench.options import BenchError, BenchOptions, System, TransportName
from tandem_cli.bench.plot import draw, draw_curves
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.records_file import RecordsWriter, read_runs
from tandem_cli.bench.report import (
    comparison_table,
    describe,
    group_table,
    has_groups,
    latency_table,
    rate_table,
)
from tandem_cli.bench.requests import Request
from tandem_cli.bench.stats import Run, summarise
from tandem_cli.bench.transports import GrpcTransport, HttpTransport, Transport
from tandem_cli.bench.workload import RequestMaker


def run_bench(options: BenchOptions) -> list[Run]:
    """Runs, prints and writes the files. Raises BenchError and DatasetError before the first request."""
    points, systems = options.points(), options.systems()
    is_comparison = len(points) * len(systems) > 1
    has_rates = all(point.rate is not None for point in points)
    if options.plot is not None and is_comparison and not has_rates:
        raise BenchError("--plot shows one run, or curves over several of --rate; leave it out")
    _check_files(options.output, options.plot, options.report)
    num_rounds = options.rounds if is_comparison else 1
    maker = RequestMaker(options)
    # Prompts differ between points and rounds, or drafts would find the answers of earlier ones.
    cases = [
        (point, number, maker.make(point.workload, first * maker.num_requests))
        for first, (point, number) in enumerate(
            (point, number) for point in points for number in range(num_rounds)
        )
    ]
    if maker.num_cut:
        print(
            f"{maker.num_cut} of {maker.num_requests} requests of the trace are shortened to --input-tokens "
            f"or --max-tokens ({options.max_tokens})"
        )
    systems = tuple(_with_model(system) for system in systems)
    writer = RecordsWriter(options.output, options.described()) if options.output is not None else None
    runs: list[Run] = []
    if is_comparison:
        for system in systems:
            _warm_up(options, system, cases[0][2][0])
        # The mirrors open their streams beside the requests.
        time.sleep(0.5)
    for point, number, requests in cases:
        shift = number % len(systems)
        for system in systems[shift:] + systems[:shift]:
            records = asyncio.run(_load(options, system, requests, maker.schedule(point)))
            runs.append(Run(point, number, system.name, summarise(records), tuple(records)))
            if writer is not None:
                writer.add(runs[-1])
            if is_comparison:
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
        text = _comparison(runs)
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


def _with_model(system: System) -> System:
    """With the model's name that a peer expects. Raises BenchError."""
    if not system.url or system.model:
        return system
    address = f"{system.url}/v1/models"
    try:
        models = httpx.get(address, timeout=30.0, trust_env=False).raise_for_status().json()["data"]
        return system._replace(model=str(models[0]["id"]))
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(
            f"--peers {system.name}: {address} names no model ({type(error).__name__}); start the server, or "
            f"give {system.name}={system.url}#MODEL"
        ) from error


def _warm_up(options: BenchOptions, system: System, request: Request) -> None:
    """A short request, so that every mode starts with an open mirror. Raises BenchError if it is refused."""
    short = dataclasses.replace(
        request,
        prompt=dataclasses.replace(request.prompt, messages=request.prompt.messages[-1:]),
        max_tokens=min(8, request.max_tokens),
        slo=SloTarget(request.slo.name),
        sends_objectives=False,
    )
    (record,) = asyncio.run(_load(options, system, [short], ClosedLoop(1)))
    if not record.is_ok:
        raise BenchError(f"a first request to {system.name} failed: {record.status}: {record.error}")


async def _load(
    options: BenchOptions, system: System, requests: Sequence[Request], schedule: Schedule
) -> list[RequestRecord]:
    transport = open_transport(options, system)
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


def open_transport(options: BenchOptions, system: System) -> Transport:
    """To Tandem at the options' target, or to a peer, which gets nothing that only Tandem understands."""
    if system.url:
        plain = dataclasses.replace(options, model=system.model, api_key=None)
        return HttpTransport(system.url, plain, extra_body={"slo_class": None}, sends_headers=False)
    if options.transport is TransportName.HTTP:
        return HttpTransport(options.target or "http://127.0.0.1:8000", options, system.speculation)
    return GrpcTransport(options.target or "127.0.0.1:50051", options, system.speculation)


def _progress(run: Run) -> str:
    summary = run.summary
    return (
        f"{run.point.workload}, {run.point.load()}, round {run.round + 1}, {run.system}: {summary.num_ok} of "
        f"{summary.num_sent} in {summary.duration_s:.1f} s"
    )


def _print_run(run: Run) -> None:
    console = Console()
    console.print(latency_table(run.summary))
    text = describe(run.records, run.summary)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    for record in [record for record in run.records if not record.is_ok][:3]:
        message = f"request {record.index}: {record.status}: {record.error}"
        console.print(message, markup=False, soft_wrap=True)


def _comparison(runs: Sequence[Run]) -> str:
    first = runs[0]
    num_rounds = max(run.round for run in runs) + 1
    names = ", ".join(dict.fromkeys(record.slo.name or "-" for record in first.records))
    about = (
        f"{num_rounds} rounds of {len(first.records)} requests, at most "
        f"{max(record.max_tokens for record in first.records)} tokens each, SLO {names}. Figures are medians "
        "over rounds"
    )
    if all(run.point.rate is not None for run in runs):
        return f"{about}.\n\n{rate_table(runs)}"
    return (
        f"{about}; ratios are to `{first.system}` in the same round: median (lowest to highest). Same text: "
        f"answers equal to the first system's.\n\n{comparison_table(runs)}"
    )
