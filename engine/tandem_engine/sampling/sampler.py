"""Chooses tokens on the host: one row of logits in, one token id out; the only state is the text so far.

A TokenChooser serves one request in one step. It starts from the request's tokens, and each choice becomes
part of the text for the next one (penalties, min_tokens, the position of the random numbers). The n tokens of
a verified draft therefore equal those of n single steps. What a guide allows comes with the row (guided.py).
"""

from __future__ import annotations

import math

from tandem_core.errors import LogitsError
from tandem_core.sampling import SamplingParams
from tandem_kernels import draw_token

from tandem_engine.guided import Mask
from tandem_engine.request import Request
from tandem_engine.sampling import processors
from tandem_engine.sampling.custom import NO_PROCESSORS, LogitsProcessors, Row
from tandem_engine.sampling.processors import TokenHistory
from tandem_engine.sampling.rng import position_key

#: Lower temperatures equal greedy, and dividing by less overflows float32.
MIN_TEMPERATURE = 1e-5


def most_likely(row: Row) -> int:
    """Index of the largest value in row [V], the lowest of equals; -1 if that is NaN or infinite."""
    token_id = int(row.argmax())
    return token_id if math.isfinite(row[token_id]) else -1


def draw_parameters(params: SamplingParams) -> tuple[float, int, float, float]:
    """temperature, top_k, top_p and log_min_p of `draw_tokens`, of a request that is not greedy."""
    log_min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    return max(params.temperature, MIN_TEMPERATURE), params.top_k, params.top_p, log_min_p


def checked(token_id: int) -> int:
    """The token. Raises LogitsError for -1, which stands for a row without a distribution."""
    if token_id < 0:
        raise LogitsError
    return token_id


class TokenChooser:
    """Chooses one request's next tokens, one after another."""

    def __init__(self, request: Request, custom: LogitsProcessors = NO_PROCESSORS) -> None:
        self._params = request.sampling
        self._custom = custom
        self._position = request.num_tokens
        self._num_output = len(request.output_token_ids)
        self._end_token_ids = request.end_token_ids
        #: None: the choice does not depend on the tokens so far.
        self._history: TokenHistory | None = None
        if self._params.changes_logits:
            if request.history is None:
                allowed = self._params.allowed_token_ids
                request.history = TokenHistory(request.prompt_token_ids, (), allowed)
            request.history.follow(request.output_token_ids)
            self._history = request.history

    def choose(self, row: Row, mask: Mask | None = None) -> int:
        """The next token from its raw logits [V], which stay unchanged. mask: the tokens that a guide allows.

        Raises InvalidRequestError if a custom logits processor fails, LogitsError when the logits hold NaN or
        +inf.
        """
        raw = row
        if self._history is not None:
            row = processors.process(
                row, self._params, self._history, self._num_output, self._end_token_ids, self._custom
            )
        if mask is not None:
            row = processors.restrict(row, raw, mask)
        if self._params.is_greedy:
            token_id = checked(most_likely(row))
        else:
            key = position_key(self._params.seed, self._position)
            token_id = checked(draw_token(row, key, *draw_parameters(self._params)))
        if self._history is not None:
            self._history.append(token_id)
        self._position += 1
        self._num_output += 1
        return token_id
