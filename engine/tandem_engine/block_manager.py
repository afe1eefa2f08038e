"""Assigns KV blocks to requests: block tables, the prefix cache, and blocks in KV transfers.

    match_prefix(r)   adopt the longest cached prefix, full blocks only
    allocate(r, n)    extend the table so that it covers n tokens; False when a pool is short
    (the step runs: KV is written, drafts are verified)
    trim(r, n)        free the blocks that only rejected drafts needed
    commit(r)         make full blocks of verified tokens findable
    slide(r)          free the blocks that no window reaches any more
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

Layers whose caches have one shape and one lifetime are a group, with a pool and a table per request of its
own. Logical blocks have the same tokens in all groups. In a group with a window, a table has only the blocks
that the next step reads or writes. In place of the others stands the pool's scratch block, `num_blocks`,
whose KV is never used (x). With a window of 5 in the picture above:

    full      b0      b1      b2      b3      b4
    window    x       x       w2      w3      w4          the next query, at 14, sees positions 10 to 14

Thus a sequence holds at most ceil((window + tokens of a step) / block_size) + 1 blocks of such a group,
however long it is. A prefix is cached if full groups have all its blocks, and windows the last ones.
Groups that keep a fixed size per sequence (state) are none of these: they have no blocks, but slots, which a
request has as long as its table (state_slots.py). There a prefix is cached where a snapshot of its state is.

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

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem_core.errors import InvariantError
from tandem_core.prefix_hash import BlockHasher, hash_block, hash_salt

from tandem_engine.block_pool import BlockContent, BlockPool
from tandem_engine.request import Request
from tandem_engine.state_slots import StateSlots

__all__ = ["BlockCopy", "BlockGroup", "BlockHold", "BlockManager", "BlockUsage"]


@dataclass(frozen=True)
class BlockGroup:
    """The blocks of the layers that share a block table."""

    num_blocks: int
    #: Keys that a query sees, its own included; None: all.
    window: int | None = None

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or (self.window is not None and self.window < 1):
            raise ValueError(f"a group needs at least one block and a window of one token, not {self}")


@dataclass(frozen=True)
class BlockUsage:
    """How a pool's blocks are used; `total == free + used`."""

    total: int
    #: Can be allocated now.
    free: int
    #: Free blocks whose KV prompts can still find.
    cached: int
    #: Referenced by a request or by a transfer.
    used: int


@dataclass(frozen=True, eq=False)
class BlockHold:
    """A transfer's ownership of blocks of a group, from `hold` to `release`; compared by identity."""

    block_ids: tuple[int, ...]
    group: int


@dataclass(frozen=True)
class BlockCopy:
    """KV to be copied before the next step: the first num_slots slots of a block of a group."""

    source: int
    destination: int
    num_slots: int
    group: int = 0


@dataclass
class _GroupTable:
    """One request's blocks of a group in logical order.

    The table of each beam: at least one, all of one length.
    """

    beams: list[list[int]] = field(default_factory=lambda: [[]])
    #: Leading entries that a window has left.
    num_left: int = 0

    def __len__(self) -> int:
        return len(self.beams[0])


@dataclass
class _BlockTable:
    """One request's blocks in all groups, and the hashes of its leading full blocks.

    0 <= num_committed <= blocks of each group and num_committed <= len(contents)
    """

    groups: list[_GroupTable]
    #: Kept from the prefix lookup for `commit`, so that a block is hashed once.
    contents: list[BlockContent] = field(default_factory=list)
    num_committed: int = 0
    #: Copies of the last fork, until they are taken.
    copies: list[BlockCopy] = field(default_factory=list)


