"""A fleet as a discrete-event simulation: prompts queue at prefill pods, sequences share decode steps.

    arrival -> prefill pod (earliest end) -> transfer of the KV that is left after the last layer
            -> decode pod (least loaded that has room) -> a token per step, all its sequences together

Decode pods compute short prompts themselves, and without prefill pods all prompts: a step decodes all its
sequences and computes chunks of the oldest prompts, as the engine does. Costs are those of StepCost; nothing
else takes time. Speculation divides the steps of an answer by the tokens that a step gains.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tandem_core.slo import SloTarget
from tandem_core.step_cost import StepCost, tokens_gained

from tandem_cli.plan.costs import PodCosts
from tandem_cli.plan.workload import PlannedRequest


@dataclass(frozen=True)
class Contention:
    """How many times as long pods of a role compute while those of the other do, on a machine that they
    share."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True)
class FleetPlan:
    """A candidate. `num_prefill` 0: each pod computes prompts and decodes."""

    costs: PodCosts
    num_prefill: int
    num_decode: int
    chunk_size: int = 2048
    max_batch: int = 128
    #: Between pods.
    link_bytes_per_s: float = 12.5e9
    #: That a sequence gains in a decode step, see tokens_gained.
    tokens_per_step: tuple[float, ...] = (1.0,)
    #: A decode pod computes a prompt itself if fewer of its tokens are uncached; the second limit counts
    #: while it is idle.
    local_prefill_tokens: int = 0
    idle_prefill_tokens: int = 0
    #: A step with this many prompt tokens takes no further prompt, and a step with texts takes no more prompt
    #: tokens than this; 0: no such limit.
    enough_prompt_tokens: int = 0
    contention: Contention = Contention()
    #: How many times as long as the sum of both a step takes that computes prompts and texts.
    mixed_steps: float = 1.0

    @property
    def num_devices(self) -> int:
        return (self.num_prefill + self.num_decode) * self.costs.num_devices

    def scaled(self, what: str, factor: float) -> FleetPlan:
        """The same with one of its limits changed: compute, memory bandwidth, KV memory or link."""
        costs = self.costs
        prefill, decode = costs.prefill, costs.decode

        def faster(cost: StepCost) -> StepCost:
            return replace(cost, per_token=cost.per_token / factor, per_pair=cost.per_pair / factor)

        if what == "compute":
            costs = replace(
                costs,
                prefill=faster(prefill),
                own_prefill=faster(costs.local_prefill),
                decode=replace(decode, per_token=decode.per_token / factor),
            )
        elif what == "memory bandwidth":
            costs = replace(
                costs,
                decode=replace(decode, per_step=decode.per_step / factor, per_pair=decode.per_pair / factor),
            )
        elif what == "KV memory":
            costs = replace(costs, kv_tokens=int(costs.kv_tokens * factor))
        elif what == "link":
            return replace(self, link_bytes_per_s=self.link_bytes_per_s * factor)
        else:
            raise ValueError(what)
        return replace(self, costs=costs)


LIMITS = ("compute", "memory bandwidth", "KV memory", "link")


@dataclass
class Outcome:
    """Of one request; seconds since its arrival."""

    request: PlannedRequest
    ttft_s: float = math.inf
    e2e_s: float = math.inf

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(self.request.output_tokens - 1, 1)

    def is_met(self, slo: SloTarget) -> bool:
        return not slo.miss(self.ttft_s, self.tpot_s, self.e2e_s)


@dataclass
class _Sequence:
    outcome: Outcome
    #: Cached tokens, and tokens still to come.
    context: float
    left: float
    #: Prompt tokens that this pod has yet to compute; its first token comes with the last of them.
    uncomputed: int = 0
    computed: int = 0

    @property
    def need(self) -> int:
        """Tokens of KV at its end."""
        request = self.outcome.request
        return request.prompt_tokens + request.output_tokens


