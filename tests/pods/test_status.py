"""The pod's status, and its gauges."""

import asyncio
import threading
import time
from dataclasses import fields
from types import SimpleNamespace

import pytest
import structlog
from prometheus_client import CollectorRegistry
from tandem_engine.block_manager import BlockUsage
from tandem_engine.engine import EngineSnapshot
from tandem_engine.gpu_block_store import CopyCounts
from tandem_engine.loop import EngineLoop
from tandem_engine.scheduler import PromptWork, RequestCounts, SchedulerConfig
from tandem_engine.step_times import StepTimes
from tandem_pod.status import PodGauges, pod_status, refreshing_gauges
from tandem_proto.v1 import common_pb2
from waiting import until

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
    assert registry.get_sample_value("tandem_kv_copies_total", {"direction": "read"}) is None
    counts = CopyCounts()
    registry = CollectorRegistry()
    PodGauges(registry).watch_copies(counts)
    for value, field in enumerate(fields(counts)):
        setattr(counts, field.name, value)
    shown = [
        registry.get_sample_value(f"tandem_kv_{name}_total", {"direction": direction})
        for name in ("copies", "copied_bytes", "copy_wait_seconds")
        for direction in ("read", "write")
    ]
    assert shown == [
        counts.num_reads, counts.num_writes, counts.read_bytes, counts.written_bytes,
        counts.read_wait_s, counts.slot_wait_s,
    ]  # fmt: skip
    assert registry.get_sample_value("tandem_kv_frames_copied_out_total") == counts.num_copied_out


async def test_the_status_is_shown_at_once_and_no_more_after_the_end():
    shown = asyncio.Event()

    async with refreshing_gauges(lambda: STATUS, lambda _: shown.set()):
        await asyncio.wait_for(shown.wait(), 5.0)
    assert "pod-gauges" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_status_that_fails_does_not_end_the_refreshing():
    answers = iter([RuntimeError("the engine is gone"), STATUS])
    shown = asyncio.Event()

    def status() -> common_pb2.PodStatus:
        answer = next(answers, STATUS)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with structlog.testing.capture_logs() as logs:
        async with refreshing_gauges(status, lambda _: shown.set(), interval_s=0.01):
            await asyncio.wait_for(shown.wait(), 5.0)
    assert [str(entry["event"]) for entry in logs] == ["cannot read the pod's status for its gauges"]


class LongSteps:
    """An engine with work; each of its steps takes as long as the test says."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.in_step, self.may_end = threading.Event(), threading.Event()
        self.prefill_times = StepTimes()
        self.scheduler = SimpleNamespace(config=SchedulerConfig(max_model_len=4096))

    def has_work(self) -> bool:
        return not self.may_end.is_set()

    def check(self) -> None:
        self.num_checks = 1

    def rest(self) -> None: ...

    def work_done(self) -> int:
        return 0

    def step(self) -> list:
        self.in_step.set()
        self.may_end.wait()
        self.num_steps += 1
        return []

    def snapshot(self) -> EngineSnapshot:
        prompts = tuple(PromptWork(f"{i}#suffix", time.monotonic() + i, 0, 10) for i in range(300))
        return EngineSnapshot(time.monotonic(), BlockUsage(9, 8, 7, 1), RequestCounts(1, 2, 3), prompts, ())


def status_of(loop: EngineLoop) -> common_pb2.PodStatus:
    manifest = SimpleNamespace(name="m", revision="r", max_model_len=4096)
    layout = SimpleNamespace(block_size=64, description="dtype=float32")
    parts = SimpleNamespace(engine=loop.engine, manifest=manifest, layout=layout)
    return pod_status(parts, loop, pod_id="p", role="decode")


async def test_no_status_waits_for_a_step_and_its_age_is_said():
    engine = LongSteps()
    loop = EngineLoop(engine)
    loop.start()
    try:
        await until(engine.in_step.is_set)
        first = status_of(loop)
        await asyncio.sleep(0.05)
        second = status_of(loop)
        assert second.age_seconds - first.age_seconds > 0.04
        assert (first.usage.requests_waiting, first.usage.requests_running) == (4, 2)
        engine.may_end.set()
        await until(lambda: loop.progress() is None)
        assert status_of(loop).age_seconds == 0, "an engine without work is as it was"
    finally:
        engine.may_end.set()
        await asyncio.to_thread(loop.close)


def test_the_last_prompt_of_a_status_stands_for_those_that_are_not_listed():
    prompts = status_of(EngineLoop(LongSteps())).prompts
    assert len(prompts) == 256
    assert sum(prompt.stop - prompt.start for prompt in prompts) == 3000
    assert [round(prompt.due_seconds) for prompt in prompts] == list(range(256))
    assert [prompt.request_id for prompt in prompts] == [str(i) for i in range(256)]


async def test_an_engine_that_failed_fails_the_status():
    engine = LongSteps()
    engine.step = lambda: 1 / 0
    loop = EngineLoop(engine)
    loop.start()
    await until(lambda: loop.failed is not None)
    with pytest.raises(ZeroDivisionError):
        status_of(loop)
