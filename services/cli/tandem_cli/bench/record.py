"""The record of one request, and the recorder that makes it.

Times are in seconds since the request was sent, except `sent_s`, which is since the start of the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

OK = "OK"
TIMEOUT = "TIMEOUT"


@dataclass(frozen=True)
class Speculation:
    """Drafting figures of the receipt."""

    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    #: Steps that accepted at least one guess.
    hit_steps: int = 0


@dataclass(frozen=True)
class RequestRecord:
    """One finished request. status: "OK", a gRPC code, "HTTP <code>" or "TIMEOUT"."""

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

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1); None with fewer than two tokens."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class Recorder:
    """Records the events of one request; a transport calls it."""

    def __init__(self, index: int, dialogue_id: str, run_started_s: float) -> None:
        self._index = index
        self._dialogue_id = dialogue_id
        self._sent = time.perf_counter()
        self._sent_s = self._sent - run_started_s
        self._arrivals_s: list[float] = []
        self._text: list[str] = []
        self._counted_tokens = 0
        self._ended_s: float | None = None
        #: Set by the transport from the answer's usage or receipt.
        self.prompt_tokens = 0
        self.output_tokens: int | None = None
        self.speculation: Speculation | None = None

    def tokens(self, num_tokens: int, text: str) -> None:
        """A message with tokens has arrived."""
        self._arrivals_s.append(time.perf_counter() - self._sent)
        self._counted_tokens += num_tokens
        self._text.append(text)

    def end(self) -> None:
        """The last message has arrived; closing the connection does not count."""
        self._ended_s = time.perf_counter() - self._sent

    def finish(self, status: str, error: str = "") -> RequestRecord:
        arrivals = self._arrivals_s
        return RequestRecord(
            index=self._index,
            dialogue_id=self._dialogue_id,
            status=status,
            error=error,
            sent_s=self._sent_s,
            ttft_s=arrivals[0] if arrivals else None,
            e2e_s=self._ended_s if self._ended_s is not None else time.perf_counter() - self._sent,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(arrivals)),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self._counted_tokens if self.output_tokens is None else self.output_tokens,
            text="".join(self._text),
            speculation=self.speculation,
        )
