"""A fleet as a discrete-event simulation: prompts queue at prefill pods, sequences share decode steps.

    arrival -> prefill pod (earliest end) -> transfer of the KV that is left after the last layer
            -> decode pod (least loaded that has room) -> a token per step, all its sequences together

Without prefill pods each pod does both: a step decodes all its sequences and computes a chunk of the oldest
prompt, as the engine does. Costs are those of StepCost; nothing else takes time. Speculation divides the
steps of an answer by the tokens that a step gains.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem_core.slo import SloTarget

from tandem_cli.plan.costs import PodCosts
from tandem_cli.plan.workload import PlannedRequest


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
    tokens_per_step: float = 1.0

    @property
    def num_devices(self) -> int:
        return (self.num_prefill + self.num_decode) * self.costs.num_devices

    def scaled(self, what: str, factor: float) -> FleetPlan:
        """The same with one of its limits changed: compute, memory bandwidth, KV memory or link."""
        costs = self.costs
        prefill, decode = costs.prefill, costs.decode
        if what == "compute":
            costs = replace(
                costs,
                prefill=replace(
                    prefill, per_token=prefill.per_token / factor, per_pair=prefill.per_pair / factor
                ),
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


@dataclass
class _Decoder:
    """A pod that decodes. `free_at`: when its running step ends."""

    plan: FleetPlan
    running: list[_Sequence] = field(default_factory=list)
    waiting: deque[_Sequence] = field(default_factory=deque)
    is_stepping: bool = False
    #: Prompt tokens of the running step, of the oldest prompt.
    chunk: int = 0

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
        prefilling = next((s for s in self.running if s.uncomputed), None)
        costs, seconds = self.plan.costs, 0.0
        if decoding:
            seconds += costs.decode.seconds(1, len(decoding), sum(s.context for s in decoding))
        self.chunk = 0
        if prefilling is not None:
            self.chunk = min(prefilling.uncomputed, self.plan.chunk_size)
            start = prefilling.computed
            pairs = self.chunk * (2 * start + self.chunk) / 2
            # A step's own part counts once.
            seconds += costs.prefill.seconds(0 if decoding else 1, self.chunk, pairs)
        return seconds

    def end_step(self, now: float) -> None:
        gained = self.plan.tokens_per_step
        prefilling = next((s for s in self.running if s.uncomputed), None)
        for sequence in self.running:
            if sequence.uncomputed:
                continue
            sequence.left -= gained
            sequence.context += gained
        if prefilling is not None and self.chunk:
            prefilling.uncomputed -= self.chunk
            prefilling.computed += self.chunk
            if not prefilling.uncomputed:
                request = prefilling.outcome.request
                prefilling.outcome.ttft_s = now - request.arrival_s
                prefilling.left = request.output_tokens - 1
                prefilling.context = request.prompt_tokens
        ended = [s for s in self.running if not s.uncomputed and s.left <= 0]
        for sequence in ended:
            sequence.outcome.e2e_s = now - sequence.outcome.request.arrival_s
        self.running = [s for s in self.running if s.uncomputed or s.left > 0]


def simulate(plan: FleetPlan, requests: Sequence[PlannedRequest]) -> list[Outcome]:
    """What happens to each request, in their order."""
    outcomes = [Outcome(request) for request in requests]
    decoders = [_Decoder(plan) for _ in range(plan.num_decode)]
    prefill_free_at = [0.0] * plan.num_prefill
    order = itertools.count()
    #: (time, order, decoder whose step ends; or None, sequence that arrives at a decoder)
    events: list[tuple[float, int, _Decoder | None, _Sequence | None]] = []
    for outcome in outcomes:
        request = outcome.request
        uncached = request.prompt_tokens - request.cached_tokens
        if not plan.num_prefill:
            sequence = _Sequence(outcome, 0, math.inf, uncomputed=uncached, computed=request.cached_tokens)
            heapq.heappush(events, (request.arrival_s, next(order), None, sequence))
            continue
        pod = min(range(plan.num_prefill), key=prefill_free_at.__getitem__)
        start = max(prefill_free_at[pod], request.arrival_s)
        ready = start + plan.costs.prefill.prompt_seconds(
            request.cached_tokens, request.prompt_tokens, plan.chunk_size
        )
        prefill_free_at[pod] = ready
        outcome.ttft_s = ready - request.arrival_s
        # Layers are sent while later ones are computed: what is left is what the link is too slow for.
        sent_s = uncached * plan.costs.kv_bytes_per_token / plan.link_bytes_per_s
        ready += max(sent_s - (ready - start), 0.0)
        sequence = _Sequence(outcome, request.prompt_tokens, request.output_tokens - 1)
        heapq.heappush(events, (ready, next(order), None, sequence))

    def step(decoder: _Decoder, now: float) -> None:
        seconds = decoder.begin_step()
        if seconds is not None:
            heapq.heappush(events, (now + seconds, next(order), decoder, None))

    while events:
        now, _, decoder, arrived = heapq.heappop(events)
        if arrived is not None:
            decoder = min(decoders, key=lambda one: one.load)
            if arrived.left <= 0 and not arrived.uncomputed:  # an answer of one token
                arrived.outcome.e2e_s = now - arrived.outcome.request.arrival_s
                continue
            decoder.waiting.append(arrived)
            if not decoder.is_stepping:
                step(decoder, now)
        elif decoder is not None:
            decoder.end_step(now)
            step(decoder, now)
    return outcomes
