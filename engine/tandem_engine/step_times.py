"""How long a step takes, learned from the steps that an engine runs.

    seconds = per_step + per_token * tokens + per_pair * pairs

Tokens are those that the step computes. Pairs are (token, earlier token) that attention compares, so that a
chunk at the end of a long prompt costs more than one at its beginning. The ratios of the coefficients are a
non-negative least-squares fit to steps of every size; their level is the median of recent steps, because the
speed of a shared machine changes.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

_NUM_TERMS = 3
#: Steps kept of each size, so that many small steps do not push out the few large ones.
_STEPS_PER_SIZE = 6
#: Half-life of a step's weight; and the least weight in the fit, since the only large step may be old.
_HALF_LIFE_S = 20.0
_LEAST_WEIGHT = 0.01


@dataclass(frozen=True)
class StepCost:
    """Coefficients in seconds."""

    per_step: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0

    def seconds(self, num_steps: float, num_tokens: float, num_pairs: float) -> float:
        return self.per_step * num_steps + self.per_token * num_tokens + self.per_pair * num_pairs

    def prompt_seconds(self, start: int, stop: int, chunk_size: int) -> float:
        """To compute the prompt tokens [start, stop) in chunks, while nothing else runs."""
        num_tokens = stop - start
        return self.seconds(-(-num_tokens // chunk_size), num_tokens, num_tokens * (start + stop) / 2)

    @property
    def is_known(self) -> bool:
        return self.per_step + self.per_token + self.per_pair > 0


class StepTimes:
    """One thread observes, any thread may ask for the fit."""

    def __init__(self) -> None:
        #: (tokens, pairs, seconds, time of the end) by size: the powers of two of tokens and pairs.
        self._steps: dict[tuple[int, int], deque[tuple[float, float, float, float]]] = {}
        self._num_observed = 0
        self._fitted = StepCost()
        self._num_fitted = 0

    def observe(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        size = (num_tokens.bit_length(), num_pairs.bit_length())
        if size not in self._steps:
            # A new dict: another thread may be reading the old one.
            self._steps = {**self._steps, size: deque(maxlen=_STEPS_PER_SIZE)}
        self._steps[size].append((num_tokens, num_pairs, seconds, time.monotonic()))
        self._num_observed += 1

    def cost(self) -> StepCost:
        """All zero before the first step."""
        if self._num_fitted != self._num_observed:
            self._num_fitted = self._num_observed
            self._fitted = _fit(np.array([step for steps in self._steps.values() for step in steps.copy()]))
        return self._fitted


def _fit(steps: NDArray[np.float64]) -> StepCost:
    """`steps` [n, 4]: tokens, pairs, seconds, time of the end. Errors count relative to the step's length."""
    tokens, pairs, seconds, ended = steps.T
    features = np.stack([np.ones_like(tokens), tokens, pairs], axis=1)
    # Relative to the newest, so that a pause changes nothing.
    recency = 0.5 ** ((ended.max() - ended) / _HALF_LIFE_S)
    weights = np.maximum(recency, _LEAST_WEIGHT)
    rows = features * (np.sqrt(weights) / seconds)[:, None]
    wanted = np.sqrt(weights)
    best, least = np.zeros(_NUM_TERMS), np.inf
    # With three terms all sets of positive ones can be tried. The smallest set wins a tie, so that one size
    # of step, which fits any term, is not split among them by chance.
    for terms in (
        list(terms) for size in range(1, _NUM_TERMS + 1) for terms in combinations((1, 2, 0), size)
    ):
        found, *_ = np.linalg.lstsq(rows[:, terms], wanted, rcond=None)
        if (found < 0).any():
            continue
        error = float(np.square(rows[:, terms] @ found - wanted).sum())
        if error < least - 1e-9:
            best, least = np.zeros(_NUM_TERMS), error
            best[terms] = found
    ratios = seconds / (features @ best)
    order = np.argsort(ratios)
    cumulated = recency[order].cumsum()
    level = ratios[order[np.searchsorted(cumulated, cumulated[-1] / 2)]]
    return StepCost(*(level * best).tolist())
