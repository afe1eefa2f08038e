"""What the service counts; served as /metrics by tandem_service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class LookaheadMetrics:
    """All of the service's own metrics, registered in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"tandem_lookahead_{name}", text, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tandem_lookahead_{name}", text, registry=registry)

        self.spans_received = counter("spans_received", "Spans that pods sent")
        self.tokens_merged = counter("tokens_merged", "Accepted tokens merged into a namespace's text")
        self.prompts_refused = counter(
            "prompts_refused", "Spans of prompts whose tenant does not share them, and which were dropped"
        )
        self.spans_dropped = counter("spans_dropped", "Spans given up because the backlog for Redis was full")
        self.entries_damaged = counter("stream_entries_damaged", "Redis stream entries that were no spans")
        self.snapshots_published = counter("snapshots_published", "Snapshots written to Redis")
        self.snapshots_rejected = counter(
            "snapshots_rejected", "Damaged snapshots found in Redis and ignored"
        )
        self.snapshots_refused = Counter(
            "tandem_lookahead_snapshots_refused",
            "Snapshots that were not published because something came between",
            ["cause"],
            registry=registry,
        )
        self.redis_failures = counter("redis_failures", "Times Redis was lost")
        self.subscribers_lagging = counter(
            "streams_lagging", "Streams closed because the pod read too slowly"
        )
        self.redis_connected = gauge("redis_connected", "1 while Redis answers")
        self.streams_open = gauge("streams_open", "Streams of decode pods")
        self.backlog_spans = gauge("backlog_spans", "Spans waiting for Redis to come back")
        self.namespaces = gauge("namespaces", "Namespaces held")
        self.tokens_held = gauge("forest_tokens", "Tokens of text held, over all namespaces")
        self.tokens_shared = gauge("forest_shared_tokens", "Tokens of text that pods may have")
        self.memory_bytes = gauge("forest_memory_bytes", "Memory of all text, as the caps count it")
