"""The status of a pod that runs the engine: as the message of the status call, and as gauges.

Only the engine's thread may read the engine, and a step of a large model takes seconds. StatusReader
therefore answers with the last status and its age when the thread is busy for longer than a moment.

A task updates the gauges once a second from the message of the status call. They are not computed at each
scrape, because a scrape runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import structlog
from prometheus_client import CollectorRegistry, Gauge
from tandem_engine.assemble import EngineParts
from tandem_engine.gpu_block_store import CopyCounts
from tandem_proto.v1 import common_pb2

_INTERVAL_S = 1.0
#: How long a status call waits for the engine's thread; decode steps of small models are shorter.
_WAIT_S = 0.25
#: Older values are not shown: NaN stands for them.
_STALE_S = 5.0
#: A status and the monotonic time when it was read.
_Timed: TypeAlias = tuple[common_pb2.PodStatus, float]


def pod_status(parts: EngineParts, *, pod_id: str, role: str) -> common_pb2.PodStatus:
    """What every pod with an engine reports; the caller adds transfers, streams and what only its role has.

    Call it on the engine's thread. Checks all invariants when nothing is running.
    """
    engine, manifest = parts.engine, parts.manifest
    blocks, requests = engine.blocks.usage(), engine.scheduler.counts()
    return common_pb2.PodStatus(
        pod_id=pod_id,
        role=role,
        model=manifest.name,
        model_revision=manifest.revision,
        max_model_len=manifest.max_model_len,
        block_size=parts.layout.block_size,
        usage=common_pb2.ResourceUsage(
            blocks_total=blocks.total,
            blocks_free=blocks.free - blocks.cached,
            blocks_cached=blocks.cached,
            blocks_used=blocks.used,
            requests_waiting=requests.waiting + requests.waiting_for_kv,
            requests_running=requests.running,
            violations=[] if engine.has_work() else engine.scheduler.check(),
        ),
        kv_free_ratio=blocks.free / blocks.total,
        prefill_tokens_per_second=engine.prefill_tokens_per_second,
    )


class StatusReader:
    """`await reader()`: the status that `read` makes on the engine's thread, or the last one if that is busy.

    Only the first status is waited for without limit. Raises what `read` raises.
    """

    def __init__(
        self,
        call_async: Callable[[Callable[[], _Timed]], asyncio.Future[_Timed]],
        read: Callable[[], common_pb2.PodStatus],
        *,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._call_async, self._read, self._wait_s = call_async, read, wait_s
        #: One for all callers, so that calls do not pile up behind a step.
        self._reading: asyncio.Future[_Timed] | None = None
        self._last: _Timed | None = None

    async def __call__(self) -> common_pb2.PodStatus:
        if self._reading is None:
            self._reading = self._call_async(self._timed)
            self._reading.add_done_callback(self._keep)
        reading = self._reading
        await asyncio.wait({reading}, timeout=None if self._last is None else self._wait_s)
        newest = reading.result() if reading.done() else self._last
        assert newest is not None
        status = common_pb2.PodStatus()
        status.CopyFrom(newest[0])
        status.age_seconds = time.monotonic() - newest[1]
        return status

    def _keep(self, reading: asyncio.Future[_Timed]) -> None:
        self._reading = None
        if not reading.cancelled() and reading.exception() is None:
            self._last = reading.result()

    def _timed(self) -> _Timed:
        return self._read(), time.monotonic()


class PodGauges:
    """The gauges that decode and prefill pods share."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._blocks = Gauge(
            "tandem_kv_blocks",
            "KV blocks: free, kept for the prefix cache, or used by requests and transfers",
            ["state"],
            registry=registry,
        )
        self._requests = Gauge(
            "tandem_requests",
            "Requests: waiting for the batch, for blocks or for KV; running; with an open KV transfer",
            ["state"],
            registry=registry,
        )
        self._age = Gauge(
            "tandem_engine_status_age_seconds",
            "Time since the engine's thread told its state; it grows while a step runs or the engine hangs",
            registry=registry,
        )
        self._violations = Gauge(
            "tandem_invariant_violations",
            "Broken invariants found by the pod's last check of blocks and queues",
            registry=registry,
        )

    def show(self, status: common_pb2.PodStatus) -> None:
        usage = status.usage
        shown = 1.0 if status.age_seconds < _STALE_S else math.nan
        self._age.set(status.age_seconds)
        self._blocks.labels("free").set(shown * usage.blocks_free)
        self._blocks.labels("cached").set(shown * usage.blocks_cached)
        self._blocks.labels("used").set(shown * usage.blocks_used)
        self._requests.labels("waiting").set(shown * usage.requests_waiting)
        self._requests.labels("running").set(shown * usage.requests_running)
        self._requests.labels("transferring").set(shown * usage.transfers_open)
        self._violations.set(shown * len(usage.violations))

    def watch_copies(self, counts: CopyCounts | None) -> None:
        """Shows what a GPU's transfers copied; None shows nothing."""
        if counts is None:
            return
        for name, text, read, written in (
            ("copies", "Copies of KV from (read) and to (write) the GPU", "num_reads", "num_writes"),
            ("copied_bytes", "Bytes of these copies", "read_bytes", "written_bytes"),
            (
                "copy_wait_seconds",
                "Time that senders waited for a copy (read) and receivers for a buffer (write)",
                "read_wait_s",
                "slot_wait_s",
            ),
        ):
            gauge = Gauge(f"tandem_kv_{name}", text, ["direction"], registry=self._registry)
            for direction, attribute in (("read", read), ("write", written)):
                gauge.labels(direction).set_function(partial(getattr, counts, attribute))
        Gauge(
            "tandem_kv_frames_copied_out",
            "Frames copied once more, since pinned buffers were short",
            registry=self._registry,
        ).set_function(lambda: counts.num_copied_out)


@asynccontextmanager
async def refreshing_gauges(
    status: Callable[[], Awaitable[common_pb2.PodStatus]],
    show: Callable[[common_pb2.PodStatus], None],
    interval_s: float = _INTERVAL_S,
) -> AsyncIterator[None]:
    """Shows the status at once and every `interval_s` seconds until the context ends."""

    async def refresh() -> None:
        while True:
            try:
                show(await status())
            except Exception:
                structlog.get_logger("tandem.status").exception("cannot read the pod's status for its gauges")
            await asyncio.sleep(interval_s)

    task = asyncio.create_task(refresh(), name="pod-gauges")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