@dataclass(eq=False)
class _Decoder:
    """A pod that decodes."""

    plan: FleetPlan
    running: list[_Sequence] = field(default_factory=list)
    waiting: deque[_Sequence] = field(default_factory=deque)
    is_stepping: bool = False
    #: Prompts of the running step, and how many tokens of each it computes.
    chunks: list[tuple[_Sequence, int]] = field(default_factory=list)

    @property
    def reserved(self) -> int:
        return sum(sequence.need for sequence in self.running)

    @property
    def load(self) -> int:
        return self.reserved + sum(sequence.need for sequence in self.waiting)

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.plan.max_batch:
            if self.running and self.reserved + self.waiting[0].need > self.plan.costs.kv_tokens:
                break
            self.running.append(self.waiting.popleft())

    def begin_step(self) -> float | None:
        """Seconds of the next step; None: nothing to do."""
        self.admit()
        if not self.running:
            self.is_stepping = False
            return None
        self.is_stepping = True
        decoding = [s for s in self.running if not s.uncomputed]
        costs, seconds = self.plan.costs, 0.0
        self.chunks = self._next_chunks(is_beside_texts=bool(decoding))
        if decoding:
            # A step with prompts in it reads the weights once.
            num_steps = 0 if self.chunks else 1
            seconds = costs.decode.seconds(num_steps, len(decoding), sum(s.context for s in decoding))
        if self.chunks:
            tokens = sum(chunk for _, chunk in self.chunks)
            pairs = sum(chunk * (2 * s.computed + chunk) / 2 for s, chunk in self.chunks)
            seconds += costs.local_prefill.seconds(1, tokens, pairs)
        return seconds * self.plan.mixed_steps if decoding and self.chunks else seconds

    def _next_chunks(self, *, is_beside_texts: bool) -> list[tuple[_Sequence, int]]:
        """Of the oldest prompts, until the step has enough."""
        chunks, room = [], self.plan.chunk_size
        enough = min(self.plan.enough_prompt_tokens or room, room)
        least_room = room - enough
        if is_beside_texts:
            room, least_room = enough, 0
        for sequence in self.running:
            if sequence.uncomputed and room > least_room:
                chunks.append((sequence, min(sequence.uncomputed, room)))
                room -= chunks[-1][1]
        return chunks

    def end_step(self, now: float) -> None:
        decoding = [sequence for sequence in self.running if not sequence.uncomputed]
        gained = tokens_gained(self.plan.tokens_per_step, len(decoding))
        for sequence in decoding:
            sequence.left -= gained
            sequence.context += gained
        for sequence, chunk in self.chunks:
            sequence.uncomputed -= chunk
            sequence.computed += chunk
            if not sequence.uncomputed:
                outcome = sequence.outcome
                outcome.ttft_s = now - outcome.request.arrival_s
                sequence.left = outcome.request.output_tokens - 1
                sequence.context = outcome.request.prompt_tokens
        ended = [s for s in self.running if not s.uncomputed and s.left <= 0]
        for sequence in ended:
            sequence.outcome.e2e_s = now - sequence.outcome.request.arrival_s
        self.running = [s for s in self.running if s.uncomputed or s.left > 0]


def simulate(plan: FleetPlan, requests: Sequence[PlannedRequest]) -> list[Outcome]:
    """What happens to each request, in their order."""
    simulation = _Simulation(plan, requests)
    simulation.run()
    return simulation.outcomes


@dataclass(eq=False)
class _Prefiller:
    """A pod that computes one prompt at a time."""

    job: _Sequence | None = None
    #: How long its prompt takes alone, and of that what is left, as of `seen_at`.
    seconds: float = 0.0
    left_s: float = 0.0
    seen_at: float = 0.0
    #: The event of its end has this number; earlier ones no longer count.
    num_paces: int = 0


