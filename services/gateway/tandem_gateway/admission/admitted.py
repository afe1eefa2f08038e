"""Admission's state of a request that waits or runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tandem_gateway.admission.forecast import Forecast
from tandem_gateway.fleet.load import Placed
from tandem_gateway.fleet.routing import Effects
from tandem_gateway.request import TokenizedRequest


@dataclass(eq=False)
class Admitted:
    """A request that waits or runs. Its objectives are widened where an idle system could not meet them."""

    request: TokenizedRequest
    is_widened: bool = False
    #: The prediction at arrival; None: there was none.
    forecast: Forecast | None = None
    #: Its places; each is one sequence and takes a batch slot.
    num_places: int = 1
    #: Tokens of the call's other prompts, which are computed before its own.
    other_tokens: int = 0
    #: Monotonic seconds of the decision; the forecast's times count from it.
    judged_at: float = field(default_factory=lambda: time.monotonic())
    #: Monotonic seconds; None while it waits.
    admitted_at: float | None = None
    #: The plan with which it begins if it begins now.
    effects: Effects | None = None
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.placed = Placed(self.request, self.num_places, self.other_tokens)

    @property
    def queued_s(self) -> float:
        """Seconds from its arrival until it was admitted, or until now."""
        return (self.admitted_at or time.monotonic()) - self.request.arrived

    @property
    def first_at(self) -> float | None:
        """Monotonic seconds of its first token; None before it."""
        return self.placed.first_at

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self.placed.num_tokens
