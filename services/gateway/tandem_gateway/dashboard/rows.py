"""What a sample consists of. Rows are arrays in JSON; `COLUMNS` names their elements to the readers."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple, TypedDict


class ClassRow(NamedTuple):
    """Of one SLO class, since the gateway's start."""

    received: int
    met: int
    missed: int
    goodput_tokens: int
    output_tokens: int


class PodRow(NamedTuple):
    """One pod's last report."""

    role: str
    pod_id: str
    target: str
    #: "": it is healthy.
    trouble: str
    kv_used: int
    kv_cached: int
    kv_blocks: int
    waiting: int
    running: int
    transfers: int
    #: Seconds since its last answer; None before the first.
    age_s: float | None


class OpenRow(NamedTuple):
    """A request that has not ended. Times are since its arrival."""

    request_id: str
    slo_class: str
    age_s: float
    #: Until it was admitted; None: it waits.
    queued_s: float | None
    #: Until its first token; None: there is none yet.
    ttft_s: float | None
    prompt_tokens: int
    output_tokens: int


class EndedRow(NamedTuple):
    """A request that ended. What its receipt would say is 0 or "" if there is none."""

    request_id: str
    tenant: str
    slo_class: str
    outcome: str
    #: Why it missed its SLO; "": it met it.
    cause: str
    miss_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    decode_steps: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float
    failover_s: float
    #: The objectives are wider than those asked for.
    is_widened: bool
    ttft_s: float
    e2e_s: float
    #: 0: nothing could be predicted.
    ttft_p50_s: float
    ttft_p90_s: float
    e2e_p50_s: float
    e2e_p90_s: float
    #: 0: no objective.
    ttft_objective_s: float
    tpot_objective_s: float
    e2e_objective_s: float
    prefill_pod: str
    decode_pod: str
    prefill_retries: int
    decode_retries: int
    preemptions: int
    transfer_bytes: int
    #: Guesses verified and accepted, by source.
    drafted: dict[str, int]
    accepted: dict[str, int]


class TtftRow(NamedTuple):
    """Medians of the requests that ended in this second and had been predicted."""

    requests: int
    actual_s: float
    p50_s: float
    p90_s: float


class Sample(TypedDict):
    """One second of a gateway."""

    #: Consecutive.
    number: int
    #: Unix time in seconds.
    time: float
    classes: dict[str, ClassRow]
    #: Of all classes, by cause.
    misses: dict[str, int]
    #: Sequences of requests that wait here; that have no token yet; that have. Each choice of a call is one.
    queued: int
    prefill: int
    decode: int
    #: Since the start: choices admitted, that got a first token, that ended after they had been admitted.
    admitted: int
    begun: int
    ended: int
    #: Since the start: requests whose TTFT had been predicted, and those that took at most the predicted p90.
    predictions: int
    predictions_held: int
    #: None: no such request ended in this second.
    ttft: TtftRow | None
    #: Guesses verified and accepted by source, and decode steps, of the requests that ended since the start.
    drafted: dict[str, int]
    accepted: dict[str, int]
    steps: int
    #: Since the start: moves to another decode pod by cause, and to another prefill pod.
    failovers: dict[str, int]
    prefill_retries: int
    pods: list[PodRow]
    #: The oldest ones.
    open: list[OpenRow]
    #: Some of those that ended in this second.
    requests: list[EndedRow]


COLUMNS = MappingProxyType(
    {
        "classes": ClassRow._fields,
        "pods": PodRow._fields,
        "open": OpenRow._fields,
        "requests": EndedRow._fields,
        "ttft": TtftRow._fields,
    }
)
