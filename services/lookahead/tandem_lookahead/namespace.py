"""One namespace in the service: its corpus, and the pods that follow its shared text.

    generation ""      Redis has not answered yet; pods keep their text, and get newly shared text
    begin              sets Redis' generation; text of another generation was purged
    merge              adds stream entries to the corpus; sends newly shared text to every follower
    restore            replaces the corpus by a published snapshot
    follow             adds a pod: first it gets what its mirror lacks, then every later delta, without a gap

All of them hold one lock, so that a follower's first message and later ones are consistent. A log keeps the
latest deltas, so that a pod that reconnects gets only those that it missed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from urllib.parse import quote

import xxhash
from tandem_drafting.lookahead_protocol import SNAPSHOT_CHUNK_BYTES, BadMessageError, spans_to_proto
from tandem_drafting.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb

from tandem_lookahead.corpus import CorpusPolicy, NamespaceCorpus
from tandem_lookahead.store import NOWHERE, START, Entry, EntryId, EntryKind, StoredSnapshot

#: Messages, and tokens in them, that may wait for one pod. Beyond, its stream ends, and it resumes from its
#: position.
MAX_WAITING_MESSAGES, MAX_WAITING_TOKENS = 4096, 1_000_000
_MAX_KEY_LENGTH = 512
#: Deltas kept for pods that reconnect, and tokens in them.
_MAX_LOGGED = 4096
_MAX_LOGGED_TOKENS = 500_000
#: A delta with this many tokens gets no further span.
_MAX_DELTA_TOKENS = 20_000


class FollowerLaggingError(Exception):
    """The pod reads too slowly; it should reconnect with its position (RESOURCE_EXHAUSTED)."""


_KEY_FIELDS = ("tenant", "model_revision", "tokenizer_hash", "lora", "template")


def namespace_key(space: pb.Namespace) -> str:
    """One string per namespace. Raises BadMessageError when it is too long."""
    key = "/".join(quote(getattr(space, field), safe="") for field in _KEY_FIELDS)
    if len(key) > _MAX_KEY_LENGTH:
        raise BadMessageError(f"namespace: longer than {_MAX_KEY_LENGTH} characters once quoted")
    return key


@dataclass(frozen=True)
class Position:
    """How far a pod is in the stream of one generation of a namespace's text."""

    generation: str = ""
    entry: EntryId = NOWHERE

    def __str__(self) -> str:
        """What pods keep; opaque to them."""
        return f"{self.generation}/{self.entry}" if self.generation else ""

    @classmethod
    def parse(cls, text: str) -> Position:
        """The beginning, if the text is unreadable."""
        generation, slash, entry = text.partition("/")
        return cls(generation, EntryId.parse(entry)) if slash else cls()


@dataclass(frozen=True)
class _Delta:
    """Newly shared text, and the position after it.

    Unstored text was shared while Redis was away; the position did not move.
    """

    spans: tuple[AcceptedSpan, ...]
    position: Position
    is_unstored: bool

    @property
    def num_tokens(self) -> int:
        return _num_tokens(self.spans)

    @cached_property
    def message(self) -> pb.SyncResponse:
        return _delta_message(self.spans, self.position)


