"""Choosing tokens: one row of logits in, one token id out, nothing else remembered than the text so far.

A TokenChooser lives for one request and one step. It starts from the request's tokens, and each choice
becomes part of the text that the next one sees (penalties, min_tokens, the random number's position),
so that the n tokens of one verified draft are those of n single steps.
"""

from __future__ import annotations

import numpy as np

from tandem_engine.errors import InvariantError
from tandem_engine.request import Request
from tandem_engine.sampling import processors
from tandem_engine.sampling.processors import Row, TokenHistory
from tandem_engine.sampling.rng import uniform

#: Tokens summed at once: finding the block and then the token beats one cumulative sum over [V] eightfold.
_BLOCK = 256


def end_token_ids(request: Request) -> frozenset[int]:
    """Tokens that end this request's text: its stop tokens, and the model's unless it ignores them."""
    stop = frozenset(request.sampling.stop_token_ids)
    return stop if request.sampling.ignore_eos else stop | request.eos_token_ids


def most_likely(row: Row) -> int:
    """Index of the largest value in row [V]; the lowest of equals."""
    return int(row.argmax())


def draw(row: Row, u: float) -> int:
    """The token at quantile u in [0, 1) of softmax(row), row [V]; tokens at -inf are never drawn.

    Tokens lie side by side in the order of their ids, not of their probabilities, and sums are float64:
    logits that differ in the last bits move each border by as little, so the token is another one only
    when u falls on a border; ordered by probability, two near-equal tokens could swap places.
    """
    weights = np.exp(row - row.max()).astype(np.float64)
    borders = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)).cumsum()
    total = float(borders[-1])
    if not total > 0.0:
        raise InvariantError("cannot sample: the logits hold NaN or +inf, or no token is left")
    target = u * total
    block = _first_beyond(borders, target)
    start = block * _BLOCK
    base = borders[block - 1] if block else 0.0
    return start + _first_beyond(base + weights[start : start + _BLOCK].cumsum(), target)


def _first_beyond(borders: np.ndarray[tuple[int], np.dtype[np.float64]], target: float) -> int:
    """Index of the first border > target, which has a weight above 0.

    Rounding can leave the target on or beyond the last border; then the last index with a weight.
    """
    index = np.searchsorted(borders, target, side="right")
    return int(min(index, np.searchsorted(borders, borders[-1], side="left")))


class TokenChooser:
    """Chooses one request's next tokens, one after another."""

    def __init__(self, request: Request) -> None:
        self._params = request.sampling
        self._position = request.num_tokens
        self._num_output = len(request.output_token_ids)
        self._end_token_ids = end_token_ids(request)
        #: None: nothing looks at the tokens so far.
        self._history = (
            TokenHistory(request.prompt_token_ids, request.output_token_ids)
            if self._params.needs_processing
            else None
        )

    def choose(self, row: Row) -> int:
        """The next token from its raw logits [V], which stay unchanged."""
        if self._history is not None:
            row = processors.process(row, self._params, self._history, self._num_output, self._end_token_ids)
        if self._params.is_greedy:
            token_id = most_likely(row)
        else:
            token_id = draw(processors.warp(row, self._params), uniform(self._params.seed, self._position))
        if self._history is not None:
            self._history.append(token_id)
        self._position += 1
        self._num_output += 1
        return token_id
