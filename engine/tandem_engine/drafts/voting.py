"""What may come next at one node of a growing draft tree, and how likely.

A node carries its matches: contexts that occurred before, each a longer or shorter ending of text + path.

    local   (match length, state of the sequence's suffix automaton)
    global  (match length, node of the mirror's base, node of its overlay)

All of them vote, the longest first, blended as in prediction by partial matching: a context seen n times
gives a follower seen c times c / (n + e) of the mass still open and passes e / (n + e) on to the shorter
ones; the escape e falls with match length. One step along a token takes every match with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem_engine.drafts.calibration import GLOBAL, OUTPUT, PROMPT, Calibration
from tandem_engine.drafts.local import SuffixIndex
from tandem_engine.drafts.mirror import ForestView

LocalMatch = tuple[int, int]
GlobalMatch = tuple[int, int | None, int | None]

#: Matches per source carried along; further ones add little and cost time.
MAX_MATCHES = 3
#: Followers per context and candidates per node; the rest of the mass is spread thinner than a row costs.
MAX_FOLLOWERS = 4
#: A context with more followers than this predicts nothing worth reading them all.
MAX_READ = 32
#: Votes stop when this little mass is open.
_MIN_MASS = 0.25
#: Escape by match length; the last value holds beyond.
_ESCAPE = (8.0, 4.0, 1.6, 0.9, 0.6, 0.45, 0.35, 0.3, 0.25, 0.2)


class Candidate:
    """A possible child of a tree node."""

    __slots__ = ("cell", "node", "probability", "raw", "reach", "source", "token")

    def __init__(self, token: int, raw: float, probability: float, cell: int, source: int) -> None:
        self.token = token
        #: Probability given the parent: as voted, and after calibration.
        self.raw = raw
        self.probability = probability
        self.cell = cell
        self.source = source
        #: Probability that verification gets here, the sequence's own hit rate included; set by the tree.
        self.reach = 0.0
        #: Its node once it is in the tree.
        self.node: TreeNode | None = None


class TreeNode:
    """A node of the draft, or its root."""

    __slots__ = ("candidates", "depth", "globals", "index", "locals", "parent", "reach", "token")

    def __init__(
        self,
        index: int,
        token: int,
        parent: TreeNode | None,
        reach: float,
        local_matches: list[LocalMatch],
        global_matches: list[GlobalMatch],
    ) -> None:
        self.index = index
        self.token = token
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent is not None else 0
        #: Probability that verification gets here.
        self.reach = reach
        self.locals = local_matches
        self.globals = global_matches
        self.candidates: list[Candidate] = []


class Voters:
    """The sources of one sequence in one step."""

    __slots__ = ("_calibration", "_index", "_num_prompt", "_view")

    def __init__(
        self, index: SuffixIndex, num_prompt: int, view: ForestView | None, calibration: Calibration
    ) -> None:
        self._index = index
        self._num_prompt = num_prompt
        self._view = view
        self._calibration = calibration

    def root(self, ending: Sequence[int]) -> TreeNode:
        """The tree's root; `ending` are the last tokens of the text (depth - 1 of them suffice)."""
        global_matches = self._anchor(ending) if self._view is not None else []
        return TreeNode(0, ending[-1], None, 1.0, self._index.matches(MAX_MATCHES), global_matches)

    def advance(self, parent: TreeNode, candidate: Candidate, index: int) -> TreeNode:
        """The node of a candidate that enters the tree."""
        token = candidate.token
        transitions = self._index.transitions
        local_matches: list[LocalMatch] = []
        previous = None
        for length, state in parent.locals:
            onward = transitions[state].get(token)
            if onward is not None and onward != previous:
                local_matches.append((length + 1, onward))
                previous = onward
        global_matches: list[GlobalMatch] = []
        node = TreeNode(index, token, parent, candidate.reach, local_matches, global_matches)
        view = self._view
        if view is not None:
            for length, base, overlay in parent.globals:
                step = self._step(view, base, overlay, token)
                if step is not None and length + 1 < view.base.depth:
                    global_matches.append((length + 1, *step))
            if len(global_matches) < 2:
                node.globals = self._anchor(_path_ending(node, view.base.depth - 1))
        candidate.node = node
        return node

    def vote(self, node: TreeNode) -> list[Candidate]:
        """The likeliest children of a node, best first; kept on the node."""
        #: token -> [probability, strongest vote, match length, source]
        votes: dict[int, list[float]] = {}
        mass = 1.0
        local_matches, global_matches = node.locals, node.globals
        i = j = 0
        while mass > _MIN_MASS:
            use_local = i < len(local_matches) and (
                j == len(global_matches) or local_matches[i][0] >= global_matches[j][0]
            )
            if use_local:
                length, state = local_matches[i]
                i += 1
                total, followers = self._local_followers(state)
            elif j < len(global_matches):
                length, base, overlay = global_matches[j]
                j += 1
                total, followers = self._global_followers(base, overlay)
            else:
                break
            if not followers:
                continue
            escape = _ESCAPE[length] if length < len(_ESCAPE) else _ESCAPE[-1]
            scale = mass / (total + escape)
            for token, count, source in followers:
                share = count * scale
                vote = votes.get(token)
                if vote is None:
                    votes[token] = [share, share, length, source]
                else:
                    vote[0] += share
                    if share > vote[1]:
                        vote[1:] = [share, length, source]
            mass *= escape / (total + escape)
        calibration, depth = self._calibration, node.depth + 1
        candidates = node.candidates
        for token, (raw, _, match_length, source_number) in votes.items():
            source = int(source_number)
            cell = calibration.cell(source, int(match_length), depth)
            probability = min(raw * calibration.factors[cell], 0.99)
            candidates.append(Candidate(token, raw, probability, cell, source))
        if len(candidates) > 1:
            candidates.sort(key=_by_probability)
            del candidates[MAX_FOLLOWERS:]
        return candidates

    def _local_followers(self, state: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Occurrences that went on, and (token, count, source) of the followers."""
        index = self._index
        onward = index.transitions[state]
        if len(onward) > MAX_READ:
            return 0, []
        total = 0
        followers = []
        for token, follower in onward.items():
            count = index.counts[follower]
            total += count
            source = PROMPT if index.last_ends[follower] < self._num_prompt else OUTPUT
            followers.append((token, count, source))
        return total, followers

    def _global_followers(
        self, base_node: int | None, overlay_node: int | None
    ) -> tuple[int, list[tuple[int, int, int]]]:
        assert self._view is not None
        base, overlay = self._view.base, self._view.overlay
        total = 0
        counts: dict[int, int] = {}
        if base_node is not None:
            total += base.counts[base_node]
            start = base.starts[base_node]
            stop = min(base.starts[base_node + 1], start + MAX_FOLLOWERS)
            for child in base.by_count[start:stop]:
                counts[base.tokens[child]] = base.counts[child]
        if overlay_node is not None:
            total += overlay.counts[overlay_node]
            children = overlay.children[overlay_node]
            if len(children) <= MAX_READ:
                for token, child in children.copy().items():
                    counts[token] = counts.get(token, 0) + overlay.counts[child]
        followers = [(token, count, GLOBAL) for token, count in counts.items() if count]
        # The end of a text is an occurrence without a follower; an overlay's total lacks its base's.
        return max(total, sum(counts.values())), followers

    def _anchor(self, ending: Sequence[int]) -> list[GlobalMatch]:
        """Matches of the longest endings the forest knows, longest first."""
        view = self._view
        assert view is not None
        matches: list[GlobalMatch] = []
        longest = min(view.base.depth - 1, len(ending))
        for length in range(longest, 0, -1):
            base: int | None = 0
            overlay: int | None = 0
            for token in ending[len(ending) - length :]:
                step = self._step(view, base, overlay, token)
                if step is None:
                    break
                base, overlay = step
            else:
                matches.append((length, base, overlay))
                if len(matches) == MAX_MATCHES:
                    break
        return matches

    @staticmethod
    def _step(
        view: ForestView, base: int | None, overlay: int | None, token: int
    ) -> tuple[int | None, int | None] | None:
        if base is not None:
            base = view.base.child(base, token)
        if overlay is not None:
            overlay = view.overlay.children[overlay].get(token)
        return None if base is None and overlay is None else (base, overlay)


def _by_probability(candidate: Candidate) -> float:
    return -candidate.probability


def _path_ending(node: TreeNode, limit: int) -> list[int]:
    """Tokens from the root (or nearer) to the node, at most `limit`."""
    tokens: list[int] = []
    at: TreeNode | None = node
    while at is not None and len(tokens) < limit:
        tokens.append(at.token)
        at = at.parent
    tokens.reverse()
    return tokens
