"""Compares predictions of `tandem plan` with measurements on this machine: latencies, throughput, attainment,
and the effect of a prefill pod.

    python benchmarks/plan.py --model NAME --out FILE.md --rounds 3

Two fleets are started as `tandem up`, one after the other: one prefill and one decode pod, and one decode
pod alone. Each gets the calibration first: prompts alone, then decoding alone, after which its pods report
step costs, as for `tandem plan --measured`. Both pods of the first fleet share the cores, and the pod of the
second one mixes prompts and decoding in its steps. The mutual slowdown is fitted to one more load, BOTH,
which serves no other purpose. Then each load of LOADS is sent, with equal requests and times for both fleets,
and simulated with these costs.

The speed of a shared machine changes by up to a third within minutes. REFERENCE is therefore sent before and
after each load, and costs are scaled by its time then, divided by its time during the calibration.

Requests are sent in an open loop without objectives, so the gateway refuses none. Prompts are new random
words, so no cache is hit, and drafts are off.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import TypeAlias

import grpc
from peers import BATCH, say, tandem_peer
from reporting import describe_objectives, markdown_table, write_page
from slo import send_to, serving
from tandem_cli.bench.arrivals import ClosedLoop, OpenLoop, Schedule
from tandem_cli.bench.dataset import Turn
from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.requests import plain_requests
from tandem_cli.bench.workload import RequestMaker
from tandem_cli.plan.fleet_plan import Contention, FleetPlan
from tandem_cli.plan.measured import measured_fleet
from tandem_cli.plan.simulate import simulate
from tandem_cli.plan.workload import PlannedRequest
from tandem_core.model.registry import DEFAULT_MODEL
from tandem_core.slo import SloTarget
from tandem_core.step_cost import StepCost
from tandem_engine import model_loader
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc


@dataclass(frozen=True)
class Load:
    """Requests of words that nobody has sent, with answers of exactly `output` tokens."""

    name: str
    #: Tokens of the words, to which a chat template adds some; and of an answer.
    prompt: int
    output: int
    count: int
    #: Requests per second; 0: one after the other, or `concurrency` at a time.
    rate: float = 0.0
    concurrency: int = 1

    def schedule(self, seed: int) -> Schedule:
        return OpenLoop(self.rate, seed) if self.rate else ClosedLoop(self.concurrency)


WARM_UP = [Load("warm-up", 200, 8, 2)]
PROMPTS = [Load(f"prompts of {n}", n, 2, 2) for n in (250, 450, 650, 1000, 1800)]
TEXTS = [
    Load("1 text", 100, 48, 1),
    Load("4 texts", 100, 48, 4, concurrency=4),
    # Without it, the cost of a cached token would come from short texts only.
    Load("4 long texts", 900, 32, 4, concurrency=4),
    Load("12 texts", 100, 32, 12, concurrency=12),
]
BOTH = Load("long prompts beside texts", 700, 64, 4, concurrency=4)
CALIBRATION = [*WARM_UP, *PROMPTS, *TEXTS, BOTH]
#: Before each other load, and after the last one: how fast the machine is at that time.
REFERENCE = Load("reference", 300, 16, 2)
LOADS = [
    Load("short prompts", 200, 40, 14, rate=1.0),
    Load("short prompts, busier", 200, 40, 20, rate=2.0),
    Load("long answers", 100, 100, 10, rate=0.8),
    Load("middle prompts", 850, 40, 8, rate=0.3),
    Load("long prompts", 1500, 80, 5, rate=0.15),
]
FLEETS = {"1 + 1": "--prefill 1 --decode 1", "0 + 1": "--prefill 0 --decode 1"}
#: By which attainment is judged; the gateway does not know it.
OBJECTIVES = SloTarget("", ttft_s=2.0, e2e_s=6.0)


@dataclass(frozen=True)
class Measured:
    """A request, in seconds since the first one of its load was sent, or since it was sent."""

    sent_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(self.output_tokens - 1, 1)


@dataclass(frozen=True)
class Run:
    fleet: str
    load: str
    requests: list[Measured]
    #: As the pods reported afterwards.
    pods: list[common_pb2.PodStatus]
    #: Mean E2E of the references before and after it.
    reference_s: float


# -- measuring -----------------------------------------------------------------------------------------------


def measure(model_dir: Path, fleet: str) -> list[Run]:
    (hello,) = plain_requests([Prompt("hello", (Turn("user", "Say hello."),))], BATCH, 8)
    name = f"plan {fleet.replace(' ', '')}"
    with serving(tandem_peer(name, model_dir, f"--speculation off {FLEETS[fleet]}"), hello) as target:
        sender = Sender(fleet, target)
        return [sender.run(load) for load in (*CALIBRATION, *LOADS)]


class Sender:
    """Sends loads to one fleet, each time with other prompts."""

    def __init__(self, fleet: str, target: str) -> None:
        self._fleet, self._target = fleet, target
        self._num_sent = 0
        #: Mean E2E of the last reference.
        self._reference_s = 0.0

    def run(self, load: Load) -> Run:
        before_s = self._reference_s or self._measure_reference()
        # All fleets get a load at the same times.
        seed = [*CALIBRATION, *LOADS].index(load)
        records = self._send(load, seed)
        pods = _pods(self._target)
        after_s = self._measure_reference()
        run = _run(self._fleet, load, records, pods, (before_s + after_s) / 2)
        say(f"{run.fleet}, {run.load}: mean TTFT {mean(r.ttft_s for r in run.requests):.2f} s")
        return run

    def _measure_reference(self) -> float:
        self._reference_s = mean(record.e2e_s for record in self._send(REFERENCE, 0))
        return self._reference_s

    def _send(self, load: Load, seed: int) -> list[RequestRecord]:
        records = _send(self._target, load, self._num_sent, seed)
        self._num_sent += load.count
        return records


def _send(target: str, load: Load, first: int, seed: int) -> list[RequestRecord]:
    options = BenchOptions(
        target=target, workload="random", input_tokens=load.prompt, max_tokens=load.output, ignore_eos=True,
        slo_class=BATCH.name, num_requests=load.count, rate=1.0, model=DEFAULT_MODEL,
    )  # fmt: skip
    requests = RequestMaker(options).make("random", first)
    return send_to(target, options, requests, load.schedule(seed), timeout_s=120.0)


def _pods(target: str) -> list[common_pb2.PodStatus]:
    with grpc.insecure_channel(target) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        pods = stub.GetFleetStatus(gateway_pb2.GetFleetStatusRequest(), timeout=5.0).pods
    return [pod.status for pod in pods if pod.status.role]


def _run(
    fleet: str,
    load: Load,
    records: Sequence[RequestRecord],
    pods: list[common_pb2.PodStatus],
    reference_s: float,
) -> Run:
    failed = [record.error for record in records if not record.is_ok or record.ttft_s is None]
    if failed:
        raise SystemExit(f"{fleet}, {load.name}: {len(failed)} of {len(records)} failed: {failed[0]}")
    began = min(record.sent_s for record in records)
    requests = [
        Measured(
            record.sent_s - began, record.prompt_tokens, record.output_tokens, record.ttft_s or 0.0,
            record.e2e_s,
        )
        for record in records
    ]  # fmt: skip
    return Run(fleet, load.name, requests, pods, reference_s)


# -- predicting ----------------------------------------------------------------------------------------------


def predict(plan: FleetPlan, requests: Sequence[Measured]) -> list[Measured]:
    """These requests with the times that `tandem plan` predicts."""
    planned = [PlannedRequest(r.sent_s, r.prompt_tokens, 0, r.output_tokens) for r in requests]
    return [
        replace(request, ttft_s=outcome.ttft_s, e2e_s=outcome.e2e_s)
        for request, outcome in zip(requests, simulate(plan, planned), strict=True)
    ]


@dataclass(frozen=True)
class Calibrated:
    """What the calibration of a fleet says in a round."""

    plan: FleetPlan
    #: Mean of the references while the costs of prompts and of texts were measured.
    prompts_s: float
    texts_s: float

    @classmethod
    def of(cls, runs: Sequence[Run], fleet: str) -> Calibrated:
        """From what the pods reported after the calibration's loads."""
        of = {run.load: run for run in runs if run.fleet == fleet}
        prompts, texts = of[PROMPTS[-1].name], of[TEXTS[-1].name]
        plan = measured_fleet(prompts.pods)
        # Steps with texts in them are slower: what prompts cost is known from prompts alone.
        decode = measured_fleet(texts.pods).costs.decode
        plan = replace(plan, costs=replace(plan.costs, decode=decode), num_prefill=int(fleet[0]))
        references = ([of[load.name].reference_s for load in loads] for loads in (PROMPTS, TEXTS))
        found, both = cls(plan, *map(mean, references)), of[BOTH.name]
        fitted = _fitted(found.at(both), both.requests)
        return replace(
            found, plan=replace(plan, contention=fitted.contention, mixed_steps=fitted.mixed_steps)
        )

    def at(self, run: Run) -> FleetPlan:
        """With costs as they are at the machine's speed during the run."""
        costs, prompts = self.plan.costs, run.reference_s / self.prompts_s
        own = costs.own_prefill
        costs = replace(
            costs,
            prefill=_times(costs.prefill, prompts),
            own_prefill=own and _times(own, prompts),
            decode=_times(costs.decode, run.reference_s / self.texts_s),
        )
        return replace(self.plan, costs=costs)


