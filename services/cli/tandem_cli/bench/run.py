"""A benchmark from its options to its report.

dataset, trace -> requests -> transport, schedule -> records -> summary -> report, JSON lines
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tandem_cli import targets
from tandem_cli.bench.arrivals import Schedule
from tandem_cli.bench.loadgen import run_load
from tandem_cli.bench.options import BenchError, BenchOptions
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.records_file import RecordsWriter, read_runs
from tandem_cli.bench.report import run_report
from tandem_cli.bench.requests import Request
from tandem_cli.bench.stats import Run, summarise
from tandem_cli.bench.transports import GrpcTransport, HttpTransport, Transport
from tandem_cli.bench.workload import RequestMaker


def run_bench(options: BenchOptions) -> Run:
    """Sends the load, prints the report and writes the files. Raises BenchError before the first request."""
    point = options.point()
    _check_folders(options.output, options.report)
    RequestMaker(options)  # reports wrong options and files first
    options = _connected(options)
    maker = RequestMaker(options)
    requests = maker.make(point.workload)
    if maker.num_cut:
        print(
            f"{maker.num_cut} of {maker.num_requests} requests of the trace are shortened to --input-tokens "
            f"or --max-tokens ({options.max_tokens})"
        )
    writer = RecordsWriter(options.output, options.described()) if options.output is not None else None
    records = asyncio.run(_load(options, requests, maker.schedule(point)))
    run = Run(point, 0, "Tandem", summarise(records), tuple(records))
    if writer is not None:
        writer.add(run)
    _report([run], options.report)
    return run


def _connected(options: BenchOptions) -> BenchOptions:
    """The options with the server's address and model. Raises BenchError if nothing answers there."""
    target = targets.gateway(options.target, options.transport)
    keys = (options.api_key, *(tenant.key for tenant in options.tenant_weights()))
    ask = targets.served_model if options.transport == "grpc" else targets.served_model_http
    try:
        model = ask(target, options.ca, next(filter(None, keys), None))
    except targets.GatewayError as error:
        raise BenchError(str(error)) from error
    return replace(options, target=target, model=options.model or model)


def report_file(records: Path, report: Path | None) -> list[Run]:
    """Prints what `run_bench` printed, from the file that it wrote. Raises BenchError."""
    _check_folders(report)
    runs = read_runs(records)
    _report(runs, report)
    return runs


def _report(runs: Sequence[Run], file: Path | None) -> None:
    text = "\n\n".join(map(run_report, runs))
    print(text)
    if file is not None:
        file.write_text(f"{text}\n", encoding="utf-8")


def _check_folders(*files: Path | None) -> None:
    """Raises BenchError for a file in a missing folder."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise BenchError(f"{file}: the folder {file.parent} does not exist; make it first")


async def _load(
    options: BenchOptions, requests: Sequence[Request], schedule: Schedule
) -> list[RequestRecord]:
    make = HttpTransport if options.transport == "http" else GrpcTransport
    transport: Transport = make(options.target, options)
    console = Console()
    num_done, started = 0, time.monotonic()

    def on_done(record: RequestRecord) -> None:
        nonlocal num_done
        num_done += 1
        if console.is_terminal:
            rate = num_done / (time.monotonic() - started)
            shown = f"{num_done}/{len(requests)} {record.status}, {rate:.2f} requests/s "
            console.print(shown, end="\r", highlight=False)

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
