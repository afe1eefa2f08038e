"""One namespace in the service: its text, and the pods that follow what of it is shared.

    generation ""      Redis has not been heard of; pods keep what they have, and get what is shared here
    begin              Redis' generation is known: every pod is brought there
    merge              entries of the stream enter the text; what is shared now goes to every follower
    restore            a published snapshot takes the text's place
    forget             the text was purged: another generation begins, with nothing, for every follower too
    follow             a pod joins: first what its mirror lacks, then every later update, with no gap between

All of them hold one lock, so that a follower's first update and the next fit together. What was shared last
is kept, so that a pod that returns gets only what it missed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tandem_drafting.spans import AcceptedSpan

from tandem_lookahead import text_bytes
from tandem_lookahead.codec import (
    Delta,
    Hello,
    Namespace,
    Place,
    SharedText,
    Snapshot,
    Tables,
    TablesUpdate,
    Welcome,
)
from tandem_lookahead.follower import Follower
from tandem_lookahead.store import START, Entry, EntryKind, StoredSnapshot, position_order
from tandem_lookahead.text import NamespaceText, TextPolicy

#: Deltas kept for pods that return, and tokens in them.
_MAX_LOGGED = 4096
_MAX_LOGGED_TOKENS = 500_000
#: A delta that has this many tokens gets no more.
_MAX_DELTA_TOKENS = 20_000


@dataclass(frozen=True)
class _Logged:
    """What was shared at a position; unstored: while Redis was away, so that the position stayed."""

    delta: Delta
    is_unstored: bool

    @property
    def num_tokens(self) -> int:
        return _num_tokens(self.delta.spans)


class NamespaceForest:
    """See the module. Belongs to one event loop; heavy work runs in a thread."""

    def __init__(self, namespace: Namespace, policy: TextPolicy, *, wants_prompts: bool) -> None:
        self.namespace = namespace
        self.key = namespace.key
        self.wants_prompts = wants_prompts
        #: Of Redis' text; "": not known.
        self.generation = ""
        #: Stream position merged up to; "" before the first.
        self.position = ""
        self._policy = policy
        self._text = NamespaceText(policy)
        self._lock = asyncio.Lock()
        self._followers: set[Follower] = set()
        self._log: deque[_Logged] = deque()
        self._logged_tokens = 0
        #: Behind this position the log is whole.
        self._log_begin = (-1, 0)
        #: As it was encoded for a pod last; good as long as the log goes on from there.
        self._encoded: SharedText | None = None
        #: Learnt tables by format.
        self.tables: dict[str, Tables] = {}
        #: Set while the forest holds what Redis holds.
        self.synced = asyncio.Event()
        #: When a snapshot was published or loaded last, and the tokens and stream entries merged since.
        self.compacted_at: float | None = None
        self.num_unpublished = 0
        self.num_unpublished_entries = 0
        #: Tokens merged by this replica.
        self.num_merged = 0

    @property
    def text(self) -> NamespaceText:
        """To look at, not to write to."""
        return self._text

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    def limit(self, max_bytes: int) -> None:
        """At most this much text is held from the next merge on."""
        self._text.max_bytes = min(max_bytes, self._policy.max_bytes)

    async def begin(self, generation: str) -> None:
        """Redis' generation: text of another one is forgotten, unless there was none yet."""
        async with self._lock:
            if self.generation not in ("", generation):
                self._forget()
            self.generation = generation

    async def follow_on(self) -> None:
        """Brings the followers to where the forest is, now that it holds what Redis holds."""
        async with self._lock:
            self.position = self.position or START
            for follower in self._followers:
                await self._catch_up(follower)

    async def merge(self, entries: Sequence[Entry]) -> int:
        """Takes stream entries, in order; returns how many tokens were new."""
        num_merged = 0
        async with self._lock:
            for is_purge, group in groupby(entries, lambda entry: entry.kind is EntryKind.PURGE):
                if not is_purge:
                    batch = list(group)
                    num_new, deltas = await asyncio.to_thread(self._add, batch)
                    num_merged += num_new
                    self._count(num_new)
                    self.num_unpublished_entries += len(batch)
                    for delta in deltas:
                        self._send(delta, is_unstored=False)
                    continue
                for entry in group:
                    await self._purge(entry)
        return num_merged

    async def merge_unstored(self, spans: Sequence[AcceptedSpan]) -> int:
        """The same for spans that are not in the stream yet: nobody's position moves."""
        async with self._lock:
            num_new, shared = await asyncio.to_thread(self._text.add, spans, time.time())
            self._count(num_new)
            if shared:
                self._send(Delta(tuple(shared), self._place), is_unstored=True)
            return num_new

    async def restore(self, snapshot: StoredSnapshot) -> None:
        """Raises ValueError when the payload is damaged; the forest then stays as it was."""
        async with self._lock:
            self._text = await asyncio.to_thread(text_bytes.from_bytes, snapshot.payload, self._policy)
            self.position = snapshot.position
            self.compacted_at = time.monotonic()
            self.num_unpublished = self.num_unpublished_entries = 0
            self._clear_log()

    async def snapshot(self, version: str) -> StoredSnapshot:
        """The whole text as it is now, for Redis."""
        async with self._lock:
            payload = await asyncio.to_thread(text_bytes.to_bytes, self._text)
            return StoredSnapshot(payload, version, self.position, self.generation)

    async def shared(self) -> SharedText:
        """What of it is shared, as it is now."""
        async with self._lock:
            return await self._encode()

    async def follow(self, hello: Hello) -> Follower:
        """A new follower; end it with `unfollow`."""
        async with self._lock:
            follower = Follower(hello)
            follower.put(Welcome(self.wants_prompts))
            await self._catch_up(follower)
            tables = self.tables.get(hello.tables_format)
            if tables is not None:
                follower.put(TablesUpdate(tables))
            self._followers.add(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        self._followers.discard(follower)

    def close_followers(self) -> None:
        """Ends every pod's stream; the service is stopping."""
        for follower in self._followers:
            follower.close()

    @property
    def _place(self) -> Place:
        """Another threshold is another text for the pods, as another generation is."""
        if not self.generation:
            return Place()
        return Place(f"{self.generation}.{self._policy.promotion_requests}", self.position)

    def _add(self, entries: Sequence[Entry]) -> tuple[int, list[Delta]]:
        """How many tokens of the entries were new, and what is to be sent of them; moves the position."""
        num_merged, deltas = 0, []
        waiting: list[AcceptedSpan] = []
        for entry in entries:
            add = self._text.add_shared if entry.kind is EntryKind.SHARED else self._text.add
            num_new, shared = add(entry.spans, position_order(entry.position)[0] / 1000)
            num_merged += num_new
            self.position = entry.position
            waiting += shared
            if waiting and (entry is entries[-1] or _num_tokens(waiting) > _MAX_DELTA_TOKENS):
                deltas.append(Delta(tuple(waiting), self._place))
                waiting = []
        return num_merged, deltas

    async def _purge(self, entry: Entry) -> None:
        self.position = entry.position
        if entry.generation == self.generation:
            return  # it began before we came
        self._forget()
        self.generation = entry.generation
        for follower in self._followers:
            await self._catch_up(follower)

    def _count(self, num_new: int) -> None:
        self.num_unpublished += num_new
        self.num_merged += num_new

    def _forget(self) -> None:
        self._text = NamespaceText(self._policy)
        self._clear_log()
        self.tables.clear()
        self.num_unpublished = self.num_unpublished_entries = 0

    def _clear_log(self) -> None:
        self._log.clear()
        self._logged_tokens = 0
        self._log_begin = position_order(self.position)
        self._encoded = None

    def _send(self, delta: Delta, *, is_unstored: bool) -> None:
        """To every follower that is not past it, and into the log."""
        logged = _Logged(delta, is_unstored)
        self._log.append(logged)
        self._logged_tokens += logged.num_tokens
        while len(self._log) > _MAX_LOGGED or self._logged_tokens > _MAX_LOGGED_TOKENS:
            gone = self._log.popleft()
            self._logged_tokens -= gone.num_tokens
            at = position_order(gone.delta.place.position)
            # Of what was shared at one position, some may have gone and the rest not.
            self._log_begin = (at[0], at[1] + 1) if gone.is_unstored else at
        if self._encoded is not None and position_order(self._encoded.place.position) < self._log_begin:
            self._encoded = None
        for follower in self._followers:
            self._send_to(follower, logged)

    def _send_to(self, follower: Follower, logged: _Logged) -> None:
        place, delta = follower.place, logged.delta
        if delta.place.generation != place.generation:
            # Not brought here yet: without Redis nobody is.
            if not self.generation:
                follower.put(Delta(delta.spans, place))
            return
        ours, theirs = position_order(delta.place.position), position_order(place.position)
        if ours > theirs:
            follower.put(delta)
        elif logged.is_unstored:
            follower.put(Delta(delta.spans, place))

    async def _catch_up(self, follower: Follower) -> None:
        """Puts what the follower lacks: what the log has behind its place, else everything."""
        place = follower.place
        if not self.generation:
            shared = [
                AcceptedSpan(run.name, run.offset, tuple(run.tokens)) for run in self._text.shared().runs()
            ]
            if shared:
                follower.put(Delta(tuple(shared), place))
            return
        begin = position_order(place.position)
        if place.generation != self._place.generation or begin < self._log_begin:
            text = self._encoded or await self._encode()
            hello = follower.hello
            first = hello.snapshot_chunks if hello.snapshot_version == text.version else 0
            is_purge = place.generation not in ("", self._place.generation)
            follower.put(Snapshot(text, min(first, text.num_chunks - 1), is_purge))
            begin = position_order(text.place.position)
        for logged in self._log:
            at = position_order(logged.delta.place.position)
            if at > begin or (at == begin and logged.is_unstored):
                self._send_to(follower, logged)

    async def _encode(self) -> SharedText:
        payload = await asyncio.to_thread(lambda: self._text.shared().to_bytes())
        encoded = SharedText(payload, self._place)
        if self.generation:
            self._encoded = encoded
        return encoded


def _num_tokens(spans: Sequence[AcceptedSpan]) -> int:
    return sum(len(span.token_ids) for span in spans)