class _Group:
    """A group's pool; `scratch` stands in tables for no block."""

    def __init__(self, group: BlockGroup, block_size: int, max_step_tokens: int) -> None:
        self.num_blocks = self.scratch = group.num_blocks
        self.window = group.window
        self.pool = BlockPool(group.num_blocks)
        self._block_size = block_size
        #: Most blocks that a sequence holds.
        self.bound: int | None = None
        if group.window is not None:
            self.bound = -(-(group.window + max_step_tokens) // block_size) + 1

    def first_block(self, num_computed_tokens: int) -> int:
        """The first block that the token behind these sees."""
        if self.window is None:
            return 0
        return max(num_computed_tokens - self.window + 1, 0) // self._block_size

    def at_most(self, num_blocks: int) -> int:
        """Blocks that a text of `num_blocks` blocks holds."""
        return num_blocks if self.bound is None else min(num_blocks, self.bound)

    def take(self, count: int) -> list[int]:
        taken = self.pool.take(count)
        if taken is None:
            raise InvariantError("blocks counted as free could not be allocated")
        return taken

    def drop(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id != self.scratch:
                self.pool.drop(block_id)

    def share(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id != self.scratch:
                self.pool.share(block_id)


class BlockManager:
    """Tracks every block of the pools. A shortage of blocks returns False; a broken invariant raises.

    Args:
        groups: a pool for each.
        block_size: tokens of a block, in all groups.
        max_step_tokens: most tokens of one sequence in a step, drafts included; bounds what windows hold.
        hasher: tests pass one that collides.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        block_size: int = 64,
        *,
        max_step_tokens: int = 512,
        enable_prefix_caching: bool = True,
        states: StateSlots | None = None,
        hasher: BlockHasher = hash_block,
    ) -> None:
        if not groups or block_size < 1 or max_step_tokens < 1:
            raise ValueError(
                f"need a group, blocks and steps of at least a token, not {groups}, {block_size} and "
                f"{max_step_tokens}"
            )
        if states is not None and any(group.window is not None for group in groups):
            raise ValueError(
                "a prefix that ends with both a window and a recurrent state is not searched for"
            )
        self.block_size = block_size
        self.max_step_tokens = max_step_tokens
        self.enable_prefix_caching = enable_prefix_caching
        #: None: no layer has a recurrent state.
        self.states = states
        self._hasher = hasher
        self._groups = [_Group(group, block_size, max_step_tokens) for group in groups]
        self._windows = [(g, group) for g, group in enumerate(self._groups) if group.window is not None]
        #: The group that counts stand for: one whose blocks hold whole texts, if there is one.
        self._main = next((group for group in self._groups if group.window is None), self._groups[0])
        self._no_blocks = [0] * len(self._groups)
        self._tables: dict[str, _BlockTable] = {}
        self._holds: set[BlockHold] = set()

    @property
    def has_windows(self) -> bool:
        return bool(self._windows)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_blocks(self) -> int:
        """Counts blocks of the group that holds whole texts, as all counts here that name no group."""
        return self._main.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._main.pool.num_free

    def is_free(self, block_id: int) -> bool:
        """Whether no request holds the block of full attention."""
        return self._main.pool.is_free(block_id)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens occupy."""
        return -(-num_tokens // self.block_size)

    def max_tokens(self, num_beams: int = 1, num_shared: int = 0) -> int:
        """Longest text that the pools hold for each of `num_beams`, which share num_shared blocks."""
        return min(
            (
                (group.num_blocks + num_shared) // num_beams * self.block_size
                for group in self._groups
                if group.bound is None or group.bound * num_beams > group.num_blocks
            ),
            default=sys.maxsize,
        )

    def has_table(self, request_id: str) -> bool:
        return request_id in self._tables

    def owners(self) -> frozenset[str]:
        """Ids of the requests that own a block table."""
        return frozenset(self._tables)

    def block_ids(self, request_id: str, beam: int = 0) -> tuple[tuple[int, ...], ...]:
        """By group, the physical blocks in logical order, or the scratch block where there is none."""
        return tuple([tuple(group.beams[beam]) for group in self._table(request_id).groups])

    def is_block(self, group: int, block_id: int) -> bool:
        """Whether an entry of `block_ids` is a block of the request's."""
        return block_id != self._groups[group].scratch

    # -- prefix cache ---------------------------------------------------------------------------------

    def count_cached(self, token_ids: Sequence[int], cache_salt: bytes) -> int:
        """Number of leading tokens of this prompt that are in the cache now; changes nothing."""

        seen: list[BlockContent] = []

        def contents() -> Iterator[BlockContent]:
            parent = hash_salt(cache_salt)
            for start in range(0, self._num_matchable(len(token_ids) - 1), self.block_size):
                part = tuple(token_ids[start : start + self.block_size])
                seen.append(BlockContent(self._hasher(parent, part), part))
                yield seen[-1]
                parent = seen[-1].chain_hash

        num_blocks, _ = self._find(contents())
        if self.states is not None:
            num_blocks = self.states.find(seen[:num_blocks])
        return num_blocks * self.block_size

    def match_prefix(self, request: Request) -> int:
        """Start the request's table with the blocks that hold its longest cached prefix.

        Returns the number of tokens they cover: a multiple of block_size, at most
        `request.num_matchable_tokens`. Their references are the request's until `free`.
        """
        if request.request_id in self._tables:
            raise InvariantError(f"request {request.request_id} already owns a block table")
        table = self._tables[request.request_id] = self._new_table()
        most = self._num_matchable(request.num_matchable_tokens) // self.block_size
        num_blocks, found = self._find(self._chain(request, table, i) for i in range(most))
        if self.states is not None:
            cached = table.contents[:num_blocks]
            begun = self.states.begin(request.request_id, request.num_tokens, cached)
            num_blocks = self.states.num_tokens(request.request_id) // self.block_size if begun else 0
        for group, own, block_ids in zip(self._groups, table.groups, found, strict=True):
            own.num_left = group.first_block(num_blocks * self.block_size)
            kept = block_ids[own.num_left : num_blocks]
            group.share(kept)
            own.beams[0] += [group.scratch] * own.num_left + kept
        table.num_committed = num_blocks
        return num_blocks * self.block_size

    def _find(self, contents: Iterable[BlockContent]) -> tuple[int, list[list[int]]]:
        """Number of leading blocks on which all groups agree, and of each group those that it has."""
        found: list[list[int]] = [[] for _ in self._groups]

        def blocks() -> Iterator[list[bool]]:
            for content in contents:
                ids = [group.pool.find(content) for group in self._groups]
                for group, own, block_id in zip(self._groups, found, ids, strict=True):
                    own.append(group.scratch if block_id is None else block_id)
                yield [block_id is not None for block_id in ids]

        return self._agreed(blocks()), found

    def _agreed(self, blocks: Iterable[Sequence[bool]], most_tokens: int = sys.maxsize) -> int:
        """The longest prefix, in blocks, behind which a step can compute: full groups have all blocks of it,
        windows those that the next token sees.

        blocks: for each logical block, whether each group has it.
        most_tokens: computed tokens, at most.
        """
        runs = [0] * len(self._groups)
        agreed = 0
        for num_blocks, there in enumerate(blocks, start=1):
            end = min(num_blocks * self.block_size, most_tokens)
            fits = True
            for g, group in enumerate(self._groups):
                runs[g] = runs[g] + 1 if there[g] else 0
                if runs[g] < num_blocks - group.first_block(end):
                    if group.window is None:
                        return agreed
                    fits = False
            if fits:
                agreed = num_blocks
        return agreed

    def commit(self, request: Request) -> None:
        """Make every full block of [0, num_computed_tokens) findable.

        Draft slots lie beyond num_computed_tokens until verification, so no unverified token is findable.
        """
        table = self._table(request.request_id)
        num_full = request.num_computed_tokens // self.block_size
        if num_full == table.num_committed and request.num_computed_tokens <= request.num_tokens:
            return  # most decoding steps
        least = min([len(own) for own in table.groups])
        if request.num_computed_tokens > request.num_tokens or num_full > least:
            raise InvariantError(
                f"request {request.request_id}: {request.num_computed_tokens} tokens computed, but it has "
                f"{request.num_tokens} tokens and {least} blocks"
            )
        if not self.enable_prefix_caching:
            return
        for i in range(table.num_committed, num_full):
            content = self._chain(request, table, i)
            for group, own in zip(self._groups, table.groups, strict=True):
                if own.beams[0][i] != group.scratch:
                    group.pool.register(own.beams[0][i], content)
        table.num_committed = max(table.num_committed, num_full)

    # -- a request's table ----------------------------------------------------------------------------

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Extend the table of each beam to cover num_tokens, in groups with a window only those of the next
        step; False, and nothing changed, when blocks are short."""
        num_blocks = self.blocks_for(num_tokens)
        table = self._tables.get(request.request_id)
        if table is not None and not self._windows and len(table.groups[0].beams[0]) >= num_blocks:
            return True  # most decoding steps
        return self._extend(request, self._next_step(request, num_tokens), self._no_blocks)

    def allocate_known(self, request: Request, keep_free: Sequence[int]) -> bool:
        """`allocate` all known tokens, while `keep_free` blocks of each group stay free."""
        return self._extend(request, self._next_step(request, request.num_tokens), keep_free)

    def allocate_transfer(self, request: Request, keep_free: Sequence[int]) -> bool:
        """`allocate_known` for a request whose KV will come from a transfer: groups with a window get blocks
        for what the last token sees, so that it can be computed here, too."""
        end = self.blocks_for(request.num_tokens)
        parts = [(group.first_block(request.num_tokens - 1), end) for group in self._groups]
        return self._extend(request, parts, keep_free)

    def _next_step(self, request: Request, num_tokens: int) -> list[tuple[int, int]]:
        num_blocks = self.blocks_for(num_tokens)
        next_step = self.blocks_for(min(num_tokens, request.num_computed_tokens + self.max_step_tokens))
        return [(0, num_blocks if group.window is None else next_step) for group in self._groups]

    def _extend(self, request: Request, parts: Sequence[tuple[int, int]], keep_free: Sequence[int]) -> bool:
        """Extends each group's table to the second block of its part, with blocks from the first one on."""
        table = self._tables.get(request.request_id) or self._new_table()
        if self.states is not None and not self.states.has_state(request.request_id):
            return False
        for group, own, (begin, end), keep in zip(self._groups, table.groups, parts, keep_free, strict=True):
            if max(end - max(begin, len(own)), 0) * len(own.beams) > group.pool.num_free - keep:
                return False
        self._tables[request.request_id] = table
        for group, own, (begin, end) in zip(self._groups, table.groups, parts, strict=True):
            gap, count = max(begin - len(own), 0), max(end - max(begin, len(own)), 0)
            for block_ids in own.beams:
                block_ids += [group.scratch] * gap + group.take(count)
        return True

    def end_transfer(self, request: Request) -> None:
        """The request computes on behind its num_computed_tokens: a group with a window gives back the blocks
        that would be behind a gap."""
        for g, group in self._windows:
            block_ids = self._table(request.request_id).groups[g].beams[0]
            first = request.num_computed_tokens // self.block_size
            if group.scratch in block_ids[first:]:
                group.drop(reversed(block_ids[(end := block_ids.index(group.scratch, first)) :]))
                del block_ids[end:]

    def num_received(self, request: Request, missing: Sequence[Sequence[int]]) -> int:
        """Leading tokens behind which the request can compute, when of its blocks in each group the logical
        ones of `missing` were not received; at most all but the last token. Recurrent states do not count
        here: `advance_state` says how far they go."""
        tables = [own.beams[0] for own in self._table(request.request_id).groups]
        most = request.num_tokens - 1
        lost_blocks = [frozenset(own) for own in missing[: len(self._groups)]]
        blocks = (
            [
                i < len(ids) and ids[i] != group.scratch and i not in lost
                for group, ids, lost in zip(self._groups, tables, lost_blocks, strict=True)
            ]
            for i in range(self.blocks_for(request.num_tokens))
        )
        return min(self._agreed(blocks, most) * self.block_size, most)

    def slide(self, request: Request) -> None:
        """Give back the blocks that no window reaches from num_computed_tokens on."""
        for g, group in self._windows:
            own = self._table(request.request_id).groups[g]
            first = min(group.first_block(request.num_computed_tokens), len(own))
            if first > own.num_left:
                for block_ids in own.beams:
                    group.drop(block_ids[own.num_left : first])
                    block_ids[own.num_left : first] = [group.scratch] * (first - own.num_left)
                own.num_left = first

    def advance_state(self, request: Request, num_tokens: int | None) -> int:
        """The request's state covers num_tokens now (None: as many as before), of which its
        num_computed_tokens count. Returns the tokens from which it can go on, at most these."""
        if self.states is None:
            return request.num_computed_tokens
        table = self._table(request.request_id)
        boundary = 0
        if num_tokens is not None:
            boundary = self.states.advanced(request.request_id, num_tokens)
        if 0 < boundary <= table.num_committed * self.block_size:
            self.states.publish(request.request_id, table.contents[boundary // self.block_size - 1])
        return self.states.rewind(request.request_id, request.num_computed_tokens)

    def demand(self, request: Request) -> list[int]:
        """By group, the blocks that all known tokens of a request take, without what is cached."""
        num_blocks = self.blocks_for(request.num_tokens)
        return [group.at_most(num_blocks) for group in self._groups]

    def growth(self, requests: Sequence[Request]) -> list[int]:
        """By group, the blocks that requests with a table will soon need: one for each beam, and in
        groups with a window those of tokens that are still to be computed."""
        growth = []
        for g, group in enumerate(self._groups):
            needed = [r.num_places for r in requests]
            if group.bound is not None:
                wanted = [group.at_most(self.blocks_for(r.num_tokens)) for r in requests]
                held = [self._num_held(r.request_id, g) for r in requests]
                needed = [max(n, w - h) for n, w, h in zip(needed, wanted, held, strict=True)]
            growth.append(sum(needed))
        return growth

    def could_free(self, requests: Sequence[Request]) -> list[int]:
        """By group, the free blocks, and those that these requests hold, shared ones included."""
        return [
            group.pool.num_free + sum([self._num_held(r.request_id, g) for r in requests])
            for g, group in enumerate(self._groups)
        ]

    def _num_held(self, request_id: str, g: int) -> int:
        beams = self._table(request_id).groups[g].beams
        return len(set().union(*beams) - {self._groups[g].scratch})

    def fork(self, request: Request, parents: Sequence[int]) -> bool:
        """Beam i continues beam parents[i], with its KV of [0, num_computed_tokens); beams without a child
        end. False, and nothing changed, when blocks are short.

        The KV is there when `take_copies` was called and its copies are made.
        """
        table = self._table(request.request_id)
        num_full, num_slots = divmod(request.num_computed_tokens, self.block_size)
        if any(
            len(block_ids) != self.blocks_for(request.num_computed_tokens)
            for own in table.groups
            for block_ids in own.beams
        ):
            raise InvariantError(f"request {request.request_id} forks with blocks that hold nothing")
        if table.copies:
            raise InvariantError(f"request {request.request_id} forks before its last fork is copied")
        num_kept = len(set(parents))
        num_new = len(parents) - num_kept - (len(table.groups[0].beams) - num_kept)
        if num_slots and any(num_new > group.pool.num_free for group in self._groups):
            return False
        for g, group in enumerate(self._groups):
            own = table.groups[g]
            before, kept = own.beams, set(parents)
            # First the new references, so that shared blocks stay. Without the old ones the partial blocks
            # of ended beams are free for copies.
            beams = [before[parent][:num_full] for parent in parents]
            for block_ids in beams:
                group.share(block_ids)
            for i, block_ids in enumerate(before):
                group.drop(reversed(block_ids[:num_full] if i in kept else block_ids))
            if num_slots:
                copied = group.take(len(parents) - len(kept))
                for block_ids, parent in zip(beams, parents, strict=True):
                    partial = before[parent][num_full]
                    if parent in kept:  # the first child takes it
                        kept.remove(parent)
                        block_ids.append(partial)
                    else:
                        block_ids.append(copied.pop())
                        table.copies.append(BlockCopy(partial, block_ids[-1], num_slots, g))
            own.beams = beams
        return True

    def take_copies(self, request: Request) -> list[BlockCopy]:
        """What is to be copied before the request's next step; each copy is handed out once."""
        table = self._table(request.request_id)
        copies, table.copies = table.copies, []
        return copies

    def num_allocatable_tokens(self, request: Request) -> int:
        """Tokens this table could cover if it were given every free block; with windows no more than a step's
        behind the computed ones."""
        table = self._table(request.request_id)
        num_blocks = min(
            [len(own) + group.pool.num_free for group, own in zip(self._groups, table.groups, strict=True)]
        )
        num_tokens = num_blocks * self.block_size
        if not self._windows:
            return num_tokens
        return min(num_tokens, request.num_computed_tokens + self.max_step_tokens)

    def trim(self, request: Request, num_tokens: int) -> None:
        """Give back the blocks that num_tokens tokens do not need."""
        table = self._table(request.request_id)
        needed = self.blocks_for(num_tokens)
        if needed < table.num_committed:
            raise InvariantError(f"request {request.request_id} would give back verified blocks")
        for g, own in enumerate(table.groups):
            block_ids = own.beams[0]
            while len(block_ids) > needed:
                self._groups[g].drop([block_ids.pop()])

    def free(self, request: Request) -> None:
        """Free all blocks, the last first: eviction then starts at a chain's end, and its beginning, which
        other prompts are more likely to share, stays longest."""
        table = self._table(request.request_id)
        del self._tables[request.request_id]
        if self.states is not None and self.states.has_state(request.request_id):
            copied = self.states.copied(request.request_id)
            # Beyond what counts, tokens of a path may be that the text does not have.
            findable = 0 < copied <= min(request.num_computed_tokens, table.num_committed * self.block_size)
            key = table.contents[copied // self.block_size - 1] if findable else None
            self.states.free(request.request_id, key)
        for group, own in zip(self._groups, table.groups, strict=True):
            for block_ids in reversed(own.beams):
                group.drop(reversed(block_ids))

    # -- transfers ------------------------------------------------------------------------------------

    def hold(self, block_ids: Sequence[int], group: int = 0) -> BlockHold:
        """Make the caller the second owner of a group's blocks that a request owns, until `release`.

        The group behind those with blocks is the recurrent state, whose slots count as blocks.
        """
        if group == len(self._groups) and self.states is not None:
            self.states.share(block_ids)
            hold = BlockHold(tuple(block_ids), group)
            self._holds.add(hold)
            return hold
        pool = self._groups[group].pool
        for block_id in block_ids:
            if not 0 <= block_id < pool.num_blocks or pool.is_free(block_id):
                raise InvariantError(f"block {block_id} belongs to no request: it cannot be held")
        for block_id in block_ids:
            pool.share(block_id)
        hold = BlockHold(tuple(block_ids), group)
        self._holds.add(hold)
        return hold

    def release(self, hold: BlockHold) -> None:
        """End a hold; blocks whose request is gone become free now."""
        if hold not in self._holds:
            raise InvariantError(f"the hold on blocks {hold.block_ids} was released before")
        self._holds.remove(hold)
        if hold.group == len(self._groups) and self.states is not None:
            self.states.drop(hold.block_ids)
            return
        self._groups[hold.group].drop(reversed(hold.block_ids))

    # -- accounting -----------------------------------------------------------------------------------

    def usage(self) -> BlockUsage:
        pool = self._main.pool
        return BlockUsage(
            pool.num_blocks, pool.num_free, pool.num_free_findable, pool.num_blocks - pool.num_free
        )

    def check(self) -> list[str]:
        """Audit everything; one sentence per fault, empty when every invariant holds. O(blocks)."""
        faults = []
        for request_id, table in self._tables.items():
            if table.num_committed > min(len(table.contents), *(len(own) for own in table.groups)):
                faults.append(f"request {request_id} has committed blocks it does not own")
        for g, group in enumerate(self._groups):
            owners: Counter[int] = Counter()
            for request_id, table in self._tables.items():
                own = table.groups[g]
                for beam in own.beams:
                    block_ids = [block_id for block_id in beam if block_id != group.scratch]
                    owners.update(block_ids)
                    if len(set(block_ids)) != len(block_ids):
                        faults.append(f"request {request_id} has a block twice in its table")
                    if len(beam) != len(own):
                        faults.append(f"request {request_id} has beams of different lengths")
                    if any(block_id != group.scratch for block_id in beam[: own.num_left]):
                        faults.append(f"request {request_id} has blocks that its window has left")
            for hold in self._holds:
                if hold.group == g:
                    owners.update(hold.block_ids)
            faults += group.pool.check(owners)
        if self.states is not None:
            held = [
                slot for hold in self._holds if hold.group == len(self._groups) for slot in hold.block_ids
            ]
            faults += self.states.check(self.owners(), held)
        return faults

    def _num_matchable(self, num_tokens: int) -> int:
        """Number of the `num_tokens` first tokens that are in full blocks."""
        if not self.enable_prefix_caching:
            return 0
        return max(num_tokens, 0) // self.block_size * self.block_size

    def _chain(self, request: Request, table: _BlockTable, index: int) -> BlockContent:
        """Content of logical block `index`; hashed once and kept in the table."""
        if index == len(table.contents):
            parent = table.contents[-1].chain_hash if table.contents else hash_salt(request.cache_salt)
            start = index * self.block_size
            part = tuple(request.tokens(start, start + self.block_size))
            table.contents.append(BlockContent(self._hasher(parent, part), part))
        return table.contents[index]

    def _new_table(self) -> _BlockTable:
        return _BlockTable([_GroupTable() for _ in self._groups])

    def _table(self, request_id: str) -> _BlockTable:
        table = self._tables.get(request_id)
        if table is None:
            raise InvariantError(f"request {request_id} owns no blocks")
        return table
