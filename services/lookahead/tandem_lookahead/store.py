"""What lies in Redis, and the only module that talks to it.

Per namespace, in one hash slot so that transactions work on a cluster too:

    tandem:lookahead:1:{NS}:stream          entries {s: SpanBatch}, the truth, about `stream_length` long
    tandem:lookahead:1:{NS}:snapshot        hash {version, position, chunks}: the latest one
    tandem:lookahead:1:{NS}:snapshot:VER:I  chunk I of its payload; superseded versions expire
    tandem:lookahead:1:{NS}:compactor       lease of the replica that publishes
    tandem:lookahead:1:namespaces           set of all NS

Every failure of Redis leaves here as StoreUnavailableError; the hub goes on without and tries again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from tandem_engine.drafts.spans import AcceptedSpan

from tandem_lookahead.codec import PublishedSnapshot, pack_spans, unpack_spans

_PREFIX = "tandem:lookahead:1:"
_CHUNK_BYTES = 4 << 20
#: How long a reader that has just looked up the old version can still fetch it.
_OLD_SNAPSHOT_S = 60
#: A dead Redis host is noticed in this time.
_SOCKET_TIMEOUT_S = 2.0

#: Position before every entry.
START = "0-0"


class StoreUnavailableError(Exception):
    """Redis does not answer, or answers with an error."""


@dataclass(frozen=True)
class Entry:
    """One entry of a namespace's stream; spans is None when the entry is damaged."""

    namespace_key: str
    position: str
    spans: tuple[AcceptedSpan, ...] | None


def position_order(position: str) -> tuple[int, int]:
    """Sort key of a stream position; "" and anything unreadable come before all others."""
    milliseconds, _, sequence = position.partition("-")
    try:
        return int(milliseconds), int(sequence or 0)
    except ValueError:
        return (-1, 0)


class RedisStore:
    """The service's view of Redis at a URL. Belongs to one event loop."""

    def __init__(self, url: str, *, stream_length: int) -> None:
        self._stream_length = stream_length
        # Untyped: the library's answers are unions over protocol and decoding, both of which are fixed here.
        self._redis: Any = redis.Redis.from_url(
            url,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            socket_timeout=_SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # the hub retries, and meanwhile goes on without
            protocol=2,
        )

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def ping(self) -> None:
        with _failures():
            await self._redis.ping()

    async def namespaces(self) -> list[str]:
        """Keys of all namespaces that were ever written."""
        with _failures():
            return sorted(key.decode() for key in await self._redis.smembers(_PREFIX + "namespaces"))

    async def append(self, batches: Mapping[str, Sequence[AcceptedSpan]]) -> None:
        """One stream entry per namespace, in one round trip."""
        with _failures():
            async with self._redis.pipeline(transaction=False) as pipe:
                for namespace_key, spans in batches.items():
                    pipe.sadd(_PREFIX + "namespaces", namespace_key)
                    pipe.xadd(
                        _key(namespace_key, "stream"),
                        {"s": pack_spans(spans)},
                        maxlen=self._stream_length,
                        approximate=True,
                    )
                await pipe.execute()

    async def read(self, positions: Mapping[str, str], *, block_ms: int, limit: int) -> list[Entry]:
        """Entries after each namespace's position, at most `limit` each; waits for one up to `block_ms`."""
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

    async def read_between(
        self, namespace_key: str, after: str, until: str, limit: int
    ) -> list[Entry] | None:
        """Entries in (after, until]; None when some are no longer there, or more than `limit`."""
        stream = _key(namespace_key, "stream")
        if await self.has_gap_after(namespace_key, after):
            return None
        with _failures():
            answer = await self._redis.xrange(stream, f"({after}", until, count=limit + 1)
        if len(answer) > limit:
            return None
        return [_entry(namespace_key, position, fields) for position, fields in answer]

    async def has_gap_after(self, namespace_key: str, position: str) -> bool:
        """Whether entries after the position may have been trimmed away."""
        with _failures():
            if not await self._redis.exists(_key(namespace_key, "stream")):
                return position_order(position) > position_order(START)
            info = await self._redis.xinfo_stream(_key(namespace_key, "stream"))
        if info["entries-added"] == info["length"]:
            return False
        first = info["first-entry"]
        return first is None or position_order(first[0].decode()) > position_order(position)

    async def take_lease(self, namespace_key: str, owner: str, *, lasting_ms: int) -> bool:
        """Whether this owner may publish the namespace's next snapshot."""
        with _failures():
            return bool(
                await self._redis.set(_key(namespace_key, "compactor"), owner, nx=True, px=lasting_ms)
            )

    async def publish(self, namespace_key: str, snapshot: PublishedSnapshot) -> None:
        """Makes the snapshot the latest, in one transaction."""
        chunks = [
            snapshot.payload[i : i + _CHUNK_BYTES] for i in range(0, len(snapshot.payload), _CHUNK_BYTES)
        ]
        pointer = _key(namespace_key, "snapshot")
        with _failures():
            old_version, old_chunks = await self._redis.hmget(pointer, "version", "chunks")
            old_keys = _chunk_keys(pointer, old_version, old_chunks)
            new_keys = [f"{pointer}:{snapshot.version}:{index}" for index in range(len(chunks))]
            fields = {
                "version": snapshot.version,
                "position": snapshot.position,
                "chunks": str(len(chunks)),
            }
            async with self._redis.pipeline(transaction=True) as pipe:
                for key, chunk in zip(new_keys, chunks, strict=True):
                    pipe.set(key, chunk)
                pipe.hset(pointer, mapping=fields)
                for key in old_keys:
                    pipe.expire(key, _OLD_SNAPSHOT_S)
                await pipe.execute()

    async def latest_snapshot(self, namespace_key: str) -> PublishedSnapshot | None:
        """The latest snapshot, its payload unchecked; None when there is none or it is not all there."""
        pointer = _key(namespace_key, "snapshot")
        with _failures():
            version, position, num_chunks = await self._redis.hmget(pointer, "version", "position", "chunks")
            keys = _chunk_keys(pointer, version, num_chunks)
            if not keys or position is None:
                return None
            chunks = await self._redis.mget(keys)
        if any(chunk is None for chunk in chunks):
            return None
        return PublishedSnapshot(b"".join(chunks), version.decode(), position.decode())


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise StoreUnavailableError(f"{type(error).__name__}: {error}") from error


def _key(namespace_key: str, what: str) -> str:
    return f"{_PREFIX}{{{namespace_key}}}:{what}"


def _chunk_keys(pointer: str, version: bytes | None, num_chunks: bytes | None) -> list[str]:
    if version is None or num_chunks is None or not num_chunks.isdigit():
        return []
    return [f"{pointer}:{version.decode()}:{index}" for index in range(int(num_chunks))]


def _entry(namespace_key: str, position: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    try:
        spans = unpack_spans(fields[b"s"])
    except (KeyError, ValueError):
        spans = None
    return Entry(namespace_key, position.decode(), spans)
