"""Answers that outlive a connection.

begin(request) --> Answer <-- read(answer, position) by each connection
join(key)     /      ^
find(event id)       +-- one task: run(request) -> events

An event id is the answer's id and a position: the number of tokens up to there, one more after the end. A
cut stream is found by its last event id, a repeated request by its idempotency key; either gets the events
that it lacks, those that are there at once and the others as they are computed. When the last reader leaves,
the computation ends, unless the client gave an idempotency key and so may ask again. A computation that ended
too early is resumed by the next reader from the tokens so far, as a decode pod continues for a lost one.

Answers are kept in memory for `ttl_s` within `max_bytes`, and with a store also there, so that another
gateway can read them while this one computes, and take over when it dies. The first event is in the store
before a client gets it, the others soon after. A gateway that takes over computes again what a client has and
the store has not, up to the client's position; the tokens are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_core.codec import given_sampling, sampling_to_proto
from tandem_core.errors import InvalidRequestError
from tandem_core.sampling import SamplingParams
from tandem_core.slo import SLO_CLASSES
from tandem_core.speculation import SpeculationMode
from tandem_proto.v1 import answers_pb2, decode_pb2
from tandem_service.tasks import end_tasks

from tandem_gateway.answer_store import AnswerStore, NotOwnerError, StoredAnswer, StoreError
from tandem_gateway.errors import (
    AnswerNotFoundError,
    CrashingRequestError,
    DeadlineError,
    GatewayError,
    IdempotencyKeyError,
    UnavailableError,
    UpstreamError,
)
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import Event, TokenizedRequest

#: Time after the deadline until a caller that does not read its answer is disconnected.
_READ_GRACE_S = 5.0
#: Between two looks at an answer that another gateway computes.
_FOLLOW_S = 0.05
_PURGE_S = 5.0
#: Between writes of an answer's events to the store; one write takes .2 ms of a core.
_WRITE_S = 0.1
_NAME_CHARS, _RUN_CHARS = 16, 8
_EVENT_ID = re.compile(rf"([0-9a-f]{{{_NAME_CHARS + _RUN_CHARS}}})-([0-9]{{1,9}})")
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
#: In memory, beside the bytes of an event.
_EVENT_OVERHEAD = 128


@dataclass(eq=False)
class Answer:
    """The events of one request so far. Belongs to `Answers`."""

    record: answers_pb2.AnswerRecord
    #: What the next computation runs; None: what is missing of the answer.
    request: TokenizedRequest | None
    #: Whether it can be resumed.
    is_kept: bool
    #: Whether it is computed to its end without readers.
    has_key: bool = False
    events: list[Event] = field(default_factory=list)
    num_tokens: int = 0
    #: Why the computation ended too early.
    error: Exception | None = None
    task: asyncio.Task[None] | None = None
    num_readers: int = 0
    #: Furthest position from which a reader wants to go on.
    furthest: int = 0
    num_bytes: int = 0
    #: Monotonic seconds.
    last_used: float = field(default_factory=time.monotonic)
    #: Whether it is in the store; then that copy counts for who is not the owner.
    is_stored: bool = False
    #: Events of it that are there.
    num_stored: int = 0
    #: This gateway's computation, as the store knows it; "" if it may not write.
    owner: str = ""
    #: Held while the store is written, so that there is one owner.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.num_bytes = self.record.ByteSize() + _EVENT_OVERHEAD

    @property
    def name(self) -> str:
        return self.record.id[:_NAME_CHARS]

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], decode_pb2.DecodeFinished)

    @property
    def token_ids(self) -> tuple[int, ...]:
        chunks = (event for event in self.events if isinstance(event, decode_pb2.DecodeChunk))
        return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)

    def event_id(self, position: int) -> str:
        """ "" if the answer is not kept."""
        return f"{self.record.id}-{position}" if self.is_kept else ""

    def add(self, event: Event) -> None:
        """Readers do not see it before `notify`."""
        self.events.append(event)
        if isinstance(event, decode_pb2.DecodeChunk):
            self.num_tokens += len(event.token_ids)
        self.num_bytes += event.ByteSize() + _EVENT_OVERHEAD

    def fail(self, error: Exception) -> None:
        self.error = error
        self.notify()

    def notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    @property
    def last_position(self) -> int:
        """Where a reader can be at most. A client may have tokens that the store, and so this copy, lacks."""
        if self.has_ended or not self.is_stored:
            return self.num_tokens + self.has_ended
        return self.record.request.sampling.max_tokens + 1

    async def wait(self) -> None:
        """Until the next `notify`."""
        await self._news.wait()


class Sent(NamedTuple):
    """An event as a reader gets it."""

    event: Event
    event_id: str
    #: Whether the reader has it already.
    is_seen: bool


class Answers:
    """Of one gateway. `await start()`, then `stop()` when no more are wanted, and `await close()`."""

    def __init__(
        self,
        run: Callable[[TokenizedRequest], AsyncGenerator[Event, None]],
        metrics: GatewayMetrics,
        store: AnswerStore | None,
        *,
        ttl_s: float,
        max_bytes: int,
        request_timeout_s: float,
    ) -> None:
        self._run = run
        self._metrics = metrics
        self._store = store
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._request_timeout_s = request_timeout_s
        #: By name, the longest kept first.
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._running: set[Answer] = set()
        #: One search or creation by name at a time, so that a name has one answer here.
        self._lock = asyncio.Lock()
        self._is_stopping = False
        self._changed = asyncio.Event()
        self._purger: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        #: Answers that the store does not have as they are here.
        self._unwritten: set[Answer] = set()
        #: Names of those over the limit of bytes; in the store, too, it holds for what came through here.
        self._evicted: list[str] = []
        metrics.kept_answer_bytes.set_function(self._num_bytes)

    async def start(self) -> None:
        if self._store is not None:
            await self._store.start()
            self._writer = asyncio.create_task(self._write_behind(self._store))
        self._purger = asyncio.create_task(self._purge())

    async def finished(self) -> None:
        """Until no answer is computed."""
        while self._running:
            await self._changed.wait()
            self._changed.clear()

    def stop(self) -> None:
        """Ends the running answers with an error after which clients can resume them elsewhere."""
        self._is_stopping = True
        for answer in list(self._running):
            answer.fail(_stopping())
            if answer.task is not None:
                answer.task.cancel()

    async def close(self) -> None:
        self.stop()
        await end_tasks([answer.task for answer in self._running if answer.task is not None])
        await end_tasks([task for task in (self._purger, self._writer) if task is not None])
        if self._store is not None:
            await self._write_all(self._store)
            await self._store.close()

    async def begin(
        self,
        request: TokenizedRequest,
        *,
        kind: str,
        with_usage: bool = False,
        is_streamed: bool = True,
        key: str = "",
        payload_sha256: bytes = b"",
    ) -> Answer:
        """A new answer; with an idempotency key that is in use the one of that key.

        Raises IdempotencyKeyError, UnavailableError.
        """
        if self._is_stopping:
            raise _stopping()
        name = _key_name(request.tenant, key) if key else secrets.token_hex(_NAME_CHARS // 2)
        answer = Answer(
            answers_pb2.AnswerRecord(
                id=name + secrets.token_hex(_RUN_CHARS // 2),
                request=decode_pb2.DecodeRequest(
                    request_id=request.request_id,
                    tenant=request.tenant,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling=sampling_to_proto(request.sampling),
                    speculation=request.speculation or "",
                ),
                slo_class=request.slo.name,
                kind=kind,
                with_usage=with_usage,
                created_seconds=int(time.time()),
                payload_sha256=payload_sha256,
            ),
            request,
            is_kept=self._ttl_s > 0 and (is_streamed or bool(key)) and self._has_room(),
            has_key=bool(key),
        )
        if not answer.is_kept:
            return answer
        if not key:
            self._keep(answer)
            return answer
        async with self._lock:
            found = await self._find(name)
            with contextlib.suppress(StoreError):  # without Redis, the key holds for this gateway
                if found is None and not await self._begin_stored(answer):
                    found = await self._find(name)  # another gateway was faster
            if found is not None:
                return _checked(found, payload_sha256)
            self._keep(answer)
            return answer

    async def join(self, tenant: str, key: str, payload_sha256: bytes) -> Answer | None:
        """The answer of an idempotency key. Raises InvalidRequestError, IdempotencyKeyError."""
        if not _KEY.fullmatch(key):
            raise InvalidRequestError("Idempotency-Key", "must be 1 to 255 printable ASCII characters")
        async with self._lock:
            found = await self._find(_key_name(tenant, key))
        if found is None:
            return None
        self._metrics.resumed.labels("key").inc()
        return _checked(found, payload_sha256)

    async def find(self, tenant: str, event_id: str, kind: str) -> tuple[Answer, int]:
        """The answer of an event id, and the caller's position in it.

        Raises InvalidRequestError, AnswerNotFoundError, UnavailableError.
        """
        match = _EVENT_ID.fullmatch(event_id)
        if match is None:
            raise InvalidRequestError("Last-Event-ID", "is no id of an event of this API; send it as it came")
        answer_id, position = match[1], int(match[2])
        async with self._lock:
            found = await self._find(answer_id[:_NAME_CHARS], must_look=True)
        if (
            found is None
            or found.record.id != answer_id
            or found.record.request.tenant != tenant
            or position > found.last_position
        ):
            raise _not_kept(event_id)
        if found.record.kind != kind:
            raise InvalidRequestError(
                "Last-Event-ID", f"belongs to a {found.record.kind}; resume it where it was begun"
            )
        self._metrics.resumed.labels("event id").inc()
        return found, position

    async def read(self, answer: Answer, position: int = 0) -> AsyncGenerator[Sent, None]:
        """All events from the first one; those up to `position` are marked as seen. Close it to leave.

        Raises what `run` raises.
        """
        deadline = time.monotonic() + self._request_timeout_s
        if answer not in self._running:
            answer.error = None
        answer.num_readers += 1
        answer.furthest = max(answer.furthest, position)
        num_read = num_tokens = 0
        try:
            while True:
                while num_read < len(answer.events):
                    event = answer.events[num_read]
                    num_read += 1
                    start = num_tokens
                    num_tokens += len(event.token_ids) if isinstance(event, decode_pb2.DecodeChunk) else 1
                    if start < position < num_tokens:
                        # Computed here for another reader, in events that end elsewhere.
                        raise _not_kept(answer.event_id(position))
                    with _disconnecting_slow_reader(deadline):
                        yield Sent(event, answer.event_id(num_tokens), num_tokens <= position)
                    if isinstance(event, decode_pb2.DecodeFinished):
                        return
                if answer.error is not None:
                    raise answer.error
                if answer not in self._running:
                    self._start(answer)
                await answer.wait()
        finally:
            answer.num_readers -= 1
            answer.last_used = time.monotonic()
            if not answer.num_readers and not answer.has_key and answer.task is not None:
                await end_tasks([answer.task])
            self._drop_expired()

    def _start(self, answer: Answer) -> None:
        if self._is_stopping:
            raise _stopping()
        request = answer.request or self._request(answer)
        answer.request = None
        answer.task = asyncio.create_task(self._compute(answer, request))
        self._running.add(answer)

    async def _compute(self, answer: Answer, request: TokenizedRequest) -> None:
        """Appends events until the answer has ended."""
        is_final = False
        try:
            if self._store is not None and answer.is_stored and not answer.owner:
                request = await self._take_over(self._store, answer, request)
            if not answer.has_ended:
                async with aclosing(self._run(request)) as events:
                    async for event in events:
                        await self._add(answer, event)
        except NotOwnerError as error:
            answer.fail(UnavailableError(str(error)))
        except StoreError as error:
            answer.fail(
                UnavailableError(f"the answer is kept in Redis, which cannot be reached now: {error}")
            )
        except Exception as error:
            is_final = not _is_resumable(error)
            answer.fail(error)
        finally:
            self._settle(answer, is_final=is_final)

    async def _add(self, answer: Answer, event: Event) -> None:
        answer.add(event)
        if self._store is not None and answer.is_kept:
            if answer.num_stored:
                self._unwritten.add(answer)
            else:  # other gateways must know of every answer that a client knows of
                await self._write(self._store, answer)
        answer.notify()

    def _settle(self, answer: Answer, *, is_final: bool) -> None:
        """After a computation, however it ended. `is_final`: it would fail again."""
        self._running.discard(answer)
        self._changed.set()
        answer.last_used = time.monotonic()
        if is_final or not answer.is_kept or not (answer.events or answer.is_stored):
            self._forget(answer)
        if answer.owner:
            self._unwritten.add(answer)
        answer.notify()

    async def _write_behind(self, store: AnswerStore) -> None:
        while True:
            await asyncio.sleep(_WRITE_S)
            await self._write_all(store)

    async def _write_all(self, store: AnswerStore) -> None:
        unwritten, self._unwritten = self._unwritten, set()
        for answer in unwritten:
            await self._write(store, answer)
        evicted, self._evicted = self._evicted, []
        with contextlib.suppress(StoreError):  # they expire
            for name in evicted:
                await store.drop(name, "")

    async def _write(self, store: AnswerStore, answer: Answer) -> None:
        """Writes what the store lacks; gives the answer up after a computation. Tries later without Redis."""
        async with answer.writing:
            await self._write_alone(store, answer)

    async def _write_alone(self, store: AnswerStore, answer: Answer) -> None:
        is_kept = self._kept.get(answer.name) is answer
        if not answer.owner and (answer.num_stored or not is_kept):  # released before, or never there
            return
        try:
            if not is_kept:
                owner, answer.owner = answer.owner, ""
                await store.drop(answer.name, owner)
                return
            while answer.num_stored < len(answer.events):
                if not answer.is_stored and not await self._begin_stored(answer):
                    raise NotOwnerError("another gateway computes this answer")
                length = await store.append(
                    answer.name, answer.owner, answer.num_stored, answer.events[answer.num_stored :]
                )
                answer.is_stored, answer.num_stored = length is not None, length or 0
            if answer not in self._running:
                # First, because the next computation may begin meanwhile, as an owner of its own.
                owner, answer.owner = answer.owner, ""
                await store.release(answer.name, owner)
        except StoreError:
            if is_kept:
                self._unwritten.add(answer)
        except NotOwnerError as error:
            store.end(answer.owner)
            answer.owner = ""
            if answer.task is not None and answer in self._running:
                answer.fail(UnavailableError(str(error)))
                answer.task.cancel()

    async def _begin_stored(self, answer: Answer) -> bool:
        """Makes the answer known to other gateways. False: its name is taken. Raises StoreError."""
        if self._store is None:
            return True
        owner = self._store.new_owner()
        is_ours = False
        try:
            is_ours = await self._store.begin(answer.name, owner, answer.record)
        finally:
            if not is_ours:
                self._store.end(owner)
        if not is_ours:
            return False
        answer.is_stored, answer.num_stored, answer.owner = True, 0, owner
        return True

    async def _take_over(
        self, store: AnswerStore, answer: Answer, request: TokenizedRequest
    ) -> TokenizedRequest:
        """Reads what another gateway computes, until the answer has ended or that gateway has stopped; then
        the answer is this gateway's, and the request is what is missing of it. Raises StoreError."""
        while not answer.has_ended:
            stored = await self._read_on(store, answer)
            if answer.has_ended:
                break
            if not stored.is_owned:
                await self._claim(store, answer, stored.owner)
                if answer.owner:
                    break
            if time.monotonic() >= request.deadline:
                raise DeadlineError("the deadline passed before the answer was complete")
            await asyncio.sleep(_FOLLOW_S)
        return self._request(answer)

    async def _claim(self, store: AnswerStore, answer: Answer, previous: str) -> None:
        """Makes the answer this gateway's, unless another one was faster."""
        owner = store.new_owner()
        async with answer.writing:
            try:
                if await store.claim(answer.name, previous, owner):
                    await self._read_on(store, answer)  # written between reading and claiming
                    answer.owner, answer.num_stored = owner, len(answer.events)
            finally:
                if not answer.owner:
                    store.end(owner)

    async def _read_on(self, store: AnswerStore, answer: Answer) -> StoredAnswer:
        stored = await store.read(answer.name, len(answer.events))
        if stored is None or stored.record.id != answer.record.id:
            raise UnavailableError("the answer was given up by the gateway that computed it")
        for event in stored.events:
            answer.add(event)
        answer.notify()
        return stored

    def _request(self, answer: Answer) -> TokenizedRequest:
        """What is missing of the answer, with a deadline of its own."""
        now = time.monotonic()
        request = answer.record.request
        return TokenizedRequest(
            request_id=request.request_id,
            tenant=request.tenant,
            prompt_token_ids=tuple(request.prompt_token_ids),
            sampling=SamplingParams(**given_sampling(request.sampling)),
            slo=SLO_CLASSES.get(answer.record.slo_class) or next(iter(SLO_CLASSES.values())),
            arrived=now,
            deadline=now + self._request_timeout_s,
            speculation=SpeculationMode.parse(request.speculation),
            output_token_ids=answer.token_ids,
            is_repeated=True,
            chunk_boundary=answer.furthest if answer.furthest > answer.num_tokens else 0,
        )

    async def _find(self, name: str, *, must_look: bool = False) -> Answer | None:
        """`must_look`: without an answer of Redis there is none. Raises UnavailableError. Hold the lock."""
        known = self._kept.get(name)
        if known is not None and (
            known.has_ended or known.owner or known in self._running or not known.is_stored
        ):
            return known
        if self._store is None:
            return None
        # What is here is a copy, and another gateway may have gone on with the answer.
        try:
            stored = await self._store.read(name)
        except StoreError as error:
            if known is None and not must_look:
                return None
            raise UnavailableError(
                f"answers are kept in Redis, which cannot be reached now: {error}"
            ) from error
        if known is not None:
            self._forget(known)
        if stored is None:
            return None
        has_key = bool(stored.record.payload_sha256)
        answer = Answer(stored.record, None, is_kept=True, has_key=has_key, is_stored=True)
        for event in stored.events:
            answer.add(event)
        self._keep(answer)
        return answer

    def _has_room(self) -> bool:
        self._drop_expired()
        return self._num_bytes() < self._max_bytes

    def _num_bytes(self) -> int:
        return sum(answer.num_bytes for answer in self._kept.values())

    def _keep(self, answer: Answer) -> None:
        self._kept[answer.name] = answer

    def _forget(self, answer: Answer) -> None:
        if self._kept.get(answer.name) is answer:
            del self._kept[answer.name]

    def _drop_expired(self) -> None:
        """Those that are too old; over the limit of bytes the oldest ones that are not computed."""
        oldest = time.monotonic() - self._ttl_s
        excess = self._num_bytes() - self._max_bytes
        for answer in list(self._kept.values()):
            if answer in self._running or answer.num_readers or (answer.last_used > oldest and excess <= 0):
                continue
            excess -= answer.num_bytes
            self._forget(answer)
            if answer.is_stored and excess + answer.num_bytes > 0:
                self._evicted.append(answer.name)

    async def _purge(self) -> None:
        while True:
            await asyncio.sleep(min(_PURGE_S, max(self._ttl_s, 0.1)))
            self._drop_expired()


