"""Answers that survive a lost connection.

begin(request) --> Answer <-- read(answer, position) by each connection
join(key)     /      ^
find(event id)       +-- one task: run(request) -> events

An event id is the answer's id and a position: for each choice the number of tokens so far, plus one after its
end. A cut stream is found by its last event id, a repeated request by its idempotency key. Both get the
events that they lack: existing ones at once, others as they are computed. When the last reader leaves, the
computation ends, unless the client sent an idempotency key and may ask again. The next reader resumes an
incomplete computation from the tokens so far, as a decode pod continues for a lost one.

Answers stay in memory for a time and within a number of bytes (KeptAnswers). With a store, another gateway
can read them while this one computes, and take over when it dies. The first event is stored before a client
gets it, the others soon after. A gateway that takes over computes again what the client has and the store
lacks; the tokens are equal.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from weakref import WeakValueDictionary

from tandem_core.codec import sampling_to_proto, slo_to_proto
from tandem_core.contracts import RefusalReason
from tandem_core.errors import InvalidRequestError
from tandem_proto.v1 import answers_pb2, decode_pb2
from tandem_service import tracing
from tandem_service.tasks import end_tasks

from tandem_gateway.answers.answer import NAME_CHARS, RUN_CHARS, Answer, Sent, num_positions
from tandem_gateway.answers.answer_store import (
    PAGE_EVENTS,
    AnswerStore,
    NotOwnerError,
    StoredAnswer,
    StoreError,
    decode_event,
)
from tandem_gateway.answers.answer_writer import FOLLOW_S, STORE_WAIT_S, AnswerWriter
from tandem_gateway.answers.kept_answers import KeptAnswers
from tandem_gateway.errors import (
    GATEWAY_STOPS,
    AnswerGivenUpError,
    AnswerNotFoundError,
    CrashingRequestError,
    GatewayError,
    IdempotencyKeyError,
    OverloadedError,
    UnavailableError,
    UpstreamError,
)
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import NO_LIMITS, Event, TenantLimits, TokenizedRequest, choices_of

#: Time after the deadline until a caller that does not read is disconnected.
_READ_GRACE_S = 5.0
_PURGE_S = 5.0
#: Longest time for which a reader of existing events keeps the event loop.
_TURN_S = 0.005
#: Time from finding an answer to reading it.
_FOUND_S = 1.0
_EVENT_ID = re.compile(rf"([0-9a-f]{{{NAME_CHARS + RUN_CHARS}}})-([0-9]{{1,9}}(?:\.[0-9]{{1,9}})*)")
_MAX_EVENT_ID_CHARS = 2048
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


class Answers:
    """One per gateway. `await start()`; to shut down `await drain()`, `stop()` and `await close()`."""

    def __init__(
        self,
        run: Callable[[Sequence[TokenizedRequest], Callable[[], None]], AsyncGenerator[Event, None]],
        metrics: GatewayMetrics,
        store: AnswerStore | None,
        *,
        kept: KeptAnswers,
        request_timeout_s: float,
    ) -> None:
        self._run = run
        self._metrics = metrics
        self._writer = AnswerWriter(store) if store is not None else None
        self._request_timeout_s = request_timeout_s
        self._kept = kept
        self._running: set[Answer] = set()
        #: By name; each lock serializes search and creation, so that a name has one answer here.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._is_stopping = False
        self.is_draining = False
        self._changed = asyncio.Event()
        self._purger: asyncio.Task[None] | None = None
        metrics.kept_answer_bytes.set_function(lambda: self._kept.num_bytes)

    async def start(self) -> None:
        if self._writer is not None:
            await self._writer.start()
        self._purger = asyncio.create_task(self._purge())

    async def drain(self) -> None:
        """Refuses new answers, and waits for the running ones."""
        self.is_draining = True
        while self._running:
            await self._changed.wait()
            self._changed.clear()

    def stop(self) -> None:
        """Ends the running answers with an error; clients can resume them at another gateway."""
        self.is_draining = self._is_stopping = True
        for answer in list(self._running):
            answer.fail(_stopping(is_resumable=answer.is_kept))
            if answer.task is not None:
                answer.task.cancel(GATEWAY_STOPS)

    async def close(self) -> None:
        self.stop()
        await end_tasks([answer.task for answer in self._running if answer.task is not None])
        await end_tasks([self._purger] if self._purger is not None else [])
        if self._writer is not None:
            await self._writer.close()

    async def begin(
        self,
        prompts: Sequence[TokenizedRequest],
        *,
        kind: str,
        num_choices: int = 1,
        with_usage: bool = False,
        shown: answers_pb2.ShownAs | None = None,
        is_resumable: bool = True,
        key: str = "",
        payload_sha256: bytes = b"",
    ) -> Answer:
        """A new answer with `num_choices` choices for each prompt, or the existing answer of the same key.
        `is_resumable`: its events have ids, if there is room to keep it; with a key they always do.

        Raises IdempotencyKeyError, OverloadedError, UnavailableError.
        """
        if self.is_draining:
            raise _stopping()
        self._remove_excess()
        first = prompts[0]
        has_room = self._kept.has_room(first.tenant)
        if key and not has_room and self._kept.ttl_s > 0:
            raise OverloadedError(
                f"Idempotency-Key: the answers kept for this tenant or for all fill the memory, at most "
                f"{self._kept.tenant_bytes >> 20} MiB per tenant; send the request later, or without a key",
                self._kept.room_in_s(),
                RefusalReason.KEPT_ANSWERS,
            )
        name = _key_name(first.tenant, key) if key else secrets.token_hex(NAME_CHARS // 2)
        answer = Answer(
            answers_pb2.AnswerRecord(
                id=name + secrets.token_hex(RUN_CHARS // 2),
                request=_record_of(first),
                more_requests=map(_record_of, prompts[1:]),
                num_choices=num_choices,
                slo_class=first.slo.name,
                slo=slo_to_proto(first.slo),
                kind=kind,
                with_usage=with_usage,
                shown=shown,
                form=first.form,
                created_seconds=int(time.time()),
                payload_sha256=payload_sha256,
            ),
            choices_of(prompts, num_choices),
            is_kept=(is_resumable or bool(key)) and has_room,
            has_key=bool(key),
        )
        if not answer.is_kept:
            if self._kept.ttl_s > 0 and is_resumable:
                self._metrics.not_kept.labels("memory").inc()
            return answer
        if not key:
            self._kept.add(answer)
            return answer
        tracing.current().stage("store answer")
        async with self._lock(name):
            found = await self._find(name)
            try:
                if found is None and self._writer is not None and not await self._writer.begin(answer):
                    found = await self._find(name)  # another gateway was faster
            except StoreError:
                self._metrics.not_kept.labels("redis").inc()
            if found is not None:
                return _checked(found, payload_sha256)
            self._kept.add(answer)
            return answer

    async def join(
        self, tenant: str, key: str, payload_sha256: bytes, limits: TenantLimits = NO_LIMITS
    ) -> Answer | None:
        """The answer of an idempotency key; `limits` apply to its missing part.

        Raises InvalidRequestError, IdempotencyKeyError.
        """
        tracing.current().stage("look up answer")
        if not _KEY.fullmatch(key):
            raise InvalidRequestError("Idempotency-Key", "must be 1 to 255 printable ASCII characters")
        name = _key_name(tenant, key)
        async with self._lock(name):
            found = await self._find(name)
        if found is None:
            return None
        self._metrics.resumed.labels("key").inc()
        found.limits = limits
        return _checked(found, payload_sha256)

    async def find(
        self, tenant: str, event_id: str, kind: str, limits: TenantLimits = NO_LIMITS
    ) -> tuple[Answer, tuple[int, ...]]:
        """The answer of an event id, and the caller's position in it; `limits` apply to its missing part.

        Raises InvalidRequestError, AnswerNotFoundError, UnavailableError.
        """
        tracing.current().stage("look up answer")
        match = _EVENT_ID.fullmatch(event_id) if len(event_id) <= _MAX_EVENT_ID_CHARS else None
        if match is None:
            raise InvalidRequestError(
                "Last-Event-ID", "is not an event id of this API; send the id as received"
            )
        answer_id, position = match[1], tuple(map(int, match[2].split(".")))
        name = answer_id[:NAME_CHARS]
        deadline = time.monotonic() + STORE_WAIT_S
        while True:
            try:
                async with self._lock(name):
                    found = await self._find(name, answer_id=answer_id, must_look=True)
                break
            except UnavailableError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(FOLLOW_S)
        if (
            found is None
            or found.record.id != answer_id
            or found.record.request.tenant != tenant
            or not found.may_be_at(position)
        ):
            raise _not_kept(event_id)
        if found.record.kind != kind:
            raise InvalidRequestError(
                "Last-Event-ID", f"belongs to a {found.record.kind}; resume it at the path where it began"
            )
        self._metrics.resumed.labels("event id").inc()
        found.limits = limits
        return found, position

    async def read(
        self, answer: Answer, position: Sequence[int] = (), *, is_whole: bool = False
    ) -> AsyncGenerator[Sent, None]:
        """All events from the first one; those up to `position` are marked as seen. Close it to leave. The
        answer keeps events after reading if it can be resumed or `is_whole`.

        Raises what `run` raises.
        """
        deadline = time.monotonic() + self._request_timeout_s
        if not answer.is_running:
            answer.error = None
        if answer.is_running or answer.has_ended:
            tracing.current().stage("read answer")
        answer.num_readers += 1
        num_read = 0
        position = position or [0] * answer.num_choices
        at = [0] * answer.num_choices
        try:
            while True:
                turn_ends = time.monotonic() + _TURN_S
                while num_read < len(answer.events):
                    if time.monotonic() > turn_ends:  # a resumed answer may have many events
                        await asyncio.sleep(0)
                        turn_ends = time.monotonic() + _TURN_S
                    event = decode_event(answer.events[num_read])
                    if not (answer.is_kept or is_whole):
                        answer.events[num_read] = b""
                    num_read += 1
                    choice = event.choice
                    start = at[choice]
                    at[choice] += num_positions(event)
                    if start < position[choice] < at[choice]:
                        # No event of any computation of the answer ended there.
                        raise _not_kept(answer.event_id(position))
                    with _disconnecting_slow_reader(deadline):
                        yield Sent(event, answer.event_id(at), at[choice] <= position[choice])
                if answer.has_ended:
                    return
                if answer.error is not None:
                    raise answer.error
                if not answer.is_running:
                    self._start(answer)
                await answer.wait()
        finally:
            answer.num_readers -= 1
            answer.last_used = time.monotonic()
            if not answer.num_readers:
                answer.error = None  # its frames refer to the answer
            if not answer.num_readers and not answer.has_key and answer.task is not None:
                await end_tasks([answer.task])
            self._remove_excess()

    def _start(self, answer: Answer) -> None:
        if self._is_stopping:
            raise _stopping(is_resumable=answer.is_kept)
        requests = answer.requests or answer.remaining(self._request_timeout_s)
        answer.requests = None
        answer.task = asyncio.create_task(self._compute(answer, requests))
        self._running.add(answer)
        answer.is_running = True

    async def _compute(self, answer: Answer, requests: Sequence[TokenizedRequest]) -> None:
        """Computes the answer and appends its events."""
        is_final = False
        try:
            if self._writer is not None and answer.is_stored and not answer.owner:
                answer.accept()  # another gateway may compute it
                await self._writer.take_over(answer, requests[0].deadline)
                requests = answer.remaining(self._request_timeout_s)
            if not answer.has_ended:
                async with aclosing(self._run(requests, answer.accept)) as events:
                    async for event in events:
                        await self._add(answer, event)
        except NotOwnerError as error:
            answer.fail(UnavailableError(str(error)))
        except StoreError as error:
            answer.fail(
                UnavailableError(f"the answer is kept in Redis, which cannot be reached now: {error}")
            )
        except Exception as error:
            # A refused request that is sent again with the same key is a new request.
            is_refused = isinstance(error, OverloadedError) and not answer.events
            is_final = is_refused or not _is_resumable(error)
            answer.fail(error)
        finally:
            self._settle(answer, is_final=is_final)

    async def _add(self, answer: Answer, event: Event) -> None:
        answer.add(event)
        self._kept.count(answer)
        if self._writer is not None and answer.is_kept:
            await self._writer.added(answer)
        answer.notify()

    def _settle(self, answer: Answer, *, is_final: bool) -> None:
        """Call it after a computation, whatever its outcome. `is_final`: it would fail again."""
        self._running.discard(answer)
        self._kept.count(answer)  # includes events read from the store
        answer.is_running = answer.is_accepted = False
        self._changed.set()
        answer.last_used = time.monotonic()
        if is_final or not answer.is_kept or not (answer.events or answer.is_stored):
            self._kept.remove(answer)
        if self._writer is not None:
            self._writer.settled(answer)
        answer.notify()

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _find(self, name: str, *, answer_id: str = "", must_look: bool = False) -> Answer | None:
        """The answer with this name, in memory or in the store. Hold the name's lock.

        `answer_id`: the answer's id, if the caller knows it; `must_look`: raise UnavailableError without
        Redis.
        """
        known = self._kept.get(name)
        if known is not None and (
            known.has_ended
            or known.owner
            or known.is_running
            or not known.is_stored
            or (self._is_wanted(known) and known.record.id.startswith(answer_id))
        ):
            known.last_found = time.monotonic()
            return known
        if self._writer is None:
            return None
        # The answer here is a copy, and another gateway may have continued it.
        try:
            stored = await self._writer.read(name)
            answer = None if stored is None else await _copy_of(stored)
        except StoreError as error:
            if known is None and not must_look:
                return None
            raise UnavailableError(
                f"answers are kept in Redis, which cannot be reached now: {error}"
            ) from error
        if known is not None:
            self._kept.remove(known)
        if answer is not None:
            answer.last_found = time.monotonic()
            self._kept.add(answer)
        return answer

    def _is_wanted(self, known: Answer) -> bool:
        """Whether another caller has found this copy and is about to read it."""
        return known.num_readers > 0 or time.monotonic() - known.last_found < _FOUND_S

    def _remove_excess(self) -> None:
        for answer in self._kept.remove_excess():
            if self._writer is not None and answer.is_stored and not answer.is_copy:
                self._writer.evict(answer.name)  # also bounds this gateway's share of the store

    async def _purge(self) -> None:
        while True:
            await asyncio.sleep(min(_PURGE_S, max(self._kept.ttl_s, 0.1)))
            self._kept.remove_expired()


async def _copy_of(stored: StoredAnswer) -> Answer:
    """Raises StoreError for inconsistent events."""
    has_key = bool(stored.record.payload_sha256)
    answer = Answer(stored.record, None, is_kept=True, has_key=has_key, is_copy=True, is_stored=True)
    for number, event in enumerate(stored.events, start=1):
        answer.add(event)
        if not number % PAGE_EVENTS:
            await asyncio.sleep(0)
    return answer


def _record_of(request: TokenizedRequest) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_proto(request.sampling),
        speculation=request.speculation or "",
    )


def _key_name(tenant: str, key: str) -> str:
    return hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()[:NAME_CHARS]


def _checked(answer: Answer, payload_sha256: bytes) -> Answer:
    if answer.record.payload_sha256 != payload_sha256:
        raise IdempotencyKeyError(
            "Idempotency-Key", "was used for another request; choose a new key for each request"
        )
    return answer


def _not_kept(event_id: str) -> AnswerNotFoundError:
    return AnswerNotFoundError(
        f"the answer of event {event_id} is not kept here: it has expired, was dropped when memory was full, "
        "or belongs to another tenant or another model; send the request again"
    )


def _stopping(*, is_resumable: bool = False) -> UnavailableError:
    remedy = ", or continue with Last-Event-ID" if is_resumable else ""
    return UnavailableError(f"the gateway is stopping; send the request again{remedy}")


def _is_resumable(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, CrashingRequestError | UpstreamError | AnswerGivenUpError):
        return False
    return isinstance(error, GatewayError)


@contextmanager
def _disconnecting_slow_reader(deadline: float) -> Iterator[None]:
    """Wraps a yield: cancels the reading task if it does not ask for the next event in time.

    A client that stops reading blocks the task in its send, and nothing else ends that without a deadline of
    the client.
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
