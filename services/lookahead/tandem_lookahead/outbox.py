"""Spans of pods that are not in Redis yet.

While Redis answers, they become stream entries. Otherwise they are merged here at once and become stream
entries later. Merging them again from the stream is harmless, because a corpus skips repetitions.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence

from tandem_drafting.spans import AcceptedSpan

from tandem_lookahead.namespace import Namespace
from tandem_lookahead.store import EntryKind, RedisStore, WrongGenerationError

_SPANS_PER_WRITE = 1024
#: A stream entry with this many tokens gets no further span.
_TOKENS_PER_WRITE = 50_000


class Outbox:
    """Belongs to one event loop; one task writes."""

    def __init__(self, max_backlog_tokens: int) -> None:
        self._max_backlog_tokens = max_backlog_tokens
        #: Neither merged here nor stored.
        self._fresh: deque[tuple[Namespace, AcceptedSpan]] = deque()
        #: Merged here while Redis was away.
        self._backlog: deque[tuple[Namespace, AcceptedSpan]] = deque()
        self._backlog_tokens = 0

    @property
    def num_backlog(self) -> int:
        return len(self._backlog)

    @property
    def has_fresh(self) -> bool:
        return bool(self._fresh)

    @property
    def is_empty(self) -> bool:
        return not self._fresh and not self._backlog

    def put(self, namespace: Namespace, spans: Sequence[AcceptedSpan]) -> None:
        self._fresh.extend((namespace, span) for span in spans)

    def forget(self, namespace: Namespace) -> None:
        """Drops the spans of a namespace whose text was purged."""
        self._fresh = deque(pending for pending in self._fresh if pending[0] is not namespace)
        self._backlog = deque(pending for pending in self._backlog if pending[0] is not namespace)
        self._backlog_tokens = sum(len(span.token_ids) for _, span in self._backlog)

    async def write(self, store: RedisStore) -> None:
        """Writes the oldest spans, one stream entry per namespace. They stay queued if that fails.

        Raises StoreUnavailableError. The next call may write some spans again, which is harmless.
        """
        queue = self._backlog or self._fresh
        batches: dict[Namespace, list[AcceptedSpan]] = {}
        num_taken = num_tokens = 0
        while num_taken < min(len(queue), _SPANS_PER_WRITE) and num_tokens < _TOKENS_PER_WRITE:
            namespace, span = queue[num_taken]
            batches.setdefault(namespace, []).append(span)
            num_tokens += len(span.token_ids)
            num_taken += 1
        purged = []
        for namespace, spans in batches.items():
            if not namespace.generation:
                await namespace.begin(await store.generation(namespace.key, ours=uuid.uuid4().hex))
            try:
                await store.append(namespace.key, namespace.generation, EntryKind.SPANS, spans)
            except WrongGenerationError:
                purged.append(namespace)
        for _ in range(min(num_taken, len(queue))):
            _, span = queue.popleft()
            if queue is self._backlog:
                self._backlog_tokens -= len(span.token_ids)
        for namespace in purged:
            self.forget(namespace)

    async def merge_unstored(self) -> tuple[int, int]:
        """Merges fresh spans here and keeps them in the backlog; the numbers of merged tokens and dropped
        spans."""
        batches: dict[Namespace, list[AcceptedSpan]] = {}
        num_dropped = 0
        while self._fresh:
            namespace, span = self._fresh.popleft()
            batches.setdefault(namespace, []).append(span)
            self._backlog.append((namespace, span))
            self._backlog_tokens += len(span.token_ids)
        while self._backlog_tokens > self._max_backlog_tokens:
            _, span = self._backlog.popleft()
            self._backlog_tokens -= len(span.token_ids)
            num_dropped += 1
        num_merged = sum([await namespace.merge_unstored(spans) for namespace, spans in batches.items()])
        return num_merged, num_dropped
