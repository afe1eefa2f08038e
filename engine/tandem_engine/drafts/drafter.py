"""Drafts a batch: which guesses to verify in the next step, over all sequences at once.

    propose   index what is new of each sequence, vote, and grow all trees best first while it pays
    (engine)  verifies the trees and accepts a path of each
    extend    compare the accepted tokens with what was considered, sent or not, and calibrate
    forget    the request is over

A draft never changes what is generated, only how fast: any tree is valid, a wrong one costs its rows.

The price: a step with Q rows beyond the batch's own takes 1 + Q * row_cost times as long, and yields E
tokens, one per sequence plus each guess's chance to be accepted. One more row with chance f pays when

    (E + f) / (1 + (Q + 1) * row_cost) > E / (1 + Q * row_cost)   i.e.   f > E * row_cost / (1 + Q * row_cost)

so that copy length follows from hit rate and batch size, and drafting stops where it does not pay.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem_engine.drafts.calibration import SOURCES, Calibration, Ratio
from tandem_engine.drafts.local import SuffixIndex
from tandem_engine.drafts.mirror import GlobalMirror
from tandem_engine.drafts.tree import MAX_TREE_NODES, DraftTree
from tandem_engine.drafts.voting import Candidate, TreeNode, Voters

if TYPE_CHECKING:  # the request module needs this package's tree
    from tandem_engine.request import Request

#: Guesses less likely than this are not worth the drafter's own time, however cheap a row.
_MIN_REACH = 0.02


class Strategy(enum.Enum):
    """Where guesses come from."""

    OFF = "off"
    #: The sequence's own prompt and output.
    LOCAL = "local"
    #: Those and the tenant's forest.
    GLOBAL = "global"


@dataclass(frozen=True)
class DraftPolicy:
    """What a pod may draft, and the first estimate of its price."""

    strategy: Strategy = Strategy.GLOBAL
    #: Time of one more row of a step relative to a step without drafts.
    row_cost: float = 0.03

    def __post_init__(self) -> None:
        if not 0.0 <= self.row_cost < 10.0:
            raise ValueError(f"row_cost is {self.row_cost}; it is a share of a step, in [0, 10)")


class _Sequence:
    """What the drafter knows of one request."""

    __slots__ = ("index", "ratio", "root")

    def __init__(self) -> None:
        self.index = SuffixIndex()
        #: This sequence's hits over the pod's expectation; copy length adapts to it.
        self.ratio = Ratio(prior=3.0, memory=24.0)
        #: Tree of the last proposal, with all that was considered.
        self.root: TreeNode | None = None


class Drafter:
    """Owns the sequences' indexes and the calibration. Used by one thread; mirrors are written by others."""

    def __init__(self, mirror: GlobalMirror | None, policy: DraftPolicy) -> None:
        self._policy = policy
        self._mirrors: dict[str, GlobalMirror] = {}
        if mirror is not None:
            self.attach(mirror)
        self._calibration = Calibration()
        self._sequences: dict[str, _Sequence] = {}
        #: Settable while running: the engine measures it.
        self.row_cost = policy.row_cost

    def attach(self, mirror: GlobalMirror) -> None:
        """Uses a mirror for its tenant's requests, and for no other's."""
        self._mirrors[mirror.tenant] = mirror

    def propose(self, requests: Sequence[Request], max_nodes: int) -> list[DraftTree | None]:
        """One tree of at most `max_nodes` guesses per request, None where nothing pays.

        The price counts every request given, so pass the whole decoding batch. Requests that are not
        decoding get None. Nothing beyond a request's max_tokens is guessed.
        """
        if self._policy.strategy is Strategy.OFF:
            return [None] * len(requests)
        trees: list[_GrowingTree | None] = []
        heap: list[tuple[float, int, int, TreeNode, Candidate]] = []
        for number, request in enumerate(requests):
            tree = self._plant(request, max_nodes)
            trees.append(tree)
            if tree is not None:
                tree.offer(tree.root, number, heap)
        expected, rows = float(len(requests)), 0
        while heap:
            reach = -heap[0][0]
            if reach < expected * self.row_cost / (1.0 + rows * self.row_cost):
                break
            _, number, _, parent, candidate = heapq.heappop(heap)
            tree = trees[number]
            assert tree is not None
            if tree.is_full:
                continue
            tree.offer(tree.grow(parent, candidate), number, heap)
            expected += reach
            rows += 1
        return [tree.draft() if tree is not None else None for tree in trees]

    def extend(self, request: Request, token_ids: Sequence[int]) -> None:
        """Learns from the tokens a step has emitted for the request, the bonus token included.

        May be called before or after they are appended to the request; the next `propose` indexes them.
        """
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            return
        node, sequence.root = sequence.root, None
        for token in token_ids:
            if node is None:
                break
            onward = None
            for candidate in node.candidates:
                came_true = candidate.token == token
                self._calibration.learn(candidate.cell, candidate.raw, came_true)
                sequence.ratio.learn(candidate.probability, came_true)
                if came_true:
                    onward = candidate.node
            node = onward

    def forget(self, request_id: str) -> None:
        """Drops what is known of a finished request; unknown ids are ignored."""
        self._sequences.pop(request_id, None)

    @property
    def num_sequences(self) -> int:
        """Requests whose text is held; 0 when idle."""
        return len(self._sequences)

    def _plant(self, request: Request, max_nodes: int) -> _GrowingTree | None:
        """A tree of only the root, with the sequence's index brought up to date."""
        room = request.sampling.max_tokens - len(request.output_token_ids) - 1
        if not request.is_decoding or room < 1 or max_nodes < 1:
            return None
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            sequence = self._sequences[request.request_id] = _Sequence()
        index = sequence.index
        index.extend(request.tokens(index.num_tokens, request.num_tokens))
        mirror = self._mirrors.get(request.tenant) if self._policy.strategy is Strategy.GLOBAL else None
        view = mirror.view if mirror is not None else None
        voters = Voters(index, request.num_prompt_tokens, view, self._calibration)
        num_context = view.base.depth - 1 if view is not None else 1
        ending = request.tokens(max(0, request.num_tokens - num_context), request.num_tokens)
        sequence.root = voters.root(ending)
        limit = min(max_nodes, MAX_TREE_NODES - 1)
        return _GrowingTree(sequence.root, voters, sequence.ratio.value, limit, room)


