"""Chooses the decode pod of a request, and the order in which it asks the prefill pods.

Each pod reports what its steps cost. The choice is the pods with which the request is predicted to end first:
the prompts before its own, the tokens of its prompt that are not in the pod's prefix cache, and the time per
output token in the batch that it joins. So a conversation returns to the pod that holds its KV, unless that
pod is so busy that it is cheaper to compute the prompt elsewhere. And when a decode pod is lost, the prefill
pod that computed the prompt still has it for the next one.

The block size of the prefix cache can differ between pods; each pod reports it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import fmean

from tandem_core.prefix_hash import ChainHash

from tandem_gateway.fleet.pods import Fleet, Pod, Role
from tandem_gateway.request import TokenizedRequest

#: Blocks remembered per pod: 4 million tokens in blocks of 64.
_MAX_BLOCKS_PER_POD = 65_536
#: Beginnings of prompts whose answers' lengths are remembered, and how many tokens of them.
_MAX_TEMPLATES = 4096
_TEMPLATE_TOKENS = 64
#: A prompt is computed in another zone than it is decoded in if it is ready so much sooner there: KV between
#: zones takes longer, and clouds charge for it.
_OTHER_ZONE_S = 0.25
#: Lengths remembered of each, and how many tell something: the first ones that end are the short ones.
_NUM_LENGTHS, _ENOUGH_LENGTHS = 16, 4
#: Until then an answer is taken to be so long, in tokens: most end long before max_tokens, and with that a
#: system that was just started would refuse what comes beside the first request.
_USUAL_LENGTH = 128


@dataclass(frozen=True)
class Route:
    """Pods for a request, and what it will take there."""

    decode: Pod
    #: In the order in which the decode pod asks them.
    prefill: tuple[Pod, ...]
    computes_prompt: Pod
    #: Decode pods among which it was chosen.
    num_decode: int
    #: For prompts with earlier deadlines.
    wait_s: float
    #: Until the pod's step has ended, and for the sequences that decode in the steps of the prompts.
    join_s: float
    #: To compute the prompt, and per output token.
    prefill_s: float
    token_s: float
    #: Of prompts that the decode pod computes while it computes the answer, and how many they are.
    beside_s: float
    prompts_beside: float
    #: The same while nothing else uses the machine.
    alone_prefill_s: float
    alone_token_s: float
    #: Tokens that the answer may have, each number as likely as the others.
    lengths: tuple[int, ...]
    #: Cached tokens in the middle of the answer; sequences beside it, on average.
    context: int
    num_beside: float
    #: Until the decode pod, which computes so many sequences at once, has a place for it.
    place_s: float = 0.0

    @property
    def num_output(self) -> int:
        """Expected tokens of the answer."""
        return self.tokens_left(0)

    def tokens_left(self, num_tokens: int) -> int:
        """Expected after so many tokens: the mean of the lengths beyond that."""
        ordered, sums = self._ordered_lengths
        num_shorter = bisect_right(ordered, num_tokens)
        num_longer = len(ordered) - num_shorter
        # Nothing is known of one that is longer than all others.
        if not num_longer:
            return max(num_tokens // 4, 1)
        return round((sums[-1] - sums[num_shorter]) / num_longer) - num_tokens

    @cached_property
    def _ordered_lengths(self) -> tuple[list[int], list[int]]:
        """And the sums of those before each: admission asks for each request that runs."""
        ordered = sorted(self.lengths)
        return ordered, [0, *accumulate(ordered)]

    @property
    def is_known(self) -> bool:
        """Whether reports of the pods say what things cost, and are new."""
        return self.computes_prompt.load.prefill_cost.is_known and all(
            pod.is_fresh for pod in (self.decode, self.computes_prompt)
        )

    @property
    def is_local(self) -> bool:
        """Whether the decode pod computes the prompt."""
        return self.computes_prompt is self.decode

    @property
    def ttft_s(self) -> float:
        # The first token of a prefill pod needs no place in the batch.
        begins_s = max(self.wait_s, self.place_s) if self.is_local else self.wait_s
        return begins_s + self.join_s + self.prefill_s

    @property
    def e2e_s(self) -> float:
        return self.e2e_beside_s(self.num_beside)

    def e2e_beside_s(self, num_sequences: float) -> float:
        """The end beside so many others."""
        return max(self.ttft_s, self.place_s) + self.decode.load.answer_seconds(
            self.num_output, num_sequences + 1, self.context, self.prompts_beside, self.beside_s
        )

    @property
    def work_s(self) -> float:
        """Seconds of the whole fleet that the request takes beside many others, of the role of which it takes
        more."""
        load = self.decode.load
        num_steps = self.num_output / load.gained(load.max_batch)
        decode_s = load.decode_seconds(0, num_steps, self.context)
        if self.is_local:
            return (self.prefill_s + decode_s) / self.num_decode
        return max(self.prefill_s / len(self.prefill), decode_s / self.num_decode)

    @property
    def alone_e2e_s(self) -> float:
        return self.alone_prefill_s + self.num_output * self.alone_token_s


@dataclass(frozen=True)
class _Work:
    """Of one prompt on one pod."""

    num_uncached: int
    wait_s: float
    join_s: float
    prefill_s: float
    lacks_room: bool

    @property
    def ready_s(self) -> float:
        return self.wait_s + self.join_s + self.prefill_s


class OutputLengths:
    """Lengths of the last answers, for each tenant and beginning of a prompt, often a template.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        #: By tenant and first tokens; the tenant alone is the fallback.
        self._lengths: OrderedDict[tuple[str, int], deque[int]] = OrderedDict()

    def of(self, request: TokenizedRequest) -> tuple[int, ...]:
        """Tokens that its answer may have, from min_tokens to max_tokens, each as likely as the others."""
        least, most = max(request.sampling.min_tokens, 1), request.sampling.max_tokens
        if request.sampling.ignore_eos:
            return (most,)
        of_template, of_tenant = ([*self._lengths.get(key, ())] for key in self._keys(request))
        known = of_template if len(of_template) >= _ENOUGH_LENGTHS else of_tenant
        known += [_USUAL_LENGTH] * (_ENOUGH_LENGTHS - len(known))
        return tuple(min(max(length, least), most) for length in known)

    def observe(self, request: TokenizedRequest, num_tokens: int, *, is_cut: bool = False) -> None:
        """Of an answer that ended. `is_cut`: at its max_tokens, so that it says only what others, which may
        be longer, have at least."""
        if is_cut:
            num_tokens = max(num_tokens, _USUAL_LENGTH)
        for key in self._keys(request):
            self._lengths.setdefault(key, deque(maxlen=_NUM_LENGTHS)).append(num_tokens)
            self._lengths.move_to_end(key)
        while len(self._lengths) > _MAX_TEMPLATES:
            self._lengths.popitem(last=False)

    def _keys(self, request: TokenizedRequest) -> tuple[tuple[str, int], tuple[str, int]]:
        return (request.tenant, hash(request.prompt_token_ids[:_TEMPLATE_TOKENS])), (request.tenant, 0)


