"""The store's bytes: read back as written, refused when they are not what was written."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_drafting.spans import AcceptedSpan
from tandem_drafting.text_store import TextStore

spans = st.lists(
    st.builds(
        AcceptedSpan,
        st.text(min_size=1, max_size=3),
        st.integers(0, 5),
        st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple),
    ),
    max_size=12,
)


def filled(given_spans: list[AcceptedSpan]) -> TextStore:
    store = TextStore(1000)
    for span in given_spans:
        store.add(span)
    return store


@settings(deadline=None)
@given(spans)
def test_bytes_are_read_back(given_spans):
    store = filled(given_spans)
    again = TextStore.from_bytes(store.to_bytes(), 1000)
    assert again.to_bytes() == store.to_bytes()
    assert again.num_tokens == store.num_tokens
    assert again.max_token == store.max_token


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 10)), max_size=30))
def test_whatever_is_resent_each_token_counts_once(pieces):
    text = tuple(range(100, 140))
    store, reached = TextStore(1000), 0
    for offset, length in pieces:
        offset = min(offset, reached)  # resends and overlaps, but no gaps
        span = AcceptedSpan("r", offset, text[offset : offset + length])
        store.add(span)
        reached = max(reached, offset + len(span.token_ids))
    run = store.run("r")
    assert (tuple(run.tokens) if run is not None else ()) == text[:reached]


def test_of_a_snapshot_only_the_latest_runs_fit():
    store = filled([AcceptedSpan(f"r{n}", 0, tuple(range(10))) for n in range(5)])
    small = TextStore.from_bytes(store.to_bytes(), 25)
    assert [run.name for run in small.runs()] == ["r3", "r4"]


def test_every_damage_has_its_sentence():
    good = filled([AcceptedSpan("r", 0, (1, 2, 3))]).to_bytes()
    for payload, words in (
        (good[:10], "cut short"),
        (b"NOPE" + good[4:], "not a snapshot"),
        (good[:4] + struct.pack("<I", 9) + good[8:], "version 9"),
        (good[:-1], "checksum"),
        (good[:-1] + b"\xff", "checksum"),
    ):
        with pytest.raises(ValueError, match=words):
            TextStore.from_bytes(payload, 1000)
