"""Pieces of a request's output: joined in order, counted once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_engine.drafts.spans import AcceptedSpan, Fresh, SpanAssembler

TEXT = tuple(range(100, 140))


def test_a_piece_continues_the_one_before():
    assembler = SpanAssembler(num_context=3)
    assert assembler.accept(AcceptedSpan("r", 0, (1, 2, 3, 4))) == Fresh((1, 2, 3, 4), 0)
    assert assembler.accept(AcceptedSpan("r", 4, (5, 6))) == Fresh((2, 3, 4, 5, 6), 3)
    assert assembler.accept(AcceptedSpan("other", 6, (7,))) == Fresh((7,), 0)


def test_after_a_gap_there_is_no_context():
    assembler = SpanAssembler(num_context=3)
    assembler.accept(AcceptedSpan("r", 0, (1, 2)))
    assert assembler.accept(AcceptedSpan("r", 5, (6,))) == Fresh((6,), 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 10)), max_size=30))
def test_whatever_is_resent_each_token_counts_once(pieces):
    assembler = SpanAssembler(num_context=3)
    counted = []
    reached = 0
    for offset, length in pieces:
        offset = min(offset, reached)  # resends and overlaps, but no gaps
        span = AcceptedSpan("r", offset, TEXT[offset : offset + length])
        reached = max(reached, offset + len(span.token_ids))
        fresh = assembler.accept(span)
        if fresh is not None:
            counted += fresh.token_ids[fresh.num_context :]
    assert tuple(counted) == TEXT[:reached]


def test_only_the_latest_requests_are_remembered():
    assembler = SpanAssembler(num_context=3, max_requests=2)
    for request_id, offset in (("a", 0), ("b", 0), ("a", 1), ("c", 0)):
        assembler.accept(AcceptedSpan(request_id, offset, (1,)))
    assert assembler.accept(AcceptedSpan("a", 0, (1,))) is None
    assert assembler.accept(AcceptedSpan("b", 0, (1,))) == Fresh((1,), 0)
