"""Chooses the decode pod of a request, and the order in which the decode pod asks the prefill pods.

The router chooses the pair of pods with which the request is predicted to end first, by the timelines of
their works (load.py). So a conversation returns to the pod that has its KV, unless another pod would be
faster although it computes the prompt again. If a decode pod is lost, the prefill pod that computed the
prompt still has its KV for the next decode pod.

The block size of the prefix cache can differ between pods; each pod reports it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

from tandem_core.contracts import computes_locally
from tandem_core.pod_model import Job, Times

from tandem_gateway.fleet.load import Placed, PodWorks, Work
from tandem_gateway.fleet.output_lengths import OutputLengths
from tandem_gateway.fleet.pods import Fleet, Pod, Role
from tandem_gateway.fleet.prefix_index import PrefixIndex
from tandem_gateway.request import TokenizedRequest

#: A prompt is computed in another zone than its answer only if it is ready this much sooner there, because KV
#: takes longer between zones, and clouds charge for it.
_OTHER_ZONE_S = 0.25
#: Number of decode pods whose timelines are compared; a simpler estimate chooses them among all.
_MOST_COMPARED = 2


@dataclass(frozen=True)
class Route:
    """Pods for a request, and its predicted times on them."""

    decode: Pod
    #: The prefill pods, in the order in which the decode pod asks them.
    prefill: tuple[Pod, ...]
    computes_prompt: Pod
    #: Number of decode pods among which this one was chosen.
    num_decode: int
    #: Prompt tokens [start, stop) that are not in the prefix cache of the pod that computes the prompt.
    start: int
    stop: int
    #: Equally likely lengths of the answer in tokens.
    lengths: tuple[int, ...]
    #: Seconds from now to the first token and to the end, by the timelines.
    first_s: float = math.nan
    end_s: float = math.nan

    @property
    def num_output(self) -> int:
        """Expected tokens of the answer."""
        return self.tokens_left(0)

    def tokens_left(self, num_tokens: int) -> int:
        """Expected further tokens after `num_tokens`: the mean of the longer lengths, minus `num_tokens`."""
        ordered, sums = self._ordered_lengths
        num_shorter = bisect_right(ordered, num_tokens)
        num_longer = len(ordered) - num_shorter
        # An answer that is longer than all earlier ones is expected to grow by a quarter.
        if not num_longer:
            return max(num_tokens // 4, 1)
        return round((sums[-1] - sums[num_shorter]) / num_longer) - num_tokens

    @cached_property
    def _ordered_lengths(self) -> tuple[list[int], list[int]]:
        """The sorted lengths and their running sums, computed once because admission reads them often."""
        ordered = sorted(self.lengths)
        return ordered, [0, *accumulate(ordered)]

    @property
    def context(self) -> int:
        """Number of cached tokens in the middle of the answer."""
        return self.stop + self.num_output // 2

    @property
    def is_known(self) -> bool:
        """Whether the pods have measured their step costs, and their reports are fresh."""
        knows_costs = self.computes_prompt.works.load.knows_prompts and self.decode.works.load.knows_texts
        return knows_costs and self.decode.is_fresh and self.computes_prompt.is_fresh

    @property
    def is_local(self) -> bool:
        """Whether the decode pod computes the prompt."""
        return self.computes_prompt is self.decode

    @property
    def prefill_s(self) -> float:
        """Seconds to compute the prompt while nothing else runs on its pod."""
        return self.computes_prompt.works.load.model.prompt_seconds(self.start, self.stop)

    @property
    def token_s(self) -> float:
        """Predicted seconds per output token after the first."""
        return (self.end_s - self.first_s) / max(self.num_output - 1, 1)

    @property
    def alone(self) -> dict[str, float]:
        """Seconds that the request takes on an idle system, by objective."""
        prompts, texts = self.computes_prompt.works.load.model, self.decode.works.load.model
        ttft_s = self.prefill_s * prompts.prefill.unloaded
        token_s = texts.token_seconds(1, self.context) * texts.decode.unloaded
        return {"ttft": ttft_s, "tpot": token_s, "e2e": ttft_s + self.num_output * token_s}

    @property
    def work_s(self) -> float:
        """Seconds of the whole fleet that the request takes in full batches; of the two roles, the larger
        value."""
        model = self.decode.works.load.model
        decode_s = self.num_output * model.token_seconds(model.max_batch, self.context) / model.max_batch
        if self.is_local:
            return (self.prefill_s + decode_s) / self.num_decode
        return max(self.prefill_s / len(self.prefill), decode_s / self.num_decode)

    def works(self, placed: Placed) -> Iterator[tuple[PodWorks, Work]]:
        """Yields the request's work on each of its pods, the decode pod first."""
        # A new pod computes the answer so far like a prompt.
        start, stop = self.start, self.stop + placed.other_tokens + placed.num_tokens
        decode = Work(
            placed.request.due,
            start if self.is_local else stop,
            stop,
            self.num_output,
            self.context,
            placed.num_places,
            placed,
        )
        yield self.decode.works, decode
        if not self.is_local:
            prompt = Work(placed.request.due, start, stop, 1, stop, 1, placed)
            yield self.computes_prompt.works, prompt


