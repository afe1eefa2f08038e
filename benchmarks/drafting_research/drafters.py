"""The drafters that `benchmarks/replay.py` compares.

chain          the text behind the longest earlier match in the sequence, copied: prompt lookup
global-chain   the same, or behind a longer match in earlier answers (TACO-LLM's linear lookahead)
suffix         trees from suffix counts, after Oliaro et al., "SuffixDecoding: Extreme Speculative
               Decoding for Emerging AI Applications" (2024): the tree of highest score, over all match
               lengths, either from the sequence or from earlier answers
local          the forest on the sequence alone
forest         the forest on the sequence and on earlier answers: what decode pods run
line           the same text and candidates, but one guess after another: what decode pods call chain
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from tandem_drafting.native import (
    AcceptanceModel,
    CorpusIndex,
    Guesses,
    SequenceIndex,
    SequenceInput,
    draft,
    learn,
)
from tandem_engine.draft_tree import DraftTree

from drafting_research.replaying import ReplayDrafter
from drafting_research.suffix_index import SuffixIndex

_CHAIN_ORDERS = range(8, 0, -1)
#: SuffixDecoding: a match of p tokens may be followed by a tree of at most so many times p.
_SUFFIX_FACTOR = 4


#: From how many sequences there are: seconds of a step with 0, 1, ... guesses in all.
Price = Callable[[int], Sequence[float]]


class Forest:
    """`tandem_drafting.native`. Without a price it always drafts as much as it may.

    `max_chain`: guesses of a draft in one line; 0: trees.
    """

    def __init__(
        self,
        name: str,
        num_nodes: int,
        corpus: CorpusIndex | None,
        *,
        max_chain: int = 0,
        price: Price | None = None,
    ) -> None:
        self.name = name
        self._num_nodes = num_nodes
        self._corpus = corpus
        self._max_chain = max_chain
        self._price = price or self._nothing
        self._learner = AcceptanceModel()
        self._jobs: dict[int, SequenceInput] = {}
        self._num_runs = 0

    def begin(self, sequence: int, prompt: Sequence[int]) -> None:
        text = SequenceIndex(len(prompt))
        text.extend(prompt)
        self._jobs[sequence] = SequenceInput(text, self._learner, self._corpus, max_chain=self._max_chain)

    def draft(self, sequences: Sequence[int], rooms: Sequence[int]) -> list[Guesses | None]:
        jobs = [self._jobs[sequence] for sequence in sequences]
        for job, room in zip(jobs, rooms, strict=True):
            job.room = room
        return draft(jobs, self._num_nodes, self._price(len(jobs)))

    def accept(self, sequence: int, emitted: Sequence[int]) -> None:
        learn([self._jobs[sequence]], [emitted])

    def end(self, sequence: int, target: Sequence[int]) -> None:
        if self._corpus is not None:
            self._corpus.add(self._num_runs, target)
            self._num_runs += 1

    def _nothing(self, num_sequences: int) -> list[float]:
        return [1.0 + 1e-9 * q for q in range(self._num_nodes * num_sequences + 1)]


class Chain:
    """Copies what followed the longest match, the latest of equals."""

    def __init__(self, name: str, num_nodes: int, *, is_global: bool) -> None:
        self.name = name
        self._num_nodes = num_nodes
        self._is_global = is_global
        self._answers = _Positions()
        self._texts: dict[int, _Positions] = {}

    def begin(self, sequence: int, prompt: Sequence[int]) -> None:
        text = self._texts[sequence] = _Positions()
        text.extend(prompt)

    def draft(self, sequences: Sequence[int], rooms: Sequence[int]) -> list[Guesses | None]:
        return [
            self._copy(self._texts[sequence], min(room, self._num_nodes))
            for sequence, room in zip(sequences, rooms, strict=True)
        ]

    def accept(self, sequence: int, emitted: Sequence[int]) -> None:
        self._texts[sequence].extend(emitted)

    def end(self, sequence: int, target: Sequence[int]) -> None:
        self._answers.extend((*target, _END))

    def _copy(self, text: _Positions, length: int) -> Guesses | None:
        context = text.tokens[-_CHAIN_ORDERS[0] :]
        for order in _CHAIN_ORDERS:
            for source in (text, self._answers) if self._is_global else (text,):
                following = source.after(tuple(context[-order:]), length) if len(context) >= order else []
                if following:
                    count = len(following)
                    tree = DraftTree(tuple(following), tuple(range(count)), (self.name,) * count)
                    return Guesses(tree, (0.0,) * count)
        return None


#: Between answers.
_END = -1


class _Positions:
    """A text, and behind which position each short n-gram occurred last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._positions: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # The follower of the text's end is known only now, so that an n-gram never finds itself.
            for order in _CHAIN_ORDERS:
                if order <= len(self.tokens):
                    self._positions[tuple(self.tokens[-order:])] = len(self.tokens)
            self.tokens.append(token)

    def after(self, ngram: tuple[int, ...], length: int) -> list[int]:
        """At most `length` tokens behind its last occurrence."""
        position = self._positions.get(ngram)
        if position is None:
            return []
        following = self.tokens[position : position + length]
        return following[: following.index(_END)] if _END in following else following


