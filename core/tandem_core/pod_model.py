"""How long a pod's work takes: the engine's scheduling rule as a pure function of costs and jobs.

    PodModel       costs of steps and limits of a step, as the pod reports them
    Job            a request that runs, waits, or may come: prompt tokens, output tokens, deadline
    timeline       PodModel, jobs -> when each job has its first token, and when it ends
    SimulatedPod   the same rule for jobs that arrive over time, run from one change to the next

The rule is that of tandem_engine.scheduler: the jobs due earliest share the batch; a step computes a token of
each of them that decodes, and chunks of prompts in the order of their deadlines. The model omits preemption
and the gain of single steps from drafts; of block limits it has a total of KV tokens. No clock and no I/O:
all times are seconds from now.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem_core.step_cost import StepCost, tokens_gained


@dataclass(frozen=True)
class PodModel:
    prefill: StepCost
    decode: StepCost
    #: Sequences that share a step.
    max_batch: int
    #: Prompt tokens of a step.
    chunk_size: int
    #: A step with this many takes no further prompt, and a step in which sequences decode takes no more.
    enough_prompt_tokens: int
    #: Tokens that a sequence gains in a decode step, see tokens_gained.
    tokens_per_step: tuple[float, ...] = (1.0,)
    #: Room for the KV of the jobs that share the batch.
    kv_tokens: float = math.inf
    #: Duration of a step that decodes and computes prompts, as a multiple of the sum of both.
    mixed_steps: float = 1.0


@dataclass(frozen=True, eq=False)
class Job:
    """A request on one pod. Two jobs with the same numbers are two jobs."""

    #: Earlier ones come first; seconds from now, or any other common clock.
    due: float
    #: Prompt tokens [start, stop) that this pod has yet to compute; empty if another pod computes them.
    start: int
    stop: int
    #: Output tokens still to come, the first one included unless another pod computes the prompt.
    num_tokens: float
    #: Cached tokens in the middle of what is left of the answer.
    context: int
    num_places: int = 1
    #: Until its KV arrives from another pod.
    ready_s: float = 0.0
    #: Its KV at its end; counts only where the pod's room is limited.
    kv_tokens: int = 0


class Times(NamedTuple):
    """Seconds from now; infinite where it would begin beyond the horizon."""

    #: To the first token that this pod computes.
    first_s: float
    end_s: float


class SimulatedPod:
    """Jobs in progress. A change is the end of a prompt or of an answer; the steps up to it are equal."""

    def __init__(self, model: PodModel, jobs: Iterable[Job] = ()) -> None:
        #: End of the last step that was run.
        self.now_s = 0.0
        self._model = model
        self._states = {job: _State(job) for job in jobs}
        self._left = sorted(self._states.values(), key=_due)
        self._last_ready_s = max([job.ready_s for job in self._states], default=0.0)

    @property
    def has_jobs(self) -> bool:
        """Whether a job has not ended."""
        return bool(self._left)

    def times(self, job: Job) -> Times:
        state = self._states[job]
        return Times(state.first_s, state.end_s)

    def add(self, job: Job) -> None:
        """The job takes part from the next step on."""
        self._states[job] = _State(job)
        insort(self._left, self._states[job], key=_due)
        self._last_ready_s = max(self._last_ready_s, job.ready_s)

    def change_s(self) -> float:
        """When the next change comes unless jobs are added; infinite without jobs."""
        active, next_ready = self._active(), self._next_ready_s()
        if not active:
            return next_ready
        steps = _Steps(self._model, active)
        return self.now_s + steps.seconds(steps.num_until(next_ready - self.now_s))

    def run(self, until_s: float = math.inf) -> None:
        """Runs to the next change. A step that begins before `until_s` is the last one, and is completed."""
        active, stop = self._active(), min(self._next_ready_s(), until_s)
        if not active:
            self.now_s = max(self.now_s, stop)
            return
        steps = _Steps(self._model, active)
        self.now_s = steps.run(self.now_s, steps.num_until(stop - self.now_s))
        self._left = [state for state in self._left if state.end_s == math.inf]

    def advance(self, until_s: float) -> None:
        """Runs all steps that begin before `until_s`."""
        while self.now_s < until_s:
            self.run(until_s)

    def _active(self) -> list[_State]:
        """The jobs that share the next step."""
        active: list[_State] = []
        places_left, kv_left, now_s = self._model.max_batch, self._model.kv_tokens, self.now_s
        for state in self._left:
            job = state.job
            if job.ready_s <= now_s:
                places_left -= job.num_places
                kv_left -= job.kv_tokens
                # A job that finds too little room holds up those behind it.
                if (places_left < 0 or kv_left < 0) and active:
                    break
                active.append(state)
        return active

    def _next_ready_s(self) -> float:
        if self.now_s >= self._last_ready_s:
            return math.inf
        return min(
            [state.job.ready_s for state in self._left if state.job.ready_s > self.now_s], default=math.inf
        )


def timeline(model: PodModel, jobs: Sequence[Job], horizon_s: float = math.inf) -> dict[Job, Times]:
    """When each job has its first token and its end. Jobs with equal deadlines come in the given order.

    Steps that begin after `horizon_s` are not computed. Takes time in proportion to the number of jobs times
    the number of sequences that share a step.
    """
    pod = SimulatedPod(model, jobs)
    while pod.has_jobs and pod.now_s <= horizon_s:
        pod.run()
    return {job: pod.times(job) for job in jobs}


class _State:
    """The remaining work of a job."""

    __slots__ = ("end_s", "first_s", "job", "num_tokens", "start")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.start = job.start
        self.num_tokens = job.num_tokens
        self.first_s = self.end_s = math.inf

    def gain(self, num_tokens: float, first_s: float, last_s: float) -> None:
        """`first_s`, `last_s`: times of the first and the last of these tokens."""
        self.first_s = min(self.first_s, first_s)
        self.num_tokens -= num_tokens
        if self.num_tokens <= 0:
            self.end_s = last_s


def _due(state: _State) -> float:
    return state.job.due


class _Steps:
    """Equal steps: the sequences that decode, and the prompts that are computed with a chunk of each."""

    __slots__ = ("_chunks", "_decode_s", "_decoding", "_factor", "_gained", "_model")

    def __init__(self, model: PodModel, active: Sequence[_State]) -> None:
        self._model = model
        self._decoding = [state for state in active if state.start >= state.job.stop]
        self._chunks = _chunks(model, active, has_decodes=bool(self._decoding))
        num_sequences = sum([state.job.num_places for state in self._decoding])
        cached = sum([state.job.num_places * state.job.context for state in self._decoding])
        self._gained = tokens_gained(model.tokens_per_step, num_sequences)
        # A step with prompts in it reads the weights once.
        num_reads = not self._chunks
        self._decode_s = model.decode.seconds(num_reads, num_sequences, cached) if self._decoding else 0.0
        self._factor = model.mixed_steps if self._decoding and self._chunks else 1.0

    def seconds(self, num_steps: int) -> float:
        """Each step continues the prompts where the one before it ended."""
        seconds = self._decode_s * num_steps
        if self._chunks:
            tokens = pairs = 0.0
            for state, size in self._chunks:
                tokens += size * num_steps
                pairs += size * num_steps * (state.start + size * num_steps / 2)
            seconds += self._model.prefill.seconds(num_steps, tokens, pairs)
        return seconds * self._factor

    def num_until(self, stop_s: float) -> int:
        """Steps until a prompt or an answer ends; fewer if all others begin at or after `stop_s` from now."""
        most = min([state.num_tokens for state in self._decoding], default=math.inf) / self._gained
        if self._chunks:
            state, size = self._chunks[0]
            most = min(most, (state.job.stop - state.start) // size) if len(self._chunks) == 1 else 1
        num_steps = max(math.ceil(most), 1)
        if stop_s == math.inf or num_steps == 1:
            return num_steps
        return bisect_left(range(1, num_steps), stop_s, key=self.seconds) + 1

    def run(self, now: float, num_steps: int) -> float:
        """Advances the jobs. Returns when the last step ends."""
        end = now + self.seconds(num_steps)
        first_s = end if num_steps == 1 or not self._decoding else now + self.seconds(1)
        for state in self._decoding:
            state.gain(self._gained * num_steps, first_s, end)
        for state, size in self._chunks:
            state.start += size * num_steps
            if state.start >= state.job.stop:
                state.gain(1, end, end)
        return end


def _chunks(model: PodModel, active: Sequence[_State], *, has_decodes: bool) -> list[tuple[_State, int]]:
    """Prompts of the next step, the earliest due first, and how many tokens of each it computes."""
    chunks = []
    enough = min(model.enough_prompt_tokens, model.chunk_size)
    budget, wanted = enough if has_decodes else model.chunk_size, enough
    for state in active:
        size = min(state.job.stop - state.start, budget)
        if size > 0 and wanted > 0:
            chunks.append((state, size))
            budget -= size
            wanted -= size
    return chunks
