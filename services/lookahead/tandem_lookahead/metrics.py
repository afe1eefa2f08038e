"""The metrics of the service; tandem_service serves them at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from tandem_service import metric_table as table


class LookaheadMetrics:
    """Registers them in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.spans_received = table.SPANS_RECEIVED.make(registry)
        self.tokens_merged = table.TOKENS_MERGED.make(registry)
        self.prompts_refused = table.PROMPTS_REFUSED.make(registry)
        self.spans_dropped = table.SPANS_DROPPED.make(registry)
        self.entries_damaged = table.ENTRIES_DAMAGED.make(registry)
        self.snapshots_published = table.SNAPSHOTS_PUBLISHED.make(registry)
        self.snapshots_rejected = table.SNAPSHOTS_REJECTED.make(registry)
        self.snapshots_refused = table.SNAPSHOTS_REFUSED.make(registry)
        self.redis_failures = table.REDIS_FAILURES.make(registry)
        self.redis_full = table.REDIS_FULL.make(registry)
        self.subscribers_lagging = table.STREAMS_LAGGING.make(registry)
        self.redis_connected = table.REDIS_CONNECTED.make(registry)
        self.streams_open = table.STREAMS_OPEN.make(registry)
        self.backlog_spans = table.BACKLOG_SPANS.make(registry)
        self.namespaces = table.NAMESPACES.make(registry)
        self.tokens_held = table.CORPUS_TOKENS.make(registry)
        self.tokens_shared = table.CORPUS_SHARED_TOKENS.make(registry)
        self.memory_bytes = table.CORPUS_MEMORY_BYTES.make(registry)
