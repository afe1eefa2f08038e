"""Publishes namespaces' texts as snapshots, from which a replica begins; one replica per namespace at a time.

    lease (SET by one owner, expires) -> encode -> upload, chunk by chunk -> PUBLISH script

The lease saves work; what makes an old snapshot harmless is the script, which refuses whoever has lost the
lease, comes from before a purge, or is behind what is there. A replica that was paused while it published
finds out there.

The stream holds the latest entries anyhow, so a snapshot is due when enough has been merged since the last: a
share of what is held, or so many entries that the stream will soon drop some of them.
"""

from __future__ import annotations

import time
import uuid

import structlog

from tandem_lookahead.metrics import LookaheadMetrics
from tandem_lookahead.namespace import NamespaceForest
from tandem_lookahead.settings import LookaheadSettings
from tandem_lookahead.store import RedisStore

#: Due when this share of what is held is new, or this share of the stream.
_DUE_TEXT = 1 / 16
_DUE_STREAM = 1 / 8
#: A lease outlasts the interval, so that the replica that has it keeps it.
_LEASE_INTERVALS = 2.5


class Compactor:
    """Used by one task of the hub."""

    def __init__(self, store: RedisStore, settings: LookaheadSettings, metrics: LookaheadMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._due_entries = _DUE_STREAM * settings.stream_length
        self._lease_ms = max(1, int(1000 * _LEASE_INTERVALS * settings.snapshot_interval_s))
        #: This replica, this time: a restarted one is another.
        self._owner = uuid.uuid4().hex
        self._log = structlog.get_logger("tandem.lookahead.compactor")

    async def compact(self, forest: NamespaceForest) -> None:
        """Publishes if it is due and this replica's turn. Raises StoreUnavailableError."""
        if not forest.synced.is_set() or not forest.position:
            return
        is_due = forest.num_unpublished and (
            forest.num_unpublished >= _DUE_TEXT * forest.text.num_tokens
            or forest.num_unpublished_entries >= self._due_entries
        )
        # Another replica may have published since; or Redis may have lost what was.
        held = await self._store.snapshot_version(forest.key)
        if is_due or (not held and forest.text.num_tokens):
            await self.publish(forest)

    async def publish(self, forest: NamespaceForest) -> None:
        """Publishes if it is this replica's turn. Raises StoreUnavailableError."""
        if not await self._store.take_lease(forest.key, self._owner, lasting_ms=self._lease_ms):
            # Somebody else does; this replica has nothing to do either.
            forest.num_unpublished = forest.num_unpublished_entries = 0
            return
        num_included, num_entries = forest.num_unpublished, forest.num_unpublished_entries
        snapshot = await forest.snapshot(version=uuid.uuid4().hex)
        outcome = await self._store.publish(forest.key, snapshot, self._owner)
        if outcome != "ok":
            self._metrics.snapshots_refused.labels(outcome).inc()
            self._log.info("snapshot not published", namespace=forest.key, because=outcome)
            return
        forest.compacted_at = time.monotonic()
        forest.num_unpublished = max(0, forest.num_unpublished - num_included)
        forest.num_unpublished_entries = max(0, forest.num_unpublished_entries - num_entries)
        self._metrics.snapshots_published.inc()