class PrefixIndex:
    """Estimates the prefix cache of each pod: an LRU of the prompt blocks sent to it."""

    def __init__(self, max_blocks_per_pod: int = _MAX_BLOCKS_PER_POD) -> None:
        self._max_blocks = max_blocks_per_pod
        self._seen: dict[str, OrderedDict[ChainHash, None]] = {}

    def num_matching(self, target: str, hashes: Sequence[ChainHash]) -> int:
        """Number of leading blocks of the prompt in the pod's LRU."""
        seen = self._seen.get(target, OrderedDict())
        count = 0
        for block in hashes:
            if block not in seen:
                break
            count += 1
        return count

    def add(self, target: str, hashes: Sequence[ChainHash]) -> None:
        seen = self._seen.setdefault(target, OrderedDict())
        # Last block first, so that the end of a prompt is evicted before its beginning.
        for block in reversed(hashes):
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._max_blocks:
            seen.popitem(last=False)

    def forget(self, target: str) -> None:
        self._seen.pop(target, None)

    def keep_only(self, targets: Collection[str]) -> None:
        """Forgets every other pod."""
        for target in self._seen.keys() - set(targets):
            del self._seen[target]


def _far_s(one: Pod, other: Pod) -> float:
    """What a pair of pods counts as slower if they are known to be in two zones."""
    return _OTHER_ZONE_S if one.zone and other.zone and one.zone != other.zone else 0.0


