"""An engine whose thread hangs is noticed, by its pod and by those who call it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from pathlib import Path

import grpc
import pytest
from pod_fleet import request, run_fleet
from prometheus_client import CollectorRegistry
from tandem_engine.loop import EngineLoop
from tandem_pod import engine_watch
from tandem_pod.engine_watch import EngineWatch, leave_if_stuck
from tandem_pod.status import PodGauges
from tandem_proto.v1 import common_pb2, decode_pb2
from tandem_service.tasks import end_tasks
from toy_models import prompt_of
from waiting import until, until_async


class Busy:
    """An engine of short steps."""

    num_steps = 0

    def __init__(self, *, step_s: float = 0.01, sequence_s: float = math.inf) -> None:
        """A sequence of a step is done each `sequence_s`."""
        self._step_s, self._sequence_s = step_s, sequence_s
        self._num_done = 0

    def work_done(self) -> int:
        return self._num_done

    def snapshot(self) -> None:
        return None

    def check(self) -> None:
        return None

    def has_work(self) -> bool:
        return True

    def step(self) -> list:
        self.num_steps += 1
        until = time.monotonic() + self._step_s
        while time.monotonic() < until:
            time.sleep(min(self._step_s, self._sequence_s))
            self._num_done += self._sequence_s < self._step_s
        return []


async def test_a_long_step_whose_sequences_are_done_one_by_one_is_no_hang() -> None:
    loop, changes = EngineLoop(Busy(step_s=1.8, sequence_s=0.1)), []
    watch = EngineWatch(loop, counts_work=True, on_change=changes.append, on_hang=changes.append)
    loop.start()
    watching = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(1.7)
        assert not changes
    finally:
        await end_tasks([watching])
        await asyncio.to_thread(loop.close)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_whose_thread_has_ended_ends_the_process() -> None:
    class Dies(Busy):
        def step(self) -> list:
            raise SystemExit

    def cannot(_: Exception) -> None:
        raise SystemExit

    loop, hung = EngineLoop(Dies(), on_failure=cannot), []
    watch = EngineWatch(loop, counts_work=False, on_change=hung.append, on_hang=hung.append)
    loop.start()
    watching = asyncio.create_task(watch.run())
    try:
        await until(lambda: hung)
        assert "has ended" in str(hung[0])
    finally:
        await end_tasks([watching])


class Context:
    """Of a call: notes how it is aborted."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise AbortedError(code)


class AbortedError(Exception):
    """With the status."""


async def test_a_hang_counts_against_the_requests_whose_work_is_under_way() -> None:
    engine = Busy()
    engine.is_under_way = lambda request_id: request_id == "mine"
    loop = EngineLoop(engine)
    await leave_if_stuck(loop, Context(), "mine")
    loop.is_stuck = True
    for request_id, code in {
        "mine": grpc.StatusCode.UNAVAILABLE,
        None: grpc.StatusCode.UNAVAILABLE,  # a status call
        "other": grpc.StatusCode.CANCELLED,
    }.items():
        with pytest.raises(AbortedError) as left:
            await leave_if_stuck(loop, Context(), request_id)
        assert left.value.args == (code,)


async def test_only_an_engine_without_progress_is_stuck() -> None:
    loop, changes, hung = EngineLoop(Busy()), [], []
    may_go_on = threading.Event()
    watch = EngineWatch(loop, counts_work=True, on_change=changes.append, on_hang=hung.append)
    loop.start()
    watching = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(1.5)
        assert not changes
        blocked = loop.call(may_go_on.wait)
        await until(lambda: loop.is_stuck)
        may_go_on.set()
        await until(lambda: not loop.is_stuck)
        assert blocked.result()
        assert changes == [True, False]
        assert not hung
    finally:
        may_go_on.set()
        await end_tasks([watching])
        await asyncio.to_thread(loop.close)


async def test_calls_leave_a_pod_whose_engine_hangs(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops, may_go_on = [], threading.Event()

    def make_loop(*arguments: object, **options: object) -> EngineLoop:
        loops.append(EngineLoop(*arguments, **options))
        return loops[-1]

    monkeypatch.setattr("tandem_decode.main.EngineLoop", make_loop)
    monkeypatch.setattr(engine_watch, "_STEP_LIMIT_S", 0.75)  # the tiny model may not be compiled
    async with run_fleet(tiny_model) as fleet:
        call = fleet.decode.Decode(request("cut", prompt_of(40), [], max_tokens=200))
        try:
            async for response in call:
                if response.HasField("chunk"):
                    break
            loops[0].call(may_go_on.wait)
            with pytest.raises(grpc.aio.AioRpcError) as left:
                async for _ in call:
                    pass
            assert left.value.code() is grpc.StatusCode.CANCELLED  # the engine hangs between two steps
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in fleet.decode.Decode(request("new", prompt_of(40), [])):
                    pass
            assert refused.value.code() is grpc.StatusCode.CANCELLED  # no crash: it was not accepted
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await fleet.decode.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest())
            assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            may_go_on.set()

        async def serves() -> bool:
            try:
                await fleet.decode.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest())
            except grpc.aio.AioRpcError:
                return False
            return True

        await until_async(serves)
        await fleet.assert_idle()


def test_gauges_of_an_engine_that_says_nothing_are_not_its_last_ones() -> None:
    registry = CollectorRegistry()
    gauges = PodGauges(registry)
    usage = common_pb2.ResourceUsage(blocks_free=3, requests_running=2)

    def running(age_seconds: float) -> float | None:
        gauges.show(common_pb2.PodStatus(usage=usage, age_seconds=age_seconds))
        return registry.get_sample_value("tandem_requests", {"state": "running"})

    assert running(1.0) == 2
    assert math.isnan(running(6.0))
    assert registry.get_sample_value("tandem_engine_status_age_seconds") == 6
