"""A request's guide while its text grows: which tokens may come next, and which must.

The state is the output so far, so another pod can make it anew from that. The tokens of a draft are consumed
one by one as they are chosen; those that the scheduler does not append are taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from tandem_core.errors import InvalidRequestError
from tandem_core.model.guides import reason

from tandem_engine.draft_tree import DraftTree

#: Source of draft tokens in the receipt and the metrics.
SOURCE = "guide"


class GuideState:
    """Used by the thread that owns the request."""

    def __init__(self, matcher: LLMatcher) -> None:
        """`matcher`: before any token."""
        self._matcher = matcher
        self._num_consumed = 0

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Brings the state to the end of this output, which begins with what was consumed, or is its
        beginning."""
        num_output = len(output_token_ids)
        if num_output < self._num_consumed:
            self._matcher.rollback(self._num_consumed - num_output)
        for token_id in output_token_ids[self._num_consumed :]:
            self._consume(token_id)
        self._num_consumed = num_output

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """[vocab_size]: whether each token may come next; at least one may.

        Raises InvalidRequestError when the guide grows too complex or has no text with this beginning.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or not allowed.any():
            error = reason(self._matcher.get_error())
            raise InvalidRequestError("guide", f"cannot go on after {self._num_consumed} tokens: {error}")
        return allowed

    def consume(self, token_id: int) -> None:
        """The token that was chosen."""
        self._consume(token_id)
        self._num_consumed += 1

    def draft(self, tree: DraftTree | None, max_nodes: int) -> DraftTree | None:
        """The tree without branches that the guide forbids, behind the text that it forces."""
        if self._matcher.is_stopped():  # also after an error
            return None
        branches = [] if tree is None else self._allowed_nodes(tree)
        forced = self._matcher.compute_ff_tokens()[:max_nodes]
        return _merged(forced, tree, branches, max_nodes)

    def _allowed_nodes(self, tree: DraftTree) -> list[int]:
        """Nodes, from 1 on, whose path the guide allows, in topological order."""
        is_allowed = [True] + [False] * len(tree)
        paths: list[list[int]] = [[]]
        parents = set(tree.parents)
        for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True), start=1):
            paths.append([*paths[parent], token_id])
            if node in parents:
                continue
            num_valid = self._matcher.validate_tokens(paths[node])
            on_path = node
            for depth in range(len(paths[node]), 0, -1):
                is_allowed[on_path] |= depth <= num_valid
                on_path = tree.parents[on_path - 1]
        return [node for node in range(1, len(tree) + 1) if is_allowed[node]]

    def _consume(self, token_id: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)


def _merged(
    forced: Sequence[int], tree: DraftTree | None, kept: Sequence[int], max_nodes: int
) -> DraftTree | None:
    """A chain of forced tokens, and the kept nodes of the tree, of which those on the chain stand once."""
    token_ids, sources = list(forced), [SOURCE] * len(forced)
    parents = list(range(len(forced)))
    #: (parent, token) -> node, of the new tree; node of the old tree -> of the new one.
    known = {(node, token_id): node + 1 for node, token_id in enumerate(forced)}
    moved = {0: 0}
    for node in kept:
        if tree is None:
            break
        token_id, parent = tree.token_ids[node - 1], tree.parents[node - 1]
        if parent not in moved:
            continue
        key = (moved[parent], token_id)
        if key not in known:
            if len(token_ids) >= max_nodes:
                continue
            token_ids.append(token_id)
            parents.append(key[0])
            sources.append(tree.sources[node - 1])
            known[key] = len(token_ids)
        moved[node] = known[key]
    return DraftTree(tuple(token_ids), tuple(parents), tuple(sources)) if token_ids else None