@dataclass(frozen=True)
class Effects:
    """The effects of a request on its route: the times of other requests without it and with it."""

    request: TokenizedRequest
    route: Route
    #: The request on its decode pod.
    job: Job
    others: Mapping[Placed, tuple[Times, Times]]
    #: The times of future jobs that the timeline includes.
    coming: Mapping[Job, Times]
    moment: _Moment


def _far_s(one: Pod, other: Pod) -> float:
    """Seconds added to the time of a pair of pods that are known to be in two zones."""
    return _OTHER_ZONE_S if one.zone and other.zone and one.zone != other.zone else 0.0


def _order(route: Route, lacks_room: bool, end_s: float) -> tuple[bool, float, int, str]:
    """The sort key of a route; the best route has the smallest."""
    pod = route.decode
    return lacks_room, end_s + _far_s(route.computes_prompt, pod), -pod.works.load.free_blocks, pod.target


class _Moment:
    """The timelines of all pods at one moment, each computed at its first use."""

    def __init__(self) -> None:
        self._jobs: dict[Pod, dict[Work, Job]] = {}
        self._times: dict[Pod, dict[Work, Times]] = {}

    def jobs(self, pod: Pod) -> dict[Work, Job]:
        if pod not in self._jobs:
            ready_s = {}
            for work in pod.works.all:
                other = None if work.placed is None else work.placed.prompt_work
                # Another pod computes the prompt; the answer is ready when the prompt ends there.
                if other is not None and other is not work and work.placed and work.placed.route:
                    ready_s[work] = self.times(work.placed.route.computes_prompt)[other].first_s
            self._jobs[pod] = pod.works.jobs(ready_s)
        return self._jobs[pod]

    def times(self, pod: Pod) -> dict[Work, Times]:
        if pod not in self._times:
            self._times[pod] = self.with_jobs(pod, ())[0]
        return self._times[pod]

    def with_jobs(self, pod: Pod, coming: Sequence[Job]) -> tuple[dict[Work, Times], dict[Job, Times]]:
        """The times of the pod's works and of these jobs, in one timeline."""
        jobs = self.jobs(pod)
        times = pod.works.times(jobs, coming)
        return {work: times[job] for work, job in jobs.items()}, {job: times[job] for job in coming}


