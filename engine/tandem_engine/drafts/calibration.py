"""From votes to probabilities: how much each kind of vote has been worth so far.

A vote's raw probability comes from counts; whether such votes come true depends on the traffic. Each
cell (source, match length, depth) keeps what was predicted and what came true, and scales later votes of
its kind by the ratio. Learning needs no extra verification: the accepted tokens also tell the fate of
candidates that were considered but not sent, so a cell that fell silent hears when it is right again.
"""

from __future__ import annotations

from bisect import bisect_right

SOURCES = ("prompt", "output", "global")
PROMPT, OUTPUT, GLOBAL = range(3)

#: First value of every bucket after the first.
_MATCH_EDGES = (2, 3, 4, 6, 9, 17)
_DEPTH_EDGES = (2, 3, 5, 9)
_NUM_MATCH = len(_MATCH_EDGES) + 1
_NUM_DEPTH = len(_DEPTH_EDGES) + 1
#: Tables instead of bisection: this is the inner loop. Beyond the end the last bucket holds.
_MATCH_BUCKET = tuple(bisect_right(_MATCH_EDGES, n) * _NUM_DEPTH for n in range(_MATCH_EDGES[-1] + 1))
_DEPTH_BUCKET = tuple(bisect_right(_DEPTH_EDGES, n) for n in range(_DEPTH_EDGES[-1] + 1))

#: Trials that the raw probability itself is worth, and after which the older half is forgotten.
_PRIOR = 4.0
_MEMORY = 400.0


class Ratio:
    """What came true over what was predicted, starting at 1 and following slow change."""

    __slots__ = ("_memory", "_prior", "came_true", "predicted")

    def __init__(self, prior: float = _PRIOR, memory: float = _MEMORY) -> None:
        self._prior = prior
        self._memory = memory
        self.came_true = 0.0
        self.predicted = 0.0

    @property
    def value(self) -> float:
        return (self.came_true + self._prior) / (self.predicted + self._prior)

    def learn(self, predicted: float, came_true: bool) -> None:
        """One trial: a candidate whose parent was accepted."""
        self.predicted += predicted
        self.came_true += came_true
        if self.predicted > self._memory:
            self.predicted *= 0.5
            self.came_true *= 0.5


class Calibration:
    """One ratio per cell, shared by all sequences of a pod."""

    def __init__(self) -> None:
        self._cells = [Ratio() for _ in range(len(SOURCES) * _NUM_MATCH * _NUM_DEPTH)]
        #: Present value of every cell; read by the inner loop.
        self.factors = [1.0] * len(self._cells)

    def cell(self, source: int, match_length: int, depth: int) -> int:
        """Index of the cell; depth 1 is the first guess after the root."""
        return (
            source * _NUM_MATCH * _NUM_DEPTH
            + (_MATCH_BUCKET[match_length] if match_length < len(_MATCH_BUCKET) else _MATCH_BUCKET[-1])
            + (_DEPTH_BUCKET[depth] if depth < len(_DEPTH_BUCKET) else _DEPTH_BUCKET[-1])
        )

    def learn(self, cell: int, predicted: float, came_true: bool) -> None:
        """One trial of a vote whose raw probability was `predicted`."""
        self._cells[cell].learn(predicted, came_true)
        self.factors[cell] = self._cells[cell].value
