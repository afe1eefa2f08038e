"""The metrics of the service; tandem_service serves them at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class LookaheadMetrics:
    """Registers them in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"tandem_lookahead_{name}", text, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tandem_lookahead_{name}", text, registry=registry)

        self.spans_received = counter("spans_received", "Spans that pods sent")
        self.tokens_merged = counter("tokens_merged", "Tokens merged into a namespace's corpus")
        self.prompts_refused = counter("prompts_refused", "Dropped spans of prompts that are not shared")
        self.spans_dropped = counter("spans_dropped", "Spans dropped because the backlog for Redis was full")
        self.entries_damaged = counter("stream_entries_damaged", "Unreadable entries in Redis streams")
        self.snapshots_published = counter("snapshots_published", "Snapshots written to Redis")
        self.snapshots_rejected = counter("snapshots_rejected", "Dropped damaged snapshots in Redis")
        self.snapshots_refused = Counter(
            "tandem_lookahead_snapshots_refused",
            "Snapshots that Redis refused, by cause",
            ["cause"],
            registry=registry,
        )
        self.redis_failures = counter("redis_failures", "Times Redis was lost")
        self.subscribers_lagging = counter("streams_lagging", "Streams closed because a pod read too slowly")
        self.redis_connected = gauge("redis_connected", "1 while Redis answers")
        self.streams_open = gauge("streams_open", "Streams of decode pods")
        self.backlog_spans = gauge("backlog_spans", "Spans that wait for Redis")
        self.namespaces = gauge("namespaces", "Namespaces held")
        self.tokens_held = gauge("corpus_tokens", "Tokens held, over all namespaces")
        self.tokens_shared = gauge("corpus_shared_tokens", "Tokens shared with pods, over all namespaces")
        self.memory_bytes = gauge("corpus_memory_bytes", "Memory of all text, as the limits count it")
