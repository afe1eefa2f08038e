"""Spans on their way from pods to Redis.

    put -> fresh -> stream            while Redis answers
             `----> forest, backlog   while it does not: merged here at once, added to the stream later

Spans that come back from the stream after having been merged here already are repetitions, which a
namespace's text skips; so nothing needs to be remembered about what was delivered how.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_drafting.spans import AcceptedSpan

from tandem_lookahead.namespace import NamespaceForest
from tandem_lookahead.store import EntryKind, RedisStore, WrongGenerationError

_SPANS_PER_WRITE = 1024
#: An entry that has this many tokens gets no more.
_TOKENS_PER_WRITE = 50_000


@dataclass(frozen=True)
class _Pending:
    forest: NamespaceForest
    span: AcceptedSpan


class Outbox:
    """Belongs to one event loop; one task writes."""

    def __init__(self, backlog_tokens: int) -> None:
        self._max_backlog_tokens = backlog_tokens
        #: Neither merged nor stored.
        self._fresh: deque[_Pending] = deque()
        #: Merged here while Redis was away.
        self._backlog: deque[_Pending] = deque()
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

    def put(self, forest: NamespaceForest, spans: Sequence[AcceptedSpan]) -> None:
        self._fresh.extend(_Pending(forest, span) for span in spans)

    def forget(self, forest: NamespaceForest) -> None:
        """Drops what waits of a namespace whose text was purged."""
        self._fresh = deque(pending for pending in self._fresh if pending.forest is not forest)
        self._backlog = deque(pending for pending in self._backlog if pending.forest is not forest)
        self._backlog_tokens = sum(len(pending.span.token_ids) for pending in self._backlog)

    async def write(self, store: RedisStore) -> None:
        """What waits longest becomes one stream entry per namespace, and stays queued if that fails.

        Raises StoreUnavailableError. What was already written then is written again, which is harmless.
        """
        queue = self._backlog or self._fresh
        batches: dict[NamespaceForest, list[AcceptedSpan]] = {}
        num_taken = num_tokens = 0
        while num_taken < min(len(queue), _SPANS_PER_WRITE) and num_tokens < _TOKENS_PER_WRITE:
            pending = queue[num_taken]
            batches.setdefault(pending.forest, []).append(pending.span)
            num_tokens += len(pending.span.token_ids)
            num_taken += 1
        purged = []
        for forest, spans in batches.items():
            if not forest.generation:
                await forest.begin(await store.generation(forest.key, ours=uuid.uuid4().hex))
            try:
                await store.append(forest.key, forest.generation, EntryKind.SPANS, spans)
            except WrongGenerationError:
                purged.append(forest)
        for _ in range(min(num_taken, len(queue))):
            pending = queue.popleft()
            if queue is self._backlog:
                self._backlog_tokens -= len(pending.span.token_ids)
        for forest in purged:
            self.forget(forest)

    async def merge_unstored(self) -> tuple[int, int]:
        """Moves what is fresh into the forests and the backlog: tokens merged, spans dropped."""
        batches: dict[NamespaceForest, list[AcceptedSpan]] = {}
        num_merged = num_dropped = 0
        while self._fresh:
            pending = self._fresh.popleft()
            batches.setdefault(pending.forest, []).append(pending.span)
            self._backlog.append(pending)
            self._backlog_tokens += len(pending.span.token_ids)
        while self._backlog_tokens > self._max_backlog_tokens:
            self._backlog_tokens -= len(self._backlog.popleft().span.token_ids)
            num_dropped += 1
        for forest, spans in batches.items():
            num_merged += await forest.merge_unstored(spans)
        return num_merged, num_dropped
