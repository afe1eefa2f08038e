"""A drafter that ignores what guesses cost, for benchmarks that fix how much is drafted."""

from __future__ import annotations

from collections.abc import Sequence

from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_drafting.mirror import GlobalMirror
from tandem_engine.draft_tree import MAX_TREE_NODES, DraftTree
from tandem_engine.request import Request


class FreeDrafter(Drafter):
    """Drafts the likeliest guesses, as many as the two limits allow: guesses per sequence, rows per step."""

    def __init__(
        self, mirror: GlobalMirror, *, max_guesses: int = MAX_TREE_NODES - 1, max_rows: int | None = None
    ) -> None:
        super().__init__(mirror, DraftPolicy(row_cost=0.0))
        self._max_guesses, self._max_rows = max_guesses, max_rows

    def propose(
        self, requests: Sequence[Request], max_nodes: int, share: float = 1.0
    ) -> list[DraftTree | None]:
        limit = min(max_nodes, self._max_guesses)
        if self._max_rows is not None and requests:
            limit = min(limit, self._max_rows // len(requests) - 1)
        return super().propose(requests, limit, share)

    def observe_step(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        """Learns nothing, so the cost of a guess stays 0."""
