"""The pod's status as gauges."""

import asyncio
from collections.abc import Callable
from dataclasses import fields

import pytest
import structlog
from prometheus_client import CollectorRegistry
from tandem_engine.gpu_block_store import CopyCounts
from tandem_pod.status import PodGauges, StatusReader, refreshing_gauges
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


class BusyThread:
    """An engine's thread whose calls run when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_async(self, function):
        future = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                future.set_result(function())
            except RuntimeError as error:
                future.set_exception(error)

        self.calls.append(run)
        return future

    def run(self) -> None:
        while self.calls:
            self.calls.pop()()


async def test_a_long_step_delays_no_status_and_its_age_is_said():
    thread, seen = BusyThread(), iter(range(1, 9))
    reader = StatusReader(
        thread.call_async, lambda: common_pb2.PodStatus(requests_total=next(seen)), wait_s=0.01
    )
    first = asyncio.create_task(reader())
    await asyncio.sleep(0.05)
    assert not first.done(), "there is nothing to answer with before the first status"
    thread.run()
    assert (await first).requests_total == 1
    during = [await reader() for _ in range(3)]
    assert [status.requests_total for status in during] == [1, 1, 1]
    assert 0.02 < during[1].age_seconds < during[2].age_seconds
    assert len(thread.calls) == 1, "calls do not pile up behind the step"
    thread.run()
    await asyncio.sleep(0)
    after = asyncio.create_task(reader())
    await asyncio.sleep(0)
    thread.run()
    status = await after
    assert status.requests_total == 3, "not the one that was read for an earlier call"
    assert status.age_seconds < 1


async def test_an_engine_that_failed_fails_the_status():
    def fail() -> common_pb2.PodStatus:
        raise RuntimeError("the engine's thread has ended")

    thread = BusyThread()
    reader = StatusReader(thread.call_async, fail, wait_s=0.01)
    with pytest.raises(RuntimeError, match="has ended"):
        call = asyncio.create_task(reader())
        await asyncio.sleep(0)
        thread.run()
        await call


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
