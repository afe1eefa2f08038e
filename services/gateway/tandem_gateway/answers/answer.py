"""One answer: the events of a request so far, as readers get them."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tandem_core.codec import given_sampling, slo_from_proto
from tandem_core.sampling import SamplingParams
from tandem_core.slo import SloTarget
from tandem_core.speculation import SpeculationMode
from tandem_proto.v1 import answers_pb2, decode_pb2

from tandem_gateway.answers.answer_store import StoreError, encode_event
from tandem_gateway.request import (
    NO_LIMITS,
    Event,
    TenantLimits,
    TokenizedRequest,
    choices_of,
    num_choices_of,
)

#: An answer's id is a name, by which it is found, and a number of the computation.
NAME_CHARS, RUN_CHARS = 16, 8
#: Memory of an answer without its events, in addition to its record's bytes, and of an event in addition to
#: its bytes. A small message takes .9 kB, its bytes 50.
_ANSWER_OVERHEAD, _EVENT_OVERHEAD = 4096, 48


@dataclass(eq=False)
class Answer:
    """The events of one request so far. `Answers` computes it, `AnswerWriter` writes it to the store."""

    record: answers_pb2.AnswerRecord
    #: Requests of the next computation, one per choice; None: `remaining` makes them.
    requests: tuple[TokenizedRequest, ...] | None
    #: Whether it can be resumed.
    is_kept: bool
    #: The tenant's limits at the last request for this answer; later computation counts against them.
    limits: TenantLimits = NO_LIMITS
    #: Whether an idempotency key belongs to it; then it is computed to its end without readers.
    has_key: bool = False
    #: Read from the store: it may be removed here, and read again.
    is_copy: bool = False
    #: Encoded, because messages take many times as much memory.
    events: list[bytes] = field(default_factory=list)
    #: For each choice the number of its tokens, plus one after its end.
    position: list[int] = field(init=False)
    #: The tokens of each choice.
    _outputs: list[array[int]] = field(init=False)
    _num_ended: int = 0
    #: Why the computation ended before the answer did.
    error: Exception | None = None
    task: asyncio.Task[None] | None = None
    is_running: bool = False
    #: Whether admission has accepted the computation that runs.
    is_accepted: bool = False
    num_readers: int = 0
    #: Whether it was removed here and must leave the store.
    is_forgotten: bool = False
    #: Monotonic seconds at which a caller found it.
    last_found: float = -math.inf
    num_bytes: int = 0
    #: Monotonic seconds.
    last_used: float = field(default_factory=time.monotonic)
    #: Whether it is in the store; without ownership, the store's copy is authoritative.
    is_stored: bool = False
    #: Number of its events in the store.
    num_stored: int = 0
    #: The store's name of this gateway's computation; "" if it may not write.
    owner: str = ""
    #: Held during writes to the store, so that there is one owner.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.num_bytes = self.record.ByteSize() + _ANSWER_OVERHEAD
        self.position = [0] * self.num_choices
        self._outputs = [array("I") for _ in self.position]

    @property
    def name(self) -> str:
        return self.record.id[:NAME_CHARS]

    @property
    def tenant(self) -> str:
        return self.record.request.tenant

    @property
    def num_choices(self) -> int:
        return num_choices_of(self.record)

    @property
    def has_ended(self) -> bool:
        return self._num_ended == self.num_choices

    @property
    def is_idle(self) -> bool:
        """Whether no task computes it and no reader reads it."""
        return not self.is_running and not self.num_readers

    def event_id(self, position: Sequence[int]) -> str:
        """ "" if the answer is not kept."""
        return f"{self.record.id}-{'.'.join(map(str, position))}" if self.is_kept else ""

    def add(self, event: Event) -> None:
        """Readers do not see it before `notify`. Raises StoreError for an event of no choice."""
        if event.choice >= self.num_choices:
            raise StoreError(f"an event belongs to choice {event.choice} of {self.num_choices}")
        payload = encode_event(event)
        self.events.append(payload)
        self.position[event.choice] += num_positions(event)
        self.num_bytes += len(payload) + _EVENT_OVERHEAD
        if isinstance(event, decode_pb2.DecodeFinished):
            self._num_ended += 1
        else:
            self._outputs[event.choice].extend(event.token_ids)
            self.num_bytes += self._outputs[event.choice].itemsize * len(event.token_ids)

    def fail(self, error: Exception) -> None:
        self.error = error
        self.notify()

    def notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def may_be_at(self, position: Sequence[int]) -> bool:
        """Whether a reader can have this position. A client may have tokens that the store and so this copy
        lack."""
        if len(position) != self.num_choices:
            return False
        if self.has_ended or not self.is_stored:
            return all(at <= end for at, end in zip(position, self.position, strict=True))
        return all(at <= self._request_of(c).sampling.max_tokens + 1 for c, at in enumerate(position))

    async def wait(self) -> None:
        """Waits for the next `notify`."""
        await self._news.wait()

    def accept(self) -> None:
        self.is_accepted = True
        self.notify()

    async def accepted(self) -> None:
        """Waits until admission can no longer refuse the computation."""
        while not self.is_accepted:
            await self.wait()

    def _request_of(self, choice: int) -> decode_pb2.DecodeRequest:
        """The request for the choice's prompt."""
        prompt = choice // (self.record.num_choices or 1)
        return self.record.more_requests[prompt - 1] if prompt else self.record.request

    def remaining(self, timeout_s: float) -> tuple[TokenizedRequest, ...]:
        """Requests for the missing part of the answer, with a new deadline."""
        now = time.monotonic()
        has_slo = self.record.HasField("slo")  # records of earlier versions have the class alone
        slo = slo_from_proto(self.record.slo) if has_slo else SloTarget(self.record.slo_class)
        prompts = [
            TokenizedRequest(
                request_id=self.record.request.request_id,
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                prompt_token_ids=tuple(request.prompt_token_ids),
                sampling=SamplingParams(**given_sampling(request.sampling)),
                slo=slo,
                arrived=now,
                deadline=now + timeout_s,
                speculation=SpeculationMode.parse(request.speculation),
                is_repeated=True,
                # Clients may have tokens that the store lacks, and each client may have another position.
                one_token_events=self.is_stored,
                limits=self.limits,
            )
            for request in (self.record.request, *self.record.more_requests)
        ]
        return tuple(
            replace(request, output_token_ids=tuple(self._outputs[request.choice]))
            for request in choices_of(prompts, self.record.num_choices or 1)
            if self.position[request.choice] == len(self._outputs[request.choice])  # it has not ended
        )


def num_positions(event: Event) -> int:
    """Positions by which the event advances its choice."""
    return len(event.token_ids) if isinstance(event, decode_pb2.DecodeChunk) else 1


class Sent(NamedTuple):
    """An event as a reader gets it."""

    event: Event
    event_id: str
    #: Whether the reader already has it.
    is_seen: bool
