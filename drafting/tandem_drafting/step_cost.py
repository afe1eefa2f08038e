"""Duration of a step as a function of its number of guesses, estimated online (drafting/csrc/step_cost.h)."""

from __future__ import annotations

from array import array

from tandem_drafting import native

#: Consecutive steps whose times are compared with one another.
_TOGETHER = 16
#: Doubles of a step in drafting/csrc/step_cost.h.
_STEP_WORDS = 4


class StepCost:
    """Online estimate, in units of about one step of one row; used by the engine's thread.

    row_cost: time of one more row relative to a step without guesses, before any measurement.
    """

    def __init__(self, row_cost: float = 0.1) -> None:
        self._library = native.LIBRARY
        if not 0.0 <= row_cost < 10.0:
            raise ValueError(f"row_cost is {row_cost}; it is a share of a step, in [0, 10)")
        self._handle = self._library.tandem_step_cost_new(row_cost)
        self._seconds = array("d")
        self._pending = array("d")

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.tandem_step_cost_free(self._handle)

    def observe(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        """Adds a step without prefill; context: cached tokens of all its sequences."""
        pending = self._pending
        pending.extend((num_sequences, context, num_guesses, seconds))
        if len(pending) == _TOGETHER * _STEP_WORDS:
            self._library.tandem_step_cost_observe(self._handle, pending.buffer_info()[0], _TOGETHER)
            self._pending = array("d")

    def curve(self, num_sequences: int, context: int, max_guesses: int) -> array[float]:
        """Times of a step with 0 .. max_guesses guesses, non-decreasing; only ratios have a meaning.

        The array is reused by the next call.
        """
        if len(self._seconds) != max_guesses + 1:
            self._seconds = array("d", bytes(8 * (max_guesses + 1)))
        native.LIBRARY.tandem_step_cost_curve(
            self._handle, num_sequences, context, len(self._seconds), self._seconds.buffer_info()[0]
        )
        return self._seconds
