"""A decode pod's copy of one namespace's forest: read on the step path, written beside it.

    view = (base, overlay)      one reference, swapped as a whole; a reader takes it once per step
      base      immutable arrays: the last snapshot from the service, or our own merge
      overlay   small mutable tree: the deltas since

The stream client applies snapshots and deltas from its own thread; the drafter reads without locks and
never waits for the service. When the overlay is full the writer merges it into a new base, pruned to the
bound, and swaps. Without the service the mirror stays as it is and goes on being used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from tandem_engine.drafts.builder import ForestBuilder
from tandem_engine.drafts.forest import ForestSnapshot, merge
from tandem_engine.drafts.spans import AcceptedSpan, SpanAssembler

#: Longest n-gram, context and continuation together.
DEFAULT_DEPTH = 8


@dataclass(frozen=True, eq=False)
class ForestView:
    """What a reader sees: two trees whose counts add up."""

    base: ForestSnapshot
    overlay: ForestBuilder

    def count(self, path: Iterable[int]) -> int:
        """How often the n-gram was accepted."""
        path = tuple(path)
        return self.base.count(path) + self.overlay.count(path)


class GlobalMirror:
    """The forest of one tenant's namespace; at most about 16 B * max_nodes + 320 B * overlay_nodes.

    Tokens outside the vocabulary never enter: a draft of one would crash the model, and what comes over
    the wire was made by others.
    """

    def __init__(
        self,
        *,
        tenant: str = "",
        vocab_size: int = 2**31,
        depth: int = DEFAULT_DEPTH,
        max_nodes: int = 2_000_000,
        overlay_nodes: int = 65_536,
    ) -> None:
        #: Only this tenant's requests may be drafted for from here.
        self.tenant = tenant
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes
        self._overlay_nodes = overlay_nodes
        self._writing = threading.Lock()
        self._assembler = SpanAssembler(depth - 1)
        self._position = ""
        self._view = ForestView(ForestSnapshot.empty(depth), ForestBuilder(depth))

    @property
    def view(self) -> ForestView:
        """The present pair; stays readable after a swap."""
        return self._view

    @property
    def position(self) -> str:
        """Stream position up to which this is current; empty before the first snapshot or delta."""
        return self._position

    @property
    def num_nodes(self) -> int:
        """Of base and overlay; an n-gram in both counts twice."""
        view = self._view
        return view.base.num_nodes + view.overlay.num_nodes

    @property
    def num_tokens(self) -> int:
        """Accepted tokens learnt from."""
        return self._view.count(())

    @property
    def memory_bytes(self) -> int:
        view = self._view
        return view.base.memory_bytes + view.overlay.memory_bytes

    def apply_snapshot(self, payload: bytes, position: str) -> None:
        """Replaces everything. Raises ValueError on a damaged payload and then changes nothing."""
        base = ForestSnapshot.from_bytes(payload).pruned(self._max_nodes)
        if base.max_token >= self._vocab_size:
            raise ValueError(
                f"forest snapshot holds token {base.max_token}, the vocabulary ends at {self._vocab_size}"
            )
        with self._writing:
            self._assembler = SpanAssembler(base.depth - 1)
            self._view = ForestView(base, ForestBuilder(base.depth))
            self._position = position

    def apply_delta(self, spans: Iterable[AcceptedSpan], position: str) -> int:
        """Adds spans accepted after the present position; returns how many tokens were new.

        Repetitions count once.
        """
        with self._writing:
            self._position = position
            return self._learn(spans)

    def learn(self, spans: Iterable[AcceptedSpan]) -> int:
        """Adds spans that the stream has yet to carry; when they come back they are repetitions."""
        with self._writing:
            return self._learn(spans)

    def snapshot(self) -> tuple[ForestSnapshot, str]:
        """Base and overlay in one, at most `max_nodes`, and the position they stand for."""
        with self._writing:
            base, overlay, position = self._view.base, self._view.overlay.to_snapshot(), self._position
        return merge([base, overlay]).pruned(self._max_nodes), position

    def _learn(self, spans: Iterable[AcceptedSpan]) -> int:
        view = self._view
        num_new = 0
        for span in spans:
            if any(not 0 <= token < self._vocab_size for token in span.token_ids):
                continue
            fresh = self._assembler.accept(span)
            if fresh is not None:
                view.overlay.insert(fresh.token_ids, fresh.num_context)
                num_new += len(fresh.token_ids) - fresh.num_context
        if view.overlay.num_nodes > self._overlay_nodes:
            base = merge([view.base, view.overlay.to_snapshot()]).pruned(self._max_nodes)
            self._view = ForestView(base, ForestBuilder(base.depth))
        return num_new
