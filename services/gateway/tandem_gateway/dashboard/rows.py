"""The parts of a sample. Rows are arrays in JSON; `COLUMNS` names their elements for readers."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple, TypedDict


class ClassRow(NamedTuple):
    """Totals of one SLO class since the gateway's start."""

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
    #: "": the pod is healthy.
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
    #: Time until admission; None: it waits.
    queued_s: float | None
    #: Time until the first token; None: no token yet.
    ttft_s: float | None
    prompt_tokens: int
    output_tokens: int


class EndedRow(NamedTuple):
    """A request that ended. Fields of the receipt are 0 or "" without one."""

    request_id: str
    tenant: str
    slo_class: str
    outcome: str
    #: Why it missed its SLO; "": it met the SLO.
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
    #: Whether admission widened the objectives.
    is_widened: bool
    ttft_s: float
    e2e_s: float
    #: 0: no prediction.
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
    #: Draft tokens verified and accepted, by source.
    drafted: dict[str, int]
    accepted: dict[str, int]


class TtftRow(NamedTuple):
    """Medians of the requests with a prediction that ended in this second."""

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
    #: Over all classes, by cause.
    misses: dict[str, int]
    #: Sequences in the gateway's queue; dispatched without a token; with tokens. Each choice counts as one.
    queued: int
    prefill: int
    decode: int
    #: Since the start: choices that were admitted, got a first token, ended after admission.
    admitted: int
    begun: int
    ended: int
    #: Since the start: requests with a predicted TTFT, and those within the predicted p90.
    predictions: int
    predictions_held: int
    #: None: no request with a prediction ended in this second.
    ttft: TtftRow | None
    #: Since the start, over ended requests: draft tokens verified and accepted by source; decode steps.
    drafted: dict[str, int]
    accepted: dict[str, int]
    steps: int
    #: Since the start: moves to another decode pod, by cause; retries on another prefill pod.
    failovers: dict[str, int]
    prefill_retries: int
    pods: list[PodRow]
    #: The oldest open requests.
    open: list[OpenRow]
    #: Some of the requests that ended in this second.
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
