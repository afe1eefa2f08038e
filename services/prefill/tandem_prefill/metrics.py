"""Metrics of the prefill pod, and of a decode pod that serves prefill while it drains."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from tandem_service import metric_table as table


class PrefillMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = table.PREFILL_REQUESTS.make(registry)
        self.prompt_tokens = table.PREFILL_PROMPT_TOKENS.make(registry)
        self.cached_tokens = table.PREFILL_CACHED_TOKENS.make(registry)
        self.sent_bytes = table.KV_SENT_BYTES.make(registry)
        self.queue_seconds = table.PREFILL_QUEUE_SECONDS.make(registry)
        self.prefill_seconds = table.PREFILL_SECONDS.make(registry)
        self.preemptions = table.PREFILL_PREEMPTIONS.make(registry)
