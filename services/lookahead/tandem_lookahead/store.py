"""What lies in Redis, and the only module that talks to it.

Per namespace, in one hash slot:

    tandem:lookahead:2:{NS}:stream      the truth, about `stream_length` entries of one field each:
                                          s  spans that pods accepted        w  shared text, imported
                                          p  the generation that begins here: what came before was purged
    tandem:lookahead:2:{NS}:generation  of the text; every write is refused that comes from another one
    tandem:lookahead:2:{NS}:snapshot    hash {version, generation, ms, seq, chunks, 0, 1, ...}: all text
    tandem:lookahead:2:{NS}:upload:WHO  a snapshot being written by a replica; expires if it is not finished
    tandem:lookahead:2:{NS}:compactor   lease of the replica that may publish
    tandem:lookahead:2:{NS}:tables      hash {n:FORMAT, p:FORMAT}: learnt tables with the most observations

and tandem:lookahead:2:namespaces, the set of all NS. What must not be half done is done by scripts
(scripts.py).

Every failure of Redis leaves here as StoreUnavailableError; the hub goes on without and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError
from tandem_drafting.spans import AcceptedSpan

from tandem_lookahead import scripts
from tandem_lookahead.codec import Tables, pack_spans, unpack_spans
from tandem_lookahead.connection import RedisAddress, connect, is_cluster
from tandem_lookahead.tasks import end_tasks

_PREFIX = "tandem:lookahead:2:"
_CHUNK_BYTES = 4 << 20
#: An upload that takes longer is given up.
_UPLOAD_S = 60

#: Position before every entry.
START = "0-0"


class StoreUnavailableError(Exception):
    """Redis does not answer, or answers with an error."""


class WrongGenerationError(Exception):
    """The namespace's text was purged meanwhile; what was to be written is of the time before."""


class EntryKind(enum.Enum):
    SPANS = b"s"
    SHARED = b"w"
    PURGE = b"p"
    #: Unreadable.
    DAMAGED = b""


@dataclass(frozen=True)
class Entry:
    """One entry of a namespace's stream."""

    namespace_key: str
    position: str
    kind: EntryKind
    spans: tuple[AcceptedSpan, ...] = ()
    #: That begins with a purge.
    generation: str = ""


@dataclass(frozen=True)
class StoredSnapshot:
    """A namespace's whole text as bytes (text_bytes.py), and the stream position it includes."""

    payload: bytes
    version: str
    position: str
    generation: str


def position_order(position: str) -> tuple[int, int]:
    """Sort key of a stream position; "" and anything unreadable come before all others."""
    milliseconds, _, sequence = position.partition("-")
    try:
        return int(milliseconds), int(sequence or 0)
    except ValueError:
        return (-1, 0)