class SuffixTrees:
    """One suffix structure per sequence and one of all answers; the better of their trees is taken whole."""

    def __init__(self, name: str, num_nodes: int) -> None:
        self.name = name
        self._num_nodes = num_nodes
        self._answers = SuffixIndex()
        self._texts: dict[int, SuffixIndex] = {}
        #: Endings of a sequence's text as states of the answers' index: (length, state), the longest first.
        self._tails: dict[int, list[int]] = {}

    def begin(self, sequence: int, prompt: Sequence[int]) -> None:
        text = self._texts[sequence] = SuffixIndex()
        text.extend(prompt)
        self._tails[sequence] = list(prompt[-_LONGEST_PATTERN:])

    def draft(self, sequences: Sequence[int], rooms: Sequence[int]) -> list[Guesses | None]:
        return [self._best(sequence, room) for sequence, room in zip(sequences, rooms, strict=True)]

    def accept(self, sequence: int, emitted: Sequence[int]) -> None:
        self._texts[sequence].extend(emitted)
        self._tails[sequence] = (self._tails[sequence] + list(emitted))[-_LONGEST_PATTERN:]

    def end(self, sequence: int, target: Sequence[int]) -> None:
        self._answers.extend((*target, _END))

    def _best(self, sequence: int, room: int) -> Guesses | None:
        text, tail = self._texts[sequence], self._tails[sequence]
        matches = [(text, length, state) for length, state in text.matches(_LONGEST_PATTERN)]
        matches += [(self._answers, length, state) for length, state in _endings(self._answers, tail)]
        best: Guesses | None = None
        best_score = 0.0
        for index, length, state in matches:
            limit = min(self._num_nodes, _SUFFIX_FACTOR * min(length, _LONGEST_PATTERN))
            guesses = self._tree(index, state, limit, room)
            score = sum(guesses.reach) if guesses is not None else 0.0
            if score > best_score:
                best, best_score = guesses, score
        return best

    def _tree(self, index: SuffixIndex, state: int, limit: int, room: int) -> Guesses | None:
        """The `limit` likeliest continuations, by the product of their shares along the path."""
        tokens: list[int] = []
        parents: list[int] = []
        reach: list[float] = []
        heap: list[tuple[float, int, int, int, int, int]] = []

        def offer(state: int, node: int, depth: int, probability: float) -> None:
            followers = index.transitions[state]
            total = sum(index.counts[onward] for token, onward in followers.items() if token != _END)
            for token, onward in followers.items():
                if token != _END and depth <= room and total:
                    share = probability * index.counts[onward] / total
                    heapq.heappush(heap, (-share, len(tokens), token, onward, node, depth))

        offer(state, 0, 1, 1.0)
        while heap and len(tokens) < limit:
            negative, _, token, onward, parent, depth = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            reach.append(-negative)
            offer(onward, len(tokens), depth + 1, -negative)
        if not tokens:
            return None
        return Guesses(DraftTree(tuple(tokens), tuple(parents), (self.name,) * len(tokens)), tuple(reach))


_LONGEST_PATTERN = 32


def _endings(index: SuffixIndex, tail: Sequence[int]) -> list[tuple[int, int]]:
    """(length, state) of every ending of `tail` that occurs in the index, the longest first."""
    state, length = 0, 0
    for token in tail:
        while state and token not in index.transitions[state]:
            state = index.links[state] or 0
            length = index.lengths[state]
        if token in index.transitions[state]:
            state, length = index.transitions[state][token], length + 1
        else:
            state = length = 0
    found = []
    while state:
        found.append((length, state))
        state = index.links[state] or 0
        length = index.lengths[state]
    return found


#: Name -> from a number of nodes, the vocabulary's size and how many tokens there are to remember.
DRAFTERS: dict[str, Callable[[int, int, int], ReplayDrafter]] = {
    "chain": lambda nodes, vocab, room: Chain("chain", nodes, is_global=False),
    "global-chain": lambda nodes, vocab, room: Chain("global-chain", nodes, is_global=True),
    "suffix": lambda nodes, vocab, room: SuffixTrees("suffix", nodes),
    "local": lambda nodes, vocab, room: Forest("local", nodes, None),
    "forest": lambda nodes, vocab, room: Forest("forest", nodes, CorpusIndex(room, vocab)),
    "line": lambda nodes, vocab, room: Forest("line", nodes, CorpusIndex(room, vocab), max_chain=nodes),
}
