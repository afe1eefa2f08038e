"""`tandem bench`: load against a running gateway, and its figures."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tandem_cli.options import TemperatureOption, fail

app = typer.Typer(help="Measure a running gateway, or drafts without one.", no_args_is_help=True)


class TransportName(StrEnum):
    GRPC = "grpc"
    HTTP = "http"


@app.command()
def serve(
    target: Annotated[
        str | None, typer.Option(help="host:port for grpc, a URL for http; default: the local gateway.")
    ] = None,
    transport: Annotated[TransportName, typer.Option(help="Protocol of the requests.")] = TransportName.GRPC,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second on average (Poisson).")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Requests under way at a time; several with commas are compared.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="How many to send (each time).")] = 32,
    speculation: Annotated[
        str, typer.Option(help="off, local, chain, global; several are compared. Unset: as the pods do.")
    ] = "",
    workload: Annotated[
        str, typer.Option(help="retail, random, copy, faq, json; several with commas are compared.")
    ] = "retail",
    rounds: Annotated[int, typer.Option(min=1, help="Of a comparison: turns that each mode has.")] = 3,
    dataset: Annotated[
        Path | None, typer.Option(help="Dialogues as JSON lines; default: a small built-in sample.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Text of the system prompt; default: the sample's policy.")
    ] = None,
    input_tokens: Annotated[
        int | None,
        typer.Option(
            min=16, help="Wanted prompt length of retail, random and copy; default: as the dialogues are."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model name to ask for (http needs one); counts tokens if it is here.")
    ] = "smollm2-135m-instruct",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate --max-tokens.")] = False,
    temperature: TemperatureOption = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of departures, prompts and sampling.")] = 0,
    slo_class: Annotated[str, typer.Option(help="interactive, chat or batch.")] = "interactive",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for the run, or for each turn.")] = 600.0,
    output: Annotated[Path | None, typer.Option(help="Write everything here as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a comparison here as Markdown.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TANDEM_API_KEY",
            help="Key, if the gateway wants one; {speculation} in it stands for the mode compared.",
        ),
    ] = None,
) -> None:
    """Send requests at a rate or a concurrency; report latencies, goodput and attainment.

    With several values of --speculation, --workload or --concurrency the modes take turns on the same
    prompts, and their ratios to the first mode are told.
    """
    from tandem_gateway.request import SPECULATIONS

    from tandem_cli.bench import compare, compare_report, run
    from tandem_cli.bench import dataset as dialogues

    if (rate is None) == (concurrency is None):
        fail("give either --rate or --concurrency", code=2)
    modes, workloads = tuple(_names(speculation)) or ("",), tuple(_names(workload))
    loads = _whole_numbers("--concurrency", concurrency) if concurrency is not None else ()
    for mode in modes:
        if mode and mode not in SPECULATIONS:
            fail(f"--speculation {mode!r} is unknown; use {', '.join(SPECULATIONS)}", code=2)
    default = "http://127.0.0.1:8000" if transport is TransportName.HTTP else "127.0.0.1:50051"
    config = run.BenchConfig(
        target=target or default,
        transport=transport.value,
        rate=rate,
        concurrency=loads[0] if loads else None,
        num_requests=num_requests,
        dataset=str(dataset) if dataset else None,
        policy=str(policy) if policy else None,
        input_tokens=input_tokens,
        model=model,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        seed=seed,
        slo_class=slo_class,
        timeout_s=timeout,
        speculation=modes[0],
        workload=workloads[0] if workloads else "",
    )
    is_comparison = max(len(modes), len(workloads), len(loads)) > 1
    if (plot if is_comparison else report) is not None:
        fail("--plot shows one run, and --report a comparison of several; leave it out", code=2)
    try:
        if is_comparison:
            compared = compare.ComparisonConfig(config, modes, workloads, loads, rounds)
            heats = compare_report.compare(compared, api_key=api_key, output=output, report=report)
            num_ok = sum(heat.summary.num_ok for heat in heats)
        else:
            num_ok = run.run_bench(config, api_key=api_key, output=output, plot=plot).num_ok
    except (run.BenchError, dialogues.DatasetError) as error:
        fail(str(error), code=2)
    if num_ok == 0:
        fail("no request succeeded")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _whole_numbers(option: str, text: str, at_most: int = 100_000) -> tuple[int, ...]:
    names = _names(text)
    if not names or not all(name.isdecimal() and 1 <= int(name) <= at_most for name in names):
        fail(
            f"{option} {text!r}: give whole numbers from 1 to {at_most}, several with commas between them",
            code=2,
        )
    return tuple(int(name) for name in names)
