"""Discrete-event simulation of a fleet: routes requests to pods and transfers KV between them.

    arrival -> prefill pod (first idle one) -> transfer of the KV that remains after the last layer
            -> decode pod (least loaded)

Decode pods compute short prompts themselves, and without prefill pods all prompts. tandem_core.pod_model
determines the duration of each pod's steps and the sequences that share them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tandem_core.contracts import computes_locally
from tandem_core.pod_model import Job, PodModel, SimulatedPod
from tandem_core.slo import SloTarget

from tandem_cli.plan.fleet_plan import Contention, FleetPlan
from tandem_cli.plan.workload import PlannedRequest


@dataclass(eq=False)
class Outcome:
    """Times of one request, in seconds since its arrival."""

    request: PlannedRequest
    ttft_s: float = math.inf
    e2e_s: float = math.inf

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(self.request.output_tokens - 1, 1)

    def is_met(self, slo: SloTarget) -> bool:
        return not slo.miss(self.ttft_s, self.tpot_s, self.e2e_s)


def simulate(plan: FleetPlan, requests: Sequence[PlannedRequest]) -> list[Outcome]:
    """The outcome of each request, in the order of the requests."""
    simulation = _Simulation(plan, requests)
    simulation.run()
    return simulation.outcomes


class _Pod:
    """A pod of the fleet. Contention slows its clock: `pace` fleet seconds pass in one of its own."""

    def __init__(self, model: PodModel) -> None:
        self._pod = SimulatedPod(model)
        self._outcomes: dict[Job, Outcome] = {}
        #: KV tokens of its jobs at their ends.
        self.load = 0
        self.pace = 1.0
        #: The fleet's time and the pod's when the pace last changed.
        self._fleet_s = self._pod_s = 0.0
        #: Number of the event of its next change; earlier events are void.
        self.event = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._outcomes)

    def add(self, outcome: Outcome, job: Job, now: float) -> None:
        """The job joins when the current step has ended."""
        self._pod.advance(self._to_pod(now))
        self._note_times()
        self._pod.add(job)
        self._outcomes[job] = outcome
        self.load += job.kv_tokens

    def set_pace(self, pace: float, now: float) -> None:
        self._pod_s, self._fleet_s, self.pace = self._to_pod(now), now, pace

    def change_s(self) -> float:
        return self._to_fleet(self._pod.change_s())

    def run(self) -> list[Outcome]:
        """Runs to the next change. Returns the outcomes of jobs that ended."""
        self._pod.run()
        return self._note_times()

    def _note_times(self) -> list[Outcome]:
        ended = []
        for job, outcome in list(self._outcomes.items()):
            first_s, end_s = self._pod.times(job)
            if outcome.ttft_s == math.inf:
                outcome.ttft_s = self._to_fleet(first_s) - outcome.request.arrival_s
            if end_s < math.inf:
                outcome.e2e_s = self._to_fleet(end_s) - outcome.request.arrival_s
                ended.append(outcome)
                self.load -= job.kv_tokens
                del self._outcomes[job]
        return ended

    def _to_pod(self, fleet_s: float) -> float:
        return self._pod_s + (fleet_s - self._fleet_s) / self.pace

    def _to_fleet(self, pod_s: float) -> float:
        return self._fleet_s + (pod_s - self._pod_s) * self.pace


class _Simulation:
    def __init__(self, plan: FleetPlan, requests: Sequence[PlannedRequest]) -> None:
        self._plan = plan
        self.outcomes = [Outcome(request) for request in requests]
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._prompts: deque[Outcome] = deque()
        self._prefillers = [_Pod(plan.prefill_model) for _ in range(plan.num_prefill)]
        self._idle = deque(self._prefillers)
        self._decoders = [_Pod(plan.decode_model) for _ in range(plan.num_decode)]
        for outcome in self.outcomes:
            self._at(outcome.request.arrival_s, partial(self._arrive, outcome))

    def run(self) -> None:
        """Runs until no event is left."""
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, at: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), happen))

    def _arrive(self, outcome: Outcome) -> None:
        request = outcome.request
        if self._prefillers and not self._is_local(request.prompt_tokens - request.cached_tokens):
            self._prompts.append(outcome)
            self._next_prompts()
        else:
            self._decode(outcome, request.cached_tokens, request.output_tokens)

    def _is_local(self, num_uncached: int) -> bool:
        """Whether a decode pod computes a prompt with `num_uncached` uncached tokens."""
        plan = self._plan
        is_idle = any(not pod.is_busy for pod in self._decoders)
        return computes_locally(
            num_uncached, plan.local_prefill_tokens, plan.idle_prefill_tokens, is_idle=is_idle
        )

    def _next_prompts(self) -> None:
        while self._prompts and self._idle:
            outcome, pod = self._prompts.popleft(), self._idle.popleft()
            request = outcome.request
            job = Job(0.0, request.cached_tokens, request.prompt_tokens, num_tokens=1, context=0)
            self._start(pod, outcome, job)

    def _decode(self, outcome: Outcome, start: int, num_tokens: int) -> None:
        """Starts a request on the least loaded decode pod, which computes the prompt from `start` on."""
        request = outcome.request
        job = Job(
            request.arrival_s,
            start,
            request.prompt_tokens,
            num_tokens,
            context=request.prompt_tokens + request.output_tokens // 2,
            kv_tokens=request.prompt_tokens + request.output_tokens,
        )
        self._start(min(self._decoders, key=lambda pod: pod.load), outcome, job)

    def _start(self, pod: _Pod, outcome: Outcome, job: Job) -> None:
        pod.add(outcome, job, self._now)
        self._expect_change(pod)

    def _expect_change(self, pod: _Pod) -> None:
        pod.event += 1
        if pod.is_busy:
            self._at(pod.change_s(), partial(self._change, pod, pod.event))
        self._set_paces()

    def _set_paces(self) -> None:
        """Applies contention: pods slow down while pods of the other role compute."""
        contention = self._plan.contention
        if contention == Contention():
            return
        for pods, others, slow in (
            (self._prefillers, self._decoders, contention.prefill),
            (self._decoders, self._prefillers, contention.decode),
        ):
            pace = slow if any(other.is_busy for other in others) else 1.0
            for pod in pods:
                if pod.pace != pace:
                    pod.set_pace(pace, self._now)
                    self._expect_change(pod)

    def _change(self, pod: _Pod, event: int) -> None:
        if event != pod.event:
            return
        for outcome in pod.run():
            if pod in self._prefillers:
                self._send(outcome)
                self._idle.append(pod)
        self._expect_change(pod)
        self._next_prompts()

    def _send(self, outcome: Outcome) -> None:
        """Transfers the KV. Layers are sent while later ones are computed, so only the excess takes time."""
        request, costs = outcome.request, self._plan.costs
        sent_s = (
            (request.prompt_tokens - request.cached_tokens)
            * costs.kv_bytes_per_token
            / self._plan.link_bytes_per_s
        )
        computed_s = costs.prefill.prompt_seconds(
            request.cached_tokens, request.prompt_tokens, self._plan.chunk_size
        )
        self._at(self._now + max(sent_s - computed_s, 0.0), partial(self._receive, outcome))

    def _receive(self, outcome: Outcome) -> None:
        request = outcome.request
        outcome.e2e_s = self._now - request.arrival_s
        if request.output_tokens > 1:
            self._decode(outcome, request.prompt_tokens, request.output_tokens - 1)
