"""The data in Redis; the only module that calls Redis.

Per namespace, in one hash slot:

    tandem:lookahead:2:{NS}:stream      latest text, about `stream_length` entries of one field each:
                                          s  spans that pods accepted        w  imported text
                                          p  the generation that starts here; earlier text was purged
    tandem:lookahead:2:{NS}:generation  of the text; writes of another generation are refused
    tandem:lookahead:2:{NS}:snapshot    hash {version, generation, ms, seq, chunks, 0, 1, ...}: all text
    tandem:lookahead:2:{NS}:upload:WHO  a snapshot that a replica is writing; expires if it is not finished
    tandem:lookahead:2:{NS}:compactor   lease of the replica that may publish

and tandem:lookahead:2:namespaces, the set of all NS. Every key of a namespace expires; use of the namespace
postpones it. Scripts do what must be atomic (scripts.py).

Every failure of Redis leaves this module as StoreUnavailableError; the hub continues without Redis and
retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from google.protobuf.message import DecodeError
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from tandem_drafting.lookahead_protocol import spans_from_proto, spans_to_proto
from tandem_drafting.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_service.redis_client import NO_ANSWER, RedisAddress, connect, is_cluster
from tandem_service.tasks import end_tasks

from tandem_lookahead import scripts

_PREFIX = "tandem:lookahead:2:"
_CHUNK_BYTES = 4 << 20
#: A stream is trimmed when this share of its limit has been appended since.
_TRIM_SHARE = 1 / 8
#: Streams of at most this size do not fill Redis.
_SMALL_STREAM_BYTES = 64 << 10
#: Limit of an upload.
_UPLOAD_S = 60


class StoreUnavailableError(Exception):
    """Redis does not answer, or answers with an error."""


class StoreFullError(StoreUnavailableError):
    """Redis is at its maxmemory; `shrink` makes room."""


class WrongGenerationError(Exception):
    """The namespace's text was purged after the text to write was prepared."""


class EntryId(NamedTuple):
    """Id of a stream entry. Ids grow along a stream."""

    ms: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.sequence}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """NOWHERE for text that is no id."""
        ms, _, sequence = text.partition("-")
        try:
            return cls(int(ms), int(sequence))
        except ValueError:
            return cls(*NOWHERE)


#: Before every entry: no entry was read, not even from the beginning.
NOWHERE = EntryId(-1, 0)
#: XREAD from here reads the whole stream.
START = EntryId(0, 0)


class EntryKind(enum.Enum):
    SPANS = b"s"
    IMPORT = b"w"
    PURGE = b"p"
    #: Unreadable.
    DAMAGED = b""


@dataclass(frozen=True)
class Entry:
    """One entry of a namespace's stream."""

    namespace_key: str
    id: EntryId
    kind: EntryKind
    spans: tuple[AcceptedSpan, ...] = ()
    #: Starts with a purge.
    generation: str = ""


@dataclass(frozen=True)
class StoredSnapshot:
    """A namespace's whole corpus as bytes, and the last stream entry that it includes."""

    payload: bytes
    version: str
    entry: EntryId
    generation: str


