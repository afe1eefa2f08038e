"""The options of `tandem bench serve`, which are its command line too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from tandem_core.model.registry import DEFAULT_MODEL

from tandem_cli.bench.prompts import WORKLOADS
from tandem_cli.options import CaOption, TemperatureOption


class BenchError(ValueError):
    """The options do not describe a benchmark; one sentence."""


class TransportName(StrEnum):
    GRPC = "grpc"
    HTTP = "http"


class Point(NamedTuple):
    """A workload at a load. concurrency None: requests leave at the run's rate."""

    workload: str
    concurrency: int | None


@dataclass(frozen=True)
class BenchOptions:
    """Several values of speculation, workload or concurrency make a comparison."""

    target: Annotated[
        str | None,
        typer.Option(
            help="For grpc host:port, with TLS https://host:port; for http a URL; default: the local gateway."
        ),
    ] = None
    ca: CaOption = None
    transport: Annotated[TransportName, typer.Option(help="Protocol of the requests.")] = TransportName.GRPC
    rate: Annotated[float | None, typer.Option(min=0.001, help="Mean requests per second (Poisson).")] = None
    concurrency: Annotated[
        str | None, typer.Option(help="Requests in flight; several with commas are compared.")
    ] = None
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 32
    speculation: Annotated[
        str, typer.Option(help="off, local, chain, global; several are compared. Unset: the pods' default.")
    ] = ""
    workload: Annotated[
        str, typer.Option(help="retail, random, copy, faq, json; several with commas are compared.")
    ] = "retail"
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each mode in a comparison.")] = 3
    dataset: Annotated[
        Path | None, typer.Option(help="Dialogues as JSON lines; default: a small built-in sample.")
    ] = None
    policy: Annotated[
        Path | None, typer.Option(help="Text of the system prompt; default: the sample's policy.")
    ] = None
    input_tokens: Annotated[
        int | None, typer.Option(min=16, help="Prompt length of retail, random and copy; default: theirs.")
    ] = None
    model: Annotated[
        str, typer.Option(help="Model name to request (http needs one); its tokenizer, if here, counts.")
    ] = DEFAULT_MODEL
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 128
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate --max-tokens.")] = False
    temperature: TemperatureOption = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Of departures, prompts and sampling.")] = 0
    slo_class: Annotated[str, typer.Option(help="interactive, chat or batch.")] = "interactive"
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a run.")] = 600.0
    output: Annotated[Path | None, typer.Option(help="Write all figures here as JSON.")] = None
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of one run here; needs matplotlib.")] = None
    report: Annotated[Path | None, typer.Option(help="Write a comparison here as Markdown.")] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="TANDEM_API_KEY",
            help="Key, if the gateway requires one; {speculation} in it stands for the mode.",
        ),
    ] = None

    def modes(self) -> tuple[str, ...]:
        """Speculation modes; "" is the pods' default. Raises BenchError."""
        from tandem_core.speculation import SpeculationMode

        known = [mode.value for mode in SpeculationMode]
        modes = _names(self.speculation)
        for mode in modes:
            if mode not in known:
                raise BenchError(f"--speculation {mode!r} is unknown; use {', '.join(known)}")
        return modes or ("",)

    def points(self) -> Iterator[Point]:
        """Raises BenchError."""
        if (self.rate is None) == (self.concurrency is None):
            raise BenchError("give either --rate or --concurrency")
        loads: list[int | None] = [None]
        if self.concurrency is not None:
            names = _names(self.concurrency)
            if not names or not all(name.isdecimal() and 1 <= int(name) <= 100_000 for name in names):
                raise BenchError(
                    f"--concurrency {self.concurrency!r}: give whole numbers from 1 to 100000, with commas"
                )
            loads = [int(name) for name in names]
        for workload in _names(self.workload):
            if workload not in WORKLOADS:
                raise BenchError(f"--workload {workload!r} is unknown; use {', '.join(WORKLOADS)}")
            yield from (Point(workload, load) for load in loads)

    def key_for(self, mode: str) -> str | None:
        return self.api_key.replace("{speculation}", mode) if self.api_key else None

    def described(self) -> dict[str, object]:
        """For the JSON file, without the key."""
        values = {name: value for name, value in asdict(self).items() if name != "api_key"}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