class RedisStore:
    """The service's view of Redis. Belongs to one event loop."""

    def __init__(self, address: RedisAddress, *, stream_length: int) -> None:
        self._address = address
        self._stream_length = stream_length
        #: Untyped: the library's answers are unions over protocol and decoding, both of which are fixed here.
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
        """Connects if need be."""
        with _failures():
            if self._client is None:
                self._client = await connect(self._address)
            await self._client.ping()

    async def namespaces(self) -> list[str]:
        """Keys of all namespaces that were ever written."""
        with _failures():
            return sorted(key.decode() for key in await self._redis.smembers(_PREFIX + "namespaces"))

    async def generation(self, namespace_key: str, *, ours: str) -> str:
        """The generation of a namespace's text; ours if none is known."""
        with _failures():
            await self._redis.set(_key(namespace_key, "generation"), ours, nx=True)
            found = await self._redis.get(_key(namespace_key, "generation"))
        return found.decode() if found is not None else ours

    async def append(
        self, namespace_key: str, generation: str, kind: EntryKind, spans: Sequence[AcceptedSpan]
    ) -> None:
        """One stream entry. Raises WrongGenerationError, with nothing written, after a purge."""
        with _failures():
            await self._redis.sadd(_PREFIX + "namespaces", namespace_key)
            position = await self._redis.eval(
                scripts.APPEND,
                2,
                _key(namespace_key, "stream"),
                _key(namespace_key, "generation"),
                generation,
                self._stream_length,
                kind.value,
                pack_spans(spans),
            )
        if position is None:
            raise WrongGenerationError(namespace_key)

    async def purge(self, namespace_key: str, generation: str) -> None:
        """Removes everything of a namespace, and begins a generation in its stream."""
        names = ("stream", "generation", "snapshot", "tables", "compactor")
        with _failures():
            await self._redis.sadd(_PREFIX + "namespaces", namespace_key)
            await self._redis.eval(
                scripts.PURGE, len(names), *(_key(namespace_key, name) for name in names), generation
            )

    async def forget_deleted(self) -> None:
        """Asks Redis to write its append-only file anew, without what was deleted."""
        # Not every server has such a file, nor lets everybody ask.
        with contextlib.suppress(RedisError):
            await self._redis.bgrewriteaof()

    async def read(self, positions: Mapping[str, str], *, block_ms: int, limit: int) -> list[Entry]:
        """Entries after each namespace's position, at most `limit` each; waits for one up to `block_ms`."""
        if not self.is_cluster:
            return await self._read(positions, block_ms=block_ms, limit=limit)
        for key in positions.keys() - self._reads.keys():
            one = {key: positions[key]}
            self._reads[key] = asyncio.create_task(self._read(one, block_ms=block_ms, limit=limit))
        done, _ = await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
        finished = [key for key, task in self._reads.items() if task in done]
        return [entry for key in finished for entry in self._reads.pop(key).result()]

    async def _read(self, positions: Mapping[str, str], *, block_ms: int, limit: int) -> list[Entry]:
        by_stream = {_key(key, "stream").encode(): key for key in positions}
        with _failures():
            answer = await self._redis.xread(
                {stream: positions[key] for stream, key in by_stream.items()}, count=limit, block=block_ms
            )
        return [
            _entry(by_stream[stream], position, fields)
            for stream, entries in answer or ()
            for position, fields in entries
        ]

    async def begin_reading(self) -> None:
        """Forgets reads that an earlier connection has left."""
        await self._end_reads()

    async def bounds(self, namespace_key: str) -> tuple[str, str] | None:
        """Positions of the stream's first entry and of the last one ever; None: there is no stream."""
        stream = _key(namespace_key, "stream")
        with _failures():
            if not await self._redis.exists(stream):
                return None
            info = await self._redis.xinfo_stream(stream)
        first = info["first-entry"]
        last = info["last-generated-id"].decode()
        return (first[0].decode() if first is not None else last), last

    async def take_lease(self, namespace_key: str, owner: str, *, lasting_ms: int) -> bool:
        """Whether this owner, and nobody else, may publish for so long."""
        with _failures():
            return bool(
                await self._redis.eval(
                    scripts.TAKE_LEASE, 1, _key(namespace_key, "compactor"), owner, lasting_ms
                )
            )

    async def publish(self, namespace_key: str, snapshot: StoredSnapshot, owner: str) -> str:
        """Makes the snapshot the latest, in one step. "ok", or why not: the lease has passed to somebody
        else, the text was purged, what is there is newer, or the upload took too long.
        """
        payload, upload = snapshot.payload, _key(namespace_key, f"upload:{owner}")
        chunks = [payload[at : at + _CHUNK_BYTES] for at in range(0, len(payload), _CHUNK_BYTES)] or [b""]
        ms, seq = position_order(snapshot.position)
        with _failures():
            fields = {"version": snapshot.version, "generation": snapshot.generation}
            fields |= {"ms": str(ms), "seq": str(seq), "chunks": str(len(chunks))}
            flat = [part for field in fields.items() for part in field]
            await self._redis.eval(scripts.BEGIN_UPLOAD, 1, upload, _UPLOAD_S, *flat)
            for index, chunk in enumerate(chunks):
                if not await self._redis.eval(scripts.ADD_CHUNK, 1, upload, str(index), chunk):
                    return "late"
            names = ("snapshot", "compactor", "generation")
            outcome: bytes = await self._redis.eval(
                scripts.PUBLISH,
                4,
                upload,
                *(_key(namespace_key, name) for name in names),
                *(owner, snapshot.generation, ms, seq),
            )
        return outcome.decode()

    async def latest_snapshot(self, namespace_key: str) -> StoredSnapshot | None:
        """The latest snapshot, its payload unchecked; None when there is none or it is not all there."""
        name = _key(namespace_key, "snapshot")
        names = ("version", "generation", "ms", "seq", "chunks")
        with _failures():
            version, generation, ms, seq, num_chunks = await self._redis.hmget(name, names)
            if None in (version, generation, ms, seq) or num_chunks is None or not num_chunks.isdigit():
                return None
            chunks = []
            for index in range(int(num_chunks)):
                now, chunk = await self._redis.hmget(name, ("version", str(index)))
                if now != version:  # another one has taken its place
                    return await self.latest_snapshot(namespace_key)
                if chunk is None:
                    return None
                chunks.append(chunk)
        position = f"{ms.decode()}-{seq.decode()}"
        return StoredSnapshot(b"".join(chunks), version.decode(), position, generation.decode())

    async def snapshot_version(self, namespace_key: str) -> str:
        """Of the latest snapshot; empty: there is none."""
        with _failures():
            version = await self._redis.hget(_key(namespace_key, "snapshot"), "version")
        return version.decode() if version is not None else ""

    async def offer_tables(self, namespace_key: str, generation: str, tables: Tables) -> bool:
        """Keeps learnt tables if those there have been taught less; whether it did."""
        with _failures():
            return bool(
                await self._redis.eval(
                    scripts.OFFER_TABLES,
                    2,
                    _key(namespace_key, "tables"),
                    _key(namespace_key, "generation"),
                    generation,
                    tables.format,
                    tables.num_observations,
                    tables.payload,
                )
            )

    async def tables(self, namespace_key: str) -> list[Tables]:
        """The learnt tables kept, one per format."""
        with _failures():
            fields = await self._redis.hgetall(_key(namespace_key, "tables"))
        return [
            Tables(name[2:].decode(), int(count), fields[b"p:" + name[2:]])
            for name, count in fields.items()
            if name.startswith(b"n:") and b"p:" + name[2:] in fields
        ]

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
    except (RedisError, OSError, TimeoutError) as error:
        raise StoreUnavailableError(f"{type(error).__name__}: {error}") from error


def _key(namespace_key: str, what: str) -> str:
    return f"{_PREFIX}{{{namespace_key}}}:{what}"


def _entry(namespace_key: str, position: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    at = position.decode()
    try:
        ((name, payload),) = fields.items()
        kind = EntryKind(name)
        if kind is EntryKind.PURGE:
            return Entry(namespace_key, at, kind, generation=payload.decode())
        return Entry(namespace_key, at, kind, unpack_spans(payload))
    except ValueError:
        return Entry(namespace_key, at, EntryKind.DAMAGED)
