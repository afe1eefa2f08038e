"""Accepted tokens on their way into the forest.

A pod reports what a request accepted in pieces of a few tokens. Whoever merges them (the service, every
mirror) must count an n-gram that crosses two pieces, and must not count a resent piece twice. The
assembler keeps, per request, the end of what it has seen; nothing else has to be remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class AcceptedSpan:
    """Consecutive accepted tokens; `offset` is the first one's index in the request's output."""

    request_id: str
    offset: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Fresh:
    """Tokens to insert: the first `num_context` were counted before, the rest were not."""

    token_ids: tuple[int, ...]
    num_context: int


class SpanAssembler:
    """Joins the pieces of each request; (request_id, offset) makes a resend harmless.

    Remembers the `max_requests` requests heard of last; a piece of a forgotten one starts afresh.
    """

    def __init__(self, num_context: int, max_requests: int = 8192) -> None:
        self._num_context = num_context
        self._max_requests = max_requests
        #: Request id -> (index after the last token seen, the last tokens seen).
        self._ends: OrderedDict[str, tuple[int, tuple[int, ...]]] = OrderedDict()

    def accept(self, span: AcceptedSpan) -> Fresh | None:
        """What of the span is new, with the context it continues; None for a repetition."""
        end, tail = self._ends.get(span.request_id, (0, ()))
        new = span.token_ids
        if span.offset > end:
            tail = ()
        elif span.offset < end:
            new = new[end - span.offset :]
        if not new:
            return None
        tokens = tail + new
        self._ends[span.request_id] = (
            span.offset + len(span.token_ids),
            tokens[max(0, len(tokens) - self._num_context) :],
        )
        self._ends.move_to_end(span.request_id)
        if len(self._ends) > self._max_requests:
            self._ends.popitem(last=False)
        return Fresh(tokens, len(tail))
