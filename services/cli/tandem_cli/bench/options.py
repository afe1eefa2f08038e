"""The options of `tandem bench serve`, which define its command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from tandem_core.slo import SloTarget
from tandem_core.speculation import SpeculationMode

from tandem_cli.bench import BenchError as BenchError
from tandem_cli.bench.prompts import WORKLOADS
from tandem_cli.bench.requests import Tenant, parse_mix, parse_tenants
from tandem_cli.options import ApiKeyOption, CaOption, TargetOption


class Point(NamedTuple):
    """A workload and its load: concurrency or mean requests per second; neither for a trace as recorded."""

    workload: str
    concurrency: int | None = None
    rate: float | None = None

    def load(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return "as recorded" if self.rate is None else f"{self.rate:g} requests/s"


@dataclass(frozen=True)
class BenchOptions:
    """The load, the requests, the objectives and the files of a run."""

    target: TargetOption = ""
    ca: CaOption = None
    transport: Annotated[Literal["grpc", "http"], typer.Option(help="Protocol of the requests.")] = "grpc"
    rate: Annotated[float | None, typer.Option(min=0.001, help="Mean requests per second.")] = None
    burstiness: Annotated[
        float,
        typer.Option(help="Shape of the gaps' gamma distribution: 1 Poisson, 0.25 bursts, inf constant."),
    ] = 1.0
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay recorded arrivals and lengths: own JSON lines, Mooncake's, BurstGPT's CSV."
        ),
    ] = None
    rate_scale: Annotated[
        float | None, typer.Option(min=0.000001, help="Speed relative to the recording; default: 1.")
    ] = None
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests of a run; default: 32, or those of the trace.")
    ] = None
    speculation: Annotated[SpeculationMode | None, typer.Option(help="Drafts; unset: the pods' default.")] = (
        None
    )
    workload: Annotated[str, typer.Option(help=f"{', '.join(WORKLOADS)}.")] = "retail"
    dataset: Annotated[
        Path | None, typer.Option(help="Dialogues as JSON lines; default: a small built-in sample.")
    ] = None
    policy: Annotated[
        Path | None, typer.Option(help="Text of the system prompt; default: the sample's policy.")
    ] = None
    input_tokens: Annotated[
        int | None,
        typer.Option(min=16, help="Prompt length; of a trace, the longest."),
    ] = None
    model: Annotated[
        str, typer.Option(help="Model to request, by default the served one; its tokenizer counts tokens.")
    ] = ""
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 128
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate --max-tokens.")] = False
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 picks the likeliest token.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of departures, prompts and sampling.")] = 0
    slo_class: Annotated[
        str, typer.Option(help="standard, interactive, chat, batch, or one of --slo-classes-file.")
    ] = "interactive"
    slo_classes_file: Annotated[
        Path | None, typer.Option(help="SLO classes of the gateway, if it has a file of them.")
    ] = None
    mix: Annotated[
        str, typer.Option(help="Classes drawn for each request, e.g. interactive=.6,chat=.3,batch=.1.")
    ] = ""
    tenants: Annotated[
        str,
        typer.Option(
            envvar="TANDEM_BENCH_TENANTS",
            help="Tenants drawn for each request: NAME=KEY:WEIGHT, with commas.",
        ),
    ] = ""
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0.001, help="TTFT objective of every request; default: its class's.")
    ] = None
    slo_tpot_ms: Annotated[float | None, typer.Option(min=0.001, help="TPOT objective.")] = None
    slo_e2e_ms: Annotated[float | None, typer.Option(min=0.001, help="E2E objective.")] = None
    honour_retry_after: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Send a refused request again after its retry-after, at most N times."
        ),
    ] = 0
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a run.")] = 600.0
    output: Annotated[
        Path | None,
        typer.Option(help="Write every request here as a JSON line; `tandem bench report` reads them."),
    ] = None
    report: Annotated[Path | None, typer.Option(help="Write the report here too.")] = None
    api_key: ApiKeyOption = None

    def point(self) -> Point:
        """Raises BenchError."""
        if self.rate is not None and self.concurrency is not None:
            raise BenchError("give either --rate or --concurrency")
        if self.rate is None and self.concurrency is None and self.trace is None:
            raise BenchError("give either --rate or --concurrency, or --trace")
        if self.trace is None and self.rate_scale is not None:
            raise BenchError("--rate-scale changes the speed of a --trace; give one, or use --rate")
        if self.rate is not None and self.rate_scale is not None:
            raise BenchError("--rate and --rate-scale both set the speed of the --trace; give one")
        if self.trace is not None and self.concurrency is not None:
            raise BenchError("--trace has arrival times; give --rate or --rate-scale, not --concurrency")
        if not self.burstiness > 0:
            raise BenchError(f"--burstiness {self.burstiness:g}: give a number above 0, or inf")
        if self.trace is not None and self.burstiness != 1:
            raise BenchError("--trace has arrival times; leave out --burstiness")
        if self.workload not in WORKLOADS:
            raise BenchError(f"--workload {self.workload!r} is unknown; use {', '.join(WORKLOADS)}")
        return Point(self.workload, self.concurrency, self.rate)

    def objectives(self, slo_class: str) -> SloTarget:
        """Objectives of a class with those of the options; "" has only the latter. Raises BenchError."""
        # Imports pydantic, which other commands do not need.
        from tandem_service.slo_file import SloFileError, load_slo_classes

        try:
            classes = load_slo_classes(self.slo_classes_file)
        except SloFileError as error:
            raise BenchError(str(error)) from error
        if slo_class and slo_class not in classes:
            raise BenchError(f"SLO class {slo_class!r} is unknown; use one of {', '.join(classes)}")
        target = classes.get(slo_class, SloTarget(""))
        own = SloTarget(
            "",
            ttft_s=(self.slo_ttft_ms or 0.0) / 1000,
            tpot_s=(self.slo_tpot_ms or 0.0) / 1000,
            e2e_s=(self.slo_e2e_ms or 0.0) / 1000,
        )
        return target.overridden(own)

    @property
    def has_objectives(self) -> bool:
        return any(limit is not None for limit in (self.slo_ttft_ms, self.slo_tpot_ms, self.slo_e2e_ms))

    def class_weights(self) -> dict[str, float]:
        """Raises BenchError."""
        weights = parse_mix(self.mix) or {self.slo_class: 1.0}
        for slo_class in weights:
            self.objectives(slo_class)
        return weights

    def tenant_weights(self) -> dict[Tenant, float]:
        """Raises BenchError."""
        return parse_tenants(self.tenants)

    def described(self) -> dict[str, object]:
        """The options for the records file, without keys."""
        values = {name: value for name, value in asdict(self).items() if name != "api_key"}
        weights = {tenant.name: weight for tenant, weight in self.tenant_weights().items()}
        values["tenants"] = ",".join(f"{name}:{weight:g}" for name, weight in weights.items())
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
