"""Laws of scaling beside each other, on a simulated fleet: attainment and pod-hours.

    .venv/bin/python benchmarks/scaling.py --out benchmarks/results/scaling.md
    .venv/bin/python benchmarks/scaling.py --trace conversation_trace.jsonl --ttft 5

Each law sees every 15 s what its own metrics would show, and decides the pods of both roles of one fleet, the
simulated one of `tandem plan` (services/cli/tandem_cli/plan/simulate.py). New pods are ready after --start-s.

    tandem      services/cli/tandem_cli/scaler/law.py, as `tandem scaler` runs it
    llm-d       its SLO-aware law (docs/architecture/advanced/autoscaling/slo-aware-keda.md there) with its
                thresholds .55 and .40, on measured latencies; prefill by TTFT and decode by TPOT, since one
                signal for both cannot tell the roles apart
    HPA on CPU  as deploy/k8s/components/autoscaling-hpa: 70 % of the time in which a pod computes
    fixed       what tandem's law needs at the busiest minute, all the time

Arrivals are generated where no --trace is given: gamma gaps (a coefficient of variation of 1 is Poisson's)
stretched to a rate that follows a curve, lengths from a lognormal distribution; see `generated`. Traces in
the forms of `tandem bench serve` (Mooncake's, BurstGPT's, our own) can be given instead.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from reporting import markdown_table, write_page
from tandem_cli.bench.traces import TraceError, read_trace
from tandem_cli.plan.costs import GPUS, SHAPES, PodCosts, of_gpu
from tandem_cli.plan.simulate import FleetPlan, Outcome, Simulation
from tandem_cli.plan.workload import PlannedRequest, of_trace
from tandem_cli.scaler import law
from tandem_core.slo import SloTarget
from tandem_core.step_cost import tokens_gained

#: Between two decisions.
TICK_S = 15.0
BOUNDS = law.Bounds(1, 32)
#: Decode steps that are simulated together.
SPAN_S = 0.25


@dataclass(frozen=True)
class Workload:
    name: str
    requests: Sequence[PlannedRequest]
    slo: SloTarget


# -- arrivals ----------------------------------------------------------------------------------------------


def arrivals(rate: Callable[[float], float], seconds: float, cv: float, rng: random.Random) -> list[float]:
    """Times of a renewal process with gamma gaps (cv 1: Poisson), stretched to the rate at each time."""
    shape = 1 / cv**2
    now, times = 0.0, []
    while True:
        left = rng.gammavariate(shape, 1 / shape)  # in mean gaps
        while left > 0:  # in pieces of a second, in which the rate is constant
            piece = math.floor(now) + 1 - now
            due = left / rate(now)
            now, left = (now + due, 0.0) if due <= piece else (now + piece, left - piece * rate(now))
            if now >= seconds:
                return times
        times.append(now)


def requests_of(times: Sequence[float], prompt: int, output: int, rng: random.Random) -> list[PlannedRequest]:
    """Lengths from lognormal distributions with these means and a coefficient of variation of .8."""
    sigma = math.sqrt(math.log(1 + 0.8**2))

    def length(mean: int, most: int) -> int:
        return min(max(round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)), 8), most)

    return [PlannedRequest(at, length(prompt, 8 * prompt), 0, length(output, 8 * output)) for at in times]


def day(at: float, length: float) -> float:
    """Low at its ends, 1 in the middle: a raised cosine."""
    return 0.5 - 0.5 * math.cos(2 * math.pi * at / length)


def generated(minutes: float, seed: int) -> list[Workload]:
    """The four shapes; `minutes` is the length of each."""
    seconds, chat = 60 * minutes, SloTarget("", ttft_s=1.0, tpot_s=0.06)
    rng = random.Random(seed)
    spikes = [seconds * share for share in (0.2, 0.5, 0.75)]

    def diurnal(at: float) -> float:
        return 4 + 16 * day(at, seconds)

    def bursty(at: float) -> float:
        return 24.0 if any(spike <= at < spike + 120 for spike in spikes) else 8.0

    def steps(at: float) -> float:
        return 20.0 if seconds / 3 <= at < 2 * seconds / 3 else 5.0

    def long_prompts(at: float) -> float:
        return 0.6 + 1.2 * day(at, seconds)

    def made(
        name: str, rate: Callable[[float], float], cv: float, slo: SloTarget, prompt: int, output: int
    ) -> Workload:
        return Workload(name, requests_of(arrivals(rate, seconds, cv, rng), prompt, output, rng), slo)

    return [
        made("a day in an hour: 4 to 20/s, Poisson", diurnal, 1.0, chat, 1200, 300),
        made("bursts: 8/s, three times 24/s for 2 min, gaps with cv 2", bursty, 2.0, chat, 1200, 300),
        made("a step: 5, 20, 5/s, Poisson", steps, 1.0, chat, 1200, 300),
        made(
            "long prompts: .6 to 1.8/s of 12,000 tokens, Poisson",
            long_prompts,
            1.0,
            SloTarget("", ttft_s=10.0, tpot_s=0.06),
            12_000,
            340,
        ),
    ]


# -- what a law sees ---------------------------------------------------------------------------------------


class Seen:
    """Requests as gateways count them: received, first tokens, ends; by when each happened."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._next = 0
        self._no_first: list[Outcome] = []
        self._no_end: list[Outcome] = []
        self.received: deque[float] = deque()
        self.first: deque[tuple[float, float]] = deque()
        self.ended: deque[tuple[float, Outcome]] = deque()

    def update(self) -> None:
        now, outcomes = self._simulation.now, self._simulation.outcomes
        while self._next < len(outcomes) and outcomes[self._next].request.arrival_s <= now:
            outcome = outcomes[self._next]
            self.received.append(outcome.request.arrival_s)
            self._no_first.append(outcome)
            self._no_end.append(outcome)
            self._next += 1
        for outcome in self._no_first:
            if outcome.ttft_s < math.inf:
                self.first.append((outcome.request.arrival_s + outcome.ttft_s, outcome.ttft_s))
        self._no_first = [outcome for outcome in self._no_first if outcome.ttft_s == math.inf]
        for outcome in self._no_end:
            if outcome.e2e_s < math.inf:
                self.ended.append((outcome.request.arrival_s + outcome.e2e_s, outcome))
        self._no_end = [outcome for outcome in self._no_end if outcome.e2e_s == math.inf]
        for times in (self.first, self.ended):
            while times and times[0][0] < now - 300:
                times.popleft()
        while self.received and self.received[0] < now - 300:
            self.received.popleft()

    def rate(self, seconds: float) -> float:
        since = self._simulation.now - seconds
        return sum(at >= since for at in self.received) / min(seconds, max(self._simulation.now, TICK_S))

    def ttfts(self, seconds: float = 60.0) -> list[float]:
        return [ttft_s for at, ttft_s in self.first if at >= self._simulation.now - seconds]

    def tpots(self, seconds: float = 60.0) -> list[float]:
        return [outcome.tpot_s for at, outcome in self.ended if at >= self._simulation.now - seconds]


