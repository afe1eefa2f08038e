"""Writes a gateway's answers to the store, and takes over answers whose gateway has died.

Only an answer's owner, one computation of one gateway, writes it. An answer has no owner between a
computation that ended early and the next one, which claims it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from tandem_service.tasks import end_tasks

from tandem_gateway.answers.answer import Answer
from tandem_gateway.answers.answer_store import (
    PAGE_EVENTS,
    AnswerStore,
    NotOwnerError,
    StoredAnswer,
    StoredProgress,
    StoreError,
)
from tandem_gateway.errors import AnswerGivenUpError, DeadlineError, UnavailableError

#: Time between two reads of an answer that another gateway computes.
FOLLOW_S = 0.05
#: Longest wait of a resuming client for Redis. A hanging Redis is killed after 5 s and replaced.
STORE_WAIT_S = 10.0
#: Time between writes of an answer's events. A write takes .2 ms of a core; at .1 s, writing took a quarter
#: of the gateway's CPU time with sixteen answers. Unwritten events of a dead gateway are computed again.
WRITE_S = 0.3


class AnswerWriter:
    """One per gateway. `await start()`, then `await close()`."""

    def __init__(self, store: AnswerStore) -> None:
        self._store = store
        #: Answers with changes that the store lacks.
        self._unwritten: set[Answer] = set()
        #: Names of answers to delete from the store before they expire.
        self._evicted: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._store.start()
        self._task = asyncio.create_task(self._write_behind())

    async def close(self) -> None:
        """Writes the remaining events."""
        await end_tasks([self._task] if self._task is not None else [])
        await self._write_all()
        await self._store.close()

    async def read(self, name: str) -> StoredAnswer | None:
        """Raises StoreError."""
        return await self._store.read(name)

    async def begin(self, answer: Answer) -> bool:
        """Makes the answer known to other gateways. False: its name is taken. Raises StoreError."""
        owner = self._store.new_owner()
        is_ours = False
        try:
            is_ours = await self._store.begin(answer.name, owner, answer.record)
        finally:
            if not is_ours:
                self._store.end(owner)
        if not is_ours:
            return False
        self._store.end(answer.owner)  # of the computation whose answer Redis has lost
        answer.is_stored, answer.num_stored, answer.owner = True, 0, owner
        return True

    async def added(self, answer: Answer) -> None:
        """Call it after a new event. The first event is stored on return, if Redis answers, because other
        gateways must know every answer that a client knows."""
        if answer.num_stored:
            self._unwritten.add(answer)
        else:
            await self._write(answer)

    def settled(self, answer: Answer) -> None:
        """Call it after a computation, whatever its outcome."""
        if answer.owner:
            self._unwritten.add(answer)

    def evict(self, name: str) -> None:
        self._evicted.append(name)

    async def take_over(self, answer: Answer, deadline: float) -> None:
        """Follows another gateway's computation until the answer has ended, or claims the answer when that
        gateway has stopped. Raises StoreError, AnswerGivenUpError, DeadlineError.

        deadline: monotonic seconds.
        """
        last_heard = time.monotonic()
        while not answer.has_ended:
            try:
                stored = await self._read_on(answer)
                if answer.has_ended:
                    break
                if not stored.is_owned:
                    await self._claim(answer, stored.owner)
                    if answer.owner:
                        break
                last_heard = time.monotonic()
            except StoreError:
                if time.monotonic() - last_heard > STORE_WAIT_S:
                    raise
            if time.monotonic() >= deadline:
                raise DeadlineError("the deadline passed before the answer was complete")
            await asyncio.sleep(FOLLOW_S)

    async def _claim(self, answer: Answer, previous: str) -> None:
        """Makes this gateway the owner, unless another one is faster."""
        owner = self._store.new_owner()
        async with answer.writing:
            try:
                if await self._store.claim(answer.name, previous, owner):
                    await self._read_on(answer)  # events written between reading and claiming
                    answer.owner, answer.num_stored = owner, len(answer.events)
            finally:
                if not answer.owner:
                    self._store.end(owner)

    async def _read_on(self, answer: Answer) -> StoredProgress:
        """Adds all missing events of the answer."""
        while True:
            stored = await self._store.read_on(answer.name, answer.record.id, len(answer.events))
            if stored is None:
                raise AnswerGivenUpError("the answer was given up by the gateway that computed it")
            for event in stored.events:
                answer.add(event)
            answer.notify()
            if len(stored.events) < PAGE_EVENTS:
                return stored

    async def _write_behind(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            await self._write_all()

    async def _write_all(self) -> None:
        unwritten, self._unwritten = self._unwritten, set()
        for answer in unwritten:
            await self._write(answer)
        evicted, self._evicted = self._evicted, []
        with contextlib.suppress(StoreError):  # they expire
            for name in evicted:
                await self._store.drop(name, "")

    async def _write(self, answer: Answer) -> None:
        """Writes the missing events, and releases the answer after a computation. Retries later without
        Redis."""
        async with answer.writing:
            await self._write_alone(answer)

    async def _write_alone(self, answer: Answer) -> None:
        if not answer.owner and (
            answer.num_stored or answer.is_forgotten
        ):  # already released, or never stored
            return
        try:
            if answer.is_forgotten:
                owner, answer.owner = answer.owner, ""
                await self._store.drop(answer.name, owner)
                return
            while answer.num_stored < len(answer.events):
                if not answer.is_stored and not await self.begin(answer):
                    raise NotOwnerError("another gateway computes this answer")
                length = await self._store.append(
                    answer.name, answer.owner, answer.num_stored, answer.events[answer.num_stored :]
                )
                answer.is_stored, answer.num_stored = length is not None, length or 0
            if not answer.is_running:
                # Cleared first, because the next computation may begin meanwhile as another owner.
                owner, answer.owner = answer.owner, ""
                await self._store.release(answer.name, owner)
        except StoreError:
            if not answer.is_forgotten:
                self._unwritten.add(answer)
        except NotOwnerError as error:
            self._store.end(answer.owner)
            answer.owner = ""
            if answer.task is not None and answer.is_running:
                answer.fail(UnavailableError(str(error)))
                answer.task.cancel()
