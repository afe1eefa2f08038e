"""A model pod's books as gauges, so that a leak or a full cache is seen from outside.

    once a second   status() -> the pod's state, as its status call tells it -> show(status) sets the gauges

The state is asked for in the way of the status call and not at each scrape: a scrape comes from a thread of
its own and must not wait for a long step of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog
from prometheus_client import CollectorRegistry, Gauge
from tandem_proto.v1 import common_pb2

_INTERVAL_S = 1.0


class BookGauges:
    """The gauges that decode and prefill pods share."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._blocks = Gauge(
            "tandem_kv_blocks",
            "KV blocks: free, kept for the prefix cache, or used by requests and transfers",
            ["state"],
            registry=registry,
        )
        self._requests = Gauge(
            "tandem_requests",
            "Requests: waiting for a turn, for blocks or for KV; running; with an open KV transfer, whatever "
            "else they do",
            ["state"],
            registry=registry,
        )
        self._violations = Gauge(
            "tandem_books_violations",
            "Broken invariants in the pod's last check of its books",
            registry=registry,
        )

    def show(self, status: common_pb2.PodStatus) -> None:
        books = status.books
        self._blocks.labels("free").set(books.blocks_free)
        self._blocks.labels("cached").set(books.blocks_cached)
        self._blocks.labels("used").set(books.blocks_used)
        self._requests.labels("waiting").set(books.requests_waiting)
        self._requests.labels("running").set(books.requests_running)
        self._requests.labels("transferring").set(books.transfers_open)
        self._violations.set(len(books.violations))


@asynccontextmanager
async def refreshing(
    status: Callable[[], Awaitable[common_pb2.PodStatus]], show: Callable[[common_pb2.PodStatus], None]
) -> AsyncIterator[None]:
    """Shows the status at once and every second until the context ends."""
    task = asyncio.create_task(_refresh_forever(status, show), name="book-gauges")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _refresh_forever(
    status: Callable[[], Awaitable[common_pb2.PodStatus]], show: Callable[[common_pb2.PodStatus], None]
) -> None:
    while True:
        try:
            show(await status())
        except Exception:
            structlog.get_logger("tandem.books").exception("the pod's state could not be read for its gauges")
        await asyncio.sleep(_INTERVAL_S)
