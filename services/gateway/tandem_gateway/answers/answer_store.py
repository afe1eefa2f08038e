"""Answers in Redis, so that another gateway can continue what one gateway has sent.

tandem:answer:MODEL:NAME         hash: `record`, an AnswerRecord, its `id`, and `owner`, the computation that
                                 may append, "" if there is none
tandem:answer:MODEL:NAME:events  list of DecodeResponse messages, in the order in which clients get them
tandem:gateway:ID                exists while the gateway lives: the number of its next owner, and the numbers
                                 of the owners that compute

MODEL names the model and the format of the messages, so gateways of two models, or of two formats, in one
Redis never read each other's answers.

The stored events are always a prefix of the answer, and mostly all of it. Only the owner appends: a gateway
that was paused while another one took over its answer is refused. An owner that its gateway no longer lists
has ended, even if Redis lost the release. Everything expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from google.protobuf.message import DecodeError
from redis.exceptions import NoScriptError, ResponseError
from tandem_core.model.manifest import ModelManifest
from tandem_proto.v1 import answers_pb2, decode_pb2
from tandem_service.redis_client import NO_ANSWER, RedisAddress, connect
from tandem_service.tasks import end_tasks

from tandem_gateway.request import Event

_PREFIX = "tandem:answer:"
_GATEWAY_PREFIX = "tandem:gateway:"
#: Increase it with every field of AnswerRecord that changes an answer: a gateway of an earlier version would
#: ignore the field and continue with another text.
FORMAT = 3
#: A gateway whose lease expires is considered dead.
LEASE_MS = 1000
_HEARTBEAT_S = 0.3
#: Longest wait for Redis, because streams pause meanwhile.
_TIMEOUT_S = 0.5
#: Events per call. An answer of 100,000 would exceed the wait for Redis and an event-loop turn.
PAGE_EVENTS = 500
#: Longest wait for a new connection; no stream waits for it.
_CONNECT_S = 2.0

#: record, events | owner, ms, id, record -> 1, or 0 if the name is taken. A gateway repeats it after a lost
#: reply.
_BEGIN = """
if redis.call('EXISTS', KEYS[1]) == 1 then
  local gateway = string.match(redis.call('HGET', KEYS[1], 'owner') or '', '^[^:]*')
  local is_ours = gateway == string.match(ARGV[1], '^[^:]*')
  if not is_ours or redis.call('HGET', KEYS[1], 'id') ~= ARGV[3] then return 0 end
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'id', ARGV[3], 'record', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('DEL', KEYS[2])
return 1
"""
#: record, events | owner, number of events before, ms, event, ... -> number of events now; fewer than before,
#: with nothing written, if some were lost; -1 if another owns it; -2 if there is none.
_APPEND = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if not owner then return -2 end
if owner ~= ARGV[1] then return -1 end
local before = tonumber(ARGV[2])
local length = redis.call('LLEN', KEYS[2])
if length < before then return length end
if length > before then  -- written by a call whose reply was lost
  if before == 0 then redis.call('DEL', KEYS[2]) else redis.call('LTRIM', KEYS[2], 0, before - 1) end
end
for i = 4, #ARGV do length = redis.call('RPUSH', KEYS[2], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return before + #ARGV - 3
"""
#: record, events | owner, next owner, ms -> 1, or 0 if another owns it.
_PASS_ON = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
"""
#: record, events | owner : deletes both.
_DROP = """
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2]) end
return 1
"""


class StoreError(Exception):
    """Redis does not answer."""


class WrongTypeError(StoreError):
    """A key has another type than this module gives it."""


class NotOwnerError(Exception):
    """Another gateway continues the answer."""


@dataclass(frozen=True)
class StoredAnswer:
    record: answers_pb2.AnswerRecord
    events: list[Event]


@dataclass(frozen=True)
class StoredProgress:
    #: From the requested position, at most PAGE_EVENTS.
    events: list[Event]
    owner: str
    #: Whether a live gateway computes the answer.
    is_owned: bool


def model_key(manifest: ModelManifest) -> str:
    """Equal for gateways that may continue each other's answers."""
    identity = f"{FORMAT}/{manifest.revision}/{manifest.tokenizer_hash}/{manifest.vocab_size}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


