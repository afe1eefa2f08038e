"""The time of a step as a function of its guesses, estimated online; drafting/csrc/step_cost.h says how.

The unit is that of the prior, about a step of one row without context: how times compare is what drafts need.
"""

from __future__ import annotations

from array import array

from tandem_drafting import native

#: Steps that are compared with one another.
_TOGETHER = 16
#: Doubles of a step in drafting/csrc/step_cost.h.
_STEP_WORDS = 4


class StepCost:
    """Online estimate of the seconds of a decode step; belongs to the engine's thread.

    row_cost: time of one more row relative to a step without guesses, before anything was measured.
    """

    def __init__(self, row_cost: float = 0.1) -> None:
        self._library = native.LIBRARY
        if not 0.0 <= row_cost < 10.0:
            raise ValueError(f"row_cost is {row_cost}; it is a share of a step, in [0, 10)")
        self._handle = self._library.tandem_step_cost_new(row_cost)
        self._seconds = array("d")
        self._pending = array("d")
        #: Recent mean duration of a decode step; 0 before any was seen.
        self.mean_seconds = 0.0

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.tandem_step_cost_free(self._handle)

    def observe(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        """Notes a step that only decoded; context: cached tokens of all its sequences."""
        old = self.mean_seconds
        self.mean_seconds = seconds if old == 0.0 else 0.98 * old + 0.02 * seconds
        pending = self._pending
        pending.extend((num_sequences, context, num_guesses, seconds))
        if len(pending) == _TOGETHER * _STEP_WORDS:
            self._library.tandem_step_cost_observe(self._handle, pending.buffer_info()[0], _TOGETHER)
            self._pending = array("d")

    def curve(self, num_sequences: int, context: int, max_guesses: int) -> array[float]:
        """Times of a step with 0 .. max_guesses guesses, never less for more; their ratios count.

        Good until it is called again.
        """
        if len(self._seconds) != max_guesses + 1:
            self._seconds = array("d", bytes(8 * (max_guesses + 1)))
        native.LIBRARY.tandem_step_cost_curve(
            self._handle, num_sequences, context, len(self._seconds), self._seconds.buffer_info()[0]
        )
        return self._seconds
