"""What admission knows of the requests that it let in: what is left of each, and by when it has to end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from tandem_gateway.admission.batch_plan import Turn
from tandem_gateway.admission.forecast import Forecast
from tandem_gateway.fleet.routing import Route
from tandem_gateway.request import TokenizedRequest


@dataclass(eq=False)
class Admitted:
    """A request with its place, its objectives widened where this system could not meet them alone."""

    request: TokenizedRequest
    is_widened: bool = False
    #: As it came; None: nothing could be predicted.
    forecast: Forecast | None = None
    #: The pods it was last predicted to go to: from its forecast, and anew when it has waited.
    route: Route | None = None
    #: Monotonic seconds of its first token by that.
    first_planned_at: float = 0.0
    #: Sequences that it runs; each takes a place.
    num_places: int = 1
    #: Whether its call has other prompts, which are computed before its own.
    has_other_prompts: bool = False
    #: Monotonic seconds; the forecast counts from then.
    judged_at: float = field(default_factory=lambda: time.monotonic())
    #: Monotonic seconds; None before it is admitted, and before its first token.
    admitted_at: float | None = None
    first_at: float | None = None
    #: Whether one that is due earlier was admitted to its pod before its first token.
    is_overtaken: bool = False
    #: Of the answer so far.
    num_tokens: int = 0
    has_ended: bool = False
    #: When the last request came to its pod, itself or a later one, and how long the model of costs said then
    #: that it would take to its end.
    changed_at: float = 0.0
    left_then_s: float = 0.0
    #: How long it took until then by that model.
    done_s: float = 0.0

    def __post_init__(self) -> None:
        if self.forecast is not None:
            self.plan(self.forecast.route, self.judged_at + self.forecast.queue_s)

    def plan(self, route: Route, at: float) -> None:
        """It will go, or goes, to these pods, at these monotonic seconds."""
        self.route, self.first_planned_at = route, at + route.ttft_s

    @property
    def model_s(self) -> float:
        """How long it takes by the model of costs, beside all that came while it ran."""
        return self.done_s + self.left_then_s

    @property
    def queued_s(self) -> float:
        """Seconds from its arrival until it was admitted, or until now."""
        return (self.admitted_at or time.monotonic()) - self.request.arrived

    @property
    def tokens_left(self) -> int:
        """Expected."""
        assert self.route is not None
        return self.route.tokens_left(self.num_tokens)

    @property
    def first_expected_at(self) -> float:
        """When its first token came, or is expected."""
        return self.first_at or max(self.first_planned_at, time.monotonic())

    @property
    def starts_by(self) -> float:
        """When its first token must come for its objective, in monotonic seconds; inf: it has come."""
        slo = self.request.slo
        return self.request.arrived + slo.ttft_s if slo.ttft_s and not self.num_tokens else math.inf

    @property
    def ends_by(self) -> float:
        """When its last token must come for its objectives, in monotonic seconds."""
        assert self.route is not None
        slo, by = self.request.slo, math.inf
        if slo.e2e_s:
            by = self.request.arrived + slo.e2e_s
        if slo.tpot_s:
            num_tokens = self.num_tokens + self.tokens_left
            by = min(by, self.first_expected_at + slo.tpot_s * (num_tokens - 1))
        return by

    def turn(self) -> Turn:
        """What it needs yet of its decode pod's batch."""
        assert self.route is not None
        prompt_s = 0.0 if self.num_tokens or not self.route.is_local else self.route.prefill_s
        return Turn(self.request.due, self.num_places, prompt_s, self.tokens_left)

    def left_s(
        self, begin_s: float, num_sequences: float, context: int, num_prompts: float, prompts_s: float
    ) -> float:
        """Until its end beside so many sequences, it included, and so many prompts on its decode pod, if it
        has a place there from `begin_s` on."""
        assert self.route is not None
        load, backlog = self.route.decode.load, self.route.decode.backlog
        first_s, later_s, num_tokens = begin_s, prompts_s, float(self.tokens_left)
        if not self.num_tokens:
            first_s = max(self.first_expected_at - time.monotonic(), begin_s)
            # Its own prompt is among them, unless another pod computes it meanwhile.
            later_s = max(prompts_s - first_s, 0.0)
        elif not backlog.num_own:
            # The step that runs is halfway through, and no prompt that comes is in it.
            first_s += load.decode_seconds(1, num_sequences, context) / 2
            num_tokens -= load.gained(num_sequences)
            if num_tokens <= 0:
                return first_s
        num_later = num_prompts * later_s / prompts_s if prompts_s else 0.0
        return first_s + load.answer_seconds(num_tokens, num_sequences, context, num_later, later_s)
