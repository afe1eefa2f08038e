"""Connects pods, namespaces and Redis.

    pod -> submit -> outbox -> Redis stream -> tail (XREAD) -> namespace -> followers (all replicas)

Namespaces are read from Redis when a pod asks for them. On every connection to Redis each one in memory
reads its generation: text of another one was purged. A namespace without a position, or whose next entries
were trimmed, then starts from the latest snapshot. A damaged snapshot is dropped, and its namespace starts
from the stream; other namespaces are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Sequence
from itertools import groupby

import structlog
from tandem_drafting.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_service.tasks import end_tasks
from tandem_service.tracing import RequestTrace

from tandem_lookahead.compactor import Compactor
from tandem_lookahead.corpus import CorpusPolicy, fair_limit
from tandem_lookahead.metrics import LookaheadMetrics
from tandem_lookahead.namespace import Follower, Namespace, namespace_key
from tandem_lookahead.outbox import Outbox
from tandem_lookahead.settings import LookaheadSettings
from tandem_lookahead.store import (
    START,
    EntryKind,
    RedisStore,
    StoreFullError,
    StoreUnavailableError,
)

#: Limit of one XREAD. The next one also reads the namespaces that were opened meanwhile.
_BLOCK_MS = 100
_ENTRIES_PER_READ = 512
#: Spans that arrive within this time become one stream entry.
_WRITE_PAUSE_S = 0.005
_RETRY_S = 0.02
_RETRY_LIMIT_S = 1.0
#: How long a pod's hello waits for Redis.
_SYNC_WAIT_S = 1.0
_FINAL_WRITE_S = 3.0
#: How long an opened namespace is safe from leaving memory, so that its pod can follow it.
_OPENING_S = 3.0
#: A namespace's expiry in Redis is postponed after this share of its time to live.
_RENEW_SHARE = 1 / 10
#: Time between two searches for expired namespaces in the set of all.
_FORGET_S = 3600.0
#: How long a purge waits until this replica has read it from the stream.
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
        self._policy = CorpusPolicy(
            settings.min_requests, settings.max_bytes, half_life_s=settings.half_life_s
        )
        self._compactor = Compactor(store, settings, metrics)
        self._namespaces: dict[str, Namespace] = {}
        self._connected = asyncio.Event()
        self._opened = asyncio.Event()
        self._write_wanted = asyncio.Event()
        self._outbox = Outbox(settings.backlog_tokens)
        self._tasks: list[asyncio.Task[None]] = []
        #: Traces of requests whose spans are in the outbox.
        self._traces: list[RequestTrace] = []
        #: Redis may still be starting.
        self._is_new = True
        self._is_stopping = False
        #: Redis has refused a write for lack of memory.
        self._is_full = False
        #: Spans that pods sent, and those dropped because the backlog was full.
        self.num_received = 0
        self.num_dropped = 0

    @property
    def is_connected(self) -> bool:
        """Whether Redis answered last time."""
        return self._connected.is_set()

    @property
    def namespaces(self) -> list[Namespace]:
        return list(self._namespaces.values())

    async def start(self) -> None:
        """Starts the tasks; does not wait for Redis."""
        for work, name in ((self._tail, "tail"), (self._write, "writer"), (self._compact, "compactor")):
            self._tasks.append(asyncio.create_task(work(), name=f"lookahead-{name}"))

    async def stop(self) -> None:
        """Ends the pods' streams, and publishes last snapshots if Redis answers. Can be called again."""
        if not self._tasks:
            return
        self._is_stopping = True
        for namespace in self.namespaces:
            namespace.close_followers()
        await end_tasks(self._tasks)
        self._tasks.clear()
        if self.is_connected:
            try:
                async with asyncio.timeout(_FINAL_WRITE_S):
                    while not self._outbox.is_empty:
                        await self._outbox.write(self._store)
                    for namespace in self.namespaces:
                        if namespace.synced.is_set() and namespace.num_unpublished:
                            await self._compactor.publish(namespace)
            except (StoreUnavailableError, TimeoutError) as error:
                self._log.warning("no last snapshot was published", error=str(error))

    async def open(self, proto: pb.Namespace) -> Namespace:
        """The namespace, with what Redis holds if it answers soon.

        Raises BadMessageError, TooManyNamespacesError.
        """
        key = namespace_key(proto)
        while key not in self._namespaces and len(self._namespaces) >= self._settings.max_namespaces:
            await self._unload_oldest()
        if key not in self._namespaces:
            wants_prompts = proto.tenant in self._settings.share_prompts
            self._namespaces[key] = Namespace(proto, self._policy, wants_prompts=wants_prompts)
        namespace = self._namespaces[key]
        namespace.last_used = time.monotonic()
        if not namespace.synced.is_set() and (self.is_connected or self._is_new):
            self._opened.set()
            try:
                await asyncio.wait_for(namespace.synced.wait(), _SYNC_WAIT_S)
            except TimeoutError:
                self._log.warning("redis is slow; answering without it", namespace=namespace.key)
            namespace.last_used = time.monotonic()
        return namespace

    async def follow(self, namespace: Namespace, hello: pb.SyncHello) -> Follower:
        """A new follower, closed already when the service is stopping."""
        follower = await namespace.follow(hello)
        if self._is_stopping:
            follower.close()
        return follower

    def submit(
        self, namespace: Namespace, spans: Sequence[AcceptedSpan], traces: Sequence[RequestTrace] = ()
    ) -> None:
        """Adds spans of a pod; never waits or raises. The traces end when the spans are stored."""
        self.num_received += len(spans)
        self._metrics.spans_received.inc(len(spans))
        allowed = [span for span in spans if namespace.wants_prompts or not span.is_prompt]
        self._metrics.prompts_refused.inc(len(spans) - len(allowed))
        self._outbox.put(namespace, allowed)
        self._traces += traces
        self._write_wanted.set()

    async def add_import(self, namespace: Namespace, spans: Sequence[AcceptedSpan]) -> None:
        """Adds imported text for all replicas. Raises StoreUnavailableError, WrongGenerationError."""
        if not namespace.synced.is_set():
            raise StoreUnavailableError("Redis does not answer; import again when it does")
        await self._store.append(namespace.key, namespace.generation, EntryKind.IMPORT, spans)

    async def purge(self, tenant: str) -> int:
        """Removes all text of a tenant; returns the number of its namespaces.

        Returns when this replica and Redis have forgotten; other replicas follow within moments. Raises
        StoreUnavailableError.
        """
        if not self.is_connected:
            raise StoreUnavailableError(
                "Redis does not answer, and its text would come back; purge again when it answers"
            )
        keys = {*await self._store.namespaces(), *self._namespaces}
        prefix = namespace_key(pb.Namespace(tenant=tenant)).partition("/")[0] + "/"
        purged = [key for key in sorted(keys) if key.startswith(prefix)]
        for key in purged:
            generation = uuid.uuid4().hex
            namespace = self._namespaces.get(key)
            if namespace is not None:
                self._outbox.forget(namespace)
            await self._store.purge(key, generation)
            if namespace is not None:
                await self._wait_for_generation(namespace, generation)
        if purged:
            await self._store.forget_deleted()
        return len(purged)

    async def _wait_for_generation(self, namespace: Namespace, generation: str) -> None:
        deadline = asyncio.get_running_loop().time() + _PURGE_WAIT_S
        while namespace.generation != generation:
            if asyncio.get_running_loop().time() > deadline:
                raise StoreUnavailableError(
                    "Redis has purged the tenant, but this replica has not read that yet; purge again"
                )
            await asyncio.sleep(_RETRY_S)

    async def lag_s(self, namespace: Namespace) -> float | None:
        """Lag of the corpus behind the stream; None if Redis does not answer."""
        if not self.is_connected or not namespace.synced.is_set():
            return None
        try:
            bounds = await self._store.bounds(namespace.key)
        except StoreUnavailableError:
            return None
        return max(0, bounds[1].ms - namespace.entry.ms) / 1000 if bounds is not None else 0.0

    async def _tail(self) -> None:
        """Connects to Redis, keeps the namespaces in step with their streams, and reconnects after a loss."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        retry_s = _RETRY_S
        while True:
            started = loop.time()
            try:
                await self._follow_streams()
            except StoreUnavailableError as error:
                self._is_new = self._is_new and loop.time() - begun < _SYNC_WAIT_S
                self._lose_redis(error)
            except Exception as error:  # a bug must not end sharing permanently
                self._log.exception("following the streams failed; reconnecting")
                self._lose_redis(error)
            self._write_wanted.set()
            if loop.time() - started > 5 * _RETRY_LIMIT_S:
                retry_s = _RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_LIMIT_S)

    def _lose_redis(self, error: Exception) -> None:
        self._is_full = self._is_full or isinstance(error, StoreFullError)
        if self.is_connected:
            self._log.warning("redis lost; continuing without it", reason=str(error))
            self._metrics.redis_failures.inc()
        self._connected.clear()
        self._metrics.redis_connected.set(0)

    async def _follow_streams(self) -> None:
        """Returns when the writer has lost Redis. Raises StoreUnavailableError."""
        await self._store.ping()
        await self._store.begin_reading()
        if self._is_full:
            self._log.warning("redis is full; halving the streams")
            self._metrics.redis_full.inc()
            await self._store.shrink()
            self._is_full = False
        for namespace in self.namespaces:
            namespace.synced.clear()
        self._connected.set()
        self._is_new = False
        self._metrics.redis_connected.set(1)
        self._log.info("redis connected", namespaces=len(self._namespaces), backlog=self._outbox.num_backlog)
        while self.is_connected:
            self._opened.clear()
            for namespace in self.namespaces:
                if not namespace.synced.is_set():
                    await self._sync(namespace)
            self._write_wanted.set()
            self._report()
            after = {space.key: space.entry for space in self.namespaces if space.synced.is_set()}
            if not after:
                await self._store.ping()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._opened.wait(), _BLOCK_MS / 1000)
                continue
            entries = await self._store.read(after, block_ms=_BLOCK_MS, limit=_ENTRIES_PER_READ)
            for key, group in groupby(entries, lambda entry: entry.namespace_key):
                batch = list(group)
                known = self._namespaces.get(key)
                if known is None:  # it was idle and has left meanwhile
                    continue
                for entry in batch:
                    if entry.kind is EntryKind.DAMAGED:
                        self._metrics.entries_damaged.inc()
                    elif entry.kind is EntryKind.PURGE:
                        self._outbox.forget(known)
                self._metrics.tokens_merged.inc(await known.merge(batch))

    async def _sync(self, namespace: Namespace) -> None:
        """Brings a namespace to an entry from which its stream can be read without a gap."""
        ours = namespace.generation or uuid.uuid4().hex
        generation = await self._store.generation(namespace.key, ours=ours)
        if namespace.generation not in ("", generation):
            self._outbox.forget(namespace)
        await namespace.begin(generation)
        bounds = await self._store.bounds(namespace.key)
        if namespace.entry < (bounds[0] if bounds is not None else START):
            try:
                snapshot = await self._store.latest_snapshot(namespace.key)
                # The corpus may be newer than the snapshot when the stream was trimmed or lost.
                if snapshot and snapshot.generation == generation and snapshot.entry > namespace.entry:
                    await namespace.restore(snapshot)
            except StoreUnavailableError:
                raise
            except Exception as error:  # whatever a damaged snapshot causes, other namespaces go on
                self._metrics.snapshots_rejected.inc()
                self._log.warning(
                    "dropped a damaged snapshot; the namespace starts from its stream",
                    namespace=namespace.key,
                    error=str(error),
                )
                await self._store.drop_snapshot(namespace.key)
        await self._store.renew(namespace.key)
        namespace.renewed_at = time.monotonic()
        await namespace.catch_up_followers()
        namespace.synced.set()

    async def _write(self) -> None:
        """Moves fresh spans to the stream; without Redis, into the corpora and the backlog."""
        while True:
            await self._write_wanted.wait()
            await asyncio.sleep(_WRITE_PAUSE_S)
            self._write_wanted.clear()
            while self._outbox.has_fresh or (self._outbox.num_backlog and self.is_connected):
                if self.is_connected:
                    try:
                        await self._outbox.write(self._store)
                    except StoreUnavailableError as error:
                        self._lose_redis(error)
                else:
                    num_merged, num_dropped = await self._outbox.merge_unstored()
                    self.num_dropped += num_dropped
                    self._metrics.spans_dropped.inc(num_dropped)
                    self._metrics.tokens_merged.inc(num_merged)
            for trace in self._traces:
                trace.set({"tandem.lookahead.redis": self.is_connected})
                trace.end()
            self._traces.clear()
            self._metrics.backlog_spans.set(self._outbox.num_backlog)

    async def _compact(self) -> None:
        forgot_at = -math.inf
        while True:
            await asyncio.sleep(self._settings.snapshot_interval_s)
            for namespace in self.namespaces:
                try:
                    if self.is_connected:
                        await self._compactor.compact(namespace)
                        await self._renew(namespace)
                except StoreUnavailableError as error:
                    self._is_full = self._is_full or isinstance(error, StoreFullError)
                    self._log.warning("snapshot not published", namespace=namespace.key, error=str(error))
            with contextlib.suppress(StoreUnavailableError):
                for namespace in self.namespaces:
                    await self._unload(namespace, idle_s=self._settings.idle_s)
                if self.is_connected and time.monotonic() - forgot_at > _FORGET_S:
                    await self._store.forget_expired()
                    forgot_at = time.monotonic()

    async def _renew(self, namespace: Namespace) -> None:
        """Postpones the expiry of a namespace in use, rarely, because Redis logs each time."""
        is_due = time.monotonic() - namespace.renewed_at > self._settings.redis_ttl_s * _RENEW_SHARE
        if is_due and namespace.num_followers and namespace.synced.is_set():
            await self._store.renew(namespace.key)
            namespace.renewed_at = time.monotonic()

    async def _unload_oldest(self) -> None:
        """Frees the place of the namespace that no pod has used for the longest time. Raises
        TooManyNamespacesError."""
        with contextlib.suppress(StoreUnavailableError):
            for namespace in sorted(self.namespaces, key=lambda one: one.last_used):
                if await self._unload(namespace, idle_s=_OPENING_S):
                    return
        raise TooManyNamespacesError(
            f"pods use {len(self._namespaces)} namespaces, or Redis does not answer; raise --max-namespaces"
        )

    async def _unload(self, namespace: Namespace, *, idle_s: float) -> bool:
        """Frees the memory of a namespace that no pod has used for this time, if Redis has its text; `open`
        reads it again."""

        def is_idle() -> bool:
            is_used = namespace.num_followers > 0 or time.monotonic() - namespace.last_used < idle_s
            return self.is_connected and namespace.synced.is_set() and self._outbox.is_empty and not is_used

        if is_idle() and namespace.num_unpublished:
            await self._compactor.publish(namespace)
        if not is_idle() or namespace.num_unpublished:
            return False
        if self._namespaces.pop(namespace.key, None) is not None:
            self._log.info("unloaded an idle namespace", namespace=namespace.key)
        return True

    def _report(self) -> None:
        """Sets the gauges, and divides the total memory among the namespaces."""
        corpora = [namespace.corpus for namespace in self.namespaces]
        sizes = [corpus.num_bytes for corpus in corpora]
        limit = fair_limit(sizes, self._settings.max_total_bytes)
        for namespace in self.namespaces:
            namespace.limit(limit)
        self._metrics.namespaces.set(len(corpora))
        self._metrics.tokens_held.set(sum(corpus.num_tokens for corpus in corpora))
        self._metrics.tokens_shared.set(sum(corpus.num_shared_tokens for corpus in corpora))
        self._metrics.memory_bytes.set(sum(sizes))