# -- laws --------------------------------------------------------------------------------------------------


class Law(Protocol):
    def decide(self, simulation: Simulation, seen: Seen) -> tuple[int, int]:
        """Prefill and decode pods from now on."""


class Tandem:
    def __init__(self, plan: FleetPlan, slo: SloTarget, start_s: float, settle_s: float = 300.0) -> None:
        self._plan, self._slo, self._start_s = plan, slo, start_s
        self._policy = law.Policy(BOUNDS, BOUNDS, settle_s=settle_s)
        self._memory = law.Memory()
        #: Mean prompt and output tokens.
        self.lengths = (0.0, 0.0)

    def decide(self, simulation: Simulation, seen: Seen) -> tuple[int, int]:
        recent = [outcome.request for _, outcome in seen.ended]
        if recent:
            self.lengths = (
                sum(one.prompt_tokens for one in recent) / len(recent),
                sum(one.output_tokens for one in recent) / len(recent),
            )
        snapshot = self.snapshot(simulation, seen, seen.rate(30), seen.rate(120))
        decision, self._memory = law.decide(snapshot, self._memory, self._policy)
        return decision.prefill.wanted, decision.decode.wanted

    def snapshot(self, simulation: Simulation, seen: Seen, rate: float, before: float) -> law.Snapshot:
        slo, costs, (prompt, output) = self._slo, self._plan.costs, self.lengths
        work_s = costs.prefill.prompt_seconds(0, round(prompt), self._plan.chunk_size)
        return law.Snapshot(
            simulation.now,
            law.Traffic(
                received_per_s=rate,
                received_per_s_before=before,
                seconds_between=45.0,
                held=simulation.num_held,
                prompt_tokens=prompt,
                output_tokens=output,
                ttft_s=slo.ttft_s,
                tpot_s=slo.tpot_s,
                ttft_kept=_kept(seen.ttfts(), slo.ttft_s),
                tpot_kept=_kept(seen.tpots(), slo.tpot_s),
            ),
            law.PrefillLoad(
                law.Pods(simulation.prefill.wanted, simulation.prefill.num_ready, self._start_s),
                work_s,
                simulation.queued_prompt_s,
            ),
            law.DecodeLoad(
                law.Pods(simulation.decode.wanted, simulation.decode.num_ready, self._start_s),
                cost=costs.decode,
                tokens_per_step=tokens_gained(self._plan.tokens_per_step, self._plan.max_batch),
                max_batch=self._plan.max_batch,
                kv_tokens=costs.kv_tokens,
                kv_use=simulation.kv_use,
                sequences=simulation.num_sequences,
            ),
        )


