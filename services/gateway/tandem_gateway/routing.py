"""Which decode pod takes a request, and which prefill pods it may ask, in what order.

A decode pod's cost is counted in prompt tokens still to be computed: those of this prompt that the pod has
not seen before, plus a fixed number for each request it is busy with. So a conversation returns to the pod
that holds its KV, unless that pod is so much busier that computing anew elsewhere is cheaper.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem_gateway.fleet import Fleet, Pod, Role
from tandem_gateway.request import Job

#: Tokens a hash stands for; the pods' default block size.
HASH_BLOCK = 64
#: Blocks remembered per pod, about 4 million tokens.
_MAX_BLOCKS_PER_POD = 65_536
#: A request in progress weighs as much as this many uncached prompt tokens.
_TOKENS_PER_REQUEST = 512


@dataclass(frozen=True)
class Route:
    decode: Pod
    prefill_targets: tuple[str, ...]


def chain_hashes(tenant: str, token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """One hash per full block, each covering everything before it, salted with the tenant."""
    parent = tenant.encode()
    hashes = []
    for start in range(0, len(token_ids) - HASH_BLOCK + 1, HASH_BLOCK):
        block = array("I", token_ids[start : start + HASH_BLOCK]).tobytes()
        parent = hashlib.blake2b(block, key=parent[:64], digest_size=16).digest()
        hashes.append(parent)
    return tuple(hashes)


class PrefixIndex:
    """What each pod has probably cached: the prompts sent there, least recently used forgotten first."""

    def __init__(self, max_blocks_per_pod: int = _MAX_BLOCKS_PER_POD) -> None:
        self._max_blocks = max_blocks_per_pod
        self._seen: dict[str, OrderedDict[bytes, None]] = {}

    def num_matching(self, target: str, hashes: Sequence[bytes]) -> int:
        """Leading blocks of the prompt that the pod has seen."""
        seen = self._seen.get(target, OrderedDict())
        count = 0
        for block in hashes:
            if block not in seen:
                break
            count += 1
        return count

    def add(self, target: str, hashes: Sequence[bytes]) -> None:
        seen = self._seen.setdefault(target, OrderedDict())
        # Tail first: when space runs out, the end of a prompt goes before its beginning.
        for block in reversed(hashes):
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._max_blocks:
            seen.popitem(last=False)

    def forget(self, target: str) -> None:
        """The pod died, and its cache with it."""
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

    def choose(self, job: Job, excluded: frozenset[str] = frozenset()) -> Route | None:
        """The cheapest decode pod not in `excluded`, remembered as having seen the prompt; None: no pod."""
        hashes = chain_hashes(job.tenant, job.prompt_token_ids)
        healthy = self._fleet.healthy(Role.DECODE)
        # Whoever left or restarted has lost its cache; a crowd of replaced pods would fill our memory.
        self._prefixes.keep_only([pod.target for pod in healthy])
        candidates = [pod for pod in healthy if pod.target not in excluded]
        if not candidates:
            return None
        best = min(candidates, key=lambda pod: self._cost(pod, job, hashes))
        self._prefixes.add(best.target, hashes)
        prefill = sorted(self._fleet.healthy(Role.PREFILL), key=_prefill_order)
        return Route(best, tuple(pod.target for pod in prefill))

    def forget(self, pod: Pod) -> None:
        """Drop what is remembered of a pod that died."""
        self._prefixes.forget(pod.target)

    def _cost(self, pod: Pod, job: Job, hashes: Sequence[bytes]) -> tuple[bool, int, int, str]:
        """Least first: has room for the prompt, tokens of work, then most free blocks, then the name."""
        load = pod.load
        cached = self._prefixes.num_matching(pod.target, hashes) * HASH_BLOCK
        # The pod's report is up to a second old; our own count is exact but knows no other gateway.
        busy = max(pod.in_flight, load.num_requests)
        work = len(job.prompt_token_ids) - cached + busy * _TOKENS_PER_REQUEST
        needed = -(-len(job.prompt_token_ids) // load.block_size) if load.block_size else 0
        lacks_room = needed > load.free_blocks
        return lacks_room, work, -load.free_blocks, pod.target


def _prefill_order(pod: Pod) -> tuple[int, int, str]:
    return pod.load.num_requests, -pod.load.free_blocks, pod.target
