"""The pod's status as gauges."""

import asyncio
from dataclasses import fields

import structlog
from prometheus_client import CollectorRegistry
from tandem_engine.gpu_block_store import CopyCounts
from tandem_pod.status import PodGauges, refreshing_gauges
from tandem_proto.v1 import common_pb2

STATUS = common_pb2.PodStatus(
    usage=common_pb2.ResourceUsage(
        blocks_free=1,
        blocks_cached=2,
        blocks_used=3,
        requests_waiting=4,
        requests_running=5,
        transfers_open=6,
        violations=["block 7 is owned twice"] * 7,
    )
)


def test_each_gauge_shows_its_own_field():
    registry = CollectorRegistry()
    PodGauges(registry).show(STATUS)
    blocks = [registry.get_sample_value("tandem_kv_blocks", {"state": s}) for s in ("free", "cached", "used")]
    states = ("waiting", "running", "transferring")
    requests = [registry.get_sample_value("tandem_requests", {"state": state}) for state in states]
    assert (blocks, requests) == ([1, 2, 3], [4, 5, 6])
    assert registry.get_sample_value("tandem_invariant_violations") == 7


def test_a_gpus_copies_are_shown_as_they_are_at_the_scrape():
    registry = CollectorRegistry()
    PodGauges(registry).watch_copies(None)
    assert registry.get_sample_value("tandem_kv_copies", {"direction": "read"}) is None
    counts = CopyCounts()
    registry = CollectorRegistry()
    PodGauges(registry).watch_copies(counts)
    for value, field in enumerate(fields(counts)):
        setattr(counts, field.name, value)
    shown = [
        registry.get_sample_value(f"tandem_kv_{name}", {"direction": direction})
        for name in ("copies", "copied_bytes", "copy_wait_seconds")
        for direction in ("read", "write")
    ]
    assert shown == [
        counts.num_reads, counts.num_writes, counts.read_bytes, counts.written_bytes,
        counts.read_wait_s, counts.slot_wait_s,
    ]  # fmt: skip
    assert registry.get_sample_value("tandem_kv_frames_copied_out") == counts.num_copied_out


async def test_the_status_is_shown_at_once_and_no_more_after_the_end():
    shown = asyncio.Event()

    async def status() -> common_pb2.PodStatus:
        return STATUS

    async with refreshing_gauges(status, lambda _: shown.set()):
        await asyncio.wait_for(shown.wait(), 5.0)
    assert "pod-gauges" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_status_that_fails_does_not_end_the_refreshing():
    answers = iter([RuntimeError("the engine is gone"), STATUS])
    shown = asyncio.Event()

    async def status() -> common_pb2.PodStatus:
        answer = next(answers, STATUS)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with structlog.testing.capture_logs() as logs:
        async with refreshing_gauges(status, lambda _: shown.set(), interval_s=0.01):
            await asyncio.wait_for(shown.wait(), 5.0)
    assert [str(entry["event"]) for entry in logs] == ["cannot read the pod's status for its gauges"]
