"""Joins pods, forests and Redis.

    pod -> submit -> outbox -> Redis stream -> tail (XREAD) -> forest -> followers (all replicas)

On every (re)connection each namespace asks for its generation: text of another one was purged. A namespace
that has no position, or whose next entries were trimmed, then starts from the latest snapshot.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from itertools import groupby

import structlog
from tandem_drafting.spans import AcceptedSpan

from tandem_lookahead.codec import Hello, Namespace, Tables
from tandem_lookahead.compactor import Compactor
from tandem_lookahead.follower import Follower
from tandem_lookahead.metrics import LookaheadMetrics
from tandem_lookahead.namespace import NamespaceForest
from tandem_lookahead.outbox import Outbox
from tandem_lookahead.settings import LookaheadSettings
from tandem_lookahead.store import (
    START,
    EntryKind,
    RedisStore,
    StoreUnavailableError,
    position_order,
)
from tandem_lookahead.tasks import end_tasks, happens
from tandem_lookahead.text import TextPolicy

#: XREAD waits this long; a namespace opened meanwhile is read from the next time on.
_BLOCK_MS = 100
_ENTRIES_PER_READ = 512
#: What pods send within this time becomes one stream entry.
_WRITE_PAUSE_S = 0.005
_RETRY_S = 0.02
_RETRY_LIMIT_S = 1.0
#: How long a pod's hello waits for Redis before it is answered with what there is.
_SYNC_WAIT_S = 1.0
_FINAL_WRITE_S = 3.0
#: How long a purge waits until this replica has heard of it from the stream.
_PURGE_WAIT_S = 5.0


class TooManyNamespacesError(Exception):
    """No room for another namespace (RESOURCE_EXHAUSTED)."""


class LookaheadHub:
    """Runs between `start` and `stop`; belongs to one event loop."""

    def __init__(self, store: RedisStore, settings: LookaheadSettings, metrics: LookaheadMetrics) -> None:
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._log = structlog.get_logger("tandem.lookahead.hub")
        self._policy = TextPolicy(
            settings.promotion_requests, settings.max_bytes, half_life_s=settings.half_life_s
        )
        self._compactor = Compactor(store, settings, metrics)
        self._forests: dict[str, NamespaceForest] = {}
        self._connected = asyncio.Event()
        self._opened = asyncio.Event()
        self._write_wanted = asyncio.Event()
        self._outbox = Outbox(settings.backlog_tokens)
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
                    while not self._outbox.is_empty:
                        await self._outbox.write(self._store)
                    for forest in self.forests:
                        if forest.synced.is_set() and forest.num_unpublished:
                            await self._compactor.publish(forest)
            except (StoreUnavailableError, TimeoutError) as error:
                self._log.warning("no last snapshot was published", error=str(error))

    async def open(self, namespace: Namespace) -> NamespaceForest:
        """The namespace's forest, with what Redis holds if it answers soon. Raises TooManyNamespacesError."""
        forest = self._ensure(namespace)
        if forest is None:
            raise TooManyNamespacesError(
                f"{len(self._forests)} namespaces are held already; raise --max-namespaces"
            )
        if not forest.synced.is_set() and (self.is_connected or self._is_new):
            self._opened.set()
            if not await happens(forest.synced, _SYNC_WAIT_S):
                self._log.warning("redis is slow; answering without it", namespace=forest.key)
        return forest

    async def follow(self, forest: NamespaceForest, hello: Hello) -> Follower:
        """A new follower of the forest, at its end already when the service is stopping."""
        if hello.tables_format and self.is_connected:
            try:
                forest.tables |= {tables.format: tables for tables in await self._store.tables(forest.key)}
            except StoreUnavailableError as error:
                self._log.warning("learnt tables not read", namespace=forest.key, error=str(error))
        follower = await forest.follow(hello)
        if self._is_stopping:
            follower.close()
        return follower

    def submit(self, forest: NamespaceForest, spans: Sequence[AcceptedSpan]) -> None:
        """Takes what a pod has sent; never waits, never raises."""
        self.num_received += len(spans)
        self._metrics.spans_received.inc(len(spans))
        allowed = [span for span in spans if forest.wants_prompts or not span.is_prompt]
        self._metrics.prompts_refused.inc(len(spans) - len(allowed))
        self._outbox.put(forest, allowed)
        self._write_wanted.set()

    async def offer_tables(self, forest: NamespaceForest, tables: Tables) -> None:
        """Keeps a pod's learnt tables if they were taught more than those there are."""
        held = forest.tables.get(tables.format)
        if held is None or held.num_observations < tables.num_observations:
            forest.tables[tables.format] = tables
        if self.is_connected and forest.generation:
            try:
                await self._store.offer_tables(forest.key, forest.generation, tables)
            except StoreUnavailableError as error:
                self._log.warning("learnt tables not stored", namespace=forest.key, error=str(error))

    async def add_shared(self, forest: NamespaceForest, spans: Sequence[AcceptedSpan]) -> None:
        """Adds imported text for all replicas. Raises StoreUnavailableError, WrongGenerationError."""
        if not forest.synced.is_set():
            raise StoreUnavailableError("Redis does not answer; import again when it does")
        await self._store.append(forest.key, forest.generation, EntryKind.SHARED, spans)

    async def purge(self, tenant: str) -> int:
        """Removes all that is held of a tenant, and returns of how many namespaces; returns when this replica
        and Redis have forgotten, the other replicas do so within moments. Raises StoreUnavailableError.
        """
        if not self.is_connected:
            raise StoreUnavailableError(
                "Redis does not answer, and what it holds would come back; purge again when it does"
            )
        keys = {*await self._store.namespaces(), *self._forests}
        beginning = Namespace(tenant, "", "").key.partition("/")[0] + "/"
        doomed = [key for key in sorted(keys) if key.startswith(beginning)]
        for key in doomed:
            generation = uuid.uuid4().hex
            forest = self._forests.get(key)
            if forest is not None:
                self._outbox.forget(forest)
            await self._store.purge(key, generation)
            if forest is not None:
                await self._hear_of(forest, generation)
        if doomed:
            await self._store.forget_deleted()
        return len(doomed)

    async def _hear_of(self, forest: NamespaceForest, generation: str) -> None:
        deadline = asyncio.get_running_loop().time() + _PURGE_WAIT_S
        while forest.generation != generation:
            if asyncio.get_running_loop().time() > deadline:
                raise StoreUnavailableError(
                    "Redis has forgotten the tenant, but this replica has yet to hear of it; purge again"
                )
            await asyncio.sleep(_RETRY_S)

    async def lag_s(self, forest: NamespaceForest) -> float | None:
        """By how much the stream is ahead of the forest; None: Redis does not answer."""
        if not self.is_connected or not forest.position:
            return None
        try:
            bounds = await self._store.bounds(forest.key)
        except StoreUnavailableError:
            return None
        if bounds is None:
            return 0.0
        return max(0, position_order(bounds[1])[0] - position_order(forest.position)[0]) / 1000

    def _ensure(self, namespace: Namespace) -> NamespaceForest | None:
        forest = self._forests.get(namespace.key)
        if forest is None and len(self._forests) < self._settings.max_namespaces:
            wants_prompts = namespace.tenant in self._settings.share_prompts
            forest = NamespaceForest(namespace, self._policy, wants_prompts=wants_prompts)
            self._forests[namespace.key] = forest
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
                self._lose_redis(str(error))
                self._write_wanted.set()
            except Exception as error:  # our own bug must not end the sharing of everything else
                self._log.exception("following the streams failed; beginning anew")
                self._lose_redis(repr(error))
                self._write_wanted.set()
            if loop.time() - started > 5 * _RETRY_LIMIT_S:
                retry_s = _RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_LIMIT_S)

    def _lose_redis(self, reason: str) -> None:
        if self.is_connected:
            self._log.warning("redis lost; going on without it", reason=reason)
            self._metrics.redis_failures.inc()
        self._connected.clear()
        self._metrics.redis_connected.set(0)

    async def _follow_streams(self) -> None:
        """Returns when the writer has found Redis gone. Raises StoreUnavailableError."""
        await self._store.ping()
        await self._store.begin_reading()
        for forest in self.forests:
            forest.synced.clear()
        for key in await self._store.namespaces():
            try:
                self._ensure(Namespace.of_key(key))
            except ValueError as error:
                self._log.warning("Redis lists what is no namespace of ours; ignored", error=str(error))
        self._connected.set()
        self._is_new = False
        self._metrics.redis_connected.set(1)
        self._log.info("redis connected", namespaces=len(self._forests), backlog=self._outbox.num_backlog)
        while self.is_connected:
            self._opened.clear()
            for forest in self.forests:
                if not forest.synced.is_set():
                    await self._sync(forest)
            self._write_wanted.set()
            self._report()
            if not self._forests:
                await self._store.ping()
                await happens(self._opened, _BLOCK_MS / 1000)
                continue
            positions = {forest.key: forest.position for forest in self.forests}
            entries = await self._store.read(positions, block_ms=_BLOCK_MS, limit=_ENTRIES_PER_READ)
            for key, group in groupby(entries, lambda entry: entry.namespace_key):
                batch = list(group)
                for entry in batch:
                    if entry.kind is EntryKind.DAMAGED:
                        self._metrics.entries_damaged.inc()
                    elif entry.kind is EntryKind.PURGE:
                        self._outbox.forget(self._forests[key])
                self._metrics.tokens_merged.inc(await self._forests[key].merge(batch))

    async def _sync(self, forest: NamespaceForest) -> None:
        """Brings a forest to a position from which its stream can be read without a gap."""
        ours = forest.generation or uuid.uuid4().hex
        generation = await self._store.generation(forest.key, ours=ours)
        if forest.generation not in ("", generation):
            self._outbox.forget(forest)
        await forest.begin(generation)
        bounds = await self._store.bounds(forest.key)
        first = bounds[0] if bounds is not None else START
        if not forest.position or position_order(first) > position_order(forest.position):
            snapshot = await self._store.latest_snapshot(forest.key)
            # What we hold may be newer than what was published before the stream was trimmed or lost.
            if (
                snapshot is not None
                and snapshot.generation == generation
                and position_order(snapshot.position) > position_order(forest.position)
            ):
                try:
                    await forest.restore(snapshot)
                except ValueError as error:
                    self._metrics.snapshots_rejected.inc()
                    self._log.warning(
                        "the published snapshot is damaged and ignored",
                        namespace=forest.key,
                        error=str(error),
                    )
        await forest.follow_on()
        forest.synced.set()

    async def _write(self) -> None:
        """Moves fresh spans to the stream, or, without Redis, into the forests and the backlog."""
        while True:
            await self._write_wanted.wait()
            await asyncio.sleep(_WRITE_PAUSE_S)
            self._write_wanted.clear()
            while self._outbox.has_fresh or (self._outbox.num_backlog and self.is_connected):
                if self.is_connected:
                    try:
                        await self._outbox.write(self._store)
                    except StoreUnavailableError as error:
                        self._lose_redis(str(error))
                else:
                    num_merged, num_dropped = await self._outbox.merge_unstored()
                    self.num_dropped += num_dropped
                    self._metrics.spans_dropped.inc(num_dropped)
                    self._metrics.tokens_merged.inc(num_merged)
            self._metrics.backlog_spans.set(self._outbox.num_backlog)

    async def _compact(self) -> None:
        while True:
            await asyncio.sleep(self._settings.snapshot_interval_s)
            for forest in self.forests:
                try:
                    if self.is_connected:
                        await self._compactor.compact(forest)
                except StoreUnavailableError as error:
                    self._log.warning("snapshot not published", namespace=forest.key, error=str(error))

    def _report(self) -> None:
        """Shows what is held, and divides the room among the namespaces."""
        forests = self.forests
        sizes = [forest.text.num_bytes for forest in forests]
        cap = fair_cap(sizes, self._settings.max_total_bytes)
        for forest in forests:
            forest.limit(cap)
        self._metrics.namespaces.set(len(forests))
        self._metrics.tokens_held.set(sum(forest.text.num_tokens for forest in forests))
        self._metrics.tokens_shared.set(sum(forest.text.num_shared_tokens for forest in forests))
        self._metrics.memory_bytes.set(sum(sizes))


def fair_cap(sizes: Sequence[int], total: int) -> int:
    """The largest cap c for which the sizes, each cut to c, come to at most the total: who holds least loses
    last."""
    left, cap = total, total
    for count, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        cap = left // count
        if size > cap:
            return cap
        left -= size
    return total
