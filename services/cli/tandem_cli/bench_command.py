"""`tandem bench`: load against a running gateway, and its figures."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tandem_cli.options import ApiKeyOption, TemperatureOption, fail

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
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests under way at a time.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="How many to send.")] = 32,
    dataset: Annotated[
        Path | None, typer.Option(help="Dialogues as JSON lines; default: a small built-in sample.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Text of the system prompt; default: the sample's policy.")
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option(min=16, help="Wanted prompt length; default: as the dialogues are.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model name to ask for (http needs one); counts tokens if it is here.")
    ] = "smollm2-135m-instruct",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate --max-tokens.")] = False,
    temperature: TemperatureOption = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of departures, prompts and sampling.")] = 0,
    slo_class: Annotated[str, typer.Option(help="interactive, chat or batch.")] = "interactive",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for the whole run.")] = 600.0,
    output: Annotated[Path | None, typer.Option(help="Write everything here as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG here.")] = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Send requests at a rate or a concurrency; report latencies, goodput and attainment."""
    from tandem_cli.bench import dataset as dialogues
    from tandem_cli.bench import run

    if (rate is None) == (concurrency is None):
        fail("give either --rate or --concurrency", code=2)
    default = "http://127.0.0.1:8000" if transport is TransportName.HTTP else "127.0.0.1:50051"
    config = run.BenchConfig(
        target=target or default,
        transport=transport.value,
        rate=rate,
        concurrency=concurrency,
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
    )
    try:
        summary = run.run_bench(config, api_key=api_key, output=output, plot=plot)
    except (run.BenchError, dialogues.DatasetError) as error:
        fail(str(error), code=2)
    if summary.num_ok == 0:
        fail("no request succeeded")


@app.command()
def replay(
    data: Annotated[Path | None, typer.Option(help="Dialogues as JSON lines; default: the sample.")] = None,
    nodes: Annotated[list[int], typer.Option(min=1, max=63, help="Guesses per step; repeatable.")] = [16],  # noqa: B006
    sources: Annotated[
        str, typer.Option(help="Drafters, with commas: chain, global-chain, suffix, local, forest.")
    ] = "chain,global-chain,suffix,local,forest",
    passes: Annotated[int, typer.Option(min=1, help="Times the file is gone through.")] = 2,
    batch: Annotated[list[int], typer.Option(min=1, help="Dialogues at a time; repeatable.")] = [1],  # noqa: B006
    policy: Annotated[
        Path | None, typer.Option(help="Text of the system prompt; default: none for your own --data.")
    ] = None,
    model: Annotated[str, typer.Option(help="Whose tokenizer and chat template.")] = "smollm2-135m-instruct",
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Also predicted against realised acceptance.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the tables here as Markdown.")] = None,
) -> None:
    """Replay known answers through drafters: accepted tokens, hit rates, drafting time; no model runs."""
    from tandem_cli.bench import dataset as dialogues
    from tandem_cli.bench import replay_run

    config = replay_run.ReplayConfig(
        data=data,
        nodes=tuple(nodes),
        sources=tuple(name.strip() for name in sources.split(",")),
        passes=passes,
        batches=tuple(batch),
        policy=policy,
        model=model,
    )
    try:
        report = replay_run.run(config, calibration=calibration)
    except dialogues.DatasetError as error:
        fail(str(error), code=2)
    typer.echo(report)
    if output is not None:
        output.write_text(report + "\n", encoding="utf-8")
