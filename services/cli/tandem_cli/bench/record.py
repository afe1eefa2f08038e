"""The record of one request, and the recorder that makes it.

Times are in seconds since the request was first sent, except `sent_s`: since the start of the run.

    sent   refused, "retry after 2 s"   sent again    first token          end
    |------|............................|-------------|--------------------|
    0      attempt 0                    last_sent_s   ttft_s               e2e_s
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tandem_core.slo import NO_OBJECTIVES, SloTarget

from tandem_cli.bench.requests import Request

OK = "OK"
TIMEOUT = "TIMEOUT"
#: Statuses of an overloaded server.
REFUSALS = ("RESOURCE_EXHAUSTED", "HTTP 429")


@dataclass(frozen=True)
class Speculation:
    """Drafting figures of the receipt."""

    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    #: Steps that accepted at least one draft token.
    hit_steps: int = 0


@dataclass(frozen=True)
class Promise:
    """Objectives and predictions of the receipt, in seconds as the gateway measured them."""

    ttft_s: float
    e2e_s: float
    queue_s: float
    #: The objectives that the gateway applied.
    slo: SloTarget
    met: bool
    #: Whether the gateway widened them because an idle system could not meet the requested ones.
    widened: bool = False
    miss_reason: str = ""
    miss_cause: str = ""
    #: Predictions at admission; None: no prediction.
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p90_s: float | None = None


@dataclass(frozen=True)
class Attempt:
    """One attempt of a request."""

    sent_s: float
    ended_s: float
    status: str
    #: The server's retry-after; None: it sent none.
    retry_after_s: float | None = None

    @property
    def is_refused(self) -> bool:
        return self.status in REFUSALS


@dataclass(frozen=True)
class RequestRecord:
    """One finished request. status: "OK", a gRPC code, "HTTP <code>" or "TIMEOUT", of the last attempt."""

    index: int
    dialogue_id: str
    status: str
    error: str
    sent_s: float
    #: None: no token arrived.
    ttft_s: float | None
    e2e_s: float
    #: Gaps between messages that carried tokens.
    gaps_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    text: str
    speculation: Speculation | None
    #: The requested objectives; its name is the class.
    slo: SloTarget = NO_OBJECTIVES
    tenant: str = ""
    max_tokens: int = 0
    attempts: tuple[Attempt, ...] = ()
    promise: Promise | None = None
    #: Delay after its planned time in an open loop, because the client was busy.
    late_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def is_refused(self) -> bool:
        return self.status in REFUSALS

    @property
    def last_sent_s(self) -> float:
        """Start of the last attempt."""
        return self.attempts[-1].sent_s if self.attempts else 0.0

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1); None with fewer than two tokens."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    def is_met(self, slo: SloTarget | None = None, *, since_s: float = 0.0) -> bool:
        """Whether it succeeded within every objective, by default the requested ones, counted from the first
        attempt. The receipt has the seconds of relative objectives. An empty answer's first token is its end.
        """
        if not self.is_ok:
            return False
        ttft_s = self.e2e_s if self.ttft_s is None else self.ttft_s
        target = self.slo if slo is None else slo
        if target.is_relative and self.promise is not None:
            # Absolute objectives stay as requested: the gateway may have widened them.
            applied = self.promise.slo
            target = replace(
                target,
                ttft_s=applied.ttft_s if target.ttft_slowdown else target.ttft_s,
                tpot_s=applied.tpot_s if target.tpot_slowdown else target.tpot_s,
                e2e_s=applied.e2e_s if target.e2e_slowdown else target.e2e_s,
            )
        return target.miss(ttft_s - since_s, self.tpot_s or 0.0, self.e2e_s - since_s) == ""


class Recorder:
    """Records the events of one request; a transport calls it."""

    def __init__(self, request: Request, run_started_s: float, planned_s: float | None = None) -> None:
        """planned_s: planned time in seconds since the start of the run; None in a closed loop."""
        self._request = request
        self._sent = time.perf_counter()
        self._sent_s = self._sent - run_started_s
        self._late_s = 0.0 if planned_s is None else max(0.0, self._sent_s - planned_s)
        self._attempts: list[Attempt] = []
        self._attempt_sent_s = 0.0
        self._arrivals_s: list[float] = []
        self._text: list[str] = []
        self._counted_tokens = 0
        self._ended_s: float | None = None
        #: Set by the transport from the answer's usage or receipt.
        self.prompt_tokens = 0
        self.output_tokens: int | None = None
        self.speculation: Speculation | None = None
        self.promise: Promise | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(self._arrivals_s)

    def tokens(self, num_tokens: int, text: str) -> None:
        """Records a message with tokens."""
        self._arrivals_s.append(self._now_s())
        self._counted_tokens += num_tokens
        self._text.append(text)

    def end(self) -> None:
        """Records the last message; the time to close the connection does not count."""
        self._ended_s = self._now_s()

    def failed(self, status: str, retry_after_s: float | None) -> None:
        """Records a failed attempt, after which the request is sent again."""
        self._attempts.append(Attempt(self._attempt_sent_s, self._now_s(), status, retry_after_s))

    def sent_again(self) -> None:
        self._attempt_sent_s = self._now_s()

    def finish(self, status: str, error: str = "", retry_after_s: float | None = None) -> RequestRecord:
        arrivals = self._arrivals_s
        e2e_s = self._ended_s if self._ended_s is not None else self._now_s()
        # While a request waits to be sent again, its last attempt is already recorded.
        if not self._attempts or self._attempts[-1].sent_s < self._attempt_sent_s:
            self._attempts.append(Attempt(self._attempt_sent_s, e2e_s, status, retry_after_s))
        return RequestRecord(
            index=self._request.index,
            dialogue_id=self._request.prompt.dialogue_id,
            status=status,
            error=error,
            sent_s=self._sent_s,
            ttft_s=arrivals[0] if arrivals else None,
            e2e_s=e2e_s,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(arrivals)),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self._counted_tokens if self.output_tokens is None else self.output_tokens,
            text="".join(self._text),
            speculation=self.speculation,
            slo=self._request.slo,
            tenant=self._request.tenant.name,
            max_tokens=self._request.max_tokens,
            attempts=tuple(self._attempts),
            promise=self.promise,
            late_s=self._late_s,
        )

    def _now_s(self) -> float:
        return time.perf_counter() - self._sent