class RedisStore:
    """Access to the service's data in Redis. Belongs to one event loop."""

    def __init__(
        self,
        address: RedisAddress,
        *,
        stream_length: int,
        stream_bytes: int,
        ttl_s: float,
        chunk_bytes: int = _CHUNK_BYTES,
        upload_s: int = _UPLOAD_S,
    ) -> None:
        self._address = address
        self._stream_length = stream_length
        self._stream_bytes = stream_bytes
        self._ttl_s = max(1, round(ttl_s))
        #: By namespace: bytes appended here since its stream was last trimmed.
        self._appended: Counter[str] = Counter()
        self._chunk_bytes = chunk_bytes
        self._upload_s = upload_s
        #: Untyped, because the library's types are unions over protocols and decodings, which are fixed here.
        self._client: Any = None
        #: A cluster's streams lie in different slots and are read one by one.
        self._reads: dict[str, asyncio.Task[list[Entry]]] = {}

    @property
    def is_cluster(self) -> bool:
        return is_cluster(self._client)

    async def close(self) -> None:
        await self._end_reads()
        if self._client is not None:
            with contextlib.suppress(RedisError, OSError):
                await self._client.aclose()

    async def ping(self) -> None:
        """Connects first if there is no connection."""
        with _failures():
            if self._client is None:
                self._client = await connect(self._address)
            await self._client.ping()

    async def namespaces(self) -> list[str]:
        """Keys of the namespaces that Redis holds, and of some that have expired."""
        with _failures():
            return sorted(key.decode() for key in await self._redis.smembers(_PREFIX + "namespaces"))

    async def forget_expired(self) -> None:
        """Removes expired namespaces from the set and from Redis' file, and lets those of an earlier version
        expire."""
        num_expired = 0
        for key in await self.namespaces():
            with _failures():
                left_s = await self._redis.ttl(_key(key, "generation"))
                if left_s == -2:
                    num_expired += await self._redis.srem(_PREFIX + "namespaces", key)
            if left_s == -1:
                await self.renew(key)
        if num_expired:
            await self.forget_deleted()

    async def renew(self, namespace_key: str) -> None:
        """Postpones the namespace's expiry."""
        names = ("stream", "generation", "snapshot")
        with _failures():
            await self._redis.eval(
                scripts.RENEW, len(names), *(_key(namespace_key, name) for name in names), self._ttl_s
            )

    async def shrink(self) -> None:
        """Halves all streams but small ones. Entries that no snapshot includes may be lost."""
        for key in await self.namespaces():
            await self._trim(key, _SMALL_STREAM_BYTES, most=0.5)

    async def generation(self, namespace_key: str, *, ours: str) -> str:
        """The generation of a namespace's text; sets ours if there is none."""
        with _failures():
            await self._redis.set(_key(namespace_key, "generation"), ours, nx=True, ex=self._ttl_s)
            found = await self._redis.get(_key(namespace_key, "generation"))
        return found.decode() if found is not None else ours

    async def append(
        self, namespace_key: str, generation: str, kind: EntryKind, spans: Sequence[AcceptedSpan]
    ) -> None:
        """One stream entry. Raises WrongGenerationError, with nothing written, after a purge."""
        payload = pb.SpanBatch(spans=spans_to_proto(spans)).SerializeToString()
        with _failures():
            await self._redis.sadd(_PREFIX + "namespaces", namespace_key)
            position = await self._redis.eval(
                scripts.APPEND,
                2,
                _key(namespace_key, "stream"),
                _key(namespace_key, "generation"),
                generation,
                self._stream_length,
                self._ttl_s,
                kind.value,
                payload,
            )
        if position is None:
            raise WrongGenerationError(namespace_key)
        self._appended[namespace_key] += len(payload)
        if self._appended[namespace_key] > _TRIM_SHARE * self._stream_bytes:
            del self._appended[namespace_key]
            await self._trim(namespace_key, self._stream_bytes, most=1.0)

    async def _trim(self, namespace_key: str, num_bytes: int, *, most: float) -> None:
        with _failures():
            await self._redis.eval(scripts.TRIM, 1, _key(namespace_key, "stream"), num_bytes, most)

    async def purge(self, namespace_key: str, generation: str) -> None:
        """Removes everything of a namespace, and starts a generation in its stream."""
        names = ("stream", "generation", "snapshot", "compactor")
        with _failures():
            await self._redis.sadd(_PREFIX + "namespaces", namespace_key)
            keys = (_key(namespace_key, name) for name in names)
            await self._redis.eval(scripts.PURGE, len(names), *keys, generation, self._ttl_s)

    async def forget_deleted(self) -> None:
        """Asks Redis to rewrite its append-only file without what was deleted."""
        # Not every server has such a file or permits the command.
        with contextlib.suppress(RedisError):
            await self._redis.bgrewriteaof()

    async def read(self, after: Mapping[str, EntryId], *, block_ms: int, limit: int) -> list[Entry]:
        """Entries after each namespace's last one, at most `limit` each; waits for one up to `block_ms`."""
        if not self.is_cluster:
            return await self._read(after, block_ms=block_ms, limit=limit)
        for key in after.keys() - self._reads.keys():
            one = {key: after[key]}
            self._reads[key] = asyncio.create_task(self._read(one, block_ms=block_ms, limit=limit))
        done, _ = await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
        finished = [key for key, task in self._reads.items() if task in done]
        return [entry for key in finished for entry in self._reads.pop(key).result()]

    async def _read(self, after: Mapping[str, EntryId], *, block_ms: int, limit: int) -> list[Entry]:
        by_stream = {_key(key, "stream").encode(): key for key in after}
        with _failures():
            answer = await self._redis.xread(
                {stream: str(after[key]) for stream, key in by_stream.items()}, count=limit, block=block_ms
            )
        return [
            _entry(by_stream[stream], EntryId.parse(entry_id.decode()), fields)
            for stream, entries in answer or ()
            for entry_id, fields in entries
        ]

    async def begin_reading(self) -> None:
        """Forgets reads of an earlier connection."""
        await self._end_reads()

    async def bounds(self, namespace_key: str) -> tuple[EntryId, EntryId] | None:
        """Ids of the stream's first entry and of the last one ever written; None: there is no stream."""
        stream = _key(namespace_key, "stream")
        with _failures():
            if not await self._redis.exists(stream):
                return None
            info = await self._redis.xinfo_stream(stream)
        first = info["first-entry"]
        last = EntryId.parse(info["last-generated-id"].decode())
        return (EntryId.parse(first[0].decode()) if first is not None else last), last

    async def take_lease(self, namespace_key: str, owner: str, *, lasting_ms: int) -> bool:
        """Takes the lease of a namespace for this time; returns whether the owner has it."""
        with _failures():
            return bool(
                await self._redis.eval(
                    scripts.TAKE_LEASE, 1, _key(namespace_key, "compactor"), owner, lasting_ms
                )
            )

    async def publish(self, namespace_key: str, snapshot: StoredSnapshot, owner: str) -> str:
        """Makes the snapshot the latest, atomically. Returns "ok" or the cause of a refusal: another owner
        has the "lease", the text was "purged", the present one is "newer", or the upload was "late".
        """
        payload, upload = snapshot.payload, _key(namespace_key, f"upload:{owner}")
        size = self._chunk_bytes
        chunks = [payload[at : at + size] for at in range(0, len(payload), size)] or [b""]
        ms, seq = snapshot.entry
        with _failures():
            fields = {"version": snapshot.version, "generation": snapshot.generation}
            fields |= {"ms": str(ms), "seq": str(seq), "chunks": str(len(chunks))}
            flat = [part for field in fields.items() for part in field]
            await self._redis.eval(scripts.BEGIN_UPLOAD, 1, upload, self._upload_s, *flat)
            for index, chunk in enumerate(chunks):
                if not await self._redis.eval(scripts.ADD_CHUNK, 1, upload, str(index), chunk):
                    return "late"
            names = ("snapshot", "compactor", "generation")
            outcome: bytes = await self._redis.eval(
                scripts.PUBLISH,
                4,
                upload,
                *(_key(namespace_key, name) for name in names),
                *(owner, snapshot.generation, ms, seq, self._ttl_s),
            )
        return outcome.decode()

    async def latest_snapshot(self, namespace_key: str) -> StoredSnapshot | None:
        """The latest snapshot, its payload unchecked; None: there is none. Raises ValueError for a damaged
        one."""
        name = _key(namespace_key, "snapshot")
        names = ("version", "generation", "ms", "seq", "chunks")
        with _failures():
            try:
                if not await self._redis.exists(name):
                    return None
                version, generation, ms, seq, num_chunks = await self._redis.hmget(name, names)
                if None in (version, generation, ms, seq, num_chunks):
                    raise ValueError("a field of the snapshot is missing")
                chunks = []
                for index in range(int(num_chunks)):
                    now, chunk = await self._redis.hmget(name, ("version", str(index)))
                    if now != version:  # another replica replaced it
                        return await self.latest_snapshot(namespace_key)
                    if chunk is None:
                        raise ValueError(f"chunk {index} of the snapshot is missing")
                    chunks.append(chunk)
            except ResponseError as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
                raise ValueError("the snapshot is no hash") from error
        entry = EntryId(int(ms), int(seq))
        return StoredSnapshot(b"".join(chunks), version.decode(), entry, generation.decode())

    async def has_snapshot(self, namespace_key: str) -> bool:
        with _failures():
            return bool(await self._redis.exists(_key(namespace_key, "snapshot")))

    async def drop_snapshot(self, namespace_key: str) -> None:
        with _failures():
            await self._redis.delete(_key(namespace_key, "snapshot"))

    @property
    def _redis(self) -> Any:
        if self._client is None:
            raise OSError("not connected yet")
        return self._client

    async def _end_reads(self) -> None:
        reads = list(self._reads.values())
        self._reads.clear()
        await end_tasks(reads)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except NO_ANSWER as error:
        # Redis 6 reports the refusal of a script's command as the script's error.
        if isinstance(error, OutOfMemoryError) or "-OOM" in str(error):
            raise StoreFullError(f"Redis is at its maxmemory: {error}") from error
        raise StoreUnavailableError(f"{type(error).__name__}: {error}") from error


def _key(namespace_key: str, what: str) -> str:
    return f"{_PREFIX}{{{namespace_key}}}:{what}"


def _entry(namespace_key: str, entry_id: EntryId, fields: Mapping[bytes, bytes]) -> Entry:
    try:
        ((name, payload),) = fields.items()
        kind = EntryKind(name)
        if kind is EntryKind.PURGE:
            return Entry(namespace_key, entry_id, kind, generation=payload.decode())
        return Entry(namespace_key, entry_id, kind, spans_from_proto(pb.SpanBatch.FromString(payload).spans))
    except (ValueError, DecodeError):
        return Entry(namespace_key, entry_id, EntryKind.DAMAGED)
