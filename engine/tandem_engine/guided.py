"""A request's guide while its text grows: which tokens may come next, and which must.

    engine's thread   draft(): drops branches that the guide forbids, adds the text that it forces
    a worker thread   masks(): at the end of the output and at each node of the draft, during the forward pass
    engine's thread   verification chooses by the masks

The state is a function of the output, so another pod can rebuild it. Only one thread at a time uses the
states of a guide (OwnMatcher.lock), and the engine's thread never waits for that lock.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide
from tandem_core.model.guides import GuideCompiler, reason

from tandem_engine.draft_tree import DraftTree

#: Source of draft tokens in the receipt and the metrics.
SOURCE = "guide"
#: A bit per token of the vocabulary, the lowest first: whether the token may come next. uint8.
Mask: TypeAlias = npt.NDArray[np.uint8]
#: CPU seconds that a mask may take on average. JSON schemas take 0.01 to 0.05 ms, regular expressions 0.3 ms,
#: the slowest that llguidance's limits permit take 10 ms.
_MASK_S = 0.005
#: CPU seconds that masks may take beyond that. The first mask of a choice among 4,096 texts takes 14 ms, on a
#: slow or busy processor several times that.
_CREDIT_S = 0.1
#: What a new lexer takes of the credit: compiling the guide, and the text so far.
_ANEW_S = 0.06
#: A guide is slow after this many steps with masks that took longer than this, in CPU seconds, on average.
_SLOW_STEPS, _SLOW_MASK_S = 2, 0.002


class GuideState:
    """The state of one request's guide."""

    def __init__(self, compiler: GuideCompiler, guide: Guide) -> None:
        """Also computes the first mask, which may be the slowest one, before the request enters the engine.
        Raises InvalidRequestError. Takes up to 100 ms, more for a guide that it refuses."""
        self._compiler = compiler
        self._guide = guide
        self._matcher, self._lock = compiler.matcher(guide)
        #: Tokens that the matcher has consumed.
        self._text: list[int] = []
        #: CPU seconds that masks may still take.
        self._credit_s = _CREDIT_S
        #: CPU seconds of a mask, lately.
        self._mask_s = 0.0
        self._num_slow_steps = 0
        self._is_draftable = True
        with self._lock:
            began = time.thread_time()
            #: The mask before any token.
            self._first = self._root()
            self._charge(time.thread_time() - began, 1)

    @property
    def is_busy(self) -> bool:
        """Whether a thread uses a state of this guide."""
        return self._lock.locked()

    @property
    def is_slow(self) -> bool:
        """Whether its masks were slow repeatedly. A slow guide gets no drafts, so the engine's thread does
        not use it."""
        return self._num_slow_steps >= _SLOW_STEPS

    @property
    def first_mask(self) -> Mask:
        """The mask before any token."""
        return self._first

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Brings the state to the end of this output, which begins with what was consumed, or is its
        beginning."""
        num_output = len(output_token_ids)
        if num_output < len(self._text):
            self._matcher.rollback(len(self._text) - num_output)
            del self._text[num_output:]
        for token_id in output_token_ids[len(self._text) :]:
            self._consume(token_id)
            self._text.append(token_id)

    def masks(
        self,
        output_token_ids: Sequence[int],
        draft: DraftTree | None = None,
        end_token_ids: Collection[int] = (),
    ) -> list[Mask | None]:
        """The masks at the end of the output and at each node of the draft.

        None at nodes that the guide forbids, at end tokens, and where the step's time for masks was spent.

        Raises InvalidRequestError when the guide has no text with this beginning, grows too complex, or its
        masks take too long.
        """
        with self._lock:
            self.follow(output_token_ids)
            began = time.thread_time()
            masks: list[Mask | None] = [self._root() if self._text else self._first]
            if draft is not None:
                masks += self._node_masks(draft, end_token_ids, began + _MASK_S)
            seconds, num_masks = time.thread_time() - began, sum([mask is not None for mask in masks])
            self._num_slow_steps += seconds > num_masks * _SLOW_MASK_S
            self._charge(seconds, num_masks)
            return masks

    def _root(self) -> Mask:
        """The mask at the end of the text. Raises InvalidRequestError."""
        root = self._mask()
        if root is None and self._credit_s >= _ANEW_S:
            # Lexers have a limited number of states, which all requests with the guide may have used up.
            self._credit_s -= _ANEW_S
            self._begin_anew()
            root = self._mask()
        if root is None:
            error = reason(self._matcher.get_error())
            raise InvalidRequestError("guide", f"cannot go on after {len(self._text)} tokens: {error}")
        return root

    def draft(
        self, output_token_ids: Sequence[int], tree: DraftTree | None, max_nodes: int
    ) -> DraftTree | None:
        """The tree behind this output without branches that the guide forbids, and the text that it forces.
        None if the guide is slow or busy."""
        if self._mask_s:
            max_nodes = min(max_nodes, int(_MASK_S / self._mask_s))
        if max_nodes < 1 or not self._is_draftable or self.is_slow:
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self.follow(output_token_ids)
            return self._drafted(tree, max_nodes)
        finally:
            self._lock.release()

    def _drafted(self, tree: DraftTree | None, max_nodes: int) -> DraftTree | None:
        if self._matcher.is_stopped():  # also after an error
            return None
        if tree is not None and len(tree) > max_nodes:
            tree = tree.truncated(max_nodes)
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

    def _node_masks(
        self, draft: DraftTree, end_token_ids: Collection[int], until: float
    ) -> list[Mask | None]:
        """The masks of nodes 1, 2, ...; `until`: CPU seconds of this thread."""
        masks: list[Mask | None] = [None] * len(draft)
        children = draft.children()

        def visit(node: int) -> None:
            for token_id, child in children[node].items():
                if token_id in end_token_ids or time.thread_time() > until:
                    continue
                if self._matcher.try_consume_tokens([token_id]):
                    masks[child - 1] = self._mask()
                    visit(child)
                    self._matcher.rollback(1)

        visit(0)
        if self._matcher.is_error():  # the text that the draft continues is good
            self._is_draftable = False
            self._begin_anew()
        return masks

    def _mask(self) -> Mask | None:
        """None after an error."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return None if self._matcher.is_error() or not bits.any() else bits

    def _charge(self, seconds: float, num_masks: int) -> None:
        """Raises InvalidRequestError when no credit is left. An average over masks instead of tokens does not
        depend on drafts. One step takes no more than the whole credit, because a pause of the machine counts
        as time of the thread that runs."""
        seconds = min(seconds, _CREDIT_S)
        self._credit_s = min(self._credit_s + num_masks * _MASK_S - seconds, _CREDIT_S)
        self._mask_s = (self._mask_s + seconds / num_masks) / 2
        if self._credit_s < 0:
            raise InvalidRequestError(
                "guide",
                f"takes {1000 * self._mask_s:.0f} ms per token, but may take {1000 * _MASK_S:.0f} ms on "
                "average; use fewer or shorter alternatives and repetitions",
            )

    def _begin_anew(self) -> None:
        # This thread does not hold the new lock. Until it ends, only new requests can share the lexer.
        self._matcher, self._lock = self._compiler.fresh_matcher(self._guide)
        text, self._text = self._text, []
        self.follow(text)

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