class LlmD:
    """One pool of it: P90 over an objective, clamped, averaged; thresholds; the HPA's limits."""

    _UP, _DOWN, _CLAMP = 0.55, 0.40, 2.0

    def __init__(self) -> None:
        self._signals: deque[tuple[float, float]] = deque()
        self._asked: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def decide(self, now: float, p90_per_slo: float, wanted: int, ready: int) -> int:
        self._signals.append((now, min(p90_per_slo, self._CLAMP)))
        recent = [value for at, value in self._signals if at > now - 45]
        signal = sum(recent) / len(recent)
        credit = ready / wanted if 0 < ready < wanted else 1.0
        asked = wanted
        if signal > self._UP:
            asked += max(math.ceil(wanted * (signal * credit / self._UP - 1)), 0)
        elif signal < self._DOWN:
            asked -= math.floor(wanted * (1 - signal / self._DOWN))
        # An HPA begins its window with the pods that are there.
        self._asked.append((now, BOUNDS.clamp(asked if self._asked else wanted)))
        low = min(count for at, count in self._asked if at > now - 30)
        high = max(count for at, count in self._asked if at > now - 180)
        changes = [(at, change) for at, change in self._changes if at > now - 120]
        if low > wanted:
            added = sum(change for at, change in changes if at > now - 60 and change > 0)
            before = wanted - added
            to = min(low, before + max(before, 4))
        elif high < wanted and not any(change < 0 for _, change in changes):
            to = wanted - 1
        else:
            to = wanted
        if to != wanted:
            self._changes.append((now, to - wanted))
        return max(to, BOUNDS.least)


class LlmDLaw:
    def __init__(self, slo: SloTarget) -> None:
        self._slo, self._prefill, self._decode = slo, LlmD(), LlmD()

    def decide(self, simulation: Simulation, seen: Seen) -> tuple[int, int]:
        prefill, decode = simulation.prefill, simulation.decode
        ttft, tpot = _p90(seen.ttfts()) / self._slo.ttft_s, _p90(seen.tpots()) / self._slo.tpot_s
        return (
            self._prefill.decide(simulation.now, ttft, prefill.wanted, prefill.num_ready),
            self._decode.decide(simulation.now, tpot, decode.wanted, decode.num_ready),
        )


