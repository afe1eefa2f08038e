"""Which decode pod takes a request, and which prefill pods it may ask, in what order.

A decode pod's cost is counted in prompt tokens still to be computed: those of this prompt that the pod has
not seen before, plus a fixed number for each of its unfinished requests. So a conversation returns to the pod
that holds its KV, unless that pod is so busy that computing the prompt elsewhere is cheaper.

Each pod caches prefixes in blocks of its own size, which it reports with its load.
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
#: An unfinished request costs as much as this many uncached prompt tokens.
_TOKENS_PER_REQUEST = 512


@dataclass(frozen=True)
class Route:
    decode: Pod
    prefill_targets: tuple[str, ...]


class PrefixIndex:
    """What each pod has probably cached: the prompts sent there; an LRU of blocks per pod."""

    def __init__(self, max_blocks_per_pod: int = _MAX_BLOCKS_PER_POD) -> None:
        self._max_blocks = max_blocks_per_pod
        self._seen: dict[str, OrderedDict[ChainHash, None]] = {}

    def num_matching(self, target: str, hashes: Sequence[ChainHash]) -> int:
        """Leading blocks of the prompt that the pod has seen."""
        seen = self._seen.get(target, OrderedDict())
        count = 0
        for block in hashes:
            if block not in seen:
                break
            count += 1
        return count

    def add(self, target: str, hashes: Sequence[ChainHash]) -> None:
        seen = self._seen.setdefault(target, OrderedDict())
        # Tail first: when space runs out, the end of a prompt goes before its beginning.
        for block in reversed(hashes):
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._max_blocks:
            seen.popitem(last=False)

    def forget(self, target: str) -> None:
        """Drop a pod whose cache is gone."""
        self._seen.pop(target, None)

    def keep_only(self, targets: Collection[str]) -> None:
        """Forget every pod not named."""
        for target in self._seen.keys() - set(targets):
            del self._seen[target]


class Router:
    """Chooses among the fleet's healthy pods."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._prefixes = PrefixIndex()

    def choose(self, request: TokenizedRequest, excluded: frozenset[str] = frozenset()) -> Route | None:
        """The cheapest decode pod not in `excluded`, remembered as having seen the prompt; None: no pod."""
        healthy = self._fleet.healthy(Role.DECODE)
        # A pod that left or restarted has lost its cache, and its entries would fill our memory.
        self._prefixes.keep_only([pod.target for pod in healthy])
        candidates = [pod for pod in healthy if pod.target not in excluded]
        if not candidates:
            return None
        salt = cache_salt(request.tenant, model_revision="")
        # A pod that reports no block size is one without a prefix to return to.
        hashes = {
            size: hash_prefixes(salt, request.prompt_token_ids, size) if size else []
            for size in {pod.load.block_size for pod in candidates}
        }
        best = min(candidates, key=lambda pod: self._cost(pod, request, hashes[pod.load.block_size]))
        self._prefixes.add(best.target, hashes[best.load.block_size])
        prefill = sorted(self._fleet.healthy(Role.PREFILL), key=_prefill_order)
        return Route(best, tuple(pod.target for pod in prefill))

    def forget(self, pod: Pod) -> None:
        """Drop what is remembered of a pod that died."""
        self._prefixes.forget(pod.target)

    def _cost(
        self, pod: Pod, request: TokenizedRequest, hashes: Sequence[ChainHash]
    ) -> tuple[bool, int, int, str]:
        """Least first: has room for the prompt, tokens of work, then most free blocks, then the name."""
        load = pod.load
        cached = self._prefixes.num_matching(pod.target, hashes) * load.block_size
        # The pod's report is up to a second old; our own count is exact but knows no other gateway.
        busy = max(pod.in_flight, load.num_requests)
        work = len(request.prompt_token_ids) - cached + busy * _TOKENS_PER_REQUEST
        needed = -(-len(request.prompt_token_ids) // load.block_size) if load.block_size else 0
        lacks_room = needed > load.free_blocks
        return lacks_room, work, -load.free_blocks, pod.target


def _prefill_order(pod: Pod) -> tuple[int, int, str]:
    return pod.load.num_requests, -pod.load.free_blocks, pod.target
