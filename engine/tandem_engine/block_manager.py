"""Assigns KV blocks to requests: block tables, the prefix cache, and blocks in KV transfers.

    match_prefix(r)   adopt the longest cached prefix, full blocks only
    allocate(r, n)    extend the table so that it covers n tokens; None when the pool is short
    (the step runs: KV is written, drafts are verified)
    trim(r, n)        free the blocks that only rejected drafts needed
    commit(r)         make full blocks of verified tokens findable
    free(r)           free all blocks; findable blocks stay findable until they are reused

Layout of one request's table (block_size 4, num_computed_tokens 14, a draft of 3 nodes):

    position  0       4       8       12      16      20
              |-------|-------|-------|-----··|··-----|
    block     b0      b1      b2      b3      b4
              |<- adopted ->|
              |<---- committed ------>|                   full, computed, findable by others
              |<----- num_computed ------>|               KV is valid
              |<-- num_tokens --------------->|           one token is being decoded: the draft's root
              |<-- allocate(r, num_computed + 1 + 3) -->| root and nodes; nodes are never committed

During a KV transfer a block has two owners: its request, and the transfer's writer or reader through a
BlockHold. A block is free when both have released it.

There are no locks: all calls come from the engine's thread. A transport that finishes on another thread
passes its `release` to the engine's thread.

The beams of a beam search are one request with a table for each beam (block_size 4, 14 tokens computed, beams
1 and 2 forked from beam 0):

    beam 0    b0      b1      b2      b3              full blocks are shared, by their reference counts
    beam 1    b0      b1      b2      b5              a partial last block is copied: b3 to b5 and b6
    beam 2    b0      b1      b2      b6
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_core.errors import InvariantError
from tandem_core.prefix_hash import BlockHasher, ChainHash, hash_block, hash_salt

from tandem_engine.block_pool import BlockContent, BlockPool
from tandem_engine.request import Request

__all__ = ["BlockCopy", "BlockHold", "BlockManager", "BlockUsage"]


@dataclass(frozen=True)
class BlockUsage:
    """How the pool's blocks are used; `total == free + used`."""

    total: int
    #: Can be allocated now.
    free: int
    #: Free blocks whose KV prompts can still find.
    cached: int
    #: Referenced by a request or by a transfer.
    used: int


