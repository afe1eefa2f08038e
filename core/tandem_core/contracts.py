"""Numbers and names on which several services agree, beyond what the .proto files can express."""

from __future__ import annotations

import enum

#: Seconds until the first token of a request without objectives is due.
DEFAULT_DUE_S = 60.0
#: Crashes with one request after which gateways and decode pods consider it the cause. Gateways allow
#: one more if other requests may be the cause (tandem_gateway/call/suspects.py).
MAX_CRASHES = 2


class RefusalReason(enum.Enum):
    """Why a request or call was refused for now: the values of the label `reason` of the refusals' counter,
    from which dashboards and the scaler read what is short, and of the header x-refusal-reason."""

    QUEUE_FULL = "queue full"
    TENANT_REQUESTS = "tenant requests"
    TENANT_TOKENS = "tenant tokens"
    TENANT_CALLS = "tenant calls"
    OPEN_CALLS = "open calls"
    TOKENIZING = "tokenizing"
    #: An answer of an idempotency key cannot be kept.
    KEPT_ANSWERS = "kept answers"
    POD_FULL = "pod full"
    #: The request would miss this objective, or make another request miss one.
    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"
    OTHERS = "others"
    #: The tenant sends much, and the request would leave other tenants too little room.
    SHARE = "share"
    #: The request missed its objective in the queue.


def computes_locally(num_uncached: int, local_tokens: int, idle_tokens: int, *, is_idle: bool) -> bool:
    """Whether a decode pod computes a prompt itself rather than a prefill pod: prompts with fewer uncached
    tokens than `local_tokens`, and than `idle_tokens` while the pod is idle."""
    return num_uncached < max(local_tokens, idle_tokens if is_idle else 0)
