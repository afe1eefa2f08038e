"""Admission in front of pods whose reports a test writes, on a clock that stands still.

    costs, limits ──> report of a Pod ──> Router ──> Forecaster ──> Admission

Everything but the pods' answers and the time is real, so each prediction follows from the costs. A request of
`request()` takes .1 s for its prompt and 10 ms per token on an idle pod, 12 ms next to another one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from planned_pods import FixedFleet
from still_clock import Clock
from tandem_core.pod_model import PodModel
from tandem_core.sampling import SamplingParams
from tandem_core.slo import SloTarget
from tandem_core.step_cost import StepCost
from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.forecast import Forecaster
from tandem_gateway.fleet.load import PodLoad
from tandem_gateway.fleet.output_lengths import OutputLengths
from tandem_gateway.fleet.pods import Pod, Role
from tandem_gateway.fleet.routing import Effects, Router
from tandem_gateway.request import TokenizedRequest
from waiting import run_ready_tasks

SLO = SloTarget("chat", ttft_s=1.0, tpot_s=0.05, e2e_s=5.0)
BATCH = SloTarget("batch")
MODEL = PodModel(
    prefill=StepCost(per_token=0.001),
    decode=StepCost(per_step=0.008, per_token=0.002),
    max_batch=16,
    chunk_size=100,
    enough_prompt_tokens=100,
)
#: Median and upper quantile of measured / predicted times without measurements.
MEDIAN, HIGH = 1.05, 1.3

_numbers = itertools.count()


def request(
    slo: SloTarget = SLO, *, num_prompt: int = 100, max_tokens: int = 100, **fields: Any
) -> TokenizedRequest:
    """A request that arrives now, with a prompt of its own and an answer of exactly `max_tokens`."""
    number, now = next(_numbers), time.monotonic()
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    plain = TokenizedRequest(f"r{number}", "default", (number,) * num_prompt, sampling, slo, now, now + 600)
    return replace(plain, **fields)


def again(asked: TokenizedRequest, **fields: Any) -> TokenizedRequest:
    """The request of a client that returns now."""
    now = time.monotonic()
    return replace(asked, request_id=f"r{next(_numbers)}", arrived=now, deadline=now + 600, **fields)


class ReportedSystem:
    """Admission with one decode pod; `async with` closes its channels."""

    def __init__(
        self,
        clock: Clock,
        *,
        num_pods: int = 1,
        slack: float = 0.0,
        max_in_flight: int = 128,
        max_queue: int = 8,
        first_confidence: float = 0.99,
        end_confidence: float = 0.95,
    ) -> None:
        self._clock = clock
        self.fleet = FixedFleet()
        self.router = Router(self.fleet, lengths := OutputLengths())
        self.forecaster = Forecaster(
            self.router, lengths, first_confidence=first_confidence, end_confidence=end_confidence
        )
        self.admission = Admission(
            self.forecaster, max_in_flight=max_in_flight, max_queue=max_queue, slack=slack
        )
        self.pods = [self.add_pod(f"d:{number}") for number in range(num_pods)]

    async def __aenter__(self) -> ReportedSystem:
        return self

    async def __aexit__(self, *_: object) -> None:
        for pod in self.fleet.members:
            await pod.channel.close()

    def add_pod(self, target: str, role: Role = Role.DECODE) -> Pod:
        pod = Pod(role, target)
        pod.healthy = True
        self.fleet.members.append(pod)
        self.report(pod)
        return pod

    def report(self, pod: Pod, *, is_known: bool = True, num_foreign: int = 0, **limits: Any) -> None:
        """The pod reports now. `limits`: fields of the PodModel."""
        model = replace(MODEL, **limits)
        load = PodLoad(model, is_known, is_known, free_blocks=1000, total_blocks=1000)
        pod.works.report(load, (), num_foreign)
        pod.last_seen = self._clock.now

    async def pass_s(self, seconds: float) -> None:
        """Time passes, at the end of which the pods report again; tasks that can run do."""
        self._clock.now += seconds
        for pod in self.fleet.members:
            pod.last_seen = self._clock.now
        await run_ready_tasks()

    def decide(self, request: TokenizedRequest, num_places: int = 1, other_tokens: int = 0) -> Admitted:
        return self.admission.gate.decide(request, num_places, other_tokens)

    def plan(self, request: TokenizedRequest) -> Effects:
        effects = self.router.plan(request)
        assert effects is not None
        return effects

    @asynccontextmanager
    async def running(
        self, request: TokenizedRequest, num_places: int = 1, *, num_tokens: int = 0
    ) -> AsyncIterator[Admitted]:
        """A request that is admitted, and called on its decode pod; `num_tokens`: of its answer so far."""
        async with self.admission.slot(request, num_places) as admitted:
            route = admitted.placed.route
            if route is not None:
                route.decode.works.entered(request.request_id)
            if num_tokens:
                admitted.placed.computed()
                admitted.placed.gained(num_tokens, self._clock.now)
            try:
                yield admitted
            finally:
                if route is not None:
                    route.decode.works.left(request.request_id)
