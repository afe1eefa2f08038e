"""Predicts the work of a pod: the engine's scheduling rule as a pure function of costs and jobs.

    PodModel       costs of steps and limits of a step, as the pod reports them
    Job            a request that runs, waits, or may come: prompt tokens, output tokens, deadline
    timeline       PodModel, jobs -> the time of each job's first token, and of its end
    SimulatedPod   the same rule for jobs that arrive over time, run from one change to the next

The rule is that of tandem_engine.scheduler: the jobs with the earliest deadlines share the batch; a step
computes one token for each that decodes, and chunks of prompts in order of their deadlines. The model omits
preemption and the gain of single steps from drafts; of block limits it has a total of KV tokens. No clock and
no I/O: times are seconds from now.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop
from typing import NamedTuple

from tandem_core.step_cost import StepCost, tokens_gained

#: Sums of tokens are off by less.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class PodModel:
    prefill: StepCost
    decode: StepCost
    #: Sequences that share a step at most.
    max_batch: int
    #: Prompt tokens of a step at most.
    chunk_size: int
    #: A step with this many prompt tokens takes no further prompt; a step in which sequences decode takes no
    #: more prompt tokens than this.
    enough_prompt_tokens: int
    #: Tokens that a sequence gains in a decode step, see tokens_gained.
    tokens_per_step: tuple[float, ...] = (1.0,)
    #: Room for the KV of the jobs that share the batch.
    kv_tokens: float = math.inf
    #: Duration of a step that decodes and computes prompts, as a multiple of the sum of both.
    mixed_steps: float = 1.0

    def decode_seconds(self, num_steps: float, num_sequences: float, context: float) -> float:
        """Seconds of steps in which sequences with `context` cached tokens decode; 0 steps: their share of a
        step that also computes prompts."""
        return self.decode.seconds(num_steps, num_sequences, num_sequences * context)

    def prompt_seconds(self, start: int, stop: int) -> float:
        """Seconds to compute the prompt tokens [start, stop) while nothing else runs."""
        return self.prefill.prompt_seconds(start, stop, self.chunk_size)

    def token_seconds(self, num_sequences: float, context: float) -> float:
        """Seconds per output token of each of these sequences; those beyond `max_batch` take turns."""
        together = min(num_sequences, self.max_batch)
        step_s = self.decode_seconds(1, together, context)
        return step_s / tokens_gained(self.tokens_per_step, together) * num_sequences / together


@dataclass(frozen=True, eq=False)
class Job:
    """A request on one pod. Two jobs with equal fields are two jobs."""

    #: Jobs with earlier deadlines come first. Any clock that all jobs share.
    due: float
    #: Prompt tokens [start, stop) that this pod has yet to compute; empty if another pod computes them.
    start: int
    stop: int
    #: Output tokens still to come, the first one included unless another pod computes the prompt.
    num_tokens: float
    #: Mean cached tokens during the rest of the answer.
    context: int
    num_places: int = 1
    #: Seconds until it arrives, or its KV does. It joins the first step that begins at that time or later.
    ready_s: float = -math.inf
    #: Its KV at its end; counts only where the pod's room is limited.
    kv_tokens: int = 0


class Times(NamedTuple):
    """Seconds from now; infinite for a job that would begin beyond the horizon."""

    #: To the first token that this pod computes.
    first_s: float
    end_s: float


class SimulatedPod:
    """Jobs in progress. A change is the end of a prompt or of an answer; the steps up to it are equal."""

    def __init__(self, model: PodModel, jobs: Iterable[Job] = (), *, step_share: float = 0.0) -> None:
        """`step_share`: the share of the running step that has passed, in [0, 1). Jobs with ready_s >= 0 are
        not in that step."""
        self._model = model
        self._batch = _Batch(model)
        self._states = {job: _State(job) for job in jobs}
        #: In order of deadlines; jobs that have ended are dropped when the batch is filled.
        self._left = sorted(self._states.values(), key=_due)
        self._num_left = len(self._left)
        #: When the next job that could join is ready.
        self._next_ready_s = -math.inf
        #: Whether a job waits for a batch slot.
        self._has_waiting = False
        #: End of the last step that was run.
        self.now_s = 0.0
        if step_share:
            self.now_s = -math.inf
            self._fill_batch()
            self.now_s = -step_share * self._batch.seconds(1) if self._batch else 0.0

    @property
    def has_jobs(self) -> bool:
        """Whether a job has not ended."""
        return self._num_left > 0

    def times(self, job: Job) -> Times:
        state = self._states[job]
        return Times(state.first_s, state.end_s)

    def add(self, job: Job) -> None:
        """The job takes part from the next step on."""
        self._states[job] = _State(job)
        insort(self._left, self._states[job], key=_due)
        self._num_left += 1
        self._next_ready_s = -math.inf

    def change_s(self) -> float:
        """When the next change comes unless jobs are added; infinite without jobs."""
        self._fill_batch()
        if not self._batch:
            return self._next_ready_s
        return self.now_s + self._batch.seconds(self._batch.num_until(self._next_ready_s - self.now_s))

    def run(self, until_s: float = math.inf) -> None:
        """Runs to the next change. A step that begins before `until_s` is the last one, and is completed."""
        self._fill_batch()
        stop_s = min(self._next_ready_s, until_s)
        if not self._batch:
            self.now_s = max(self.now_s, stop_s)
            return
        self.now_s, num_ended = self._batch.run(self.now_s, self._batch.num_until(stop_s - self.now_s))
        self._num_left -= num_ended
        if num_ended and self._has_waiting:
            self._next_ready_s = -math.inf

    def advance(self, until_s: float) -> None:
        """Runs all steps that begin before `until_s`."""
        while self.now_s < until_s:
            self.run(until_s)

    def _fill_batch(self) -> None:
        """Chooses the jobs that share the next step, where that may have changed."""
        if self.now_s < self._next_ready_s:
            return
        self._left = [state for state in self._left if state.end_s == math.inf]
        members: list[_State] = []
        places_left, kv_left = self._model.max_batch, self._model.kv_tokens
        self._next_ready_s = math.inf
        for state in self._left:
            job = state.job
            if job.ready_s > self.now_s:
                self._next_ready_s = min(self._next_ready_s, job.ready_s)
                continue
            places_left -= job.num_places
            kv_left -= job.kv_tokens
            # A job that finds too little room blocks those behind it.
            if (places_left < 0 or kv_left < 0) and members:
                break
            members.append(state)
        self._has_waiting = len(members) < len(self._left)
        self._batch.fill(members)


def timeline(
    model: PodModel, jobs: Sequence[Job], *, step_share: float = 0.0, horizon_s: float = math.inf
) -> dict[Job, Times]:
    """The times of all jobs. Jobs with equal deadlines come in the given order. `step_share`: see
    SimulatedPod. Steps that begin after `horizon_s` are not computed.

    The work is proportional to the number of jobs times the sequences that share a step at most, and where no
    job waits, to the number of jobs.
    """
    pod = SimulatedPod(model, jobs, step_share=step_share)
    while pod.has_jobs and pod.now_s <= horizon_s:
        pod.run()
    return {job: pod.times(job) for job in jobs}


class _State:
    """The remaining work of a job."""

    __slots__ = ("end_s", "first_s", "job", "num_tokens", "start", "until")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.start = job.start
        self.num_tokens = job.num_tokens
        self.first_s = self.end_s = math.inf
        #: While it decodes: the tokens that a text of this batch has gained when this one ends.
        self.until = 0.0

    def __lt__(self, other: _State) -> bool:
        return self.until < other.until


def _due(state: _State) -> float:
    return state.job.due


class _Batch:
    """The jobs that share the next step: texts, which decode, and prompts. All texts gain equally, so a heap
    tells which one ends next."""

    def __init__(self, model: PodModel) -> None:
        self._model = model
        #: In order of deadlines.
        self._prompts: list[_State] = []
        self._texts: list[_State] = []
        #: Texts whose first token comes with the next step.
        self._new: list[_State] = []
        #: Tokens that a text has gained since the beginning.
        self._gained = 0.0
        self._num_sequences = self._cached = 0
        #: Prompts of the next step and their tokens.
        self._chunks: list[tuple[_State, int]] = []

    def __bool__(self) -> bool:
        return bool(self._texts or self._prompts)

    def fill(self, members: Sequence[_State]) -> None:
        """These are the jobs from now on, in order of deadlines."""
        for state in self._texts:
            state.num_tokens = state.until - self._gained
        self._prompts, self._texts, self._new = [], [], []
        self._num_sequences = self._cached = 0
        for state in members:
            if state.start < state.job.stop:
                self._prompts.append(state)
            else:
                self._decode(state)
        heapify(self._texts)
        self._choose_chunks()

    def _decode(self, state: _State) -> None:
        state.until = self._gained + state.num_tokens
        self._num_sequences += state.job.num_places
        self._cached += state.job.num_places * state.job.context
        self._texts.append(state)
        if state.first_s == math.inf:
            self._new.append(state)

    def _choose_chunks(self) -> None:
        """The prompts of the next step, the earliest deadline first, and the number of tokens of each."""
        self._chunks = []
        model = self._model
        enough = min(model.enough_prompt_tokens, model.chunk_size)
        budget, wanted = enough if self._texts else model.chunk_size, enough
        for state in self._prompts:
            size = min(state.job.stop - state.start, budget)
            if size <= 0 or wanted <= 0:
                break
            self._chunks.append((state, size))
            budget -= size
            wanted -= size

    def seconds(self, num_steps: int) -> float:
        """Each step continues the prompts where the one before it ended."""
        model, seconds = self._model, 0.0
        if self._texts:
            # A step that also computes prompts reads the weights once.
            num_reads = not self._chunks
            seconds = model.decode.seconds(num_reads, self._num_sequences, self._cached) * num_steps
        if not self._chunks:
            return seconds
        tokens = pairs = 0.0
        for state, size in self._chunks:
            tokens += size * num_steps
            pairs += size * num_steps * (state.start + size * num_steps / 2)
        seconds += model.prefill.seconds(num_steps, tokens, pairs)
        return seconds * model.mixed_steps if self._texts else seconds

    def num_until(self, stop_s: float) -> int:
        """Steps until a prompt or an answer ends; fewer if all others begin at or after `stop_s` from now."""
        most = math.inf
        if self._texts:
            most = (self._texts[0].until - self._gained - _ROUNDING) / self._gain()
        if self._chunks:
            state, size = self._chunks[0]
            most = min(most, (state.job.stop - state.start) // size) if len(self._chunks) == 1 else 1
        num_steps = max(math.ceil(most), 1)
        if stop_s == math.inf or num_steps == 1:
            return num_steps
        return bisect_left(range(1, num_steps), stop_s, key=self.seconds) + 1

    def _gain(self) -> float:
        return tokens_gained(self._model.tokens_per_step, self._num_sequences)

    def run(self, now: float, num_steps: int) -> tuple[float, int]:
        """Advances the jobs. Returns when the last step ends, and how many jobs have ended."""
        end = now + self.seconds(num_steps)
        if self._new:
            first_s = end if num_steps == 1 else now + self.seconds(1)
            for state in self._new:
                state.first_s = first_s
            self._new.clear()
        num_ended = 0
        self._gained += self._gain() * num_steps if self._texts else 0.0
        while self._texts and self._texts[0].until <= self._gained + _ROUNDING:
            state = heappop(self._texts)
            state.end_s = end
            self._num_sequences -= state.job.num_places
            self._cached -= state.job.num_places * state.job.context
            num_ended += 1
        for state, size in self._chunks:
            state.start += size * num_steps
            if state.start >= state.job.stop:
                num_ended += self._computed(state, end)
        if self._prompts or self._chunks:
            self._choose_chunks()
        return end, num_ended

    def _computed(self, state: _State, now: float) -> bool:
        """A prompt is computed, with the first token. Returns whether that is the last one."""
        self._prompts.remove(state)
        state.first_s = min(state.first_s, now)
        state.num_tokens -= 1
        if state.num_tokens <= 0:
            state.end_s = now
            return True
        self._decode(state)
        heapify(self._texts)
        return False