@dataclass(frozen=True)
class _EncodedCorpus:
    """The shared corpus as bytes, and the position it stands for."""

    payload: bytes
    position: Position

    def chunks(self, hello: pb.SyncHello, *, is_purge: bool) -> Iterator[pb.SyncResponse]:
        """The messages that the pod has not received yet; at least one."""
        version = xxhash.xxh3_64_hexdigest(self.payload)
        num_chunks = -(-len(self.payload) // SNAPSHOT_CHUNK_BYTES)
        first = min(hello.snapshot_chunks, num_chunks - 1) if hello.snapshot_version == version else 0
        for index in range(first, num_chunks):
            chunk = self.payload[index * SNAPSHOT_CHUNK_BYTES : (index + 1) * SNAPSHOT_CHUNK_BYTES]
            yield pb.SyncResponse(
                snapshot=pb.SnapshotChunk(
                    version=version,
                    index=index,
                    num_chunks=num_chunks,
                    payload=chunk,
                    position=str(self.position),
                    is_purge=is_purge,
                )
            )


class Follower:
    """Messages for one pod, in order."""

    def __init__(self, hello: pb.SyncHello) -> None:
        self.hello = hello
        #: Where the pod will be after it has read the queued messages.
        self.position = Position.parse(hello.have_position)
        self.is_lagging = False
        #: With the number of tokens, except for snapshots, which are shared by all followers.
        self._waiting: deque[tuple[Iterable[pb.SyncResponse], int]] = deque()
        self._num_tokens = 0
        self._changed = asyncio.Event()
        self._closed = False

    def put(
        self, messages: Iterable[pb.SyncResponse], position: Position | None = None, num_tokens: int = 0
    ) -> None:
        """Never blocks. Closes a follower that is too far behind."""
        if len(self._waiting) >= MAX_WAITING_MESSAGES or self._num_tokens > MAX_WAITING_TOKENS:
            self.is_lagging = True
            self._waiting.clear()
            self.close()
            return
        self.position = position or self.position
        self._waiting.append((messages, num_tokens))
        self._num_tokens += num_tokens
        self._changed.set()

    def put_spans(self, spans: Sequence[AcceptedSpan]) -> None:
        """Text that does not move the pod's position."""
        self.put((_delta_message(spans, self.position),), num_tokens=_num_tokens(spans))

    def close(self) -> None:
        """Ends `messages` after the queued ones."""
        self._closed = True
        self._changed.set()

    async def messages(self) -> AsyncIterator[pb.SyncResponse]:
        """The queued messages, until closed. Raises FollowerLaggingError."""
        while True:
            while self._waiting:
                messages, num_tokens = self._waiting.popleft()
                self._num_tokens -= num_tokens
                for message in messages:
                    yield message
            if self.is_lagging:
                raise FollowerLaggingError(
                    f"over {MAX_WAITING_MESSAGES} messages or {MAX_WAITING_TOKENS} tokens were waiting; "
                    "reconnect with have_position"
                )
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()


class Namespace:
    """See the module. Belongs to one event loop; heavy work runs in a thread."""

    def __init__(self, proto: pb.Namespace, policy: CorpusPolicy, *, wants_prompts: bool) -> None:
        self.proto = proto
        self.key = namespace_key(proto)
        self.wants_prompts = wants_prompts
        #: Generation of the text in Redis; "": unknown.
        self.generation = ""
        #: Last stream entry merged.
        self.entry = NOWHERE
        #: Read-only outside this class.
        self.corpus = NamespaceCorpus(policy)
        #: Set while the corpus holds what Redis holds.
        self.synced = asyncio.Event()
        #: Time of the last published or loaded snapshot, and tokens and entries merged since.
        self.snapshot_at: float | None = None
        self.num_unpublished = 0
        self.num_unpublished_entries = 0
        #: Tokens merged by this replica.
        self.num_merged = 0
        self._policy = policy
        self._lock = asyncio.Lock()
        self._followers: set[Follower] = set()
        #: When a pod last came or left, in monotonic seconds.
        self.last_used = time.monotonic()
        #: When its expiry in Redis was last postponed.
        self.renewed_at = -math.inf
        self._log: deque[_Delta] = deque()
        self._logged_tokens = 0
        #: The log is complete after this entry.
        self._log_begin = NOWHERE
        #: The latest encoding for a pod, as long as the log continues it.
        self._encoded: _EncodedCorpus | None = None

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    def limit(self, max_bytes: int) -> None:
        """Limits the corpus from the next merge on."""
        self.corpus.max_bytes = min(max_bytes, self._policy.max_bytes)

    async def begin(self, generation: str) -> None:
        """Sets Redis' generation. Forgets text of another one."""
        async with self._lock:
            if self.generation not in ("", generation):
                self._forget()
            self.generation = generation

    async def catch_up_followers(self) -> None:
        """Brings the followers to the present position, now that the corpus holds what Redis holds."""
        async with self._lock:
            self.entry = max(self.entry, START)
            for follower in self._followers:
                await self._catch_up(follower)

    async def merge(self, entries: Sequence[Entry]) -> int:
        """Merges stream entries, in order; returns the number of new tokens."""
        num_merged = 0
        async with self._lock:
            for is_purge, group in groupby(entries, lambda entry: entry.kind is EntryKind.PURGE):
                batch = list(group)
                if is_purge:
                    for entry in batch:
                        await self._purge(entry)
                    continue
                num_new, deltas = await asyncio.to_thread(self._add, batch)
                num_merged += self._count(num_new)
                self.num_unpublished_entries += len(batch)
                for delta in deltas:
                    self._send(delta)
        return num_merged

    async def merge_unstored(self, spans: Sequence[AcceptedSpan]) -> int:
        """Merges spans that are not in the stream yet; no position moves. Returns the number of new
        tokens."""
        async with self._lock:
            num_new, shared = await asyncio.to_thread(self.corpus.add, spans, time.time())
            if shared:
                self._send(_Delta(tuple(shared), self._position, is_unstored=True))
            return self._count(num_new)

    async def restore(self, snapshot: StoredSnapshot) -> None:
        """Loads a snapshot. Raises ValueError for a damaged payload, and then keeps the corpus."""
        async with self._lock:
            self.corpus = await asyncio.to_thread(NamespaceCorpus.from_bytes, snapshot.payload, self._policy)
            self.entry = snapshot.entry
            self.snapshot_at = time.monotonic()
            self.num_unpublished = self.num_unpublished_entries = 0
            self._clear_log()

    async def snapshot(self, version: str) -> StoredSnapshot:
        """The whole corpus as it is now, for Redis."""
        async with self._lock:
            payload = await asyncio.to_thread(self.corpus.to_bytes)
            return StoredSnapshot(payload, version, self.entry, self.generation)

    async def export(self) -> bytes:
        """The shared corpus as it is now."""
        async with self._lock:
            return await asyncio.to_thread(lambda: self.corpus.shared().to_bytes(self.proto))

    async def follow(self, hello: pb.SyncHello) -> Follower:
        """A new follower; end it with `unfollow`."""
        async with self._lock:
            follower = Follower(hello)
            follower.put((pb.SyncResponse(welcome=pb.SyncWelcome(wants_prompts=self.wants_prompts)),))
            await self._catch_up(follower)
            self._followers.add(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        self._followers.discard(follower)
        self.last_used = time.monotonic()

    def close_followers(self) -> None:
        """Ends every pod's stream."""
        for follower in self._followers:
            follower.close()

    @property
    def _position(self) -> Position:
        """The position with `min_requests`, because another value gives pods another text."""
        if not self.generation:
            return Position()
        return Position(f"{self.generation}.{self._policy.min_requests}", self.entry)

    def _add(self, entries: Sequence[Entry]) -> tuple[int, list[_Delta]]:
        """The number of new tokens, and the deltas to send. Moves the position."""
        num_merged, deltas = 0, []
        waiting: list[AcceptedSpan] = []
        for entry in entries:
            is_import = entry.kind is EntryKind.IMPORT
            num_new, shared = self.corpus.add(entry.spans, entry.id.ms / 1000, is_import=is_import)
            num_merged += num_new
            self.entry = entry.id
            waiting += shared
            if waiting and (entry is entries[-1] or _num_tokens(waiting) > _MAX_DELTA_TOKENS):
                deltas.append(_Delta(tuple(waiting), self._position, is_unstored=False))
                waiting = []
        return num_merged, deltas

    async def _purge(self, entry: Entry) -> None:
        self.entry = entry.id
        if entry.generation != self.generation:
            self._forget()
            self.generation = entry.generation
            for follower in self._followers:
                await self._catch_up(follower)

    def _count(self, num_new: int) -> int:
        self.num_unpublished += num_new
        self.num_merged += num_new
        return num_new

    def _forget(self) -> None:
        self.corpus = NamespaceCorpus(self._policy)
        self._clear_log()
        self.num_unpublished = self.num_unpublished_entries = 0

    def _clear_log(self) -> None:
        self._log.clear()
        self._logged_tokens = 0
        self._log_begin = self.entry
        self._encoded = None

    def _send(self, delta: _Delta) -> None:
        """Logs a delta, and sends it to every follower that is not past it."""
        self._log.append(delta)
        self._logged_tokens += delta.num_tokens
        while len(self._log) > _MAX_LOGGED or self._logged_tokens > _MAX_LOGGED_TOKENS:
            dropped = self._log.popleft()
            self._logged_tokens -= dropped.num_tokens
            entry = dropped.position.entry
            # The log may still hold other unstored deltas of this position.
            self._log_begin = EntryId(entry.ms, entry.sequence + 1) if dropped.is_unstored else entry
        if self._encoded is not None and self._encoded.position.entry < self._log_begin:
            self._encoded = None
        for follower in self._followers:
            self._send_to(follower, delta)

    def _send_to(self, follower: Follower, delta: _Delta) -> None:
        if delta.position.generation != follower.position.generation:
            # Without Redis no follower has this generation.
            if not self.generation:
                follower.put_spans(delta.spans)
        elif delta.position.entry > follower.position.entry:
            follower.put((delta.message,), delta.position, delta.num_tokens)
        elif delta.is_unstored:
            follower.put_spans(delta.spans)

    async def _catch_up(self, follower: Follower) -> None:
        """Sends what the follower lacks: deltas of the log, or else the shared corpus."""
        position, here = follower.position, self._position
        if not self.generation:
            spans = self.corpus.shared().spans()
            if spans:
                follower.put_spans(spans)
            return
        begin = position.entry
        if position.generation != here.generation or begin < self._log_begin:
            if self._encoded is None:
                payload = await asyncio.to_thread(lambda: self.corpus.shared().to_bytes())
                self._encoded = _EncodedCorpus(payload, here)
            is_purge = position.generation not in ("", here.generation)
            follower.put(self._encoded.chunks(follower.hello, is_purge=is_purge), self._encoded.position)
            begin = self._encoded.position.entry
        for delta in self._log:
            entry = delta.position.entry
            if entry > begin or (entry == begin and delta.is_unstored):
                self._send_to(follower, delta)


def _delta_message(spans: Iterable[AcceptedSpan], position: Position) -> pb.SyncResponse:
    return pb.SyncResponse(delta=pb.Delta(spans=spans_to_proto(spans), position=str(position)))


def _num_tokens(spans: Sequence[AcceptedSpan]) -> int:
    return sum(len(span.token_ids) for span in spans)