class AnswerStore:
    """`await start()`, then `await close()`. Belongs to one event loop. Methods that use Redis raise
    StoreError."""

    def __init__(self, address: RedisAddress, *, model: str, ttl_s: float, longest_s: float) -> None:
        """`model`: the `model_key`; `ttl_s`: how long an answer is kept after its end; `longest_s`: longest
        computation."""
        self._address = address
        self._model = model
        self._ttl_ms = round(ttl_s * 1000)
        #: Expiry during a computation.
        self._running_ms = round((longest_s + ttl_s) * 1000)
        self.id = secrets.token_hex(8)
        self._next_owner = 1
        #: Owners whose computations have not ended.
        self._owners: set[int] = set()
        #: Untyped, as in the library. None: Redis does not answer.
        self._client: Any = None
        self._log = structlog.get_logger("tandem.answers")
        self._heart: asyncio.Task[None] | None = None
        self._hashes: dict[str, str] = {}

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    async def start(self) -> None:
        """Connects now, or as soon as Redis answers."""
        try:
            await self.renew_lease()
        except StoreError as error:
            self._log.warning("Redis does not answer; answers stay in this gateway", reason=str(error))
        self._heart = asyncio.create_task(self._keep_alive())

    async def close(self) -> None:
        if self._heart is not None:
            await end_tasks([self._heart])
        with contextlib.suppress(StoreError):
            async with self.connection() as redis:
                await redis.delete(_GATEWAY_PREFIX + self.id)
        if self._client is not None:
            await self._client.aclose()

    def new_owner(self) -> str:
        """A name for one computation by this gateway, valid until `release`, `drop` or `end`."""
        number = self._next_owner
        self._next_owner += 1
        self._owners.add(number)
        return f"{self.id}:{number}"

    def end(self, owner: str) -> None:
        """Ends the computation, so that any gateway may resume it."""
        gateway, _, number = owner.partition(":")
        if gateway == self.id:
            self._owners.discard(int(number))

    async def begin(self, name: str, owner: str, record: answers_pb2.AnswerRecord) -> bool:
        """Creates the answer. False, with nothing written: the name is taken."""
        record.model = self._model
        payload = record.SerializeToString()
        return bool(await self._eval(_BEGIN, name, owner, self._running_ms, record.id, payload))

    async def append(self, name: str, owner: str, num_before: int, events: Sequence[bytes]) -> int | None:
        """Appends encoded events; returns how many are stored. Fewer than before, with nothing written: Redis
        has lost some; None: it has lost the answer. Raises NotOwnerError."""
        length = await self._eval(_APPEND, name, owner, num_before, self._running_ms, *events)
        if length == -1:
            raise NotOwnerError("another gateway continues this answer")
        return None if length == -2 else length

    async def claim(self, name: str, previous: str, owner: str) -> bool:
        """Passes ownership from `previous` to `owner`; False: another gateway was faster."""
        return bool(await self._eval(_PASS_ON, name, previous, owner, self._running_ms))

    async def release(self, name: str, owner: str) -> None:
        """Ends the computation; its events stay for the time to live."""
        self.end(owner)
        await self._eval(_PASS_ON, name, owner, "", self._ttl_ms)

    async def drop(self, name: str, owner: str) -> None:
        self.end(owner)
        await self._eval(_DROP, name, owner)

    async def read(self, name: str) -> StoredAnswer | None:
        """The answer with its events so far; None: there is none, or it cannot be read."""
        with self._unreadable(name):
            async with self.connection() as redis:
                payload = await redis.hget(self._key(name), "record")
            if payload is None:
                return None
            record = answers_pb2.AnswerRecord.FromString(payload)
            if record.model != self._model:
                raise ValueError("it belongs to another model or format")
            events: list[Event] = []
            while not len(events) % PAGE_EVENTS:
                progress = await self.read_on(name, record.id, len(events))
                if progress is None:
                    return None
                events += progress.events
                if not progress.events:
                    break
            return StoredAnswer(record, events)
        return None

    async def read_on(self, name: str, answer_id: str, start: int) -> StoredProgress | None:
        """A page of events from `start`, without the record, which has all prompts. None: there is no answer
        with this id, or it cannot be read."""
        with self._unreadable(name):
            async with self.connection() as redis:
                stored_id, stored_owner = await redis.hmget(self._key(name), ("id", "owner"))
                if stored_id != answer_id.encode():
                    return None
                owner = (stored_owner or b"").decode()
                gateway, _, number = owner.partition(":")
                # An owner of this gateway has ended but is not released yet, since a gateway computes an
                # answer once.
                is_owned = gateway not in ("", self.id) and _computes(
                    await redis.get(_GATEWAY_PREFIX + gateway), number
                )
                # Read after the check of the owner, which includes a dead owner's last events.
                payloads = await redis.lrange(self._key(name) + ":events", start, start + PAGE_EVENTS - 1)
            return StoredProgress([decode_event(payload) for payload in payloads], owner, is_owned)
        return None

    @contextlib.contextmanager
    def _unreadable(self, name: str) -> Iterator[None]:
        """Logs and suppresses the errors of a damaged answer."""
        try:
            yield
        except (DecodeError, ValueError, WrongTypeError) as error:
            self._log.warning("an answer in Redis cannot be read", name=name, reason=str(error))

    def _key(self, name: str) -> str:
        # The braces put both keys of an answer into one hash slot of a cluster.
        return f"{_PREFIX}{self._model}:{{{name}}}"

    async def _eval(self, script: str, name: str, *arguments: object) -> int:
        keys = (self._key(name), self._key(name) + ":events")
        async with self.connection() as redis:
            if script not in self._hashes:
                self._hashes[script] = await redis.script_load(script)
            try:
                return int(await redis.evalsha(self._hashes[script], len(keys), *keys, *arguments))
            except NoScriptError:  # Redis was restarted
                return int(await redis.eval(script, len(keys), *keys, *arguments))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        if self._client is None:
            raise StoreError("Redis does not answer")
        client = self._client
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                yield client
        except ResponseError as error:  # out of memory, or a key of another type
            kind = WrongTypeError if str(error).startswith("WRONGTYPE") else StoreError
            raise kind(f"Redis refuses: {error}") from error
        except NO_ANSWER as error:
            if self._client is client:
                self._log.warning(
                    "Redis lost; answers stay in this gateway", reason=str(error) or "no answer"
                )
                self._client = None
                await _close(client)
            raise StoreError(f"Redis does not answer: {error}") from error

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            with contextlib.suppress(StoreError):
                await self.renew_lease()

    async def renew_lease(self) -> None:
        """Connects if necessary, and tells other gateways that this one lives."""
        if self._client is None:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    self._client = await connect(self._address)
            except NO_ANSWER as error:
                raise StoreError(str(error) or f"no reply within {_CONNECT_S:g} s") from error
            self._log.info("Redis connected; other gateways can resume answers")
        async with self.connection() as redis:
            owners = " ".join(map(str, (self._next_owner, *self._owners)))
            await redis.set(_GATEWAY_PREFIX + self.id, owners, px=LEASE_MS)


def _computes(owners: bytes | None, number: str) -> bool:
    """Whether the gateway lists the owner as computing, or the owner is newer than the list."""
    if owners is None:
        return False
    try:
        next_owner, *running = map(int, owners.split())
        return int(number) >= next_owner or int(number) in running
    except ValueError:  # a gateway of an earlier version, without numbers
        return True


def encode_event(event: Event) -> bytes:
    if isinstance(event, decode_pb2.DecodeFinished):
        return decode_pb2.DecodeResponse(finished=event).SerializeToString()
    return decode_pb2.DecodeResponse(chunk=event).SerializeToString()


def decode_event(payload: bytes) -> Event:
    """Raises DecodeError, ValueError."""
    message = decode_pb2.DecodeResponse.FromString(payload)
    match message.WhichOneof("event"):
        case "chunk":
            return message.chunk
        case "finished":
            return message.finished
        case other:
            raise ValueError(f"an event of an answer is {other}")


async def _close(client: Any) -> None:
    with contextlib.suppress(*NO_ANSWER):
        async with asyncio.timeout(_TIMEOUT_S):
            await client.aclose()
