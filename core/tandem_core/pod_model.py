"""What a pod's work will take: the engine's scheduling rule as a pure function of costs and jobs.

    PodModel   what steps cost, and the limits of a step, as the pod reports them
    Job        a request that runs, waits, or may come: its prompt's tokens, its answer's, its deadline
    timeline   PodModel, jobs -> when each job has its first token, and when it ends

The rule is that of tandem_engine.scheduler: the jobs due earliest share the batch; a step computes a token of
each of them that decodes, and chunks of prompts in the order of their deadlines. Block limits, preemption and
what drafts gain in single steps are left out. No clock and no I/O: all times are seconds from now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    #: That a sequence gains in a decode step, see tokens_gained.
    tokens_per_step: tuple[float, ...] = (1.0,)


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


class Times(NamedTuple):
    """Seconds from now; infinite where it would begin beyond the horizon."""

    #: To the first token that this pod computes.
    first_s: float
    end_s: float


class _State:
    """What is left of a job."""

    __slots__ = ("end_s", "first_s", "job", "num_tokens", "start")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.start = job.start
        self.num_tokens = job.num_tokens
        self.first_s = self.end_s = math.inf


def timeline(model: PodModel, jobs: Sequence[Job], horizon_s: float = math.inf) -> dict[Job, Times]:
    """When each job has its first token and its end. Jobs with equal deadlines come in the given order.

    Steps that begin after `horizon_s` are not looked at. Takes time in proportion to the jobs' number times
    the sequences that share a step.
    """
    states = [_State(job) for job in jobs]
    left = sorted(states, key=lambda state: state.job.due)
    now = 0.0
    while left and now <= horizon_s:
        active, next_ready = _active(left, model.max_batch, now)
        if not active:
            now = next_ready
            continue
        now = _run(model, active, now, next_ready)
        left = [state for state in left if state.end_s == math.inf]
    return {state.job: Times(state.first_s, state.end_s) for state in states}


def _active(ordered: Sequence[_State], max_batch: int, now: float) -> tuple[list[_State], float]:
    """Those that share the next step; and when the next of the others is ready."""
    active: list[_State] = []
    places, next_ready, is_full = 0, math.inf, False
    for state in ordered:
        job = state.job
        if job.ready_s > now:
            next_ready = min(next_ready, job.ready_s)
        elif not is_full:
            places += job.num_places
            # One that finds too few places holds up those behind it.
            is_full = places > max_batch and bool(active)
            if not is_full:
                active.append(state)
    return active, next_ready


def _run(model: PodModel, active: Sequence[_State], now: float, next_ready: float) -> float:
    """Some equal steps: until a prompt or an answer ends, or others may join. Returns when they end."""
    decoding = [state for state in active if state.start >= state.job.stop]
    num_sequences = sum([state.job.num_places for state in decoding])
    cached = sum([state.job.num_places * state.job.context for state in decoding])
    chunks = _chunks(model, active, is_beside_texts=bool(decoding))
    gained = tokens_gained(model.tokens_per_step, num_sequences)
    # A step with prompts in it reads the weights once.
    decode_s = model.decode.seconds(not chunks, num_sequences, cached) if decoding else 0.0
    step_s = decode_s + _prompts_s(model, chunks, 1)
    most = min([state.num_tokens for state in decoding], default=math.inf) / gained
    if chunks:
        state, size = chunks[0]
        most = min(most, (state.job.stop - state.start) // size) if len(chunks) == 1 else 1
    if next_ready < math.inf:
        most = min(most, (next_ready - now) / step_s)
    num_steps = max(math.ceil(most), 1)
    end = now + decode_s * num_steps + _prompts_s(model, chunks, num_steps)
    for state in decoding:
        _gain(state, gained * num_steps, now + step_s, end)
    for state, size in chunks:
        state.start += size * num_steps
        if state.start >= state.job.stop:
            _gain(state, 1, end, end)
    return end


def _prompts_s(model: PodModel, chunks: Sequence[tuple[_State, int]], num_steps: int) -> float:
    """What chunks of prompts add to `num_steps` steps, each of which continues the last one's."""
    if not chunks:
        return 0.0
    tokens = pairs = 0.0
    for state, size in chunks:
        tokens += size * num_steps
        pairs += size * num_steps * (state.start + size * num_steps / 2)
    return model.prefill.seconds(num_steps, tokens, pairs)


def _chunks(model: PodModel, active: Sequence[_State], *, is_beside_texts: bool) -> list[tuple[_State, int]]:
    """Prompts of the next step, the earliest due first, and how many tokens of each it computes."""
    chunks = []
    enough = min(model.enough_prompt_tokens, model.chunk_size)
    budget, wanted = enough if is_beside_texts else model.chunk_size, enough
    for state in active:
        size = min(state.job.stop - state.start, budget)
        if size > 0 and wanted > 0:
            chunks.append((state, size))
            budget -= size
            wanted -= size
    return chunks


def _gain(state: _State, num_tokens: float, first_s: float, now: float) -> None:
    """`first_s`: when the first of these tokens comes; `now`: the last."""
    state.first_s = min(state.first_s, first_s)
    state.num_tokens -= num_tokens
    if state.num_tokens <= 0:
        state.end_s = now
