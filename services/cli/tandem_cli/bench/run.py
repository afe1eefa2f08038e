"""A benchmark from its options to its report.

dataset -> prompts -> transport, schedule -> records -> summary -> terminal, JSON, PNG

Several modes are compared in rounds. The modes of a round run directly after each other on the same prompts,
in another order each round, so that changes of the machine's speed affect all of them alike:

    round 1    off     local   global
    round 2    local   global  off        the next prompts

What one mode computes can serve the next: KV of its prompts, text of its answers. To prevent that, give each
mode a tenant, that is a key, of its own (`--api-key bench-{speculation}`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from tandem_core.model import registry
from tandem_core.slo import SLO_CLASSES, SloTarget

from tandem_cli.bench import dataset as dialogues
from tandem_cli.bench.loadgen import ClosedLoop, OpenLoop, run_load
from tandem_cli.bench.options import BenchError, BenchOptions, Point, TransportName
from tandem_cli.bench.plot import draw
from tandem_cli.bench.prompts import WORKLOADS, Material, Prompt, estimate_tokens, tokenizer_counter
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.report import comparison_table, describe, latency_table
from tandem_cli.bench.stats import Run, summarise
from tandem_cli.bench.transports import GrpcTransport, HttpTransport, Transport


def run_bench(options: BenchOptions) -> list[Run]:
    """Runs, prints and writes the files. Raises BenchError and DatasetError before the first request."""
    points, modes = list(options.points()), options.modes()
    is_comparison = len(points) * len(modes) > 1
    slo = _slo(options)
    if (options.plot if is_comparison else options.report) is not None:
        raise BenchError("--plot shows one run, and --report a comparison of several; leave it out")
    for file in (options.output, options.plot, options.report):
        if file is not None and not file.parent.is_dir():
            raise BenchError(f"{file}: the folder {file.parent} does not exist; make it first")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install 'tandem[plot]', or -e '.[plot]'")
    num_rounds = options.rounds if is_comparison else 1
    # Prompts differ between points and rounds, or drafts would find the answers of earlier ones.
    starts = range(0, len(points) * num_rounds * options.num_requests, options.num_requests)
    cases = [(point, number) for point in points for number in range(num_rounds)]
    prompts = [
        make_prompts(options, point.workload, first) for (point, _), first in zip(cases, starts, strict=True)
    ]
    runs: list[Run] = []
    if is_comparison:
        for mode in modes:
            _warm_up(options, mode, prompts[0][0], slo)
        # The mirrors open their streams beside the requests.
        time.sleep(0.5)
    for (point, number), asked in zip(cases, prompts, strict=True):
        shift = number % len(modes)
        for mode in modes[shift:] + modes[:shift]:
            runs.append(_run(options, point, number, mode, asked, slo))
            if is_comparison:
                Console(stderr=True).print(_progress(runs[-1]), highlight=False)
    if is_comparison:
        _report_comparison(options, modes, runs)
    else:
        _report_run(options, runs[0], slo)
    return runs


def _slo(options: BenchOptions) -> SloTarget:
    if options.slo_class not in SLO_CLASSES:
        raise BenchError(f"--slo-class {options.slo_class!r} is unknown; use one of {', '.join(SLO_CLASSES)}")
    return SLO_CLASSES[options.slo_class]


def make_prompts(options: BenchOptions, workload: str, first: int = 0) -> list[Prompt]:
    """The workload's prompts from number `first` on. Raises BenchError and DatasetError.

    Counts tokens with the model's tokenizer if it is on this machine.
    """
    conversations = dialogues.load_dialogues(options.dataset)
    try:
        policy = options.policy.read_text(encoding="utf-8") if options.policy else dialogues.sample_policy()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--policy {options.policy} cannot be read: {error}") from error
    folder = registry.find(options.model) if options.model else None
    material = Material(
        conversations,
        policy,
        input_tokens=options.input_tokens,
        count=tokenizer_counter(folder) if folder is not None else estimate_tokens,
        seed=options.seed,
    )
    return [WORKLOADS[workload](material, index) for index in range(first, first + options.num_requests)]


def _run(
    options: BenchOptions, point: Point, number: int, mode: str, prompts: Sequence[Prompt], slo: SloTarget
) -> Run:
    records = asyncio.run(_load(options, point, mode, prompts))
    return Run(point, number, mode, summarise(records, slo), tuple(records))


def _warm_up(options: BenchOptions, mode: str, prompt: Prompt, slo: SloTarget) -> None:
    """A short request, so that every mode starts with an open mirror. Raises BenchError if it is refused."""
    short = dataclasses.replace(options, rate=None, max_tokens=8)
    asked = [dataclasses.replace(prompt, messages=prompt.messages[-1:])]
    (record,) = _run(short, Point("", 1), 0, mode, asked, slo).records
    if not record.is_ok:
        raise BenchError(f"a first request with speculation {mode} failed: {record.status}: {record.error}")


async def _load(
    options: BenchOptions, point: Point, mode: str, prompts: Sequence[Prompt]
) -> list[RequestRecord]:
    transport = _transport(options, mode)
    schedule = OpenLoop(options.rate, options.seed) if options.rate else ClosedLoop(point.concurrency or 1)
    console = Console()
    num_done = 0

    def on_done(record: RequestRecord) -> None:
        nonlocal num_done
        num_done += 1
        if console.is_terminal:
            console.print(f"{num_done}/{len(prompts)} {record.status}", end="\r", highlight=False)

    try:
        return await run_load(transport, prompts, schedule, timeout_s=options.timeout, on_done=on_done)
    finally:
        await transport.close()


def _transport(options: BenchOptions, mode: str) -> Transport:
    if options.transport is TransportName.HTTP:
        return HttpTransport(options.target or "http://127.0.0.1:8000", options, mode)
    return GrpcTransport(options.target or "127.0.0.1:50051", options, mode)


def _progress(run: Run) -> str:
    load = "" if run.point.concurrency is None else f", concurrency {run.point.concurrency}"
    summary = run.summary
    return (
        f"{run.point.workload}{load}, round {run.round + 1}, {run.mode or 'default'}: {summary.num_ok} of "
        f"{summary.num_sent} in {summary.duration_s:.1f} s"
    )


def _report_run(options: BenchOptions, run: Run, slo: SloTarget) -> None:
    console, records = Console(), run.records
    console.print(latency_table(run.summary))
    console.print(describe(run.summary), markup=False, highlight=False, soft_wrap=True)
    for record in [record for record in records if not record.is_ok][:3]:
        message = f"request {record.index}: {record.status}: {record.error}"
        console.print(message, markup=False, soft_wrap=True)
    if options.output is not None:
        _write(options.output, {"config": options.described(), **_as_json(run)})
    if options.plot is not None:
        load = f"{options.rate:g} requests/s" if options.rate else f"concurrency {run.point.concurrency}"
        draw(options.plot, records, slo, f"{options.model}: {len(records)} requests, {load}, SLO {slo.name}")


def _report_comparison(options: BenchOptions, modes: Sequence[str], runs: Sequence[Run]) -> None:
    text = (
        f"{options.rounds} rounds of {options.num_requests} requests, at most {options.max_tokens} tokens "
        f"each, SLO {options.slo_class}. Figures are medians over rounds; ratios are to "
        f"`{modes[0] or 'default'}` in the same round: median (lowest to highest). Same text: answers equal "
        f"to the first mode's.\n\n{comparison_table(runs)}"
    )
    print(text)
    if options.report is not None:
        options.report.write_text(text + "\n", encoding="utf-8")
    if options.output is not None:
        _write(options.output, {"config": options.described(), "runs": [_as_json(run) for run in runs]})


def _as_json(run: Run) -> dict[str, object]:
    return {
        **run.point._asdict(),
        "round": run.round,
        "speculation": run.mode,
        "summary": dataclasses.asdict(run.summary),
        "requests": [{**dataclasses.asdict(record), "tpot_s": record.tpot_s} for record in run.records],
    }


def _write(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
