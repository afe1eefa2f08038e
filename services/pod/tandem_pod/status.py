"""The status of a pod that runs the engine: as the message of the status call, and as gauges.

The engine's thread publishes a snapshot after each step, so that no status waits for a step. A task updates
the gauges once a second from the message of the status call. They are not computed at each scrape, because a
scrape runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog
from prometheus_client import CollectorRegistry
from tandem_core import codec
from tandem_engine.assemble import EngineParts
from tandem_engine.engine import Engine
from tandem_engine.gpu_block_store import CopyCounts
from tandem_engine.loop import EngineLoop
from tandem_engine.scheduler import PromptWork
from tandem_proto.v1 import common_pb2
from tandem_service import metric_table as table
from tandem_service.metric_rows import Values
from tandem_service.version import software_version

_INTERVAL_S = 1.0
#: Prompts that a status lists individually: about the number that two gateways admit.
_MAX_PROMPTS = 256
#: Older values are shown as NaN.
_STALE_S = 5.0


def pod_status(parts: EngineParts, loop: EngineLoop, *, pod_id: str, role: str) -> common_pb2.PodStatus:
    """The common part of the status of pods with an engine; the caller adds transfers, streams and role data.

    Thread-safe. Raises the exception that ended the engine.
    """
    engine, manifest = parts.engine, parts.manifest
    snapshot, age_s = loop.snapshot()
    blocks, requests, config = snapshot.blocks, snapshot.requests, engine.scheduler.config
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
            violations=snapshot.violations,
        ),
        kv_free_ratio=blocks.free / blocks.total,
        age_seconds=age_s,
        prompts=_prompts_to_proto(snapshot.prompts),
        chunk_size=config.chunk_size,
        max_batch=config.max_batch,
        enough_prompt_tokens=config.enough_prompt_tokens or 0,
        prefill_cost=codec.step_cost_to_proto(engine.prefill_times.cost()),
        version=software_version(),
        unix_seconds=time.time(),
        kv_layout=parts.layout.description,
    )


def _prompts_to_proto(prompts: Sequence[PromptWork]) -> list[common_pb2.PromptWork]:
    now = time.monotonic()
    listed = [
        common_pb2.PromptWork(
            due_seconds=prompt.due - now,
            start=prompt.start,
            stop=prompt.stop,
            # Pods add their own suffix.
            request_id=prompt.request_id.rsplit("#", 1)[0],
        )
        for prompt in prompts[:_MAX_PROMPTS]
    ]
    rest = sum(prompt.stop - prompt.start for prompt in prompts[_MAX_PROMPTS:])
    if rest:
        listed[-1].stop += rest
    return listed


def decode_cost(engine: Engine) -> common_pb2.StepCost:
    return codec.step_cost_to_proto(engine.decode_times.cost())


class PodGauges:
    """The gauges that decode and prefill pods share."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._blocks = table.KV_BLOCKS.make(registry)
        self._requests = table.POD_REQUESTS.make(registry)
        self._age = table.STATUS_AGE.make(registry)
        self._violations = table.VIOLATIONS.make(registry)
        self._block_tokens = table.KV_BLOCK_TOKENS.make(registry)
        self._limits = table.STEP_LIMIT.make(registry)
        self._costs = table.STEP_COST.make(registry)
        self._backlog = table.PROMPT_BACKLOG.make(registry)
        self._tokens_per_step = table.TOKENS_PER_STEP.make(registry)

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
        self._block_tokens.set(status.block_size)
        self._limits.labels("chunk").set(status.chunk_size)
        self._limits.labels("batch").set(status.max_batch)
        prefill = codec.step_cost_from_proto(status.prefill_cost)
        for steps, cost in (("prefill", prefill), ("decode", codec.step_cost_from_proto(status.decode_cost))):
            self._costs.labels(steps, "step").set(cost.per_step)
            self._costs.labels(steps, "token").set(cost.per_token)
            self._costs.labels(steps, "pair").set(cost.per_pair)
        seconds = (prefill.prompt_seconds(one.start, one.stop, status.chunk_size) for one in status.prompts)
        self._backlog.set(shown * sum(seconds))
        self._tokens_per_step.set(status.tokens_per_step)

    def watch_copies(self, counts: CopyCounts | None) -> None:
        """Shows what a GPU's transfers copied; None shows nothing."""
        if counts is None:
            return
        for row, read, written in (
            (table.KV_COPIES, "num_reads", "num_writes"),
            (table.KV_COPIED_BYTES, "read_bytes", "written_bytes"),
            (table.KV_COPY_WAIT, "read_wait_s", "slot_wait_s"),
        ):
            row.view(self._registry, partial(_by_direction, counts, read, written))
        table.KV_COPIED_OUT.view(self._registry, lambda: {(): counts.num_copied_out})


def _by_direction(counts: CopyCounts, read: str, written: str) -> Values:
    return {("read",): getattr(counts, read), ("write",): getattr(counts, written)}


@asynccontextmanager
async def refreshing_gauges(
    status: Callable[[], common_pb2.PodStatus],
    show: Callable[[common_pb2.PodStatus], None],
    interval_s: float = _INTERVAL_S,
) -> AsyncIterator[None]:
    """Shows the status at once and every `interval_s` seconds until the context ends."""

    async def refresh() -> None:
        while True:
            try:
                show(status())
            except Exception:
                structlog.get_logger("tandem.status").exception("cannot read the pod's status for its gauges")
            await asyncio.sleep(interval_s)

    task = asyncio.create_task(refresh(), name="pod-gauges")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
