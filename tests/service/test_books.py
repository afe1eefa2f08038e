"""The pod's books as gauges."""

import asyncio

import structlog
from prometheus_client import CollectorRegistry
from tandem_pod.books import BookGauges, refreshing
from tandem_proto.v1 import common_pb2

BOOKS = common_pb2.Books(
    blocks_free=1,
    blocks_cached=2,
    blocks_used=3,
    requests_waiting=4,
    requests_running=5,
    transfers_open=6,
    violations=["block 7 is owned twice"] * 7,
)


def test_each_gauge_shows_its_own_entry():
    registry = CollectorRegistry()
    BookGauges(registry).show(common_pb2.PodStatus(books=BOOKS))
    blocks = [registry.get_sample_value("tandem_kv_blocks", {"state": s}) for s in ("free", "cached", "used")]
    states = ("waiting", "running", "transferring")
    requests = [registry.get_sample_value("tandem_requests", {"state": state}) for state in states]
    assert (blocks, requests) == ([1, 2, 3], [4, 5, 6])
    assert registry.get_sample_value("tandem_books_violations") == 7


async def test_the_status_is_shown_at_once_and_no_more_after_the_end():
    shown = asyncio.Event()

    async def status() -> common_pb2.PodStatus:
        return common_pb2.PodStatus(books=BOOKS)

    async with refreshing(status, lambda _: shown.set()):
        await asyncio.wait_for(shown.wait(), 0.5)
    assert "book-gauges" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_status_that_fails_does_not_end_the_refreshing(monkeypatch):
    monkeypatch.setattr("tandem_pod.books._INTERVAL_S", 0.01)
    answers = iter([RuntimeError("the engine is gone"), common_pb2.PodStatus(books=BOOKS)])
    shown = asyncio.Event()

    async def status() -> common_pb2.PodStatus:
        answer = next(answers, None)
        if isinstance(answer, Exception):
            raise answer
        return answer or common_pb2.PodStatus()

    with structlog.testing.capture_logs() as logs:
        async with refreshing(status, lambda _: shown.set()):
            await asyncio.wait_for(shown.wait(), 0.5)
    assert [str(entry["event"]) for entry in logs] == ["the pod's state could not be read for its gauges"]
