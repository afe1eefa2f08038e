"""The n-gram forest: builder, snapshot, merge, prune and wire form against plain counting."""

from __future__ import annotations

import struct
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_engine.drafts.builder import ForestBuilder
from tandem_engine.drafts.forest import ForestSnapshot, merge

DEPTH = 4
texts = st.lists(st.lists(st.sampled_from([0, 1, 2, 49_151, 2**31 - 1]), max_size=30), max_size=5)


def ngrams(spans: list[list[int]]) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(span[i : i + n])
        for span in spans
        for n in range(1, DEPTH + 1)
        for i in range(len(span) - n + 1)
    )


def built(spans: list[list[int]]) -> ForestBuilder:
    builder = ForestBuilder(DEPTH)
    for span in spans:
        builder.insert(span)
    return builder


def contents(forest: ForestSnapshot) -> dict[tuple[int, ...], int]:
    """Every n-gram with its count, by walking the tree."""
    found = {}
    waiting = [((), 0)]
    while waiting:
        path, node = waiting.pop()
        for child in range(forest.starts[node], forest.starts[node + 1]):
            found[(*path, forest.tokens[child])] = forest.counts[child]
            waiting.append(((*path, forest.tokens[child]), child))
    return found


@settings(deadline=None)
@given(texts)
def test_builder_and_snapshot_count_every_ngram(spans):
    builder = built(spans)
    expected = ngrams(spans)
    assert contents(builder.to_snapshot()) == expected
    assert all(builder.count(path) == builder.to_snapshot().count(path) == n for path, n in expected.items())
    assert builder.count(()) == sum(len(span) for span in spans)
    assert builder.count((5,)) == builder.to_snapshot().count((0, 5)) == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_a_text_in_pieces_counts_as_the_whole(text, cuts):
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    builder = ForestBuilder(DEPTH)
    for start, stop in pairwise(edges):
        context = min(DEPTH - 1, start)
        builder.insert(text[start - context : stop], num_context=context)
    assert contents(builder.to_snapshot()) == ngrams([text])


@settings(deadline=None)
@given(texts)
def test_followers_are_listed_most_frequent_first(spans):
    forest = built(spans).to_snapshot()
    for node in range(forest.num_nodes):
        start, stop = forest.starts[node], forest.starts[node + 1]
        ranked = list(forest.by_count[start:stop])
        assert sorted(ranked) == list(range(start, stop))
        counts = [forest.counts[child] for child in ranked]
        assert counts == sorted(counts, reverse=True)


@settings(deadline=None)
@given(texts, texts, texts)
def test_merging_equals_building_from_everything(one, two, three):
    parts = [built(spans).to_snapshot() for spans in (one, two, three)]
    assert contents(merge(parts)) == ngrams(one + two + three)


def test_forests_of_different_depths_do_not_merge():
    with pytest.raises(ValueError, match="depths"):
        merge([ForestSnapshot.empty(3), ForestSnapshot.empty(4)])


@settings(deadline=None)
@given(texts, st.integers(1, 40))
def test_pruning_keeps_a_tree_of_the_most_frequent(spans, max_nodes):
    forest = built(spans).to_snapshot()
    pruned = forest.pruned(max_nodes)
    assert pruned.num_nodes == min(forest.num_nodes, max_nodes)
    before, after = contents(forest), contents(pruned)
    assert after.items() <= before.items()
    dropped = [n for path, n in before.items() if path not in after]
    assert not dropped or max(dropped) <= min(after.values(), default=max(dropped))


def test_counts_grow_again_under_a_pruned_beginning():
    old = built([[1, 1, 1, 2]]).to_snapshot().pruned(2)  # only (1,) is left
    new = ForestBuilder(DEPTH)
    new.insert([2, 3], num_context=1)  # counts (2, 3) but not (2,), which was counted and pruned
    merged = contents(merge([old, new.to_snapshot()]))
    assert merged == {(1,): 3, (2,): 1, (2, 3): 1, (3,): 1}


@settings(deadline=None)
@given(texts)
def test_bytes_round_trip(spans):
    forest = built(spans).to_snapshot()
    again = ForestSnapshot.from_bytes(forest.to_bytes())
    assert (contents(again), again.depth, again.counts[0]) == (contents(forest), DEPTH, forest.counts[0])


@settings(deadline=None)
@given(st.data())
def test_any_damage_is_noticed(data):
    payload = bytearray(built([[1, 2, 3, 1, 2]]).to_snapshot().to_bytes())
    if data.draw(st.booleans()):
        # Bytes 12..16 hold the depth, which the checksum does not cover; any positive one is valid.
        at = data.draw(st.integers(0, len(payload) - 1).filter(lambda i: not 12 <= i < 16))
        payload[at] ^= data.draw(st.integers(1, 255))
    else:
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    with pytest.raises(ValueError, match="forest snapshot"):
        ForestSnapshot.from_bytes(bytes(payload))


def test_another_version_is_refused_by_name():
    payload = bytearray(ForestSnapshot.empty(DEPTH).to_bytes())
    struct.pack_into("<I", payload, 8, 9)
    with pytest.raises(ValueError, match="version 9"):
        ForestSnapshot.from_bytes(bytes(payload))
