"""Metrics of the prefill pod."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from tandem_service.metrics import LATENCY_BUCKETS_S


class PrefillMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "tandem_prefill_requests", "Prompts by outcome", ["outcome"], registry=registry
        )
        self.prompt_tokens = Counter(
            "tandem_prefill_prompt_tokens",
            "Prompt tokens computed or found in the prefix cache",
            registry=registry,
        )
        self.cached_tokens = Counter(
            "tandem_prefill_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.sent_bytes = Counter("tandem_kv_sent_bytes", "KV payload bytes sent", registry=registry)
        self.prefill_seconds = Histogram(
            "tandem_prefill_seconds",
            "From a prompt's first step to its first token",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