class Router:
    """Chooses among the fleet's healthy pods."""

    def __init__(self, fleet: Fleet, lengths: OutputLengths) -> None:
        self._fleet = fleet
        self._lengths = lengths
        self._prefixes = PrefixIndex()

    def has_failed_since(self, at: float) -> bool:
        """Whether since these monotonic seconds pods began to be lost, or to fail to compute prompts."""
        return self._fleet.failing_since > at

    def num_batch_places(self) -> int:
        """Sequences that the decode pods compute at once."""
        return sum([pod.load.max_batch for pod in self._fleet.healthy(Role.DECODE)])

    def plan(self, request: TokenizedRequest, excluded: frozenset[str] = frozenset()) -> Route | None:
        """The pods with which the request is predicted to end first, among decode pods that are not in
        `excluded`; None: no decode pod."""
        healthy, prefill = (self._fleet.healthy(role) for role in (Role.DECODE, Role.PREFILL))
        # A pod that left or restarted has lost its cache.
        self._prefixes.keep_only([pod.target for pod in (*healthy, *prefill)])
        candidates = [pod for pod in healthy if pod.target not in excluded]
        if not candidates:
            return None
        work = {pod: self._work(pod, request) for pod in (*candidates, *prefill)}
        lengths = self._lengths.of(request)
        num_output = round(fmean(lengths))
        routes = []
        for pod in candidates:
            prefill.sort(
                key=lambda other: (
                    work[other].lacks_room,
                    work[other].ready_s + _far_s(other, pod),
                    other.target,
                )
            )
            computes = pod if self._is_local(pod, request, work[pod]) or not prefill else prefill[0]
            context = len(request.prompt_token_ids) + num_output // 2
            num_beside = pod.num_beside(num_output)
            wait_s, prefill_s = work[computes].wait_s, work[computes].prefill_s
            # The pod computes those before this prompt, or while another pod computes it, in that time.
            others_s = pod.backlog.present_s - wait_s - (prefill_s if computes is not pod else 0.0)
            others_s = max(others_s, 0.0)
            part = others_s / pod.backlog.present_s if others_s else 0.0
            route = Route(
                decode=pod,
                prefill=tuple(prefill),
                computes_prompt=computes,
                num_decode=len(candidates),
                wait_s=wait_s,
                join_s=work[computes].join_s,
                prefill_s=prefill_s,
                token_s=pod.load.token_seconds(num_beside + 1, context),
                beside_s=others_s,
                prompts_beside=part * pod.backlog.num_own,
                alone_prefill_s=prefill_s * computes.load.prefill_cost.unloaded,
                alone_token_s=pod.load.token_seconds(1, context) * pod.load.decode_cost.unloaded,
                lengths=lengths,
                context=context,
                num_beside=num_beside,
            )
            e2e_s = route.e2e_s + _far_s(computes, pod)
            routes.append((work[pod].lacks_room, e2e_s, -pod.load.free_blocks, pod.target, route))
        return min(routes, key=lambda scored: scored[:4])[4]

    def choose(self, request: TokenizedRequest, excluded: frozenset[str] = frozenset()) -> Route | None:
        """The same, and adds the prompt to the LRUs of the pods that will have it."""
        route = self.plan(request, excluded)
        if route is not None:
            for pod in (route.decode, *(() if request.scores_prompt else route.prefill[:1])):
                self._prefixes.add(pod.target, request.block_hashes(pod.load.block_size))
        return route

    def forget(self, pod: Pod) -> None:
        """Forgets the cache of a pod that died."""
        self._prefixes.forget(pod.target)

    def _work(self, pod: Pod, request: TokenizedRequest) -> _Work:
        load, num_tokens = pod.load, len(request.prompt_token_ids)
        # A pod without a prefix cache reports block size 0.
        hashes = request.block_hashes(load.block_size)
        num_cached = self._prefixes.num_matching(pod.target, hashes) * load.block_size
        # The last token is always computed.
        num_cached = 0 if request.scores_prompt else min(num_cached, num_tokens - 1)
        needed = -(-num_tokens // load.block_size) if load.block_size else 0
        decoding, backlog = pod.num_decoding, pod.backlog
        # About one for each prompt before it.
        num_steps = backlog.num_before(request.due) + -(-(num_tokens - num_cached) // load.chunk_beside_texts)
        join_s = load.decode_seconds(0, num_steps * decoding, num_tokens)
        if decoding and backlog.is_empty:
            join_s += load.decode_seconds(1, decoding, num_tokens) / 2
        return _Work(
            num_uncached=num_tokens - num_cached,
            wait_s=backlog.seconds(request.due, load.chunk_seconds),
            join_s=join_s,
            prefill_s=load.prompt_seconds(num_cached, num_tokens),
            lacks_room=needed > load.free_blocks,
        )

    def _is_local(self, pod: Pod, request: TokenizedRequest, work: _Work) -> bool:
        """Whether the decode pod will compute the prompt itself."""
        if request.scores_prompt:
            return True
        load = pod.load
        is_idle = not max(pod.in_flight, load.num_requests)
        limit = max(load.local_prefill_tokens, load.idle_prefill_tokens if is_idle else 0)
        return work.num_uncached < limit
