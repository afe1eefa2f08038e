"""Chooses the decode pod of a request, and the order in which it asks the prefill pods.

The cost of a pod is a number of prompt tokens to compute: the tokens of this prompt that are not in the pod's
prefix cache, plus a fixed number for each of its unfinished requests. So a conversation returns to the pod
that holds its KV, unless that pod is so busy that it is cheaper to compute the prompt elsewhere. And when a
decode pod is lost, the prefill pod that computed the prompt still has it for the next one.

The block size of the prefix cache can differ between pods; each pod reports it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem_core.prefix_hash import ChainHash, cache_salt, hash_prefixes

from tandem_gateway.fleet import Fleet, Pod, Role
from tandem_gateway.request import TokenizedRequest

#: Blocks remembered per pod: 4 million tokens in blocks of 64.
_MAX_BLOCKS_PER_POD = 65_536
#: An unfinished request costs as much as this many uncached prompt tokens. A prefill pod has the whole prompt
#: of each before it.
_TOKENS_PER_REQUEST = {Role.DECODE: 512, Role.PREFILL: 2048}


@dataclass(frozen=True)
class Route:
    decode: Pod
    #: In the order in which the decode pod asks them.
    prefill: tuple[Pod, ...]


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


class Router:
    """Chooses among the fleet's healthy pods."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._prefixes = PrefixIndex()

    def choose(self, request: TokenizedRequest, excluded: frozenset[str] = frozenset()) -> Route | None:
        """Returns the cheapest pods, with a decode pod not in `excluded`, and adds the prompt to the LRUs of
        those that will compute it; None: no decode pod."""
        healthy, prefill = (self._fleet.healthy(role) for role in (Role.DECODE, Role.PREFILL))
        # A pod that left or restarted has lost its cache.
        self._prefixes.keep_only([pod.target for pod in (*healthy, *prefill)])
        candidates = [pod for pod in healthy if pod.target not in excluded]
        if not candidates:
            return None
        salt = cache_salt(request.tenant, model_revision="")
        # A pod without a prefix cache reports block size 0.
        hashes = {
            size: hash_prefixes(salt, request.prompt_token_ids, size) if size else []
            for size in {pod.load.block_size for pod in (*candidates, *prefill)}
        }

        def cost(pod: Pod) -> tuple[bool, int, int, str]:
            return self._cost(pod, request, hashes[pod.load.block_size])

        best = min(candidates, key=cost)
        prefill.sort(key=cost)
        for pod in (best, *prefill[:1]):
            self._prefixes.add(pod.target, hashes[pod.load.block_size])
        return Route(best, tuple(prefill))

    def forget(self, pod: Pod) -> None:
        """Forgets the cache of a pod that died."""
        self._prefixes.forget(pod.target)

    def _cost(
        self, pod: Pod, request: TokenizedRequest, hashes: Sequence[ChainHash]
    ) -> tuple[bool, int, int, str]:
        """Sort key: lacks room for the prompt, tokens of work, most free blocks first, then the name."""
        load = pod.load
        cached = self._prefixes.num_matching(pod.target, hashes) * load.block_size
        # The pod's report is up to a second old; `in_flight` is exact but leaves out other gateways.
        busy = max(pod.in_flight, load.num_requests)
        work = len(request.prompt_token_ids) - cached + busy * _TOKENS_PER_REQUEST[pod.role]
        needed = -(-len(request.prompt_token_ids) // load.block_size) if load.block_size else 0
        lacks_room = needed > load.free_blocks
        return lacks_room, work, -load.free_blocks, pod.target
