"""The corpus as bytes: read back as written, refused when they are not what was written."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_drafting.lookahead_protocol import MAX_SPAN_TOKENS, snapshot_to_bytes, split_span
from tandem_drafting.shared_corpus import SharedCorpus
from tandem_drafting.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb

spans = st.lists(
    st.builds(
        AcceptedSpan,
        st.text(min_size=1, max_size=3),
        st.integers(0, 5),
        st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple),
    ),
    max_size=12,
)


def filled(given_spans: list[AcceptedSpan]) -> SharedCorpus:
    corpus = SharedCorpus(1000)
    for span in given_spans:
        corpus.add(span)
    return corpus


@settings(deadline=None)
@given(spans)
def test_bytes_are_read_back(given_spans):
    corpus = filled(given_spans)
    again = SharedCorpus.from_bytes(corpus.to_bytes(), 1000)
    assert again.to_bytes() == corpus.to_bytes()
    assert again.num_tokens == corpus.num_tokens
    assert again.max_token == corpus.max_token


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 10)), max_size=30))
def test_whatever_is_resent_each_token_counts_once(pieces):
    text = tuple(range(100, 140))
    corpus, reached = SharedCorpus(1000), 0
    for offset, length in pieces:
        offset = min(offset, reached)  # resends and overlaps, but no gaps
        span = AcceptedSpan("r", offset, text[offset : offset + length])
        corpus.add(span)
        reached = max(reached, offset + len(span.token_ids))
    sequence = corpus.sequence("r")
    assert (tuple(sequence.tokens) if sequence is not None else ()) == text[:reached]


def test_of_a_snapshot_only_the_latest_runs_fit():
    corpus = filled([AcceptedSpan(f"r{n}", 0, tuple(range(10))) for n in range(5)])
    small = SharedCorpus.from_bytes(corpus.to_bytes(), 25)
    assert [sequence.name for sequence in small.sequences()] == ["r3", "r4"]


def test_a_damaged_snapshot_is_refused_with_a_reason():
    good = filled([AcceptedSpan("r", 0, (1, 2, 3))]).to_bytes()
    content = pb.SharedCorpus(version=9).SerializeToString()
    other_version = pb.Snapshot(digest=xxhash.xxh3_128_digest(content), content=content)
    too_large = snapshot_to_bytes(pb.SharedCorpus(spans=[pb.Span(run="r", token_ids=[2**31])]))
    for payload, words in (
        (b"", "digest"),
        (b"TLKT" + bytes(28), "not a Snapshot"),
        (good[:-1], "not a Snapshot"),
        (good[:-1] + b"\xff", "digest"),
        (other_version.SerializeToString(), "version 9"),
        (too_large, "token_ids"),
    ):
        with pytest.raises(ValueError, match=words):
            SharedCorpus.from_bytes(payload, 1000)


def test_a_sequence_longer_than_a_span_is_read_back():
    tokens = tuple(range(2 * MAX_SPAN_TOKENS + 5))
    corpus = SharedCorpus(10**6)
    for span in split_span(AcceptedSpan("r", 3, tokens)):
        assert len(span.token_ids) <= MAX_SPAN_TOKENS
        corpus.add(span)
    (sequence,) = SharedCorpus.from_bytes(corpus.to_bytes(), 10**6).sequences()
    assert (sequence.offset, tuple(sequence.tokens)) == (3, tokens)
