"""Chooses tokens on the host: one row of logits in, one token id out; the only state is the text so far.

A TokenChooser serves one request in one step. It starts from the request's tokens, and each choice becomes
part of the text for the next one (penalties, min_tokens, the position of the random numbers). The n tokens of
a verified draft therefore equal those of n single steps.
"""

from __future__ import annotations

import math

import numpy as np

from tandem_engine.request import Request
from tandem_engine.sampling import processors
from tandem_engine.sampling.custom import NO_PROCESSORS, LogitsProcessors, Row
from tandem_engine.sampling.processors import TokenHistory, TokenIds
from tandem_engine.sampling.rng import RANGE, position_key, uniforms, uniforms_of_range


def most_likely(row: Row) -> int:
    """Index of the largest value in row [V]; the lowest of equals."""
    return int(row.argmax())


def draw(row: Row, key: int, token_ids: TokenIds | None = None) -> int:
    """A token from softmax(row), chosen by the random bits `key`; tokens at -inf are never drawn.

    row [n] holds the logits of token_ids [n], ascending; None: of all tokens.

    An exponential race (the Gumbel-max trick): token t arrives at time E_t / weight_t with its own standard
    exponential E_t, and the first wins with probability proportional to its weight. Inverse transform
    sampling needs one random number instead of V, but noise in the logits shifts all its intervals: noise of
    1e-5 changed 5 of 1000 tokens, hence one 64-token text in four. Here it changed none of 1000, and noise of
    1e-4 none either.

    Raises InvariantError when the logits hold NaN or +inf.
    """
    top = processors.largest(row)
    # With uniform u, E = -log(1 - u) >= u, so u / weight bounds a token's time from below. Nearly all tokens
    # have a bound above the earliest time so far and need no logarithm.
    first_time = math.inf
    first_token = -1
    for start in range(0, len(row), RANGE):
        weights = np.exp(row[start : start + RANGE] - top)
        stop = start + len(weights)
        u = uniforms_of_range(key, start, stop) if token_ids is None else uniforms(key, token_ids[start:stop])
        with np.errstate(divide="ignore"):
            earliest = u / weights
        favourite = earliest.argmin()
        if weights[favourite] == 0.0:
            continue
        arrival = -math.log1p(-u[favourite]) / float(weights[favourite])
        close = np.flatnonzero(earliest <= min(arrival, first_time))
        times = -np.log1p(-u[close]) / weights[close]
        if len(close) and times.min() < first_time:
            first_time = times.min()
            first_token = start + int(close[times.argmin()])
    return first_token if token_ids is None else int(token_ids[first_token])


class TokenChooser:
    """Chooses one request's next tokens, one after another."""

    def __init__(self, request: Request, custom: LogitsProcessors = NO_PROCESSORS) -> None:
        self._params = request.sampling
        self._custom = custom
        self._position = request.num_tokens
        self._num_output = len(request.output_token_ids)
        self._end_token_ids = request.end_token_ids
        #: None: the choice does not depend on the tokens so far.
        self._history = (
            TokenHistory(request.prompt_token_ids, request.output_token_ids)
            if self._params.changes_logits
            else None
        )
        self._guide = request.guide
        if self._guide is not None:
            self._guide.follow(request.output_token_ids)

    def choose(self, row: Row) -> int:
        """The next token from its raw logits [V], which stay unchanged.

        Raises InvalidRequestError if a custom logits processor fails.
        """
        raw = row
        if self._history is not None:
            row = processors.process(
                row, self._params, self._history, self._num_output, self._end_token_ids, self._custom
            )
        if self._guide is not None:
            row = processors.restrict(row, raw, self._guide.allowed(len(row)))
        if self._params.is_greedy:
            token_id = most_likely(row)
        else:
            logits, token_ids = processors.warp(row, self._params)
            token_id = draw(logits, position_key(self._params.seed, self._position), token_ids)
        if self._history is not None:
            self._history.append(token_id)
        if self._guide is not None:
            self._guide.consume(token_id)
        self._position += 1
        self._num_output += 1
        return token_id
