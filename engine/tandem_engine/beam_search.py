"""Beam search over one prompt: which beams go on, which texts are finished, and when the search ends.

    log_probs [n, V] of the n running beams
        score of a candidate = the beam's sum of log probabilities + log_probs[beam, token]
        the (1 + number of end tokens) x width best candidates, at least 2 x width, in order:
            ends the text, among the first `width`    -> a finished text: sum / length ** length_penalty
            ends the text, behind them                -> dropped
            goes on                                   -> a running beam, until there are `width`
    finished texts: the `width` best of all so far

Equal to transformers' `generate(num_beams=width, do_sample=False)`, in float32 as there. Of equal scores the
lower (beam, token) comes first, so that every pod finds the same beams. All running beams have the same
length. The model, KV and text are not known here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tandem_core.beams import BeamParams, EarlyStopping
from tandem_core.errors import InvariantError, LogitsError
from tandem_core.sampling import TokenLogprobs

LogProbs = npt.NDArray[np.float32]

#: Values per column in `largest`.
_COLUMN = 64


@dataclass(frozen=True)
class _Beam:
    """A running beam, or a finished text: its last token, and the beam before it."""

    #: Sum of log probabilities of all tokens.
    total: np.float32
    token_id: int
    logprobs: TokenLogprobs | None
    parent: _Beam | None

    def path(self) -> list[_Beam]:
        """One for each token, in order."""
        path: list[_Beam] = []
        beam = self
        while beam.parent is not None:
            path.append(beam)
            beam = beam.parent
        return path[::-1]


@dataclass(frozen=True)
class Hypothesis:
    """A finished text."""

    token_ids: tuple[int, ...]
    score: float
    #: One per token if they were asked for, else empty.
    logprobs: tuple[TokenLogprobs, ...]


def num_candidates(width: int, num_end_tokens: int) -> int:
    """Candidates per step with which `width` beams continue even if all beams' best tokens are end tokens."""
    return max(2, 1 + num_end_tokens) * width


class BeamSearch:
    """State of one search.

    end_token_ids: tokens that end a text.
    max_tokens: at this length every text ends.
    num_top: of `TokenLogprobs` for every token; None: no log probabilities are wanted.
    """

    def __init__(
        self,
        params: BeamParams,
        *,
        end_token_ids: Collection[int],
        max_tokens: int,
        num_top: int | None = None,
    ) -> None:
        self.params = params
        self.is_done = False
        #: Parent of each running beam among those before the last `advance`.
        self.parents: tuple[int, ...] = ()
        self._end_token_ids = frozenset(end_token_ids)
        self._max_tokens = max_tokens
        self._num_top = num_top
        self._num_tokens = 0
        self._running = [_Beam(np.float32(0.0), -1, None, None)]
        #: With their scores, the best first.
        self._finished: list[tuple[np.float32, _Beam]] = []

    @property
    def num_running(self) -> int:
        """1 before the first step, then the width."""
        return len(self._running)

    @property
    def last_token_ids(self) -> tuple[int, ...]:
        """Last tokens of the running beams."""
        return tuple(beam.token_id for beam in self._running)

    def running_token_ids(self, beam: int) -> list[int]:
        """The running beam's text."""
        return [one.token_id for one in self._running[beam].path()]

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The finished texts, the best first; `width` when the search is done."""
        return tuple(
            Hypothesis(
                tuple(one.token_id for one in path),
                float(score),
                tuple(one.logprobs for one in path if one.logprobs is not None),
            )
            for score, path in ((score, beam.path()) for score, beam in self._finished)
        )

    def advance(self, log_probs: LogProbs) -> None:
        """Advances by one token. log_probs [num_running, V] float32: natural logarithms of the probabilities
        of the next token of each running beam.

        Raises LogitsError when they hold NaN.
        """
        if self.is_done or log_probs.shape[0] != len(self._running):
            raise InvariantError(
                f"{len(self._running)} beams run (done: {self.is_done}), {log_probs.shape} probabilities came"
            )
        width, vocab_size = self.params.width, log_probs.shape[1]
        totals = log_probs + np.array([[beam.total] for beam in self._running], dtype=np.float32)
        count = num_candidates(width, len(self._end_token_ids))
        candidates = largest(totals.reshape(-1), count)
        self._num_tokens += 1
        running: list[_Beam] = []
        parents: list[int] = []
        for rank, index in enumerate(candidates.tolist()):
            parent, token_id = divmod(index, vocab_size)
            ends = token_id in self._end_token_ids or self._num_tokens >= self._max_tokens
            if (rank >= width) if ends else (len(running) == width):
                continue
            logprobs = self._token_logprobs(log_probs[parent], token_id)
            beam = _Beam(totals[parent, token_id], token_id, logprobs, self._running[parent])
            if ends:
                self._finished.append((self._score(beam, self._num_tokens), beam))
            else:
                running.append(beam)
                parents.append(parent)
        self._finished.sort(
            key=lambda finished: -finished[0]
        )  # stable: of equal ones the earlier stays first
        del self._finished[width:]
        self._running, self.parents = running, tuple(parents)
        self.is_done = not running or self._cannot_improve()

    def _cannot_improve(self) -> bool:
        params = self.params
        if len(self._finished) < params.width:
            return False
        # With one beam transformers decodes greedily.
        if params.early_stopping is EarlyStopping.WHEN_FULL or params.width == 1:
            return True
        is_longest_best = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0.0
        length = self._max_tokens if is_longest_best else self._num_tokens
        return not self._score(self._running[0], length) > self._finished[-1][0]

    def _score(self, beam: _Beam, num_tokens: int) -> np.float32:
        return np.float32(beam.total / np.float32(num_tokens**self.params.length_penalty))

    def _token_logprobs(self, row: LogProbs, token_id: int) -> TokenLogprobs | None:
        if self._num_top is None:
            return None
        top = largest(row, self._num_top).tolist() if self._num_top else []
        return TokenLogprobs(
            token_id, float(row[token_id]), tuple((index, float(row[index])) for index in top)
        )


def largest(values: LogProbs, count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest of values [n], or of all if there are fewer, the largest first; equal
    ones by index. Raises LogitsError when they hold NaN.
    """
    num_columns = len(values) // _COLUMN
    if num_columns <= count:
        indices = np.arange(len(values))
    else:
        # The count-th largest of all is at least the count-th largest of the columns' largest.
        columns = values[: num_columns * _COLUMN].reshape(_COLUMN, num_columns).max(0)
        indices = np.flatnonzero(values >= np.partition(columns, -count)[-count])
    if np.isnan(values.max(initial=-np.inf)):
        raise LogitsError
    order = np.argsort(-values[indices], kind="stable")
    return indices[order[:count]]
