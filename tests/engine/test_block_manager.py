"""Blocks: tables, the prefix cache, eviction order, and the two owners of a block in flight."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_core.errors import InvariantError
from tandem_core.prefix_hash import ChainHash, hash_block, hash_salt
from tandem_core.sampling import SamplingParams
from tandem_engine.block_manager import BlockGroup, BlockManager, BlockUsage
from tandem_engine.block_pool import BlockContent
from tandem_engine.request import Request

BLOCK = 4


def make_request(request_id: str, tokens: Sequence[int], salt: bytes = b"") -> Request:
    return Request(request_id, list(tokens), SamplingParams(), cache_salt=salt)


def compute(manager: BlockManager, request: Request) -> int:
    """Run a whole prompt through the manager; returns how much of it was cached."""
    cached = manager.match_prefix(request)
    assert manager.allocate(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.commit(request)
    return cached


@pytest.fixture
def manager():
    manager = BlockManager([BlockGroup(8)], BLOCK)
    yield manager
    assert manager.check() == []


class TestTables:
    def test_a_table_covers_the_tokens_asked_for_and_grows_in_place(self, manager):
        request = make_request("a", range(5))
        assert manager.allocate(request, 5)
        first = manager.block_ids("a")[0]
        assert len(first) == 2
        assert manager.allocate(request, 8)
        assert manager.block_ids("a")[0] == first
        assert manager.allocate(request, 9)
        assert manager.block_ids("a")[0][:2] == first
        assert manager.usage() == BlockUsage(total=8, free=5, cached=0, used=3)

    def test_a_shortage_is_an_answer_and_changes_nothing(self, manager):
        a, b = make_request("a", range(20)), make_request("b", range(100, 120))
        assert manager.allocate(a, 20)
        assert not manager.allocate(b, 20)
        assert not manager.has_table("b")
        assert not manager.allocate(a, 33)
        assert len(manager.block_ids("a")[0]) == 5

    def test_what_rejected_drafts_needed_comes_back(self, manager):
        request = make_request("a", range(4))
        assert manager.allocate(request, 4 + 9)
        assert manager.usage().used == 4
        manager.trim(request, 5)
        assert manager.usage().used == 2

    def test_trim_never_takes_verified_blocks(self, manager):
        request = make_request("a", range(9))
        compute(manager, request)
        with pytest.raises(InvariantError, match="verified"):
            manager.trim(request, 4)

    def test_a_request_without_blocks_is_a_bug_in_the_caller(self, manager):
        with pytest.raises(InvariantError, match="owns no blocks"):
            manager.free(make_request("ghost", [1]))

    def test_num_allocatable_tokens_is_exact(self, manager):
        request = make_request("a", range(5))
        assert manager.allocate(request, 5)
        assert manager.allocate(make_request("b", range(9)), 9)
        limit = manager.num_allocatable_tokens(request)
        assert not manager.allocate(request, limit + 1)
        assert manager.allocate(request, limit)


class TestPrefixCache:
    def test_a_second_prompt_adopts_the_common_full_blocks(self, manager):
        a, b = make_request("a", range(10)), make_request("b", [*range(9), 77, 78])
        assert compute(manager, a) == 0
        assert compute(manager, b) == 8
        assert manager.block_ids("b")[0][:2] == manager.block_ids("a")[0][:2]
        assert manager.block_ids("b")[0][2] != manager.block_ids("a")[0][2]

    def test_kv_outlives_its_request(self, manager):
        a = make_request("a", range(10))
        compute(manager, a)
        blocks = manager.block_ids("a")[0]
        manager.free(a)
        assert manager.usage() == BlockUsage(total=8, free=8, cached=2, used=0)
        b = make_request("b", range(10))
        assert compute(manager, b) == 8
        assert manager.block_ids("b")[0][:2] == blocks[:2]

    def test_at_least_one_token_is_left_to_compute(self, manager):
        compute(manager, make_request("a", range(8)))
        assert compute(manager, make_request("b", range(8))) == 4

    def test_looking_takes_nothing(self, manager):
        a = make_request("a", range(9), salt=b"s")
        compute(manager, a)
        manager.free(a)
        before = manager.usage()
        assert manager.count_cached(list(range(9)), b"s") == 8
        assert manager.count_cached(list(range(9)), b"t") == 0
        assert manager.usage() == before

    def test_different_salts_share_nothing(self, manager):
        compute(manager, make_request("a", range(9), salt=b"tenant-1"))
        assert compute(manager, make_request("b", range(9), salt=b"tenant-2")) == 0

    def test_a_block_counts_only_after_the_same_predecessors(self, manager):
        compute(manager, make_request("a", [1, 2, 3, 4, 9, 9, 9, 9, 0]))
        assert compute(manager, make_request("b", [5, 6, 7, 8, 9, 9, 9, 9, 0])) == 0

    def test_only_computed_tokens_become_findable(self, manager):
        a = make_request("a", range(12))
        assert manager.allocate(a, 12 + 8)  # room for a draft, too
        a.num_computed_tokens = 7
        manager.commit(a)
        assert manager.count_cached(list(range(12)), b"") == 4

    def test_committing_more_than_there_is_raises(self, manager):
        a = make_request("a", range(4))
        assert manager.allocate(a, 8)
        a.num_computed_tokens = 8
        with pytest.raises(InvariantError, match="8 tokens computed"):
            manager.commit(a)

    def test_output_tokens_are_found_by_the_next_turn(self, manager):
        a = make_request("a", range(6))
        assert manager.allocate(a, 8)
        a.output_token_ids += [50, 51]
        a.num_computed_tokens = 8
        manager.commit(a)
        assert manager.count_cached([*range(6), 50, 51, 60], b"") == 8

    def test_the_same_prompt_computed_twice_at_once_is_kept_once(self, manager):
        a, b = make_request("a", range(9)), make_request("b", range(9))
        for request in (a, b):
            assert manager.match_prefix(request) == 0
            assert manager.allocate(request, 9)
        for request in (a, b):
            request.num_computed_tokens = 9
            manager.commit(request)
        manager.free(b)
        manager.free(a)
        assert manager.usage().cached == 2

    def test_a_hash_collision_is_a_miss(self):
        def same_for_all(parent: ChainHash, token_ids: Sequence[int]) -> ChainHash:
            return ChainHash(b"collision")

        manager = BlockManager([BlockGroup(8)], BLOCK, hasher=same_for_all)
        compute(manager, make_request("a", [1, 2, 3, 4, 5]))
        assert compute(manager, make_request("b", [6, 7, 8, 9, 5])) == 0
        assert manager.block_ids("a")[0][0] != manager.block_ids("b")[0][0]
        assert manager.check() == []

    def test_switched_off_nothing_is_ever_found(self):
        manager = BlockManager([BlockGroup(8)], BLOCK, enable_prefix_caching=False)
        compute(manager, make_request("a", range(9)))
        assert compute(manager, make_request("b", range(9))) == 0
        assert manager.count_cached(list(range(9)), b"") == 0


class TestEviction:
    def test_blank_blocks_go_before_cached_ones(self, manager):
        a = make_request("a", range(9))
        compute(manager, a)
        manager.free(a)
        assert manager.allocate(make_request("b", range(100, 124)), 24)
        assert manager.count_cached(list(range(9)), b"") == 8

    def test_the_least_recently_used_chain_goes_first_and_its_tail_before_its_head(self, manager):
        old, new = make_request("old", range(13)), make_request("new", range(100, 113))
        compute(manager, old)
        compute(manager, new)
        manager.free(old)
        manager.free(new)
        taker = make_request("taker", range(200, 300))
        cached = []
        for blocks in range(2, 9):  # two are blank
            assert manager.allocate(taker, blocks * BLOCK)
            cached.append(tuple(manager.count_cached(r.prompt_token_ids, b"") for r in (old, new)))
        assert cached == [(12, 12), (8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]

    def test_a_hit_makes_a_chain_recently_used(self, manager):
        old, new = make_request("old", range(13)), make_request("new", range(100, 113))
        for request in (old, new):
            compute(manager, request)
        manager.free(old)
        manager.free(new)
        again = make_request("again", range(13))
        assert manager.match_prefix(again) == 12
        manager.free(again)
        assert manager.allocate(make_request("taker", range(200, 220)), 5 * BLOCK)
        assert manager.count_cached(old.prompt_token_ids, b"") == 12
        assert manager.count_cached(new.prompt_token_ids, b"") == 0

    def test_a_block_in_use_is_never_evicted(self, manager):
        a, b = make_request("a", range(9)), make_request("b", range(9))
        compute(manager, a)
        compute(manager, b)
        manager.free(a)
        assert not manager.allocate(make_request("c", range(100, 132)), 32)
        assert manager.count_cached(list(range(9)), b"") == 8


class TestHolds:
    def test_a_block_is_free_when_both_owners_have_let_go(self, manager):
        a = make_request("a", range(8))
        assert manager.allocate(a, 8)
        hold = manager.hold(manager.block_ids("a")[0])
        manager.free(a)
        assert manager.usage().used == 2
        assert manager.check() == []
        manager.release(hold)
        assert manager.usage() == BlockUsage(total=8, free=8, cached=0, used=0)

    def test_the_order_of_letting_go_does_not_matter(self, manager):
        a = make_request("a", range(8))
        compute(manager, a)
        hold = manager.hold(manager.block_ids("a")[0])
        manager.release(hold)
        assert manager.usage().used == 2
        manager.free(a)
        assert manager.usage() == BlockUsage(total=8, free=8, cached=2, used=0)

    def test_two_transfers_of_the_same_blocks_are_told_apart(self, manager):
        a = make_request("a", range(8))
        assert manager.allocate(a, 8)
        first, second = manager.hold(manager.block_ids("a")[0]), manager.hold(manager.block_ids("a")[0])
        manager.free(a)
        manager.release(first)
        with pytest.raises(InvariantError, match="released before"):
            manager.release(first)
        assert manager.usage().used == 2
        manager.release(second)
        assert manager.usage().used == 0

    def test_only_owned_blocks_can_be_held(self, manager):
        with pytest.raises(InvariantError, match="belongs to no request"):
            manager.hold([0])


class TestAudit:
    def test_a_leaked_reference_is_found(self):
        manager = BlockManager([BlockGroup(8)], BLOCK)
        manager.allocate(make_request("a", range(8)), 8)
        manager._tables.clear()
        assert [f for f in manager.check() if "1 references, 0 owners" in f]

    def test_a_block_both_free_and_referenced_is_found(self):
        manager = BlockManager([BlockGroup(8)], BLOCK)
        manager.allocate(make_request("a", range(4)), 4)
        manager._main.pool._blank.append(manager.block_ids("a")[0][0])
        assert [f for f in manager.check() if "times in the free lists" in f]

    def test_a_stale_hash_is_found(self):
        manager = BlockManager([BlockGroup(8)], BLOCK)
        a = make_request("a", range(5))
        compute(manager, a)
        manager._main.pool._index.clear()
        assert [f for f in manager.check() if "hash leads elsewhere" in f]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    windows=st.sampled_from([(None, 5), (9, None, 3), (6,), (1, None)]),
    sizes=st.tuples(st.integers(6, 14), st.integers(6, 14), st.integers(6, 14)),
)
def test_a_prefix_is_cached_as_far_as_all_groups_can_go_on(seed, windows, sizes):
    """Against a search from the longest prefix down."""
    rng = random.Random(seed)
    groups = [BlockGroup(size, window) for size, window in zip(sizes, windows, strict=False)]
    manager = BlockManager(groups, BLOCK, max_step_tokens=8)

    def expected(tokens: list[int]) -> int:
        contents, parent = [], hash_salt(b"")
        for start in range(0, (len(tokens) - 1) // BLOCK * BLOCK, BLOCK):
            part = tuple(tokens[start : start + BLOCK])
            contents.append(BlockContent(hash_block(parent, part), part))
            parent = contents[-1].chain_hash
        for n in range(len(contents), 0, -1):
            seen = [0 if w is None else max(n * BLOCK - w + 1, 0) // BLOCK for w in windows]
            if all(
                manager._groups[g].pool.find(content) is not None
                for g, first in enumerate(seen)
                for content in contents[first:n]
            ):
                return n * BLOCK
        return 0

    for i in range(20):
        stem = [rng.randrange(2)] * rng.choice([0, 4, 9])
        request = make_request(str(i), [*stem, *(rng.randrange(2) for _ in range(rng.randint(1, 14)))])
        wanted = expected(request.prompt_token_ids)
        assert manager.count_cached(request.prompt_token_ids, b"") == wanted
        assert manager.match_prefix(request) == wanted
        request.num_computed_tokens = wanted
        while request.num_computed_tokens < request.num_tokens:
            assert manager.allocate(request, request.num_tokens)
            request.num_computed_tokens = min(request.num_computed_tokens + 8, request.num_tokens)
            manager.commit(request)
            manager.slide(request)
        manager.free(request)
        assert manager.check() == []
