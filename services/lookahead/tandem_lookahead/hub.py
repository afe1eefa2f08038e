"""Joins pods, forests and Redis.

    pod -> submit -> writer -> XADD -> Redis stream -> tail (XREAD) -> forest -> followers (all replicas)
                        |
                        +- Redis away: forest -> followers (this replica), and a bounded backlog that is
                           added to the stream when Redis returns

Spans that come back from the stream after having been merged here already are repetitions, which forests
and mirrors skip; so nothing needs to be remembered about what was delivered how. On every (re)connection
a namespace that has no position, or whose next entries were trimmed, starts from the latest snapshot.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from tandem_engine.drafts.spans import AcceptedSpan

from tandem_lookahead.metrics import LookaheadMetrics
from tandem_lookahead.namespace import Follower, NamespaceForest
from tandem_lookahead.settings import LookaheadSettings
from tandem_lookahead.store import START, Entry, RedisStore, StoreUnavailableError, position_order
from tandem_lookahead.tasks import end_tasks

#: XREAD waits this long; a namespace opened meanwhile is read from the next time on.
_BLOCK_MS = 100
_ENTRIES_PER_READ = 512
_SPANS_PER_WRITE = 1024
#: A pod further behind than this gets a snapshot.
_MAX_HISTORY_ENTRIES = 2048
_RETRY_S = 0.02
_RETRY_LIMIT_S = 1.0
#: How long a pod's hello waits for Redis before it is answered with what there is.
_SYNC_WAIT_S = 1.0
_FINAL_WRITE_S = 3.0


class TooManyNamespacesError(Exception):
    """No room for another namespace (RESOURCE_EXHAUSTED)."""


@dataclass(frozen=True)
class _Pending:
    forest: NamespaceForest
    span: AcceptedSpan


class LookaheadHub:
    """Runs between `start` and `stop`; belongs to one event loop."""

    def __init__(self, store: RedisStore, settings: LookaheadSettings, metrics: LookaheadMetrics) -> None:
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._log = structlog.get_logger("tandem.lookahead.hub")
        self._forests: dict[str, NamespaceForest] = {}
        self._connected = asyncio.Event()
        self._opened = asyncio.Event()
        self._write_wanted = asyncio.Event()
        #: Neither merged nor stored.
        self._fresh: deque[_Pending] = deque()
        #: Merged here while Redis was away.
        self._backlog: deque[_Pending] = deque()
        self._backlog_tokens = 0
        self._tasks: list[asyncio.Task[None]] = []
        #: Redis may just not be up yet.
        self._is_new = True
        self._is_stopping = False
        #: Spans that pods sent, and those given up because the backlog was full.
        self.num_received = 0
        self.num_dropped = 0

    @property
    def is_connected(self) -> bool:
        """Whether Redis answered last time."""
        return self._connected.is_set()

    @property
    def forests(self) -> list[NamespaceForest]:
        return list(self._forests.values())

    async def start(self) -> None:
        """Returns at once, with or without Redis."""
        for work, name in ((self._tail, "tail"), (self._write, "writer"), (self._compact, "compactor")):
            self._tasks.append(asyncio.create_task(work(), name=f"lookahead-{name}"))

    async def stop(self) -> None:
        """Ends the pods' streams and leaves a snapshot behind if Redis answers; once is enough."""
        if not self._tasks:
            return
        self._is_stopping = True
        for forest in self.forests:
            forest.close_followers()
        await end_tasks(self._tasks)
        self._tasks.clear()
        if self.is_connected:
            try:
                async with asyncio.timeout(_FINAL_WRITE_S):
                    while self._backlog or self._fresh:
                        await self._write_some()
                    for forest in self.forests:
                        await self._publish(forest)
            except (StoreUnavailableError, TimeoutError) as error:
                self._log.warning("no last snapshot was published", error=str(error))

    async def open(self, namespace_key: str) -> NamespaceForest:
        """The namespace's forest, with what Redis holds if it answers soon."""
        forest = self._ensure(namespace_key)
        if forest is None:
            raise TooManyNamespacesError(
                f"{len(self._forests)} namespaces are held already; raise --max-namespaces"
            )
        if not forest.synced.is_set() and (self.is_connected or self._is_new):
            self._opened.set()
            if not await _happens(forest.synced, _SYNC_WAIT_S):
                self._log.warning("redis is slow; answering without it", namespace=namespace_key)
        return forest

    async def follow(self, forest: NamespaceForest, have_position: str) -> Follower:
        """A new follower of the forest, at its end already when the service is stopping."""
        follower = await forest.follow(have_position, partial(self._history, forest))
        if self._is_stopping:
            follower.close()
        return follower

    def submit(self, forest: NamespaceForest, spans: Sequence[AcceptedSpan]) -> None:
        """Takes what a pod has sent; never waits, never raises."""
        self.num_received += len(spans)
        self._metrics.spans_received.inc(len(spans))
        for span in spans:
            if forest.received.accept(span) is None:
                self._metrics.spans_duplicate.inc()
            else:
                self._fresh.append(_Pending(forest, span))
        self._write_wanted.set()

    async def _history(self, forest: NamespaceForest, after: str, until: str) -> list[Entry] | None:
        """Stream entries in (after, until]; None when not all can be had."""
        if not self.is_connected:
            return None
        try:
            return await self._store.read_between(forest.key, after, until, _MAX_HISTORY_ENTRIES)
        except StoreUnavailableError:
            return None

    def _ensure(self, namespace_key: str) -> NamespaceForest | None:
        forest = self._forests.get(namespace_key)
        if forest is None and len(self._forests) < self._settings.max_namespaces:
            forest = NamespaceForest(namespace_key, max_tokens=self._settings.max_tokens)
            self._forests[namespace_key] = forest
        return forest

    async def _tail(self) -> None:
        """Connects, keeps the forests in step with their streams, and begins anew when Redis is lost."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        retry_s = _RETRY_S
        while True:
            started = loop.time()
            try:
                await self._follow_streams()
            except StoreUnavailableError as error:
                self._is_new = self._is_new and loop.time() - begun < _SYNC_WAIT_S
                if self.is_connected:
                    self._log.warning("redis lost; going on without it", error=str(error))
                    self._metrics.redis_failures.inc()
                self._connected.clear()
                self._metrics.redis_connected.set(0)
                self._write_wanted.set()
            if loop.time() - started > 5 * _RETRY_LIMIT_S:
                retry_s = _RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_LIMIT_S)

    async def _follow_streams(self) -> None:
        """Returns when the writer has found Redis gone. Raises StoreUnavailableError."""
        await self._store.ping()
        for forest in self.forests:
            forest.synced.clear()
        for key in await self._store.namespaces():
            self._ensure(key)
        self._connected.set()
        self._is_new = False
        self._metrics.redis_connected.set(1)
        self._log.info("redis connected", namespaces=len(self._forests), backlog=len(self._backlog))
        while self.is_connected:
            self._opened.clear()
            for forest in self.forests:
                if not forest.synced.is_set():
                    await self._sync(forest)
            self._write_wanted.set()
            self._report()
            if not self._forests:
                await self._store.ping()
                await _happens(self._opened, _BLOCK_MS / 1000)
                continue
            positions = {forest.key: forest.position for forest in self.forests if forest.synced.is_set()}
            for entry in await self._store.read(positions, block_ms=_BLOCK_MS, limit=_ENTRIES_PER_READ):
                if entry.spans is None:
                    self._metrics.entries_damaged.inc()
                num_new = await self._forests[entry.namespace_key].merge(entry.spans or (), entry.position)
                self._metrics.tokens_merged.inc(num_new)

    async def _sync(self, forest: NamespaceForest) -> None:
        """Brings a forest to a position from which its stream can be read without a gap."""
        if not forest.position or await self._store.has_gap_after(forest.key, forest.position):
            snapshot = await self._store.latest_snapshot(forest.key)
            # What we hold may be newer than what was published before the stream was trimmed or lost.
            if snapshot is not None and position_order(snapshot.position) > position_order(forest.position):
                try:
                    await forest.replace(snapshot)
                except ValueError as error:
                    self._metrics.snapshots_rejected.inc()
                    self._log.warning(
                        "the published snapshot is damaged and ignored",
                        namespace=forest.key,
                        error=str(error),
                    )
            if not forest.position:
                await forest.start_at(START)
        forest.synced.set()

    async def _write(self) -> None:
        """Moves fresh spans to the stream, or, without Redis, into the forests and the backlog."""
        while True:
            await self._write_wanted.wait()
            self._write_wanted.clear()
            while self._fresh or (self._backlog and self.is_connected):
                if self.is_connected:
                    try:
                        await self._write_some()
                    except StoreUnavailableError as error:
                        self._log.warning("redis lost; going on without it", error=str(error))
                        self._metrics.redis_failures.inc()
                        self._connected.clear()
                        self._metrics.redis_connected.set(0)
                else:
                    await self._merge_unstored()
            self._metrics.backlog_spans.set(len(self._backlog))

    async def _write_some(self) -> None:
        """What waits longest becomes one stream entry per namespace; it stays queued if that fails."""
        queue = self._backlog or self._fresh
        batches: dict[str, list[AcceptedSpan]] = {}
        num_taken = min(len(queue), _SPANS_PER_WRITE)
        for i in range(num_taken):
            batches.setdefault(queue[i].forest.key, []).append(queue[i].span)
        await self._store.append(batches)
        for _ in range(num_taken):
            pending = queue.popleft()
            if queue is self._backlog:
                self._backlog_tokens -= len(pending.span.token_ids)

    async def _merge_unstored(self) -> None:
        batches: dict[NamespaceForest, list[AcceptedSpan]] = {}
        while self._fresh:
            pending = self._fresh.popleft()
            batches.setdefault(pending.forest, []).append(pending.span)
            self._backlog.append(pending)
            self._backlog_tokens += len(pending.span.token_ids)
        while self._backlog_tokens > self._settings.backlog_tokens:
            self._backlog_tokens -= len(self._backlog.popleft().span.token_ids)
            self.num_dropped += 1
            self._metrics.spans_dropped.inc()
        for forest, spans in batches.items():
            self._metrics.tokens_merged.inc(await forest.merge_unstored(spans))

    async def _compact(self) -> None:
        interval_s = self._settings.snapshot_interval_s
        while True:
            await asyncio.sleep(interval_s)
            for forest in self.forests:
                try:
                    if self.is_connected and forest.synced.is_set() and forest.num_unpublished:
                        lasting_ms = max(1, int(900 * interval_s))
                        if await self._store.take_lease(
                            forest.key, self._settings.pod_id, lasting_ms=lasting_ms
                        ):
                            await self._publish(forest)
                except StoreUnavailableError as error:
                    self._log.warning("snapshot not published", namespace=forest.key, error=str(error))

    async def _publish(self, forest: NamespaceForest) -> None:
        num_included = forest.num_unpublished
        if not num_included or not forest.synced.is_set():
            return
        snapshot = await forest.snapshot(version=uuid.uuid4().hex)
        await self._store.publish(forest.key, snapshot)
        forest.version = snapshot.version
        forest.num_unpublished -= num_included
        self._metrics.snapshots_published.inc()

    def _report(self) -> None:
        forests = self.forests
        self._metrics.namespaces.set(len(forests))
        self._metrics.tokens_held.set(sum(forest.num_tokens for forest in forests))
        self._metrics.memory_bytes.set(sum(forest.memory_bytes for forest in forests))


async def _happens(event: asyncio.Event, limit_s: float) -> bool:
    """Whether the event is set within the limit."""
    try:
        await asyncio.wait_for(event.wait(), limit_s)
    except TimeoutError:
        return False
    return True