class _GrowingTree:
    """One sequence's tree while the batch's guesses are chosen."""

    __slots__ = ("_parents", "_ratio", "_room", "_sources", "_tokens", "_voters", "limit", "root")

    def __init__(self, root: TreeNode, voters: Voters, ratio: float, limit: int, room: int) -> None:
        self.root = root
        self.limit = limit
        self._voters = voters
        self._ratio = ratio
        #: Deepest guess that could still be emitted.
        self._room = room
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._sources: list[str] = []

    @property
    def is_full(self) -> bool:
        return len(self._tokens) >= self.limit

    def offer(
        self, node: TreeNode, number: int, heap: list[tuple[float, int, int, TreeNode, Candidate]]
    ) -> None:
        """Puts a node's children up for choice."""
        if node.depth >= self._room:
            return
        for rank, candidate in enumerate(self._voters.vote(node)):
            candidate.reach = reach = node.reach * min(candidate.probability * self._ratio, 0.99)
            if reach >= _MIN_REACH:
                # Ties fall to the earlier sequence, then to the earlier node and rank.
                heapq.heappush(heap, (-reach, number, node.index * 8 + rank, node, candidate))

    def grow(self, parent: TreeNode, candidate: Candidate) -> TreeNode:
        """Takes a candidate into the tree."""
        self._tokens.append(candidate.token)
        self._parents.append(parent.index)
        self._sources.append(SOURCES[candidate.source])
        return self._voters.advance(parent, candidate, len(self._tokens))

    def draft(self) -> DraftTree | None:
        if not self._tokens:
            return None
        return DraftTree(tuple(self._tokens), tuple(self._parents), tuple(self._sources))
