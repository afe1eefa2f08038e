"""`tandem plan`: reads the options, searches for the cheapest fleets and prints them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from tandem_core.slo import SloTarget
from tandem_core.step_cost import tokens_gained

from tandem_cli.options import ApiKeyOption, CaOption, fail, table
from tandem_cli.plan import costs as pod_costs
from tandem_cli.plan.costs import GPUS, SHAPES, DoesNotFitError, ModelShape
from tandem_cli.plan.fleet_plan import Contention, FleetPlan
from tandem_cli.plan.measured import measured_fleet
from tandem_cli.plan.search import Result, cheapest, cheapest_together, slack
from tandem_cli.plan.workload import PlannedRequest, of_trace, poisson

#: Tensor parallel sizes that are tried.
_SIZES = (1, 2, 4, 8)
#: Plans that are shown.
_MOST_SHOWN = 6


def plan(
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second, on average.")],
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 4000,
    output_tokens: Annotated[int, typer.Option(min=1)] = 1000,
    cached_tokens: Annotated[
        int, typer.Option(min=0, help="Prompt tokens that are in a prefix cache, such as a system prompt.")
    ] = 0,
    spread: Annotated[
        float, typer.Option(min=0, max=0.95, help="Variation of the lengths around their means, as a share.")
    ] = 0.2,
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals and lengths of a trace, see `tandem bench serve`.")
    ] = None,
    ttft: Annotated[float, typer.Option(min=0, help="Objective in seconds; 0: none.")] = 2.5,
    tpot: Annotated[float, typer.Option(min=0, help="Objective in seconds per token; 0: none.")] = 0.0,
    e2e: Annotated[float, typer.Option(min=0, help="Objective in seconds; 0: none.")] = 5.0,
    attainment: Annotated[float, typer.Option(min=0.01, max=1, help="Share of requests in time.")] = 0.99,
    gpu: Annotated[str, typer.Option(help=f"{', '.join(GPUS)}; not used with --measured.")] = "h200",
    per_hour: Annotated[float | None, typer.Option(min=0, help="Price of a GPU or host.")] = None,
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "qwen2.5-72b",
    weight_bits: Annotated[int, typer.Option(min=2, max=32)] = 16,
    kv_bits: Annotated[int, typer.Option(min=4, max=32)] = 16,
    link: Annotated[float, typer.Option(min=0.001, help="GB/s between pods.")] = 12.5,
    tokens_per_step: Annotated[
        float | None, typer.Option(min=1, help="Tokens that a sequence gains in a step with drafts.")
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(min=16, help="Prompt tokens of a step; unset: 2048.")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a step; unset: 128.")] = None,
    local_prefill_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Decode pods compute prompts with fewer uncached tokens; unset: default."),
    ] = None,
    contention: Annotated[
        str,
        typer.Option(
            metavar="PROMPTS,TEXTS",
            help="Slowdown where pods of both roles share a machine: of prompts during decoding, and of "
            "decode steps during prompts, e.g. 3,1.3.",
        ),
    ] = "1,1",
    mixed_steps: Annotated[
        float,
        typer.Option(
            min=1, help="Duration of a step with prompts and decoding, as a multiple of the sum of both."
        ),
    ] = 1.0,
    measured: Annotated[
        str,
        typer.Option(help="Address of a gateway; its pods report costs and the settings above."),
    ] = "",
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
    requests: Annotated[int, typer.Option(min=20, help="Requests of the simulation.")] = 300,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Write a kustomize overlay to this folder.")] = None,
    base: Annotated[str, typer.Option(help="Resource of the overlay.")] = "../../base",
) -> None:
    """Compute how many pods of each role keep the objectives, the cost, and the limiting resource."""
    slo = SloTarget("", ttft, tpot, e2e)
    if not (ttft or tpot or e2e):
        fail("--ttft, --tpot and --e2e are all 0; set one of them")
    if trace is not None:
        workload = _traced(trace, rate, requests, prompt_tokens, output_tokens)
    else:
        lengths = prompt_tokens, output_tokens
        workload = poisson(rate, requests, *lengths, cached_tokens=cached_tokens, spread=spread, seed=seed)
    settings = {
        "tokens_per_step": None if tokens_per_step is None else (tokens_per_step,),
        "chunk_size": chunk_size,
        "max_batch": max_batch,
        "local_prefill_tokens": local_prefill_tokens,
        "idle_prefill_tokens": local_prefill_tokens,
        "link_bytes_per_s": link * 1e9,
        "contention": _contention(contention),
        "mixed_steps": mixed_steps,
    }
    given: dict[str, Any] = {setting: value for setting, value in settings.items() if value is not None}
    if measured:
        asked = [_measured(measured, api_key, ca, per_hour or 0.0)]
        name = f"as measured at {measured}"
    else:
        if gpu not in GPUS:
            fail(f"--gpu {gpu} is unknown; use one of {', '.join(GPUS)}")
        if shape not in SHAPES:
            fail(f"--shape {shape} is unknown; use one of {', '.join(SHAPES)}")
        model = replace(SHAPES[shape], weight_bytes=weight_bits / 8, kv_bytes=kv_bits / 8)
        asked = _sizes(gpu, model, per_hour, chunk_size or FleetPlan.chunk_size)
        is_default = (shape, gpu) == ("qwen2.5-72b", "h200")
        name = f"{shape} on {gpu}" + ", the defaults of --shape and --gpu" * is_default
    asked = [replace(fleet, **given) for fleet in asked]
    results: list[Result] = []
    for fleet in asked:
        if _misses_alone(fleet, workload, slo):
            continue

        def make(num_prefill: int, num_decode: int, fleet: FleetPlan = fleet) -> FleetPlan:
            return replace(fleet, num_prefill=num_prefill, num_decode=num_decode)

        for search in (cheapest, cheapest_together):
            found = search(make, workload, slo, attainment)
            if found is not None:
                results.append(found)
    if not results:
        typer.echo(f"No fleet of {name} keeps these objectives: {_why_none(asked, workload, slo)}")
        raise typer.Exit(1)
    lacking = [] if measured else _lacking(weight_bits, kv_bits)
    results.sort(key=lambda one: (one.plan.costs.num_devices > 1, one.plan.num_devices, one.e2e_s[1]))
    best = results[0]
    if best.plan.costs.num_devices > 1:
        lacking.append("tensor parallelism")
    typer.echo(f"{name}, {len(workload)} requests at {len(workload) / workload[-1].arrival_s:.3g}/s\n")
    typer.echo(_table(results[:_MOST_SHOWN]))
    if results[-1].plan.costs.num_devices > 1:
        typer.echo("More than one GPU per pod needs tensor parallelism, which the engine does not have yet.")
    typer.echo("\n" + _conclusion(best, slack(best, workload, slo, attainment)))
    if lacking:
        typer.echo(f"Tandem cannot run this fleet yet: the engine has no {' and no '.join(lacking)}.")
    if out is not None:
        from tandem_cli.plan.overlay import write_overlay

        try:
            typer.echo(f"wrote {write_overlay(out, base, best)}")
        except FileExistsError as error:
            fail(f"{error.filename} exists already; name another folder with --out")


def _lacking(weight_bits: int, kv_bits: int) -> list[str]:
    """Features that the options assume and the engine lacks."""
    assumed = {"quantised weights on GPUs": weight_bits < 16, "quantised KV": kv_bits < 16}
    return [name for name, is_assumed in assumed.items() if is_assumed]


def _contention(text: str) -> Contention:
    try:
        prefill, decode = map(float, text.split(","))
    except ValueError:
        prefill = decode = 0.0
    if not (1 <= prefill < math.inf and 1 <= decode < math.inf):
        fail(f"--contention {text!r} is not two numbers of at least 1 with a comma between, such as 3,1.3")
    return Contention(prefill, decode)


def _traced(
    trace: Path, rate: float, count: int, prompt_tokens: int, output_tokens: int
) -> list[PlannedRequest]:
    from tandem_cli.bench import BenchError
    from tandem_cli.bench.traces import read_trace

    try:
        return of_trace(read_trace(trace, count), rate, prompt_tokens, output_tokens)
    except BenchError as error:
        fail(str(error))


def _sizes(gpu: str, model: ModelShape, per_hour: float | None, chunk_size: int) -> list[FleetPlan]:
    from tandem_decode.settings import DecodeSettings

    defaults = {name: field.default for name, field in DecodeSettings.model_fields.items()}
    found, reason = [], ""
    for size in _SIZES:
        try:
            costs = pod_costs.of_gpu(GPUS[gpu], model, size, per_hour=per_hour, chunk_size=chunk_size)
        except DoesNotFitError as error:
            reason = str(error)
            continue
        found.append(
            FleetPlan(
                costs,
                num_prefill=1,
                num_decode=1,
                local_prefill_tokens=defaults["local_prefill_tokens"],
                idle_prefill_tokens=defaults["idle_prefill_tokens"],
            )
        )
    if not found:
        fail(f"{reason}; use a larger GPU or fewer --weight-bits")
    return found


def _measured(address: str, api_key: str | None, ca: Path | None, per_hour: float) -> FleetPlan:
    """The fleet of the pods that the gateway reports."""
    from tandem_proto.v1 import gateway_pb2

    from tandem_cli import targets

    request, metadata = gateway_pb2.GetFleetStatusRequest(), targets.key_metadata(api_key)
    try:
        with targets.stub(targets.gateway(address, "grpc"), ca) as gateway:
            pods = gateway.GetFleetStatus(request, timeout=targets.TIMEOUT_S, metadata=metadata).pods
        return measured_fleet([pod.status for pod in pods], per_hour)
    except (targets.GatewayError, ValueError) as error:
        fail(f"--measured {address}: {error}")


def _misses_alone(fleet: FleetPlan, workload: list[PlannedRequest], slo: SloTarget) -> str:
    """The objective that a request of median length misses on an idle fleet; "" if none."""
    costs = fleet.costs
    request = sorted(workload, key=lambda one: one.prompt_tokens + one.output_tokens)[len(workload) // 2]
    ttft_s = costs.prefill.prompt_seconds(request.cached_tokens, request.prompt_tokens, 1 << 30)
    step_s = costs.decode.seconds(1, 1, request.prompt_tokens + request.output_tokens / 2)
    tpot_s = step_s / tokens_gained(fleet.tokens_per_step, 1)
    return slo.miss(ttft_s, tpot_s, ttft_s + tpot_s * (request.output_tokens - 1))


def _why_none(asked: list[FleetPlan], workload: list[PlannedRequest], slo: SloTarget) -> str:
    missed = [_misses_alone(fleet, workload, slo) for fleet in asked]
    if all(missed):
        return (
            f"a request of median length misses them alone on {asked[-1].costs.num_devices} devices: "
            f"{missed[-1]}. Widen them, shorten the answer, use fewer --weight-bits, or drafts "
            "(--tokens-per-step)."
        )
    return "each request meets them alone, but not under this load; lower --attainment or the rate."


def _table(results: list[Result]) -> str:
    head = (
        "pods",
        "devices",
        "in time",
        "TTFT s p50 / p99",
        "ms per token",
        "E2E s p50 / p99",
        "per 1M tokens",
    )
    rows = [
        (
            _pods(result.plan),
            str(result.plan.num_devices),
            f"{result.attainment:.1%}",
            f"{result.ttft_s[0]:.2f} / {result.ttft_s[1]:.2f}",
            f"{1e3 * result.tpot_s[0]:.1f} / {1e3 * result.tpot_s[1]:.1f}",
            f"{result.e2e_s[0]:.2f} / {result.e2e_s[1]:.2f}",
            f"{result.per_million_tokens:.2f}",
        )
        for result in results
    ]
    has_prices = any(result.per_million_tokens for result in results)
    return table(*(row if has_prices else row[:-1] for row in (head, *rows)))


def _pods(plan: FleetPlan) -> str:
    size = f" x {plan.costs.num_devices} GPUs" if plan.costs.num_devices > 1 else ""
    if not plan.num_prefill:
        return f"{plan.num_decode} together{size}"
    return f"{plan.num_prefill} prefill, {plan.num_decode} decode{size}"


def _conclusion(best: Result, shares: list[tuple[str, float]]) -> str:
    plan = best.plan
    kind = "with prefill pods" if plan.num_prefill else "without prefill pods"
    (first, share), *others = shares
    rest = ", ".join(f"{name}: {value:.0%}" for name, value in others)
    return (
        f"Best: {_pods(plan)} ({kind}), room for {plan.costs.kv_tokens} tokens of KV in each pod, "
        f"--max-batch {plan.max_batch}, --chunk-size {plan.chunk_size}.\n"
        f"Limiting resource: {first}; {share:.0%} of it still keeps the objective ({rest})."
    )
