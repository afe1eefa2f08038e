"""One benchmark from its configuration to its report.

dataset -> prompts -> transport, schedule -> records -> summary -> terminal, JSON, PNG
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from tandem_core.model import registry
from tandem_gateway.request import SloTarget
from tandem_gateway.slo import SLO_CLASSES

from tandem_cli.bench import dataset as dialogues
from tandem_cli.bench.loadgen import ClosedLoop, OpenLoop, Schedule, run_load
from tandem_cli.bench.plot import draw
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.report import describe, latency_table, write_json
from tandem_cli.bench.stats import Summary, summarise
from tandem_cli.bench.transports import GrpcTransport, HttpTransport, RequestOptions, Transport
from tandem_cli.bench.workload import Prompt, estimate_tokens, tokenizer_counter
from tandem_cli.bench.workloads import WORKLOADS, Material


class BenchError(ValueError):
    """The configuration makes no benchmark; one sentence."""


@dataclass(frozen=True)
class BenchConfig:
    """All that determines a run; written into the JSON file. Exactly one of rate and concurrency is set."""

    target: str
    transport: str
    rate: float | None
    concurrency: int | None
    num_requests: int
    dataset: str | None
    policy: str | None
    input_tokens: int | None
    model: str
    max_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int
    slo_class: str
    timeout_s: float
    #: How to draft; "": as the pods do.
    speculation: str = ""
    workload: str = "retail"

    def schedule(self) -> Schedule:
        if self.rate is not None:
            return OpenLoop(self.rate, self.seed)
        if self.concurrency is not None:
            return ClosedLoop(self.concurrency)
        raise BenchError("give either a rate or a concurrency")

    def slo(self) -> SloTarget:
        if self.slo_class not in SLO_CLASSES:
            raise BenchError(
                f"--slo-class {self.slo_class!r} is unknown; use one of {', '.join(SLO_CLASSES)}"
            )
        return SLO_CLASSES[self.slo_class]


def run_bench(config: BenchConfig, *, api_key: str | None, output: Path | None, plot: Path | None) -> Summary:
    """Runs, prints and writes the files. Raises BenchError and DatasetError before the first request."""
    slo, schedule, console = config.slo(), config.schedule(), Console()
    check_folders(output, plot)
    prompts = make_prompts(config)
    records = asyncio.run(_load(config, schedule, prompts, api_key, console))
    summary = summarise(records, slo)
    console.print(latency_table(summary))
    console.print(describe(summary), markup=False, highlight=False, soft_wrap=True)
    for record in [record for record in records if not record.is_ok][:3]:
        console.print(
            f"request {record.index}: {record.status}: {record.error}", markup=False, soft_wrap=True
        )
    if output is not None:
        write_json(output, config, summary, records)
    if plot is not None:
        load = f"{config.rate:g} requests/s" if config.rate else f"concurrency {config.concurrency}"
        draw(plot, records, slo, f"{config.model}: {len(records)} requests, {load}, SLO {slo.name}")
    return summary


def check_folders(*files: Path | None) -> None:
    """Raises BenchError for a file that could not be written after the run."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise BenchError(f"{file}: the folder {file.parent} does not exist; make it first")


def make_prompts(config: BenchConfig, first: int = 0) -> list[Prompt]:
    """The workload's prompts from the `first` on, in order. Raises BenchError and DatasetError.

    Counts tokens with the model's tokenizer if it is on this machine.
    """
    if config.workload not in WORKLOADS:
        raise BenchError(f"--workload {config.workload!r} is unknown; use {', '.join(WORKLOADS)}")
    conversations = (
        dialogues.load_dialogues(Path(config.dataset)) if config.dataset else dialogues.sample_dialogues()
    )
    try:
        policy = (
            Path(config.policy).read_text(encoding="utf-8") if config.policy else dialogues.sample_policy()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--policy {config.policy} cannot be read: {error}") from error
    folder = registry.find(config.model) if config.model else None
    material = Material(
        conversations,
        policy,
        input_tokens=config.input_tokens,
        count=tokenizer_counter(folder) if folder is not None else estimate_tokens,
        seed=config.seed,
    )
    make = WORKLOADS[config.workload]
    return [make(material, index) for index in range(first, first + config.num_requests)]


async def _load(
    config: BenchConfig, schedule: Schedule, prompts: list[Prompt], api_key: str | None, console: Console
) -> list[RequestRecord]:
    transport = make_transport(config, api_key)
    num_done = 0

    def on_done(record: RequestRecord) -> None:
        nonlocal num_done
        num_done += 1
        if console.is_terminal:
            console.print(f"{num_done}/{len(prompts)} {record.status}", end="\r", highlight=False)

    try:
        return await run_load(transport, prompts, schedule, timeout_s=config.timeout_s, on_done=on_done)
    finally:
        await transport.close()


def make_transport(config: BenchConfig, api_key: str | None) -> Transport:
    options = RequestOptions(
        model=config.model,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        slo_class=config.slo_class,
        ignore_eos=config.ignore_eos,
        api_key=api_key,
        speculation=config.speculation,
    )
    if config.transport == "http":
        return HttpTransport(config.target, options)
    return GrpcTransport(config.target, options)
