"""Predicts the work of a pod: the engine's scheduling rule as a pure function of step costs and jobs.

    PodModel       step costs and limits of a step, as the pod reports them
    Job            a request that runs, waits, or may come: prompt tokens, output tokens, deadline
    timeline       PodModel, jobs -> the time of each job's first token, and of its end
    SimulatedPod   applies the rule to jobs that arrive over time, from one change to the next

The rule is that of tandem_engine.scheduler: the jobs with the earliest deadlines share the batch. A step
decodes each sequence of the batch whose prompt is computed, and computes chunks of the other prompts in order
of deadlines. Drafts count by the mean tokens per step. The model omits preemption, and knows KV blocks only
as a total of KV tokens. It has no clock and no I/O: times are seconds from now.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop
from typing import NamedTuple

from tandem_core.step_cost import StepCost, tokens_gained

#: Rounding errors of sums of tokens are smaller than this.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class PodModel:
    """Step costs and limits of one pod."""

    prefill: StepCost
    decode: StepCost
    #: Batch slots: most sequences in a step.
    max_batch: int
    #: Most prompt tokens in a step.
    chunk_size: int
    #: A step with this many prompt tokens takes no further prompt. A step in which sequences decode takes at
    #: most this many prompt tokens.
    enough_prompt_tokens: int
    #: Tokens that a sequence gains in a decode step, see tokens_gained.
    tokens_per_step: tuple[float, ...] = (1.0,)
    #: KV tokens of the pod, for the jobs that share the batch.
    kv_tokens: float = math.inf
    #: Duration of a step that decodes and computes prompts, as a multiple of the sum of both costs.
    mixed_steps: float = 1.0

    def decode_seconds(self, num_steps: float, num_sequences: float, context: float) -> float:
        """Seconds of steps in which these sequences, each with `context` cached tokens, decode. With 0 steps:
        what they add to one step that computes prompts."""
        return self.decode.seconds(num_steps, num_sequences, num_sequences * context)

    def prompt_seconds(self, start: int, stop: int) -> float:
        """Seconds to compute the prompt tokens [start, stop) while nothing else runs."""
        return self.prefill.prompt_seconds(start, stop, self.chunk_size)

    def token_seconds(self, num_sequences: float, context: float) -> float:
        """Seconds per output token of a sequence among `num_sequences`; more than `max_batch` take turns."""
        together = min(num_sequences, self.max_batch)
        step_s = self.decode_seconds(1, together, context)
        return step_s / tokens_gained(self.tokens_per_step, together) * num_sequences / together


@dataclass(frozen=True, eq=False)
class Job:
    """A request on one pod. Jobs are compared by identity."""

    #: Deadline; jobs with earlier ones come first. All jobs share one clock.
    due: float
    #: Prompt tokens [start, stop) that this pod has yet to compute; empty if another pod computes them.
    start: int
    stop: int
    #: Output tokens still to come, including the first one unless another pod computes the prompt.
    num_tokens: float
    #: Mean cached tokens during the rest of the answer.
    context: int
    #: Batch slots that it takes.
    num_places: int = 1
    #: Seconds until the job or its KV arrives. It joins the first step that begins at that time or later.
    ready_s: float = -math.inf
    #: KV tokens at its end; used only if `PodModel.kv_tokens` is finite.
    kv_tokens: int = 0


class Times(NamedTuple):
    """Times of a job in seconds from now; infinite if they are beyond the horizon."""

    #: Time of the first token that this pod computes.
    first_s: float
    end_s: float


class SimulatedPod:
    """Runs jobs from one change to the next. A change is the end of a prompt or of an answer, or a job that
    becomes ready; all steps before it have the same batch."""

    def __init__(self, model: PodModel, jobs: Iterable[Job] = (), *, step_share: float = 0.0) -> None:
        """`step_share`: the share of the running step that has passed, in [0, 1). Jobs with ready_s >= 0 do
        not take part in that step."""
        self._model = model
        self._batch = _Batch(model)
        self._states = {job: _State(job) for job in jobs}
        #: In order of deadlines; jobs that have ended are dropped when the batch is filled.
        self._left = sorted(self._states.values(), key=_due)
        self._num_left = len(self._left)
        #: The time at which the next job is ready, and the batch is filled again.
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
        """Whether any job has not ended."""
        return self._num_left > 0

    def times(self, job: Job) -> Times:
        state = self._states[job]
        return Times(state.first_s, state.end_s)

    def add(self, job: Job) -> None:
        """Adds a job, which takes part from the next step on."""
        self._states[job] = _State(job)
        insort(self._left, self._states[job], key=_due)
        self._num_left += 1
        self._next_ready_s = -math.inf

    def change_s(self) -> float:
        """The time of the next change unless jobs are added; infinite without jobs."""
        self._fill_batch()
        if not self._batch:
            return self._next_ready_s
        return self.now_s + self._batch.seconds(self._batch.num_until(self._next_ready_s - self.now_s))

    def run(self, until_s: float = math.inf) -> None:
        """Runs to the next change, or through the last step that begins before `until_s`."""
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
        """Chooses the jobs that share the next step, if the choice may have changed."""
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
            # A job for which slots or KV are short blocks the jobs after it.
            if (places_left < 0 or kv_left < 0) and members:
                break
            members.append(state)
        self._has_waiting = len(members) < len(self._left)
        self._batch.fill(members)


def timeline(
    model: PodModel, jobs: Sequence[Job], *, step_share: float = 0.0, horizon_s: float = math.inf
) -> dict[Job, Times]:
    """Computes the times of all jobs. Jobs with equal deadlines come in the given order. `step_share`: see
    SimulatedPod. Steps that begin after `horizon_s` are not computed.

    The computation takes time proportional to the number of jobs times `max_batch`, or to the number of jobs
    if none waits for a batch slot.
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
        #: While it decodes: the batch's count of gained tokens (`_Batch._gained`) at which it ends.
        self.until = 0.0

    def __lt__(self, other: _State) -> bool:
        return self.until < other.until