class Hpa:
    """Of one Deployment: the share of time in which its ready pods compute, 70 %, tolerance 10 %."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._busy = 0.0
        self._asked: deque[tuple[float, int]] = deque()
        self._down_at = -math.inf

    def decide(self, now: float, busy_s: float, wanted: int, ready: int) -> int:
        use, self._busy = (busy_s - self._busy) / (TICK_S * max(ready, 1)), busy_s
        ratio = min(use, 1.0) / 0.7
        asked = wanted if abs(ratio - 1) <= 0.1 else math.ceil(ready * ratio)
        if wanted > ready and asked < wanted:
            asked = wanted  # pods that start count as idle on the way up, and are not taken away
        # An HPA begins its window with the pods that are there.
        self._asked.append((now, BOUNDS.clamp(asked if self._asked else wanted)))
        if asked > wanted:
            return BOUNDS.clamp(min(asked, 2 * wanted))
        high = max(count for at, count in self._asked if at > now - self._settle_s)
        if high < wanted and now >= self._down_at + 60:
            self._down_at = now
            return wanted - 1
        return wanted


class HpaLaw:
    def __init__(self) -> None:
        self._prefill, self._decode = Hpa(300.0), Hpa(600.0)

    def decide(self, simulation: Simulation, seen: Seen) -> tuple[int, int]:
        prefill, decode = simulation.prefill, simulation.decode
        return (
            self._prefill.decide(simulation.now, prefill.busy_s, prefill.wanted, prefill.num_ready),
            self._decode.decide(simulation.now, decode.busy_s, decode.wanted, decode.num_ready),
        )


class Fixed:
    def __init__(self, prefill: int, decode: int) -> None:
        self._pods = (prefill, decode)

    def decide(self, simulation: Simulation, seen: Seen) -> tuple[int, int]:
        return self._pods


def _kept(values: Sequence[float], limit: float) -> law.Kept:
    return law.Kept(len(values), sum(value <= limit for value in values))


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1] if values else 0.0


# -- runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    law: str
    attainment: float
    ttft_p99_s: float
    prefill_hours: float
    decode_hours: float
    changes: int


def run(
    name: str, decide: Law, plan: FleetPlan, workload: Workload, first: tuple[int, int], start_s: float
) -> Row:
    """One law on one workload; `first` are the pods at its beginning, which are ready."""
    simulation = Simulation(plan, workload.requests, span_s=SPAN_S)
    simulation.resize(*first)
    simulation.start_s = start_s
    seen, counts = Seen(simulation), [first]
    end_s = workload.requests[-1].arrival_s
    while simulation.now < end_s:
        simulation.run(simulation.now + TICK_S)
        seen.update()
        counts.append(decide.decide(simulation, seen))
        simulation.resize(*counts[-1])
    prefill_h, decode_h = simulation.prefill.pod_s / 3600, simulation.decode.pod_s / 3600
    simulation.run()
    outcomes = simulation.outcomes
    ttfts = sorted(outcome.ttft_s for outcome in outcomes)
    return Row(
        name,
        sum(outcome.is_met(workload.slo) for outcome in outcomes) / len(outcomes),
        ttfts[len(ttfts) * 99 // 100],
        prefill_h,
        decode_h,
        sum(one != other for one, other in pairwise(counts)),
    )


def busiest(requests: Sequence[PlannedRequest]) -> float:
    """Requests per second of the busiest minute."""
    counts: dict[int, int] = {}
    for request in requests:
        minute = int(request.arrival_s // 60)
        counts[minute] = counts.get(minute, 0) + 1
    return max(counts.values()) / 60


def needed(plan: FleetPlan, workload: Workload, rate: float) -> tuple[int, int]:
    """What tandem's law needs at this rate, without a past."""
    tandem = Tandem(plan, workload.slo, 0.0)
    requests = workload.requests
    tandem.lengths = (
        sum(one.prompt_tokens for one in requests) / len(requests),
        sum(one.output_tokens for one in requests) / len(requests),
    )
    empty = Simulation(plan, [])
    empty.resize(1, 1)
    snapshot = tandem.snapshot(empty, Seen(empty), rate, rate)
    decision, _ = law.decide(snapshot, law.Memory(), law.Policy(BOUNDS, BOUNDS))
    return decision.prefill.wanted, decision.decode.wanted


