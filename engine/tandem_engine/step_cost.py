"""What one more row costs, learnt from the steps themselves.

The time of a step that only decodes is close to a line in its number of rows, T(Q) = a + b Q, whose slope
decides how many guesses are worth verifying (DESIGN, budget). The line is fitted by least squares with
exponential forgetting, so that it follows the machine's load.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Weight of the past after one step; 0.98 remembers about fifty steps.
_FORGETTING = 0.98
#: Before anything was measured: a row costs 3 % of a step (SmolLM2 in fp32 on two AVX2 cores).
_PRIOR_RELATIVE_COST = 0.03
_MIN_RELATIVE_COST, _MAX_RELATIVE_COST = 0.002, 1.0


@dataclass
class StepCost:
    """Online estimate of the cost of a row relative to a step with one row per sequence."""

    _weight: float = 0.0
    _rows: float = 0.0
    _rows_squared: float = 0.0
    _seconds: float = 0.0
    _rows_seconds: float = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Adds one decode-only step."""
        for name, value in (
            ("_weight", 1.0),
            ("_rows", float(num_rows)),
            ("_rows_squared", float(num_rows) ** 2),
            ("_seconds", seconds),
            ("_rows_seconds", num_rows * seconds),
        ):
            setattr(self, name, getattr(self, name) * _FORGETTING + value)

    @property
    def mean_seconds(self) -> float:
        """Recent mean duration of a decode step; 0 before any was seen."""
        return self._seconds / self._weight if self._weight else 0.0

    def relative_row_cost(self, num_sequences: int) -> float:
        """(T(Q + 1) - T(Q)) / T(num_sequences), within sane bounds."""
        if self._weight < 3.0:
            return _PRIOR_RELATIVE_COST
        mean_rows = self._rows / self._weight
        variance = self._rows_squared / self._weight - mean_rows**2
        if variance < 0.5:  # all steps alike: no slope to be seen
            return _PRIOR_RELATIVE_COST
        slope = (self._rows_seconds / self._weight - mean_rows * self.mean_seconds) / variance
        base = self.mean_seconds + slope * (num_sequences - mean_rows)
        if base <= 0.0:
            return _MAX_RELATIVE_COST
        return min(max(slope / base, _MIN_RELATIVE_COST), _MAX_RELATIVE_COST)