def _due(state: _State) -> float:
    return state.job.due


class _Batch:
    """The jobs that share the next step: prompts, and answers, which decode. All answers gain the same number
    of tokens per step, so a heap yields the one that ends next."""

    def __init__(self, model: PodModel) -> None:
        self._model = model
        #: In order of deadlines.
        self._prompts: list[_State] = []
        self._texts: list[_State] = []
        #: Answers whose first token comes with the next step.
        self._new: list[_State] = []
        #: Tokens that an answer in the batch since the beginning has gained.
        self._gained = 0.0
        self._num_sequences = self._cached = 0
        #: Prompts of the next step, with the number of tokens of each.
        self._chunks: list[tuple[_State, int]] = []

    def __bool__(self) -> bool:
        return bool(self._texts or self._prompts)

    def fill(self, members: Sequence[_State]) -> None:
        """Replaces the jobs by `members`, which are in order of deadlines."""
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
        """Chooses the prompts of the next step, the earliest deadline first, and the tokens of each."""
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
        """Seconds of the next steps. Each step continues the prompts where the previous one ended."""
        model, seconds = self._model, 0.0
        if self._texts:
            # A step that also computes prompts reads the weights only once, in the cost of the prompts.
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
        """Number of steps until a prompt or an answer ends, without those that begin `stop_s` from now or
        later; at least one."""
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
        """Advances the jobs. Returns the end of the last step, and the number of jobs that have ended."""
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
        """Ends a prompt, which yields the first token. Returns whether this is also the last token."""
        self._prompts.remove(state)
        state.first_s = now
        state.num_tokens -= 1
        if state.num_tokens <= 0:
            state.end_s = now
            return True
        self._decode(state)
        heapify(self._texts)
        return False
