"""Prometheus: one registry per process, served over HTTP as /metrics.

Names are `tandem_*` in base units. Each server has its own registry rather than prometheus_client's global
one, so two servers in one test process do not collide.
"""

from __future__ import annotations

import threading

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)

#: Seconds; every SLO value is a bucket edge, so "share under 2.5 s" is exact.
LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0,
    7.5, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip

#: Seconds per token; the `chat` class's 150 ms is a bucket edge.
TOKEN_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip


def new_registry() -> CollectorRegistry:
    """A registry with metrics of the process (memory, CPU, file descriptors, garbage collection)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class MetricsServer:
    """Serves a registry on http://host:port/metrics from a thread of its own, so a busy event loop does not
    block scrapes. Raises OSError when the port is taken."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        #: The bound port, also when the requested one was 0.
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
