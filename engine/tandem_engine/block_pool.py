"""Physical KV blocks: their reference counts, the free ones, and the cached contents of the free ones.

    take() ──> referenced ──register()──> referenced, findable
                   │ drop()                     │ drop()
                   v                            v
                 blank                  free but findable ──share()──> referenced, findable
                   ^                            │ evicted by take(), least recently used first
                   └────────────────────────────┘ (and is handed out at once)

A block is free when its reference count is zero. take() hands out blank blocks first, then the least
recently dropped findable one. The index is a dict from chain hash to block, so a prefix lookup takes one
probe per block. The LRU list is an ordered dict, from which share() removes any block in O(1). There are no
locks: all calls come from the engine's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from tandem_core.errors import InvariantError
from tandem_core.prefix_hash import ChainHash


@dataclass(frozen=True)
class BlockContent:
    """Content of a findable block; on a hit the tokens are compared too."""

    chain_hash: ChainHash
    token_ids: tuple[int, ...]


class BlockPool:
    """Reference counts, free lists and the hash index over `num_blocks` physical blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._contents: list[BlockContent | None] = [None] * num_blocks
        self._index: dict[ChainHash, int] = {}
        # Popped from the end: low ids first, which keeps tests and traces readable.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._free_findable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that take() can hand out now, the findable ones included."""
        return len(self._blank) + len(self._free_findable)

    @property
    def num_free_findable(self) -> int:
        return len(self._free_findable)

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each and undefined contents; None when fewer are free."""
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = self._free_findable.popitem(last=False)
                self._forget(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_id: int) -> None:
        """One more reference; revives a free block that is still findable."""
        if self._ref_counts[block_id] == 0:
            if block_id not in self._free_findable:
                raise InvariantError(f"block {block_id} is blank: there is nothing in it to share")
            del self._free_findable[block_id]
        self._ref_counts[block_id] += 1

    def drop(self, block_id: int) -> None:
        """One reference less; with the last one the block becomes free, most recently used."""
        if self._ref_counts[block_id] == 0:
            raise InvariantError(f"block {block_id} is free and was given back once more")
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            if self._contents[block_id] is None:
                self._blank.append(block_id)
            else:
                self._free_findable[block_id] = None

    def register(self, block_id: int, content: BlockContent) -> None:
        """Make a referenced, fully computed block findable.

        If another block has this hash already (two requests computed the same prompt at once), that one stays
        in the index, and this block becomes blank when its request ends.
        """
        if self._ref_counts[block_id] == 0 or self._contents[block_id] is not None:
            raise InvariantError(f"block {block_id} is free or already findable: it cannot be registered")
        if content.chain_hash not in self._index:
            self._index[content.chain_hash] = block_id
            self._contents[block_id] = content

    def find(self, content: BlockContent) -> int | None:
        """The block that holds exactly this content; None on a miss or on a hash collision."""
        block_id = self._index.get(content.chain_hash)
        if block_id is None or self._contents[block_id] != content:
            return None
        return block_id

    def _forget(self, block_id: int) -> None:
        content = self._contents[block_id]
        if content is not None:
            del self._index[content.chain_hash]
            self._contents[block_id] = None

    def check(self, owners: Counter[int]) -> list[str]:
        """Faults found, given how many owners each block should have; empty when all is well."""
        faults = [
            f"block {b}: {n} references, {owners[b]} owners"
            for b, n in enumerate(self._ref_counts)
            if n != owners[b]
        ]
        faults += [f"block {b} does not exist but has owners" for b in owners if not 0 <= b < self.num_blocks]
        listed = Counter([*self._blank, *self._free_findable])
        for b, n in enumerate(self._ref_counts):
            if listed[b] != (n == 0):
                faults.append(f"block {b}: {n} references, {listed[b]} times in the free lists")
            content = self._contents[b]
            if content is not None and self._index.get(content.chain_hash) != b:
                faults.append(f"block {b} is registered but its hash leads elsewhere")
        faults += [f"block {b} is listed as blank but registered" for b in self._blank if self._contents[b]]
        faults += [f"block {b} is listed as findable but blank" for b in self._free_findable
                   if self._contents[b] is None]  # fmt: skip
        if len(self._index) != sum(c is not None for c in self._contents):
            faults.append("the hash index and the registered blocks differ in number")
        return faults
