"""`tandem bench`: sends load to a running gateway and measures its latencies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tandem_cli.bench.options import BenchError, BenchOptions
from tandem_cli.options import fail

app = typer.Typer(help="Measure a running gateway.", no_args_is_help=True)


def _with_bench_options(command: Callable[[BenchOptions], None]) -> Callable[..., None]:
    """A command that takes the fields of BenchOptions as its options."""

    def run(**values: Any) -> None:
        command(BenchOptions(**values))

    hints = get_type_hints(BenchOptions, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(BenchOptions).parameters.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__doc__ = command.__doc__
    return run


@app.command("serve")
@_with_bench_options
def serve(options: BenchOptions) -> None:
    """Send requests at a rate or a concurrency; report TTFT, TPOT, ITL, E2EL, goodput and attainment.

    Several values of --rate give a table and curves over the rate, several of --concurrency a table.
    """
    from tandem_cli.bench.dataset import DatasetError
    from tandem_cli.bench.run import run_bench

    try:
        runs = run_bench(options)
    except (BenchError, DatasetError) as error:
        fail(str(error), code=2)
    if not any(run.summary.num_ok for run in runs):
        fail("no request succeeded")


@app.command("report")
def report(
    records: Annotated[Path, typer.Argument(help="What `tandem bench serve --output` wrote.")],
    plot: Annotated[Path | None, typer.Option(help="Write the PNG here; needs matplotlib.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the tables here as Markdown.")] = None,
) -> None:
    """Print the tables of a benchmark again, from its records."""
    from tandem_cli.bench.run import report_file

    try:
        report_file(records, plot=plot, report=report)
    except BenchError as error:
        fail(str(error), code=2)