def _times(cost: StepCost, factor: float) -> StepCost:
    return replace(
        cost,
        per_step=factor * cost.per_step,
        per_token=factor * cost.per_token,
        per_pair=factor * cost.per_pair,
    )


def _fitted(plan: FleetPlan, requests: Sequence[Measured]) -> FleetPlan:
    """With how much prompts and texts slow each other, so that a load's mean TTFT and TPOT come out best."""

    def error(plan: FleetPlan) -> float:
        found = predict(plan, requests)
        return sum(
            math.log(mean(map(figure, found)) / mean(map(figure, requests))) ** 2
            for figure in (lambda r: r.ttft_s, lambda r: r.tpot_s)
        )

    if plan.num_prefill:
        tried = [
            replace(plan, contention=Contention(1 + p / 10, 1 + d / 20))
            for p in range(0, 61, 2)
            for d in range(21)
        ]
    else:
        tried = [replace(plan, mixed_steps=1 + m / 20) for m in range(31)]
    return min(tried, key=error)


# -- the page ------------------------------------------------------------------------------------------------


def _p90(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


#: A figure computed from a load's requests.
Figure: TypeAlias = Callable[[Sequence[Measured]], float]
FIGURES: dict[str, Figure] = {
    "TTFT s, mean": lambda rs: mean(r.ttft_s for r in rs),
    "TTFT s, p90": lambda rs: _p90([r.ttft_s for r in rs]),
    "TPOT ms, mean": lambda rs: 1e3 * mean(r.tpot_s for r in rs),
    "E2E s, mean": lambda rs: mean(r.e2e_s for r in rs),
    "E2E s, p90": lambda rs: _p90([r.e2e_s for r in rs]),
    "output tokens/s": lambda rs: sum(r.output_tokens for r in rs) / max(r.sent_s + r.e2e_s for r in rs),
}


IN_TIME = "in time"


def attainment(requests: Sequence[Measured]) -> float:
    return mean(not OBJECTIVES.miss(r.ttft_s, r.tpot_s, r.e2e_s) for r in requests)


@dataclass(frozen=True)
class Cell:
    """A load on a fleet: the medians of all rounds."""

    load: Load
    fleet: str
    real: dict[str, float]
    #: At the machine's speed during the load.
    predicted: dict[str, float]
    #: At its speed during the calibration.
    uncorrected: dict[str, float]

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Run]], plans: Sequence[Calibrated], load: Load, fleet: str) -> Cell:
        runs = [run for some in rounds for run in some if (run.fleet, run.load) == (fleet, load.name)]
        pairs = list(zip(runs, plans, strict=True))
        return cls(
            load,
            fleet,
            _medians([run.requests for run in runs]),
            _medians([predict(plan.at(run), run.requests) for run, plan in pairs]),
            _medians([predict(plan.plan, run.requests) for run, plan in pairs]),
        )

    @property
    def errors(self) -> list[float]:
        return [self.predicted[name] / self.real[name] - 1 for name in FIGURES]

    @property
    def uncorrected_errors(self) -> list[float]:
        return [self.uncorrected[name] / self.real[name] - 1 for name in FIGURES]

    def row(self) -> list[str]:
        figures = [
            f"{self.real[name]:.3g} / {self.predicted[name]:.3g} ({error:+.0%})"
            for name, error in zip(FIGURES, self.errors, strict=True)
        ]
        return [
            f"{self.load.name}: {self.load.prompt}/{self.load.output}, {self.load.rate:g}/s",
            self.fleet,
            *figures,
            f"{self.real[IN_TIME]:.0%} / {self.predicted[IN_TIME]:.0%}",
        ]


