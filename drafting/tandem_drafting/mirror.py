"""A decode pod's copy of one namespace's shared corpus, indexed for the drafter.

    corpus   sequences of tokens, as the lookahead service shares them
    index    the same text, indexed; one reference, replaced as a whole

Only text from the service enters, so the output of this pod's own requests is here once the service has
shared it. The stream client applies snapshots and deltas in a thread of its own. The drafter reads the index
without locks and never waits for the service. A full index is rebuilt with half as much room again. Without
the service the mirror stays in use unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from tandem_drafting.native import CorpusIndex
from tandem_drafting.shared_corpus import SharedCorpus, SharedSequence
from tandem_drafting.spans import AcceptedSpan, RequestNames

DEFAULT_MAX_TOKENS = 1_000_000
_FIRST_CAPACITY = 1 << 16
#: Tokens repeated before a piece that does not follow the last indexed piece; the longest match across the
#: cut.
_NUM_CONTEXT = 8


#: Memory of a token in a large corpus: 60 to 85.
BYTES_PER_TOKEN = 85


class GlobalMirror:
    """The shared text of one tenant's namespace.

    Tokens outside the vocabulary never enter: they come from other machines, and a draft with such a token
    would crash the model.
    """

    def __init__(
        self, *, tenant: str = "", vocab_size: int = 1 << 17, max_tokens: int = DEFAULT_MAX_TOKENS
    ) -> None:
        #: Only requests of this tenant may get drafts from here.
        self.tenant = tenant
        #: Names of this pod's requests outside the pod.
        self.names = RequestNames()
        self._vocab_size = vocab_size
        self._writing = threading.Lock()
        self._position = ""
        self._shared = SharedCorpus(max_tokens)
        self._corpus: CorpusIndex
        self._last_run: int
        self._rebuild()

    @property
    def corpus(self) -> CorpusIndex:
        """The index to draft from; readable after a swap."""
        return self._corpus

    @property
    def position(self) -> str:
        """The service's position of the last snapshot or delta; empty before the first."""
        return self._position

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self._shared.num_tokens

    @property
    def max_tokens(self) -> int:
        """Most tokens held, except for the latest sequence."""
        return self._shared.max_tokens

    def limit(self, max_tokens: int) -> None:
        """Changes `max_tokens`, and drops the oldest text beyond it. Takes up to a second in a large
        corpus."""
        with self._writing:
            self._shared.max_tokens = max_tokens
            if self._shared.num_tokens > max_tokens:
                self._shared.trim()
                self._rebuild()

    @property
    def memory_bytes(self) -> int:
        return self._shared.memory_bytes + self._corpus.memory_bytes

    def run_of(self, request_id: str) -> int:
        """Number of the sequence that holds only this request's output; -1: none. Thread-safe.

        There is one where text is shared at once (`min_requests` of 1). A sequence of several requests has a
        name of its own.
        """
        sequence = self._shared.sequence(self.names.of(request_id))
        return sequence.number if sequence is not None else -1

    def count(self, ngram: Sequence[int]) -> int:
        """Number of occurrences of an n-gram. Reads all text; for tests and statistics."""
        with self._writing:
            return self._shared.count(ngram)

    def apply_snapshot(self, payload: bytes, position: str) -> None:
        """Replaces all text. Raises ValueError for a damaged payload, and then changes nothing."""
        shared = SharedCorpus.from_bytes(payload, self.max_tokens)
        if shared.max_token >= self._vocab_size:
            raise ValueError(
                f"snapshot holds token {shared.max_token}, the vocabulary ends at {self._vocab_size}"
            )
        with self._writing:
            shared.max_tokens = self.max_tokens  # it may have changed meanwhile
            shared.trim()
            self._shared = shared
            self._position = position
            self._rebuild()

    def apply_delta(self, spans: Iterable[AcceptedSpan], position: str) -> int:
        """Adds spans that were shared after the present position; returns the number of new tokens."""
        num_new = 0
        with self._writing:
            self._position = position
            for span in spans:
                if any(not 0 <= token < self._vocab_size for token in span.token_ids):
                    continue
                added = self._shared.add(span)
                if added is None:
                    continue
                sequence, count = added
                num_new += count
                if not self._index(sequence, count):
                    self._rebuild()
        return num_new

    def snapshot(self) -> tuple[bytes, str]:
        """All text as bytes, and its position."""
        with self._writing:
            return self._shared.to_bytes(), self._position

    def _index(self, sequence: SharedSequence, num_new: int) -> bool:
        """Adds a sequence's last tokens to the index; False when that is full."""
        goes_on = sequence.number == self._last_run
        num_context = 0 if goes_on else min(_NUM_CONTEXT, len(sequence.tokens) - num_new)
        self._last_run = sequence.number
        return self._corpus.add(sequence.number, sequence.tokens[-(num_new + num_context) :], num_context)

    def _rebuild(self) -> None:
        """Indexes all text anew, with half as much room again."""
        held = self._shared.num_tokens + self._shared.num_sequences
        corpus = CorpusIndex(max(_FIRST_CAPACITY, held * 3 // 2), self._vocab_size)
        self._last_run = -1
        for sequence in self._shared.sequences():
            corpus.add(sequence.number, sequence.tokens)
            self._last_run = sequence.number
        self._corpus = corpus
