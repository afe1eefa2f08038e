"""One namespace in the service: its forest, and the pods that follow it.

    merge      spans enter the forest and go to every follower that is not past them
    replace    a published snapshot takes the forest's place; every follower behind it gets it
    follow     a pod joins: first what its mirror lacks, then every later update, with no gap between

The three hold one lock, so that a follower's first snapshot and its first delta fit together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from tandem_engine.drafts.mirror import GlobalMirror
from tandem_engine.drafts.spans import AcceptedSpan, SpanAssembler

from tandem_lookahead.codec import MAX_TOKEN_ID, Delta, PublishedSnapshot, Update
from tandem_lookahead.store import Entry, position_order

#: Updates that may wait for one pod before its stream is closed; it then resumes from its position.
MAX_WAITING_UPDATES = 4096

#: Entries in (after, until] of the namespace's stream, None when not all are to be had.
History = Callable[[str, str], Awaitable[list[Entry] | None]]


class FollowerLaggingError(Exception):
    """The pod reads too slowly; it should reconnect with its position (RESOURCE_EXHAUSTED)."""


class Follower:
    """Updates on their way to one pod."""

    def __init__(self, position: str) -> None:
        #: Up to where the pod will be current once it has read what was put.
        self.position = position
        self._waiting: deque[Update] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self.is_lagging = False

    def put(self, update: Update) -> None:
        """Never blocks: a follower that is too far behind is closed instead."""
        if len(self._waiting) >= MAX_WAITING_UPDATES:
            self.is_lagging = True
            self._waiting.clear()
            self.close()
        else:
            self.position = update.position
            self._waiting.append(update)
            self._changed.set()

    def close(self) -> None:
        """Ends `updates` after what is waiting."""
        self._closed = True
        self._changed.set()

    async def updates(self) -> AsyncIterator[Update]:
        """What was put, in order, until closed. Raises FollowerLaggingError."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self.is_lagging:
                raise FollowerLaggingError(
                    f"over {MAX_WAITING_UPDATES} updates were waiting; reconnect with have_position"
                )
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()


class NamespaceForest:
    """See the module. Belongs to one event loop; heavy work runs in a thread."""

    def __init__(self, key: str, *, max_tokens: int) -> None:
        self.key = key
        self._forest = GlobalMirror(vocab_size=MAX_TOKEN_ID + 1, max_tokens=max_tokens, is_drafted_from=False)
        self._lock = asyncio.Lock()
        self._followers: set[Follower] = set()
        #: Tells a resent span before it reaches the stream.
        self.received = SpanAssembler(num_context=0)
        #: Set while the forest holds what Redis holds.
        self.synced = asyncio.Event()
        #: Version of the snapshot published or loaded last.
        self.version = ""
        #: Tokens merged since that one.
        self.num_unpublished = 0

    @property
    def position(self) -> str:
        """Stream position merged up to; "" while nothing was read from a stream."""
        return self._forest.position

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self._forest.num_tokens

    @property
    def num_learnt(self) -> int:
        """Tokens merged by this replica."""
        return self._forest.num_learnt

    @property
    def memory_bytes(self) -> int:
        return self._forest.memory_bytes

    async def merge(self, spans: Sequence[AcceptedSpan], position: str) -> int:
        """Takes a stream entry; returns how many tokens were new to this forest.

        Followers get it in any case: they may have joined after it was merged unstored.
        """
        async with self._lock:
            num_new = await asyncio.to_thread(self._forest.apply_delta, spans, position)
            self.num_unpublished += num_new
            for follower in self._followers:
                if position_order(position) > position_order(follower.position):
                    follower.put(Delta(tuple(spans), position))
            return num_new

    async def merge_unstored(self, spans: Sequence[AcceptedSpan]) -> int:
        """The same for spans that are not in the stream yet: nobody's position moves."""
        async with self._lock:
            num_new = await asyncio.to_thread(self._forest.learn, spans)
            self.num_unpublished += num_new
            if num_new:
                for follower in self._followers:
                    follower.put(Delta(tuple(spans), follower.position))
            return num_new

    async def replace(self, snapshot: PublishedSnapshot) -> None:
        """Raises ValueError when the payload is damaged; the forest then stays as it was."""
        async with self._lock:
            await asyncio.to_thread(self._forest.apply_snapshot, snapshot.payload, snapshot.position)
            self.version = snapshot.version
            self.num_unpublished = 0
            for follower in self._followers:
                if position_order(snapshot.position) > position_order(follower.position):
                    follower.put(snapshot)

    async def start_at(self, position: str) -> None:
        """Where reading the stream begins when there was no snapshot."""
        async with self._lock:
            await asyncio.to_thread(self._forest.apply_delta, (), position)

    async def snapshot(self, version: str) -> PublishedSnapshot:
        """The forest as it is now, as bytes."""
        return await asyncio.to_thread(self._snapshot, version)

    async def follow(self, have_position: str, history: History) -> Follower:
        """A new follower; end it with `unfollow`. A snapshot goes out only if it is newer than what the
        pod has; unstored spans in it may reach the pod again from the stream and then count twice there.
        """
        async with self._lock:
            ours = self.position
            follower = Follower(have_position)
            if not have_position or position_order(have_position) < position_order(ours):
                entries = await history(have_position, ours) if have_position else None
                if entries is None:
                    follower.put(await self.snapshot(version=""))
                else:
                    for entry in entries:
                        follower.put(Delta(entry.spans or (), entry.position))
            self._followers.add(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        self._followers.discard(follower)

    def close_followers(self) -> None:
        """Ends every pod's stream; the service is stopping."""
        for follower in self._followers:
            follower.close()

    def _snapshot(self, version: str) -> PublishedSnapshot:
        payload, position = self._forest.snapshot()
        return PublishedSnapshot(payload, version, position)
