"""What a step takes with so many guesses, learnt from the steps themselves.

    model    time = a + b rows + c context + d rows * context per sequence, for every batch: fitted by least
             squares with forgetting, no coefficient negative. Rows are the tokens a step computes, context
             the cached tokens it reads.
    region   batch size and context, each to a power of two: what was seen there relative to the model, by
             number of guesses, for what is not linear (tiles of rows, a GPU's idle units)

Only how times compare is learnt, within a few steps at a time, since a machine's speed changes with what else
runs on it. The unit is that of the prior: about a step of one row without context.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

#: Weight of the past after one step; 0.995 remembers about two hundred steps.
_FORGETTING = 0.995
_REGION_FORGETTING = 0.99
#: How far the prior counts: as a share of what was observed, and as steps of its own. The latter win when
#: nothing is learnt for long, so that a price that was thought too high is asked for again.
_RIDGE = 0.005
_PRIOR_STEPS = 0.1
#: Observations that weigh as much as the model does in a region.
_REGION_PRIOR = 4.0
_MAX_SURPRISE = 2.0
_ABSORB_EVERY = 16
#: Numbers of guesses between which a region's ratios are interpolated.
_KNOTS = np.array(
    [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 8192], np.float64
)

_Floats = npt.NDArray[np.float64]


@dataclass
class _Region:
    """Seconds seen over seconds expected, at each knot, and how much was seen there."""

    ratios: _Floats = field(default_factory=lambda: np.ones(len(_KNOTS)))
    weights: _Floats = field(default_factory=lambda: np.zeros(len(_KNOTS)))

    def absorb(self, num_guesses: _Floats, ratios: _Floats) -> None:
        high = np.maximum(np.searchsorted(_KNOTS, num_guesses), 1)
        share = (num_guesses - _KNOTS[high - 1]) / (_KNOTS[high] - _KNOTS[high - 1])
        knots, parts = np.concatenate((high - 1, high)), np.concatenate((1.0 - share, share))
        seen = np.bincount(knots, parts, len(_KNOTS))
        sums = np.bincount(knots, parts * np.tile(ratios, 2), len(_KNOTS))
        old = self.weights * _REGION_FORGETTING ** len(num_guesses)
        self.weights = old + seen
        self.ratios = np.where(
            seen > 0.0, (old * self.ratios + sums) / np.maximum(self.weights, 1e-9), self.ratios
        )

    def correction(self, num_guesses: _Floats) -> _Floats:
        seen = self.weights / (self.weights + _REGION_PRIOR)
        trusted = 1.0 + (self.ratios - 1.0) * seen
        # Where nothing was seen, as where something was: what makes a region slow does so for all its steps.
        known = self.weights > 0.5
        if known.any():
            trusted = np.where(known, trusted, np.interp(_KNOTS, _KNOTS[known], trusted[known]))
        return np.asarray(np.interp(num_guesses, _KNOTS, trusted))


class StepCost:
    """Online estimate of the seconds of a decode step; belongs to the engine's thread.

    row_cost: time of one more row relative to a step without guesses, before anything was measured.
    """

    def __init__(self, row_cost: float = 0.03) -> None:
        if not 0.0 <= row_cost < 10.0:
            raise ValueError(f"row_cost is {row_cost}; it is a share of a step, in [0, 10)")
        self._prior = np.array([1.0, row_cost, 0.0, 0.0])
        self._coefficients = self._prior
        rows = _features(1, 1000, np.arange(16, dtype=np.float64))
        relative = rows / (rows @ self._prior)[:, None]
        self._prior_products = _PRIOR_STEPS / len(rows) * relative.T @ relative + 1e-9 * np.eye(4)
        self._products = np.zeros((4, 4))
        self._targets = np.zeros(4)
        self._regions: dict[tuple[int, int], _Region] = {}
        self._pending: list[tuple[int, int, int, float]] = []
        self._curve: tuple[tuple[int, int, int], array[float]] | None = None
        #: Recent mean duration of a decode step; 0 before any was seen.
        self.mean_seconds = 0.0

    def observe(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        """Notes a step that only decoded; context: cached tokens of all its sequences."""
        self._pending.append((num_sequences, context, num_guesses, seconds))
        old = self.mean_seconds
        self.mean_seconds = seconds if old == 0.0 else 0.98 * old + 0.02 * seconds

    def curve(self, num_sequences: int, context: int, max_guesses: int) -> array[float]:
        """Times of a step with 0 .. max_guesses guesses, never less for more; their ratios count."""
        if len(self._pending) >= _ABSORB_EVERY:
            self._absorb()
            self._curve = None
        key = (num_sequences, context.bit_length(), max_guesses)
        if self._curve is None or self._curve[0] != key:
            guesses = np.arange(max_guesses + 1, dtype=np.float64)
            seconds = self._expected(num_sequences, context, guesses)
            region = self._regions.get(_region_of(num_sequences, context))
            if region is not None:
                seconds = seconds * region.correction(guesses)
            self._curve = (key, array("d", np.maximum.accumulate(seconds).tobytes()))
        return self._curve[1]

    def _expected(self, num_sequences: int, context: int, num_guesses: _Floats) -> _Floats:
        return np.asarray(_features(num_sequences, context, num_guesses) @ self._coefficients)

    def _absorb(self) -> None:
        """Takes what is pending into the regions, by the model as it was, and then into the model."""
        observed = np.array(self._pending)
        self._pending.clear()
        sequences, context, guesses, seconds = observed.T
        self._forget(len(observed))
        if guesses.min() == guesses.max():
            # Nothing to compare.
            self._fit()
            return
        rows = _features(sequences, context, guesses)
        expected = rows @ self._coefficients
        ratios = seconds / expected
        # Relative to one another; one that took much longer was held up.
        ratios = np.clip(ratios / np.median(ratios), 1.0 / _MAX_SURPRISE, _MAX_SURPRISE)
        keys = [_region_of(int(row[0]), int(row[1])) for row in observed]
        for key in set(keys):
            here = np.array([key == other for other in keys])
            self._regions.setdefault(key, _Region()).absorb(guesses[here], ratios[here])
        # Errors count relative to the step: short ones are as dear as long ones.
        relative = rows / expected[:, None]
        self._products += relative.T @ relative
        self._targets += relative.T @ ratios
        self._fit()

    def _forget(self, num_steps: int) -> None:
        self._products *= _FORGETTING**num_steps
        self._targets *= _FORGETTING**num_steps
        for region in self._regions.values():
            region.weights *= _REGION_FORGETTING**num_steps

    def _fit(self) -> None:
        """Least squares, drawn to the prior where nothing was seen; what comes out negative is left out."""
        ridge = np.diag(_RIDGE * np.diag(self._products)) + self._prior_products
        products, targets = self._products + ridge, self._targets + ridge @ self._prior
        used = np.ones(4, dtype=bool)
        while True:
            found = np.zeros(4)
            found[used] = np.linalg.solve(products[np.ix_(used, used)], targets[used])
            if (found >= 0.0).all():
                break
            used &= found >= 0.0
        if (found[:2] > 0.0).any():
            self._coefficients = found


def _features(num_sequences: _Floats | int, context: _Floats | int, num_guesses: _Floats) -> _Floats:
    """[len(num_guesses), 4]: one, rows, context, rows * context per sequence; context in thousands."""
    rows = num_sequences + num_guesses
    tokens = np.broadcast_to(np.asarray(context, np.float64) / 1000.0, rows.shape)
    return np.stack((np.ones_like(rows), rows, tokens, rows * tokens / num_sequences), axis=1)


def _region_of(num_sequences: int, context: int) -> tuple[int, int]:
    return num_sequences.bit_length(), context.bit_length()
