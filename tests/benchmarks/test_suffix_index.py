"""The suffix index against brute force."""

from __future__ import annotations

import random

from drafting_research.suffix_index import SuffixIndex
from hypothesis import given, settings
from hypothesis import strategies as st

texts = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def index_of(text: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    index.extend(text)
    return index


def earlier_ends(text: list[int], length: int) -> list[int]:
    """Where else the text's last `length` tokens end."""
    ending = text[len(text) - length :]
    return [end for end in range(length, len(text)) if text[end - length : end] == ending]


@settings(deadline=None)
@given(texts)
def test_the_longest_ending_that_occurred_before_is_found(text):
    matches = index_of(text).matches(limit=99)
    longest = max((n for n in range(1, len(text)) if earlier_ends(text, n)), default=0)
    assert (matches[0][0] if matches else 0) == longest


@settings(deadline=None)
@given(texts)
def test_every_match_knows_what_followed_and_how_often(text):
    index = index_of(text)
    for length, state in index.matches(limit=99):
        followers: dict[int, list[int]] = {}
        for end in earlier_ends(text, length):
            followers.setdefault(text[end], []).append(end)
        onward = index.transitions[state]
        assert {t: index.counts[s] for t, s in onward.items()} == {t: len(e) for t, e in followers.items()}
        assert {t: index.last_ends[s] for t, s in onward.items()} == {t: e[-1] for t, e in followers.items()}


@settings(deadline=None)
@given(texts, st.integers(0, 80))
def test_extending_in_pieces_equals_extending_at_once(text, cut):
    index = index_of(text[:cut])
    index.extend(text[cut:])
    assert index.matches(99) == index_of(text).matches(99)
    assert index.num_tokens == len(text)


def test_a_degenerate_text_stays_linear():
    text = [7] * 20_000 + [random.Random(0).randrange(2) for _ in range(20_000)]
    index = index_of(text)
    assert len(index.transitions) <= 2 * len(text)
    assert sum(len(onward) for onward in index.transitions) <= 3 * len(text)
