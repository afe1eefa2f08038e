"""A decode pod's copy of one namespace's shared text: read on the step path, written beside it.

    store    runs of tokens, as the lookahead service shares them
    corpus   the same, indexed for the drafter; one reference, swapped as a whole

Nothing else ever enters: not even what this pod's own requests generate, before the service has shared it.
The stream client applies snapshots and deltas from its own thread; the drafter reads the corpus meanwhile,
without locks, and never waits for the service. A full corpus is built anew from what the store holds, half as
large again. Without the service the mirror stays as it is and goes on being used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from tandem_drafting import native
from tandem_drafting.native import CorpusIndex
from tandem_drafting.spans import AcceptedSpan, RequestNames
from tandem_drafting.text_store import Run, TextStore

DEFAULT_MAX_TOKENS = 1_000_000
_FIRST_CAPACITY = 1 << 16
#: Tokens that go before a piece whose run was left for another one's; the longest match across the cut.
_NUM_CONTEXT = 8


class GlobalMirror:
    """The text of one tenant's namespace, 60 to 85 bytes a token once there are many.

    Tokens outside the vocabulary never enter: a draft of one would crash the model, and what comes over
    the wire was made by others.
    """

    def __init__(
        self, *, tenant: str = "", vocab_size: int = 1 << 17, max_tokens: int = DEFAULT_MAX_TOKENS
    ) -> None:
        #: Only this tenant's requests may be drafted for from here.
        self.tenant = tenant
        #: What this pod's requests are called outside.
        self.names = RequestNames()
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._writing = threading.Lock()
        self._position = ""
        self._store = TextStore(max_tokens)
        self._corpus: CorpusIndex | None = None
        self._last_run = -1
        self._rebuild()

    @property
    def corpus(self) -> CorpusIndex | None:
        """What to draft from; stays readable after a swap. None where the drafter was not compiled."""
        return self._corpus

    @property
    def position(self) -> str:
        """Position up to which this is current; empty before the first snapshot or delta."""
        return self._position

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self._store.num_tokens

    @property
    def memory_bytes(self) -> int:
        corpus = self._corpus
        return self._store.memory_bytes + (corpus.memory_bytes if corpus is not None else 0)

    def run_of(self, request_id: str) -> int:
        """The corpus' run that is nothing but what this request has generated; -1: none. Any thread may ask.

        There is one where text is shared at once (`promotion_requests` of 1). A run that several requests
        had to generate speaks for all of them, and goes by a name of its own.
        """
        run = self._store.run(self.names.of(request_id))
        return run.number if run is not None else -1

    def count(self, ngram: Sequence[int]) -> int:
        """How often an n-gram occurs; reads everything, for tests and questions of people."""
        with self._writing:
            return self._store.count(ngram)

    def apply_snapshot(self, payload: bytes, position: str) -> None:
        """Replaces everything. Raises ValueError on a damaged payload and then changes nothing."""
        store = TextStore.from_bytes(payload, self._max_tokens)
        if store.max_token >= self._vocab_size:
            raise ValueError(
                f"snapshot holds token {store.max_token}, the vocabulary ends at {self._vocab_size}"
            )
        with self._writing:
            self._store = store
            self._position = position
            self._rebuild()

    def apply_delta(self, spans: Iterable[AcceptedSpan], position: str) -> int:
        """Adds spans shared after the present position; returns how many tokens were new.

        Repetitions count once.
        """
        num_new = 0
        with self._writing:
            self._position = position
            for span in spans:
                if any(not 0 <= token < self._vocab_size for token in span.token_ids):
                    continue
                added = self._store.add(span)
                if added is None:
                    continue
                run, count = added
                num_new += count
                if not self._index(run, count):
                    self._rebuild()
        return num_new

    def snapshot(self) -> tuple[bytes, str]:
        """Everything held, as bytes, and the position it stands for."""
        with self._writing:
            return self._store.to_bytes(), self._position

    def _index(self, run: Run, num_new: int) -> bool:
        """Adds a run's last tokens to the corpus; False when that is full."""
        if self._corpus is None:
            return True
        goes_on = run.number == self._last_run
        num_context = 0 if goes_on else min(_NUM_CONTEXT, len(run.tokens) - num_new)
        self._last_run = run.number
        return self._corpus.add(run.number, run.tokens[-(num_new + num_context) :], num_context)

    def _rebuild(self) -> None:
        """A corpus of what is held, with half as much room again."""
        if native.LIBRARY is None:
            return
        held = self._store.num_tokens + self._store.num_runs
        corpus = CorpusIndex(max(_FIRST_CAPACITY, held * 3 // 2), self._vocab_size)
        self._last_run = -1
        for run in self._store.runs():
            corpus.add(run.number, run.tokens)
            self._last_run = run.number
        self._corpus = corpus
