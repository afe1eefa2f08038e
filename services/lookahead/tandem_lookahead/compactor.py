"""Publishes the corpora of namespaces as snapshots for starting replicas; one replica per namespace at a
time.

    lease (one owner, expires) -> encode -> upload, chunk by chunk -> PUBLISH script

The lease only saves work. The script keeps Redis correct: it refuses a replica that lost the lease, an older
generation, and an older position.

The stream holds the latest entries, so a snapshot is due when enough was merged since the last one: a share
of the corpus, or a number of entries close to the stream's limit.
"""

from __future__ import annotations

import time
import uuid

import structlog

from tandem_lookahead.metrics import LookaheadMetrics
from tandem_lookahead.namespace import Namespace
from tandem_lookahead.settings import LookaheadSettings
from tandem_lookahead.store import RedisStore

#: A snapshot is due when this share of the corpus is new, or this share of the stream.
_DUE_TEXT = 1 / 16
_DUE_STREAM = 1 / 8
#: A lease outlasts the interval, so that its owner keeps it.
_LEASE_INTERVALS = 2.5


class Compactor:
    """Used by one task of the hub."""

    def __init__(self, store: RedisStore, settings: LookaheadSettings, metrics: LookaheadMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._due_entries = _DUE_STREAM * settings.stream_length
        self._lease_ms = max(1, int(1000 * _LEASE_INTERVALS * settings.snapshot_interval_s))
        #: Differs between restarts of a replica.
        self._owner = uuid.uuid4().hex
        self._log = structlog.get_logger("tandem.lookahead.compactor")

    async def compact(self, namespace: Namespace) -> None:
        """Publishes if a snapshot is due and this replica has the lease. Raises StoreUnavailableError."""
        if not namespace.synced.is_set():
            return
        is_due = namespace.num_unpublished and (
            namespace.num_unpublished >= _DUE_TEXT * namespace.corpus.num_tokens
            or namespace.num_unpublished_entries >= self._due_entries
        )
        # Redis may have lost its data, or its snapshot was damaged.
        if is_due or (namespace.corpus.num_tokens and not await self._store.has_snapshot(namespace.key)):
            await self.publish(namespace)

    async def publish(self, namespace: Namespace) -> None:
        """Publishes if this replica has the lease. Raises StoreUnavailableError."""
        if not await self._store.take_lease(namespace.key, self._owner, lasting_ms=self._lease_ms):
            # Another replica publishes the same text.
            namespace.num_unpublished = namespace.num_unpublished_entries = 0
            return
        num_included, num_entries = namespace.num_unpublished, namespace.num_unpublished_entries
        snapshot = await namespace.snapshot(version=uuid.uuid4().hex)
        outcome = await self._store.publish(namespace.key, snapshot, self._owner)
        if outcome != "ok":
            self._metrics.snapshots_refused.labels(outcome).inc()
            self._log.info("snapshot not published", namespace=namespace.key, cause=outcome)
            return
        namespace.snapshot_at = time.monotonic()
        namespace.num_unpublished = max(0, namespace.num_unpublished - num_included)
        namespace.num_unpublished_entries = max(0, namespace.num_unpublished_entries - num_entries)
        self._metrics.snapshots_published.inc()
