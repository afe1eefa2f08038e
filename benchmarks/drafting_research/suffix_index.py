"""A sequence's own memory: every earlier place where its present ending has already occurred.

Texts repeat themselves, and answers repeat their prompts. The index is a suffix automaton over
prompt + output, chosen because three questions of the drafter become single look-ups:

    longest ending seen before        the suffix link of the automaton's last state
    shorter endings (they vote too)   further along the suffix links
    what followed, and how often      the state's transitions and their states' counts

Life cycle: made when a request is first drafted for, extended by each accepted token (O(1) amortised:
the automaton of n tokens has at most 2n states and 3n transitions), dropped with the request.
"""

from __future__ import annotations

from collections.abc import Iterable

#: State of the empty context; it matches everything and predicts nothing.
ROOT = 0
#: Counts are brought up to date along at most this many suffix links. Ordinary text has a handful; only
#: a degenerate one ("a a a a ...") has more, and there the shortest contexts need no better counts.
MAX_COUNT_HOPS = 64


class SuffixIndex:
    """Suffix automaton with occurrence counts. States are ints; all lists are indexed by state.

    The lists are read directly by the drafter's inner loop and written by `extend` only.
    """

    __slots__ = ("counts", "last", "last_ends", "lengths", "links", "num_tokens", "transitions")

    def __init__(self) -> None:
        #: State -> {token id: state of the context that is one token longer}.
        self.transitions: list[dict[int, int]] = [{}]
        #: State -> state of the longest shorter ending with other occurrences; the root has none.
        self.links: list[int | None] = [None]
        #: State -> tokens in its longest context.
        self.lengths: list[int] = [0]
        #: State -> how often its contexts have occurred.
        self.counts: list[int] = [0]
        #: State -> position of the last token of its latest occurrence.
        self.last_ends: list[int] = [0]
        #: State of the whole text.
        self.last = ROOT
        self.num_tokens = 0

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens to the text."""
        for token in token_ids:
            self._append(token)

    def matches(self, limit: int) -> list[tuple[int, int]]:
        """(match length, state) of the endings that occurred before, longest first, at most `limit`."""
        found: list[tuple[int, int]] = []
        state = self.links[self.last]
        while state and len(found) < limit:
            found.append((self.lengths[state], state))
            state = self.links[state]
        return found

    def _append(self, token: int) -> None:
        transitions, links, lengths = self.transitions, self.links, self.lengths
        new = self._new_state({}, lengths[self.last] + 1, ROOT)
        state: int | None = self.last
        while state is not None:
            onward = transitions[state]
            if token in onward:
                break
            onward[token] = new
            state = links[state]
        if state is not None:
            seen = transitions[state][token]
            if lengths[seen] == lengths[state] + 1:
                links[new] = seen
            else:
                links[new] = self._split(state, token, seen)
        self.last = new
        self._count(new)
        self.num_tokens += 1

    def _split(self, before: int, token: int, seen: int) -> int:
        """Gives the contexts of `seen` that also end elsewhere a state of their own."""
        transitions, links = self.transitions, self.links
        short = self._new_state(dict(transitions[seen]), self.lengths[before] + 1, links[seen])
        self.counts[short] = self.counts[seen]
        self.last_ends[short] = self.last_ends[seen]
        links[seen] = short
        state: int | None = before
        while state is not None and transitions[state].get(token) == seen:
            transitions[state][token] = short
            state = links[state]
        return short

    def _new_state(self, onward: dict[int, int], length: int, link: int | None) -> int:
        self.transitions.append(onward)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(0)
        self.last_ends.append(0)
        return len(self.lengths) - 1

    def _count(self, new: int) -> None:
        links, counts, last_ends, position = self.links, self.counts, self.last_ends, self.num_tokens
        state: int | None = new
        hops = 0
        while state and hops < MAX_COUNT_HOPS:
            counts[state] += 1
            last_ends[state] = position
            state = links[state]
            hops += 1