@dataclass(frozen=True, eq=False)
class BlockHold:
    """A transfer's ownership of blocks, from `hold` to `release`; compared by identity."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class BlockCopy:
    """KV to be copied before the next step: the first num_slots slots of a block."""

    source: int
    destination: int
    num_slots: int


@dataclass
class _BlockTable:
    """One request's blocks in logical order, and the hashes of its leading full blocks.

    0 <= num_committed <= len(block_ids) and num_committed <= len(contents)
    """

    block_ids: list[int] = field(default_factory=list)
    #: Kept from the prefix lookup for `commit`, so that a block is hashed once.
    contents: list[BlockContent] = field(default_factory=list)
    num_committed: int = 0
    #: The blocks of the beams after the first, as many as it has.
    more_beams: list[list[int]] = field(default_factory=list)
    #: Copies of the last fork, until they are taken.
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def beams(self) -> list[list[int]]:
        return [self.block_ids, *self.more_beams]


class BlockManager:
    """Tracks every block of the pool. A shortage of blocks returns None or False; a broken invariant raises.

    Tests pass a `hasher` that collides.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 64,
        *,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher = hash_block,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token, not {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._hasher = hasher
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, _BlockTable] = {}
        self._holds: set[BlockHold] = set()

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens occupy."""
        return -(-num_tokens // self.block_size)

    def has_table(self, request_id: str) -> bool:
        return request_id in self._tables

    def owners(self) -> frozenset[str]:
        """Ids of the requests that own a block table."""
        return frozenset(self._tables)

    def block_ids(self, request_id: str, beam: int = 0) -> tuple[int, ...]:
        """Physical blocks in logical order."""
        return tuple(self._table(request_id).beams[beam])

    def num_held(self, request_id: str) -> int:
        """Blocks that the request holds, shared ones included."""
        return len(set().union(*self._table(request_id).beams))

    # -- prefix cache ---------------------------------------------------------------------------------

    def count_cached(self, token_ids: Sequence[int], cache_salt: bytes) -> int:
        """Number of leading tokens of this prompt that are in the cache now; changes nothing."""
        hits = 0
        parent = hash_salt(cache_salt)
        for start in range(0, self._num_matchable(len(token_ids) - 1), self.block_size):
            content = self._content(parent, token_ids[start : start + self.block_size])
            if self._pool.find(content) is None:
                break
            parent = content.chain_hash
            hits += 1
        return hits * self.block_size

    def match_prefix(self, request: Request) -> int:
        """Start the request's table with the blocks that hold its longest cached prefix.

        Returns the number of tokens they cover: a multiple of block_size, at most
        `request.num_matchable_tokens`. Their references are the request's until `free`.
        """
        if request.request_id in self._tables:
            raise InvariantError(f"request {request.request_id} already owns a block table")
        table = self._tables[request.request_id] = _BlockTable()
        for i in range(self._num_matchable(request.num_matchable_tokens) // self.block_size):
            block_id = self._pool.find(self._chain(request, table, i))
            if block_id is None:
                break
            self._pool.share(block_id)
            table.block_ids.append(block_id)
        table.num_committed = len(table.block_ids)
        return table.num_committed * self.block_size

    def commit(self, request: Request) -> None:
        """Make every full block of [0, num_computed_tokens) findable.

        Draft slots lie beyond num_computed_tokens until verification, so no unverified token is findable.
        """
        table = self._table(request.request_id)
        num_full = request.num_computed_tokens // self.block_size
        if request.num_computed_tokens > request.num_tokens or num_full > len(table.block_ids):
            raise InvariantError(
                f"request {request.request_id}: {request.num_computed_tokens} tokens computed, but it has "
                f"{request.num_tokens} tokens and {len(table.block_ids)} blocks"
            )
        if not self.enable_prefix_caching:
            return
        for i in range(table.num_committed, num_full):
            self._pool.register(table.block_ids[i], self._chain(request, table, i))
        table.num_committed = max(table.num_committed, num_full)

    # -- a request's table ----------------------------------------------------------------------------

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Extend the table of each beam to cover num_tokens; False, and nothing changed, when blocks are
        short."""
        table = self._tables.get(request.request_id)
        missing = self.blocks_for(num_tokens) - (len(table.block_ids) if table else 0)
        if missing > 0:
            taken = self._pool.take(missing * (len(table.beams) if table else 1))
            if taken is None:
                return False
            if table is None:
                table = self._tables[request.request_id] = _BlockTable()
            for i, block_ids in enumerate(table.beams):
                block_ids += taken[i * missing : (i + 1) * missing]
        return True

    def fork(self, request: Request, parents: Sequence[int]) -> bool:
        """Beam i continues beam parents[i], with its KV of [0, num_computed_tokens); beams without a child
        end. False, and nothing changed, when blocks are short.

        The KV is there when `take_copies` was called and its copies are made.
        """
        table = self._table(request.request_id)
        num_full, num_slots = divmod(request.num_computed_tokens, self.block_size)
        before = table.beams
        if any(len(block_ids) != self.blocks_for(request.num_computed_tokens) for block_ids in before):
            raise InvariantError(f"request {request.request_id} forks with blocks that hold nothing")
        if table.copies:
            raise InvariantError(f"request {request.request_id} forks before its last fork is copied")
        kept = set(parents)
        num_ended = len(before) - len(kept)
        if num_slots and len(parents) - len(kept) - num_ended > self._pool.num_free:
            return False
        # First the new references, so that shared blocks stay. Without the old ones the partial blocks of
        # ended beams are free for copies.
        beams = [before[parent][:num_full] for parent in parents]
        for block_id in (block_id for block_ids in beams for block_id in block_ids):
            self._pool.share(block_id)
        for i, block_ids in enumerate(before):
            for block_id in reversed(block_ids[:num_full] if i in kept else block_ids):
                self._pool.drop(block_id)
        if num_slots:
            copied = self._pool.take(len(parents) - len(kept))
            if copied is None:
                raise InvariantError("blocks counted as free could not be allocated")
            for block_ids, parent in zip(beams, parents, strict=True):
                partial = before[parent][num_full]
                if parent in kept:  # the first child takes it
                    kept.remove(parent)
                    block_ids.append(partial)
                else:
                    block_ids.append(copied.pop())
                    table.copies.append(BlockCopy(partial, block_ids[-1], num_slots))
        table.block_ids, *table.more_beams = beams
        return True

    def take_copies(self, request: Request) -> list[BlockCopy]:
        """What is to be copied before the request's next step; each copy is handed out once."""
        table = self._table(request.request_id)
        copies, table.copies = table.copies, []
        return copies

    def num_allocatable_tokens(self, request_id: str) -> int:
        """Tokens this table could cover if it were given every free block."""
        return (len(self._table(request_id).block_ids) + self._pool.num_free) * self.block_size

    def trim(self, request: Request, num_tokens: int) -> None:
        """Give back the blocks that num_tokens tokens do not need."""
        table = self._table(request.request_id)
        needed = self.blocks_for(num_tokens)
        if needed < table.num_committed:
            raise InvariantError(f"request {request.request_id} would give back verified blocks")
        while len(table.block_ids) > needed:
            self._pool.drop(table.block_ids.pop())

    def free(self, request: Request) -> None:
        """Free all blocks, the last first: eviction then starts at a chain's end, and its beginning, which
        other prompts are more likely to share, stays longest."""
        table = self._table(request.request_id)
        del self._tables[request.request_id]
        for block_ids in reversed(table.beams):
            for block_id in reversed(block_ids):
                self._pool.drop(block_id)

    # -- transfers ------------------------------------------------------------------------------------

    def hold(self, block_ids: Sequence[int]) -> BlockHold:
        """Make the caller the second owner of blocks that a request owns, until `release`."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks or self._pool.is_free(block_id):
                raise InvariantError(f"block {block_id} belongs to no request: it cannot be held")
        for block_id in block_ids:
            self._pool.share(block_id)
        hold = BlockHold(tuple(block_ids))
        self._holds.add(hold)
        return hold

    def release(self, hold: BlockHold) -> None:
        """End a hold; blocks whose request is gone become free now."""
        if hold not in self._holds:
            raise InvariantError(f"the hold on blocks {hold.block_ids} was released before")
        self._holds.remove(hold)
        for block_id in reversed(hold.block_ids):
            self._pool.drop(block_id)

    # -- accounting -----------------------------------------------------------------------------------

    def usage(self) -> BlockUsage:
        free = self._pool.num_free
        return BlockUsage(self.num_blocks, free, self._pool.num_free_findable, self.num_blocks - free)

    def check(self) -> list[str]:
        """Audit everything; one sentence per fault, empty when every invariant holds. O(num_blocks)."""
        owners: Counter[int] = Counter()
        faults = []
        for request_id, table in self._tables.items():
            for block_ids in table.beams:
                owners.update(block_ids)
                if len(set(block_ids)) != len(block_ids):
                    faults.append(f"request {request_id} has a block twice in its table")
                if len(block_ids) != len(table.block_ids):
                    faults.append(f"request {request_id} has beams of different lengths")
            if table.num_committed > min(len(table.block_ids), len(table.contents)):
                faults.append(f"request {request_id} has committed blocks it does not own")
        for hold in self._holds:
            owners.update(hold.block_ids)
        return faults + self._pool.check(owners)

    def _num_matchable(self, num_tokens: int) -> int:
        """Number of the `num_tokens` first tokens that are in full blocks."""
        if not self.enable_prefix_caching:
            return 0
        return max(num_tokens, 0) // self.block_size * self.block_size

    def _content(self, parent: ChainHash, token_ids: Sequence[int]) -> BlockContent:
        return BlockContent(self._hasher(parent, token_ids), tuple(token_ids))

    def _chain(self, request: Request, table: _BlockTable, index: int) -> BlockContent:
        """Content of logical block `index`; hashed once and kept in the table."""
        if index == len(table.contents):
            parent = table.contents[-1].chain_hash if table.contents else hash_salt(request.cache_salt)
            start = index * self.block_size
            table.contents.append(self._content(parent, request.tokens(start, start + self.block_size)))
        return table.contents[index]

    def _table(self, request_id: str) -> _BlockTable:
        table = self._tables.get(request_id)
        if table is None:
            raise InvariantError(f"request {request_id} owns no blocks")
        return table