def compare(plan: FleetPlan, workload: Workload, start_s: float) -> list[Row]:
    requests = workload.requests
    first = needed(plan, workload, sum(one.arrival_s < 60 for one in requests) / 60)
    peak = needed(plan, workload, busiest(requests))
    laws: list[tuple[str, Law, tuple[int, int]]] = [
        ("tandem", Tandem(plan, workload.slo, start_s), first),
        ("tandem, --settle-s 1200", Tandem(plan, workload.slo, start_s, 1200.0), first),
        ("llm-d", LlmDLaw(workload.slo), first),
        ("HPA on CPU", HpaLaw(), first),
        ("fixed", Fixed(*peak), peak),
    ]
    return [run(name, one, plan, workload, pods, start_s) for name, one, pods in laws]


def costs() -> PodCosts:
    """A pod is one L40S with a model of 8 billion parameters, by data sheet."""
    return of_gpu(GPUS["l40s"], SHAPES["llama-3.1-8b"], 1)


def report(tables: Sequence[tuple[Workload, Sequence[Row]]]) -> str:
    head = ["arrivals", *(row.law for row in tables[0][1])]
    lines = [
        [
            workload.name,
            *(
                f"{row.attainment:.1%}, {row.prefill_hours + row.decode_hours:.1f} "
                f"({row.prefill_hours:.1f} + {row.decode_hours:.1f})"
                for row in rows
            ),
        ]
        for workload, rows in tables
    ]
    return markdown_table(head, lines)


NOTES = """\
In each cell: the share of requests that met TTFT and TPOT, pod-hours, and in brackets those of prefill and
decode pods. "In time" counts every request; nothing is refused, unlike at a gateway, so that a fleet that
is too small serves late. "Fixed" is what tandem's law needs in the busiest minute, which nobody knows
beforehand. Where load triples within a second and pods start for 90 s (bursts, step), no law here is as
good as a fixed fleet, which in the bursts also costs little more than tandem's law; a floor of pods or a
longer --settle-s helps there.

The fleet is the simulation of `tandem plan` with step costs by data sheet (one L40S a pod, 8 billion
parameters). Each law decides every 15 s and may use 1 to 32 pods of a role. Objectives are TTFT 1 s and
TPOT 60 ms, for long prompts 10 s and 60 ms. The arrivals are generated, not recorded: one seed, curves in
`generated` of the script; --trace takes recorded ones of Mooncake and BurstGPT, of which
none longer than 24 s was at hand.

llm-d's law reads measured latencies; it prefers predicted ones, which rise a little earlier. Its thresholds
are its own for another model and GPU. CPU use is the share of time in which a pod computes: a decode pod
computes whenever it has one sequence, so that HPA holds far too many."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="of each generated shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-s", type=float, default=90.0)
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], help="instead of the generated shapes"
    )
    parser.add_argument("--rate", type=float, default=None, help="of the trace; unset: as recorded")
    parser.add_argument("--ttft", type=float, default=1.0)
    parser.add_argument("--tpot", type=float, default=0.06)
    options = parser.parse_args()
    began = time.monotonic()
    slo = SloTarget("", ttft_s=options.ttft, tpot_s=options.tpot)
    try:
        workloads = [
            Workload(path.name, of_trace(read_trace(path), options.rate, 1200, 300), slo)
            for path in options.trace
        ] or generated(options.minutes, options.seed)
    except TraceError as error:
        parser.error(str(error))
    plan = FleetPlan(costs(), 1, 1)
    table = report([(workload, compare(plan, workload, options.start_s)) for workload in workloads])
    if options.out is not None:
        write_page(options.out, "Scaling laws on a simulated fleet", table, NOTES)
    else:
        print(table)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