class _Simulation:
    def __init__(self, plan: FleetPlan, requests: Sequence[PlannedRequest]) -> None:
        self._plan = plan
        self.outcomes = [Outcome(request) for request in requests]
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._prompts: deque[_Sequence] = deque()
        self._prefillers = [_Prefiller() for _ in range(plan.num_prefill)]
        self._idle = deque(self._prefillers)
        self._decoders = [_Decoder(plan) for _ in range(plan.num_decode)]
        #: How many times as long as alone prompts take now on prefill pods.
        self._pace = 1.0
        for outcome in self.outcomes:
            self._at(outcome.request.arrival_s, partial(self._arrive, outcome))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, at: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), happen))

    def _arrive(self, outcome: Outcome) -> None:
        request = outcome.request
        uncached = request.prompt_tokens - request.cached_tokens
        if self._plan.num_prefill and not self._is_local(uncached):
            self._prompts.append(_Sequence(outcome, request.prompt_tokens, request.output_tokens - 1))
            self._next_prompts()
            return
        self._place(_Sequence(outcome, 0, math.inf, uncomputed=uncached, computed=request.cached_tokens))

    def _is_local(self, uncached: int) -> bool:
        """Whether the decode pod that takes it would compute the prompt itself."""
        plan = self._plan
        is_idle = any(not pod.is_stepping for pod in self._decoders)
        return uncached < max(plan.local_prefill_tokens, plan.idle_prefill_tokens if is_idle else 0)

    def _next_prompts(self) -> None:
        while self._prompts and self._idle:
            pod = self._idle.popleft()
            pod.job = self._prompts.popleft()
            request = pod.job.outcome.request
            pod.seconds = pod.left_s = self._plan.costs.prefill.prompt_seconds(
                request.cached_tokens, request.prompt_tokens, self._plan.chunk_size
            )
            pod.seen_at = self._now
            self._expect_end(pod)

    def _expect_end(self, pod: _Prefiller) -> None:
        pod.num_paces += 1
        self._at(self._now + pod.left_s * self._pace, partial(self._computed, pod, pod.num_paces))

    def _set_pace(self) -> None:
        """Decode pods have begun to compute or ended: running prompts get slower or faster."""
        is_decoding = any(pod.is_stepping for pod in self._decoders)
        pace = self._plan.contention.prefill if is_decoding else 1.0
        if pace == self._pace:
            return
        before, self._pace = self._pace, pace
        for pod in self._prefillers:
            if pod.job is not None:
                pod.left_s -= (self._now - pod.seen_at) / before
                pod.seen_at = self._now
                self._expect_end(pod)

    def _computed(self, pod: _Prefiller, pace: int) -> None:
        if pace != pod.num_paces:
            return
        sequence, pod.job = pod.job, None
        assert sequence is not None
        outcome = sequence.outcome
        outcome.ttft_s = self._now - outcome.request.arrival_s
        # Layers are sent while later ones are computed: what is left is what the link is too slow for.
        request, costs = outcome.request, self._plan.costs
        uncached = request.prompt_tokens - request.cached_tokens
        sent_s = uncached * costs.kv_bytes_per_token / self._plan.link_bytes_per_s
        self._at(self._now + max(sent_s - pod.seconds, 0.0), partial(self._received, sequence))
        self._idle.append(pod)
        self._next_prompts()

    def _received(self, sequence: _Sequence) -> None:
        if sequence.left <= 0:  # an answer of one token
            sequence.outcome.e2e_s = self._now - sequence.outcome.request.arrival_s
            return
        self._place(sequence)

    def _place(self, sequence: _Sequence) -> None:
        decoder = min(self._decoders, key=lambda pod: pod.load)
        decoder.waiting.append(sequence)
        if not decoder.is_stepping:
            self._step(decoder)

    def _step(self, decoder: _Decoder) -> None:
        seconds = decoder.begin_step()
        if seconds is not None:
            if any(pod.job is not None for pod in self._prefillers):
                seconds *= self._plan.contention.decode
            self._at(self._now + seconds, partial(self._stepped, decoder))
        self._set_pace()

    def _stepped(self, decoder: _Decoder) -> None:
        decoder.end_step(self._now)
        self._step(decoder)
