"""The text of a namespace that enough requests share, as the service sends it and a mirror keeps it.

Named sequences of tokens, in the order of their first appearance. Over the limit, the first ones are dropped.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from tandem_proto.v1 import lookahead_pb2 as pb

from tandem_drafting.lookahead_protocol import (
    snapshot_from_bytes,
    snapshot_to_bytes,
    spans_from_proto,
    spans_to_proto,
    split_span,
)
from tandem_drafting.spans import AcceptedSpan

#: Memory of a sequence besides its tokens.
_SEQUENCE_BYTES = 400


@dataclass
class SharedSequence:
    """Consecutive tokens under one name, the first at `offset`."""

    number: int
    name: str
    offset: int
    tokens: array[int] = field(default_factory=lambda: array("i"))

    @property
    def end(self) -> int:
        """Offset after the last token."""
        return self.offset + len(self.tokens)


class SharedCorpus:
    """At most `max_tokens`, except for the latest sequence. Not thread-safe."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._sequences: OrderedDict[str, SharedSequence] = OrderedDict()
        self._next_number = 0
        #: Tokens held.
        self.num_tokens = 0

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def max_token(self) -> int:
        """Largest token id held; -1 when empty."""
        return max((max(sequence.tokens) for sequence in self._sequences.values()), default=-1)

    @property
    def memory_bytes(self) -> int:
        return 4 * self.num_tokens + _SEQUENCE_BYTES * len(self._sequences)

    def sequences(self) -> Iterator[SharedSequence]:
        """All sequences, the oldest first."""
        return iter(self._sequences.values())

    def sequence(self, name: str) -> SharedSequence | None:
        return self._sequences.get(name)

    def spans(self) -> list[AcceptedSpan]:
        """All text, within the limit of a span."""
        return [
            span
            for sequence in self._sequences.values()
            for span in split_span(AcceptedSpan(sequence.name, sequence.offset, tuple(sequence.tokens)))
        ]

    def add(self, span: AcceptedSpan) -> tuple[SharedSequence, int] | None:
        """Returns the span's sequence and the number of its last tokens that are new.

        None for a repetition. After a gap the sequence starts again.
        """
        if not span.token_ids:
            return None
        sequence = self._sequences.get(span.run)
        if sequence is None or span.offset > sequence.end:
            if sequence is not None:
                self._set_aside(sequence)
            sequence = SharedSequence(self._next_number, span.run, span.offset)
            self._sequences[span.run] = sequence
            self._next_number += 1
        new = span.token_ids[sequence.end - span.offset :]
        if not new:
            return None
        sequence.tokens.extend(new)
        self.num_tokens += len(new)
        self.trim(span.run)
        return sequence, len(new)

    def trim(self, kept: str = "") -> None:
        """Drops the oldest sequences beyond `max_tokens`, but not the one of this name."""
        while self.num_tokens > self.max_tokens and len(self._sequences) > 1:
            oldest = next(iter(self._sequences))
            if oldest == kept:
                self._sequences.move_to_end(oldest)
            else:
                self._drop(oldest)

    def count(self, ngram: Sequence[int]) -> int:
        """Number of occurrences of an n-gram within sequences. Reads all text."""
        wanted = np.array(ngram, dtype=np.int32)
        total = 0
        for sequence in self._sequences.values():
            if len(sequence.tokens) >= len(wanted):
                windows = np.lib.stride_tricks.sliding_window_view(
                    np.frombuffer(sequence.tokens, np.int32), len(wanted)
                )
                total += int((windows == wanted).all(axis=1).sum())
        return total

    def to_bytes(self, namespace: pb.Namespace | None = None) -> bytes:
        """A snapshot; exports name the namespace."""
        return snapshot_to_bytes(pb.SharedCorpus(namespace=namespace, spans=spans_to_proto(self.spans())))

    @classmethod
    def from_bytes(cls, payload: bytes, max_tokens: int) -> SharedCorpus:
        """Reads the latest `max_tokens` of a snapshot. Raises ValueError saying what is wrong."""
        return cls.from_proto(snapshot_from_bytes(payload, pb.SharedCorpus), max_tokens)

    @classmethod
    def from_proto(cls, message: pb.SharedCorpus, max_tokens: int) -> SharedCorpus:
        """Raises ValueError for spans that exceed a limit."""
        corpus = cls(max_tokens)
        for span in spans_from_proto(message.spans):
            corpus.add(span)
        return corpus

    def _set_aside(self, sequence: SharedSequence) -> None:
        """Keeps a sequence that starts again, under a name that no further span has."""
        name = f"{sequence.name}\0{sequence.offset}"
        if name in self._sequences:
            self._drop(name)
        self._sequences[name] = self._sequences.pop(sequence.name)

    def _drop(self, name: str) -> None:
        self.num_tokens -= len(self._sequences.pop(name).tokens)