class Router:
    """Chooses among the fleet's healthy pods."""

    def __init__(self, fleet: Fleet, lengths: OutputLengths) -> None:
        self._fleet = fleet
        self._lengths = lengths
        self._prefixes = PrefixIndex()

    def has_failed_since(self, at: float) -> bool:
        """Whether a series of pod failures began after these monotonic seconds."""
        return self._fleet.failing_since > at

    def num_batch_slots(self) -> int:
        """Number of batch slots of the healthy decode pods."""
        return sum([pod.works.load.model.max_batch for pod in self._fleet.healthy(Role.DECODE)])

    def plan(
        self,
        request: TokenizedRequest,
        excluded: frozenset[str] = frozenset(),
        *,
        num_places: int = 1,
        other_tokens: int = 0,
    ) -> Effects | None:
        """Chooses the pods with which the request is predicted to end first, among decode pods that are not
        in `excluded`; None: there is none. `other_tokens`: tokens of other prompts that are computed before
        its own. Changes nothing."""
        healthy, prefill = (self._fleet.healthy(role) for role in (Role.DECODE, Role.PREFILL))
        # A pod that left or restarted has lost its cache.
        self._prefixes.keep_only([pod.target for pod in (*healthy, *prefill)])
        candidates = [pod for pod in healthy if pod.target not in excluded]
        if not candidates:
            return None
        prompts = {pod: self._prompt(pod, request) for pod in (*candidates, *prefill)}
        lengths = self._lengths.of(request)
        routes = []
        for pod in candidates:
            prefill.sort(
                key=lambda other: (
                    prompts[other].lacks_room,
                    prompts[other].ready_s + _far_s(other, pod),
                    other.target,
                )
            )
            is_local = self._is_local(pod, request, prompts[pod]) or not prefill
            computes = pod if is_local else prefill[0]
            route = Route(
                decode=pod,
                prefill=tuple(prefill),
                computes_prompt=computes,
                num_decode=len(candidates),
                start=prompts[computes].start,
                stop=len(request.prompt_token_ids),
                lengths=lengths,
            )
            num_beside = pod.works.num_sequences() + num_places
            answer_s = route.num_output * pod.works.load.model.token_seconds(num_beside, route.context)
            order = _order(route, prompts[pod].lacks_room, prompts[computes].ready_s + answer_s)
            routes.append((order, route))
        routes.sort(key=itemgetter(0))
        moment = _Moment()
        compared = [
            _first_look(moment, route, request, num_places, other_tokens)
            for _, route in routes[:_MOST_COMPARED]
        ]
        return min(
            compared,
            key=lambda effects: _order(
                effects.route, prompts[effects.route.decode].lacks_room, effects.route.end_s
            ),
        )

    def has_decode_pod(self, excluded: frozenset[str]) -> bool:
        """Whether there is a healthy decode pod that is not in `excluded`."""
        return any(pod.target not in excluded for pod in self._fleet.healthy(Role.DECODE))

    def reconsider(self, effects: Effects, coming: Sequence[Job]) -> Effects:
        """Predicts the request on the same pods again, with future jobs on its decode pod."""
        return _on_route(effects, coming)

    def times_without(self, effects: Effects, jobs: Sequence[Job]) -> dict[Job, Times]:
        """The times of these jobs on the request's decode pod without the request."""
        return effects.moment.with_jobs(effects.route.decode, jobs)[1]

    def times(self, effects: Effects) -> dict[Work, Times]:
        """The times of the works on the request's decode pod without the request."""
        return effects.moment.times(effects.route.decode)

    def choose(self, request: TokenizedRequest, excluded: frozenset[str] = frozenset()) -> Route | None:
        """Plans the request, and adds its prompt to the prefix index of its pods."""
        effects = self.plan(request, excluded)
        if effects is None:
            return None
        self.sent(request, effects.route)
        return effects.route

    def sent(self, request: TokenizedRequest, route: Route) -> None:
        """Adds the prompt to the prefix index of the route's pods."""
        for pod in {route.decode, route.computes_prompt}:
            self._prefixes.add(pod.target, request.block_hashes(pod.works.load.block_size))

    def forget(self, pod: Pod) -> None:
        """Forgets the prefix cache of a pod that died."""
        self._prefixes.forget(pod.target)

    def _prompt(self, pod: Pod, request: TokenizedRequest) -> _Prompt:
        load, num_tokens = pod.works.load, len(request.prompt_token_ids)
        # A pod without a prefix cache reports block size 0.
        hashes = request.block_hashes(load.block_size)
        num_cached = self._prefixes.num_matching(pod.target, hashes) * load.block_size
        # The last token is always computed.
        start = 0 if request.scores_prompt else min(num_cached, num_tokens - 1)
        needed = -(-num_tokens // load.block_size) if load.block_size else 0
        return _Prompt(
            start,
            num_tokens - start,
            pod.works.prompts_s(request.due) + load.model.prompt_seconds(start, num_tokens),
            needed > load.free_blocks,
        )

    def _is_local(self, pod: Pod, request: TokenizedRequest, prompt: _Prompt) -> bool:
        """Whether the decode pod will compute the prompt itself."""
        if request.scores_prompt:
            return True
        load = pod.works.load
        is_idle = not max(len(pod.works.open_ids), load.num_requests)
        return computes_locally(
            prompt.num_uncached, load.local_prefill_tokens, load.idle_prefill_tokens, is_idle=is_idle
        )


@dataclass(frozen=True)
class _Prompt:
    """A simple estimate of a prompt on one pod."""

    start: int
    num_uncached: int
    ready_s: float
    lacks_room: bool


def _first_look(
    moment: _Moment, route: Route, request: TokenizedRequest, num_places: int, other_tokens: int
) -> Effects:
    num_before = len(request.output_token_ids)
    stop = route.stop + other_tokens + num_before
    job = Job(
        request.due,
        route.start if route.is_local else stop,
        stop,
        max(route.tokens_left(num_before) - (not route.is_local), 1),
        route.context,
        num_places,
        0.0,
    )
    return _on_route(Effects(request, route, job, {}, {}, moment), ())


def _on_route(effects: Effects, coming: Sequence[Job]) -> Effects:
    """The effects of the request if its decode pod also gets the `coming` jobs."""
    route, moment, job = effects.route, effects.moment, effects.job
    first_s = math.nan
    pairs: dict[Placed, tuple[Times, Times]] = {}
    if not route.is_local:
        pod = route.computes_prompt
        prompt = Job(job.due, route.start, job.stop, 1, job.stop, 1, 0.0)
        before = moment.times(pod)
        after, of_coming = moment.with_jobs(pod, [prompt])
        first_s = of_coming[prompt].first_s
        job = replace(job, ready_s=first_s)
        for work, times in after.items():
            if work.placed is not None:
                pairs[work.placed] = _remote(moment, work.placed, before[work].first_s, times.first_s)
    before = moment.times(route.decode)
    after, of_coming = moment.with_jobs(route.decode, [job, *coming])
    for work, times in after.items():
        placed = work.placed
        if placed in pairs:
            first, later = pairs[placed]
            delay_s = later.first_s - first.first_s
            pairs[placed] = (
                Times(first.first_s, before[work].end_s),
                Times(later.first_s, times.end_s + delay_s),
            )
        elif placed is not None and placed.prompt_work in (None, work):
            pairs[placed] = before[work], times
        elif placed is not None:
            pairs[placed] = _only_end(before[work]), _only_end(times)
    if route.is_local:
        first_s = of_coming[job].first_s
    route = replace(route, first_s=first_s, end_s=max(of_coming[job].end_s, first_s))
    return replace(effects, route=route, others=pairs, coming=of_coming)


def _remote(moment: _Moment, placed: Placed, first_s: float, later_s: float) -> tuple[Times, Times]:
    """The times of a request whose prompt is on a prefill pod. Its end is delayed as much as its prompt."""
    if later_s <= first_s or placed.route is None or placed.answer_work is None:
        return Times(first_s, -math.inf), Times(later_s, -math.inf)
    end_s = moment.times(placed.route.decode)[placed.answer_work].end_s
    return Times(first_s, end_s), Times(later_s, end_s + later_s - first_s)


def _only_end(times: Times) -> Times:
    """The times of an answer whose prompt is on another pod."""
    return Times(-math.inf, times.end_s)
