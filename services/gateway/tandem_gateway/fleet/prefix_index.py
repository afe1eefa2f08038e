"""Estimates which prompts each pod has in its prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from tandem_core.prefix_hash import ChainHash

#: Blocks remembered per pod: 4 million tokens in blocks of 64.
_MAX_BLOCKS_PER_POD = 65_536
#: Blocks remembered of all pods, 160 bytes each.
_MAX_BLOCKS = 8 * _MAX_BLOCKS_PER_POD


class PrefixIndex:
    """Estimates the prefix cache of each pod: an LRU of the prompt blocks sent to it.

    While all pods together have too many blocks, the pod with the most forgets its oldest ones.
    """

    def __init__(self, max_blocks_per_pod: int = _MAX_BLOCKS_PER_POD, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks_per_pod = max_blocks_per_pod
        self._max_blocks = max_blocks
        self._seen: dict[str, OrderedDict[ChainHash, None]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks remembered of all pods."""
        return sum(map(len, self._seen.values()))

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
        # The last block goes first, so that the end of a prompt is evicted before its beginning.
        for block in reversed(hashes):
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._max_blocks_per_pod:
            seen.popitem(last=False)
        for _ in range(self.num_blocks - self._max_blocks):
            max(self._seen.values(), key=len).popitem(last=False)

    def forget(self, target: str) -> None:
        self._seen.pop(target, None)

    def keep_only(self, targets: Collection[str]) -> None:
        """Forgets every other pod."""
        for target in self._seen.keys() - set(targets):
            del self._seen[target]
