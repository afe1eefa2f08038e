"""Duration and tokens of steps, learned from the steps that an engine runs.

The ratios of the coefficients of `StepCost` are a non-negative least-squares fit to steps of all sizes. Their
level is the mean of recent steps, because the speed of a shared machine changes. It is not the median, which
would underestimate the sum of a request's steps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from tandem_core.step_cost import StepCost

_NUM_TERMS = 3
_PER_STEP, _PER_TOKEN, _PER_PAIR = range(_NUM_TERMS)
#: Order in which terms explain steps of a single size: for prompts first the tokens, which need arithmetic;
#: for decode steps first the step, which reads the weights for any number of sequences.
PROMPT_TERMS = (_PER_TOKEN, _PER_PAIR, _PER_STEP)
DECODE_TERMS = (_PER_STEP, _PER_TOKEN, _PER_PAIR)
#: Steps kept of each size, so that many small steps do not displace the few large ones.
_STEPS_PER_SIZE = 6
#: Half-life of a step's weight; and the least weight, since the only large step may be old. After a pause all
#: steps count about equally, because the last ones may have run under a load that has ended.
_HALF_LIFE_S = 10.0
_LEAST_WEIGHT = 0.01
#: Least time between fits; a fit takes half a millisecond.
_FIT_EVERY_S = 0.2
#: Pairs per token above which attention is a measurable part of a step.
_ENOUGH_PAIRS = 512
#: Steps count as at most this multiple of the fit, because a pause of the whole process is no step cost.
_LONGEST = 4.0
#: Weight of the newest step in a mean of tokens.
_RECENT = 0.02
#: Window of the mean tokens per step, in steps of one sequence.
_TEXTS_WINDOW = 256
#: Window in steps of the relative gain of a batch size; its initial value has the weight of _GUESS_STEPS.
_SHARE_WINDOW, _GUESS_STEPS = 1024, 64
#: Limit of a step's deviation as a factor, because steps of repetitive text predict others poorly.
_MOST_OFF = 4.0
#: Quantile of steps that represents an idle machine.
_FASTEST = 0.1


class StepTimes:
    """One thread observes; any thread may read the fit."""

    def __init__(self, terms: tuple[int, ...] = PROMPT_TERMS) -> None:
        """`terms`: in order of preference."""
        self._terms = terms
        #: (tokens, pairs, seconds, seconds as measured, time of the end) by size: the powers of two of tokens
        #: and pairs. The two differ in steps before `expect_load`.
        self._steps: dict[tuple[int, int], deque[tuple[float, float, float, float, float]]] = {}
        self._fitted = StepCost()
        self._fitted_at = -math.inf

    def observe(self, num_tokens: int, num_pairs: int, seconds: float) -> None:
        size = (num_tokens.bit_length(), num_pairs.bit_length())
        if size not in self._steps:
            # A new dict: another thread may be reading the old one.
            self._steps = {**self._steps, size: deque(maxlen=_STEPS_PER_SIZE)}
        self._steps[size].append((num_tokens, num_pairs, seconds, seconds, time.monotonic()))

    def expect_load(self, factor: float) -> None:
        """Multiplies the times of earlier steps, measured on an idle machine, by `factor`, until steps under
        load replace them."""
        self._steps = {
            size: deque(((n, pairs, s * factor, took, at) for n, pairs, s, took, at in steps), steps.maxlen)
            for size, steps in self._steps.items()
        }
        self._fitted_at = -math.inf

    def cost(self) -> StepCost:
        """The fitted step cost; all zero before the first step."""
        now = time.monotonic()
        steps = [step for steps in self._steps.values() for step in steps.copy()]
        if steps and (now - self._fitted_at > _FIT_EVERY_S or not self._fitted.is_known):
            self._fitted_at = now
            self._fitted = _fit(np.array(steps), self._terms, now)
        return self._fitted


class TokensPerStep:
    """Recent mean of tokens that a sequence gains in a decode step, overall and by batch size: the mean of
    the texts times the relative gain of the batch size.

    Texts change within seconds. Larger batches gain less because they share the drafts: where each of a few
    sequences gains seven tokens, each of sixteen gains two. The relative gains are kept for times when the
    load rises. One thread observes; any thread may read.
    """

    def __init__(self) -> None:
        self.mean = 1.0
        #: Mean of the texts, and the number of sequence-steps that it covers.
        self._of_texts, self._num_texts = 1.0, 0
        #: Relative gain and number of observed steps, by power of two of the number of sequences.
        self._shares: dict[int, tuple[float, int]] = {}

    def observe(self, num_sequences: int, gained: float) -> None:
        """`gained`: mean tokens per sequence of a step."""
        self.mean += _RECENT * (gained - self.mean)
        size = num_sequences.bit_length() - 1
        share, count = self._shares.get(size, (self._share(size), 0))
        ratio = gained / (self._of_texts * share)
        change = min(max(ratio, 1 / _MOST_OFF), _MOST_OFF) - 1
        self._num_texts = min(self._num_texts + num_sequences, _TEXTS_WINDOW)
        self._of_texts *= 1 + min(num_sequences / self._num_texts, 1.0) * change
        share *= 1 + change / (min(count, _SHARE_WINDOW) + _GUESS_STEPS)
        # A new dict: another thread may be reading the old one.
        self._shares = {**self._shares, size: (share, count + 1)}

    def by_batch(self) -> list[float]:
        """Tokens per step for batches of 1, 2 to 3, 4 to 7, ... sequences, up to the largest observed
        size."""
        return [self._of_texts * self._share(size) for size in range(max(self._shares, default=-1) + 1)]

    def _share(self, size: int) -> float:
        """Relative gain of a batch size, or of the nearest observed one."""
        nearest = min(self._shares, key=lambda other: (abs(other - size), other), default=None)
        return 1.0 if nearest is None else self._shares[nearest][0]


def _fit(steps: NDArray[np.float64], terms: tuple[int, ...], now: float) -> StepCost:
    """Fits step costs, with errors relative to the steps' durations. `steps` [n, 5]: tokens, pairs, seconds,
    seconds as measured, time of the end."""
    tokens, pairs, seconds, measured, ended = steps.T
    features = np.stack([np.ones_like(tokens), tokens, pairs], axis=1)
    weights = np.maximum(0.5 ** ((now - ended) / _HALF_LIFE_S), _LEAST_WEIGHT)
    rows = features * (np.sqrt(weights) / seconds)[:, None]
    wanted = np.sqrt(weights)
    best, least = np.zeros(_NUM_TERMS), np.inf
    # In steps with few pairs their cost is lost in the noise, which would be multiplied for long prompts.
    has_pairs = (pairs / tokens).max() >= _ENOUGH_PAIRS
    usable = [term for term in terms if has_pairs or term != _PER_PAIR]
    # With three terms all sets of positive ones can be tried. The smallest set wins a tie, so that one size
    # of step, which fits any term, is not split among them by chance.
    for some in (list(some) for size in range(1, len(usable) + 1) for some in combinations(usable, size)):
        found, *_ = np.linalg.lstsq(rows[:, some], wanted, rcond=None)
        if (found < 0).any():
            continue
        error = float(np.square(rows[:, some] @ found - wanted).sum())
        if error < least - 1e-9:
            best, least = np.zeros(_NUM_TERMS), error
            best[some] = found
    fitted = features @ best
    level = np.average(np.minimum(seconds / fitted, _LONGEST), weights=weights)
    unloaded = min(1.0, float(np.quantile(measured / fitted, _FASTEST) / level))
    per_step, per_token, per_pair = (level * best).tolist()
    return StepCost(per_step, per_token, per_pair, unloaded)