def _medians(of_rounds: Sequence[Sequence[Measured]]) -> dict[str, float]:
    figures = {**FIGURES, IN_TIME: attainment}
    return {name: median(figure(one) for one in of_rounds) for name, figure in figures.items()}


def report(rounds: Sequence[Sequence[Run]]) -> tuple[str, str]:
    """The table, and sentences under it."""
    plans = {fleet: [Calibrated.of(some, fleet) for some in rounds] for fleet in FLEETS}
    cells = {(load, fleet): Cell.of(rounds, plans[fleet], load, fleet) for load in LOADS for fleet in FLEETS}
    errors = [abs(error) for cell in cells.values() for error in cell.errors]
    raw = [abs(error) for cell in cells.values() for error in cell.uncorrected_errors]
    within, raw_within = (sum(error <= 0.15 for error in some) for some in (errors, raw))

    def gain(load: Load, which: str) -> float:
        """Mean E2E with a prefill pod, divided by that without one."""
        with_one, without = (getattr(cells[load, fleet], which)["E2E s, mean"] for fleet in FLEETS)
        return float(with_one / without)

    choices = [f"{load.name} {gain(load, 'real'):.2f} / {gain(load, 'predicted'):.2f}" for load in LOADS]
    fitted = [plan.plan.contention for plan in plans["1 + 1"]]
    lines = [
        f"Cells are measured / predicted (error), medians of {len(rounds)} rounds, with costs scaled to the "
        f"machine's speed during the load: {within} of {len(errors)} figures are within 15 %, the median "
        f"error is {median(errors):.0%}, the largest {max(errors):.0%}. With costs as reported after the "
        f"calibration {raw_within} are, and the median error is {median(raw):.0%}. In time means "
        f"{describe_objectives(OBJECTIVES)}.",
        f"Ratio of mean E2E with and without a prefill pod on shared cores, measured / predicted: "
        f"{', '.join(choices)}.",
        f"Fitted to the calibration: a prompt takes {median(c.prefill for c in fitted):.1f} times as long "
        f"while the other pod decodes, and a decode step {median(c.decode for c in fitted):.2f} times as "
        f"long during prompts (`--contention`); a step with both takes "
        f"{median(plan.plan.mixed_steps for plan in plans['0 + 1']):.2f} times the sum (`--mixed-steps`).",
    ]
    head = ["load: prompt/answer tokens, rate", "prefill + decode pods", *FIGURES, IN_TIME]
    return markdown_table(head, [cell.row() for cell in cells.values()]), "\n\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a name, folder or GGUF file")
    parser.add_argument("--rounds", type=int, default=1, help="each figure is the median of them")
    parser.add_argument("--out", type=Path, required=True, help="page to write")
    options = parser.parse_args()
    model_dir = model_loader.pull(options.model)
    rounds: list[list[Run]] = [[] for _ in range(options.rounds)]
    for runs, fleet in itertools.product(rounds, FLEETS):
        runs += measure(model_dir, fleet)
    write_page(options.out, "Predictions of `tandem plan` and measurements", *report(rounds))


if __name__ == "__main__":
    main()
