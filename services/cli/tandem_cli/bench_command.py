"""`tandem bench`: sends load to a running gateway and measures latencies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tandem_cli.bench.options import BenchError, BenchOptions
from tandem_cli.options import fail, with_fields

app = typer.Typer(help="Measure a running gateway.", no_args_is_help=True)


@app.command("serve")
@with_fields(BenchOptions)
def serve(**given: Any) -> None:
    """Send requests at a rate or a concurrency; report TTFT, TPOT, ITL, E2EL, goodput and attainment."""
    from tandem_cli.bench.run import run_bench

    try:
        run = run_bench(BenchOptions(**given))
    except BenchError as error:
        fail(str(error), code=2)
    if not run.summary.num_ok:
        first = run.records[0]
        fail(f"no request succeeded; the first: {first.status}: {first.error}")


@app.command("report")
def report(
    records: Annotated[Path, typer.Argument(help="File that `tandem bench serve --output` wrote.")],
    report: Annotated[Path | None, typer.Option(help="Write the report here too.")] = None,
) -> None:
    """Print the report of a benchmark again, from its records."""
    from tandem_cli.bench.run import report_file

    try:
        report_file(records, report)
    except BenchError as error:
        fail(str(error), code=2)