def _key_name(tenant: str, key: str) -> str:
    return hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()[:_NAME_CHARS]


def _checked(answer: Answer, payload_sha256: bytes) -> Answer:
    if answer.record.payload_sha256 != payload_sha256:
        raise IdempotencyKeyError(
            "Idempotency-Key", "was used for another request; choose a new key for each request"
        )
    return answer


def _not_kept(event_id: str) -> AnswerNotFoundError:
    return AnswerNotFoundError(
        f"the answer of event {event_id} is not kept here: it has expired or belongs to another tenant; send "
        "the request anew"
    )


def _stopping() -> UnavailableError:
    return UnavailableError("the gateway is stopping; send the request again, or continue with Last-Event-ID")


def _is_resumable(error: Exception) -> bool:
    """Whether the same request may go better later."""
    if isinstance(error, CrashingRequestError | UpstreamError):
        return False
    return isinstance(error, GatewayError)


@contextmanager
def _disconnecting_slow_reader(deadline: float) -> Iterator[None]:
    """Wraps a yield: cancels the reading task if it does not ask for the next event in time.

    A client that stops reading blocks the task in its send. Nothing else ends that if the client set no
    deadline.
    """
    reader = asyncio.current_task()
    if reader is None:
        yield
        return
    timer = asyncio.get_running_loop().call_at(deadline + _READ_GRACE_S, reader.cancel)
    try:
        yield
    finally:
        timer.cancel()
