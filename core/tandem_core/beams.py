"""Parameters of beam search, with the meanings of transformers' generation parameters."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from tandem_core.errors import InvalidRequestError

MAX_BEAM_WIDTH = 16
#: The longest context's length to this power is within float32's range.
MAX_LENGTH_PENALTY = 5.0


def excluded_by_beams(field: str) -> InvalidRequestError:
    return InvalidRequestError(field, "cannot be combined with beam search; leave it out")


class EarlyStopping(enum.Enum):
    """When a search with `width` finished texts ends; the names are those of common.proto."""

    #: Ends when no running beam has a better score at its present length: transformers' False.
    HEURISTIC = "heuristic"
    #: Ends at once: transformers' True.
    WHEN_FULL = "when_full"
    #: Ends when no running beam can have a better score at any length: transformers' "never".
    NEVER = "never"


@dataclass(frozen=True)
class BeamParams:
    """Raises InvalidRequestError naming the field and its limit."""

    #: Number of beams.
    width: int
    #: A text's score is the sum of its log probabilities / its number of tokens to this power.
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_BEAM_WIDTH:
            raise InvalidRequestError(
                "beam_width", f"is {self.width}; it must be between 1 and {MAX_BEAM_WIDTH}"
            )
        limit = MAX_LENGTH_PENALTY
        if not (math.isfinite(self.length_penalty) and -limit <= self.length_penalty <= limit):
            raise InvalidRequestError(
                "length_penalty", f"is {self.length_penalty}; it must be in [{-limit:g}, {limit:g}]"
            )
