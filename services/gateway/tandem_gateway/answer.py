"""One answer: the events of a request so far, as readers get them."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_core.codec import given_sampling, slo_from_proto
from tandem_core.sampling import SamplingParams
from tandem_core.slo import SloTarget
from tandem_core.speculation import SpeculationMode
from tandem_proto.v1 import answers_pb2, decode_pb2

from tandem_gateway.request import NO_LIMITS, Event, TenantLimits, TokenizedRequest

#: An answer's id: a name, by which it is found, and a number of the computation.
NAME_CHARS, RUN_CHARS = 16, 8
#: In memory, beside the bytes of an event.
_EVENT_OVERHEAD = 128


@dataclass(eq=False)
class Answer:
    """The events of one request so far. `Answers` computes it, `AnswerWriter` brings it to the store."""

    record: answers_pb2.AnswerRecord
    #: What the next computation runs; None: what is missing of the answer.
    request: TokenizedRequest | None
    #: Whether it can be resumed.
    is_kept: bool
    #: Of the tenant, for further computations; those of whoever asked for it last.
    limits: TenantLimits = NO_LIMITS
    #: Whether it is computed to its end without readers.
    has_key: bool = False
    events: list[Event] = field(default_factory=list)
    num_tokens: int = 0
    #: Why the computation ended too early.
    error: Exception | None = None
    task: asyncio.Task[None] | None = None
    is_running: bool = False
    num_readers: int = 0
    #: Whether it is no longer found here, and is to leave the store.
    is_forgotten: bool = False
    #: When a caller found it, in monotonic seconds.
    last_found: float = -math.inf
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
        return self.record.id[:NAME_CHARS]

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

    def _slo(self) -> SloTarget:
        if self.record.HasField("slo"):
            return slo_from_proto(self.record.slo)
        return SloTarget(self.record.slo_class)

    def remaining(self, timeout_s: float) -> TokenizedRequest:
        """A request for what is missing of it, with a deadline of its own."""
        now = time.monotonic()
        request = self.record.request
        return TokenizedRequest(
            request_id=request.request_id,
            tenant=request.tenant,
            prompt_token_ids=tuple(request.prompt_token_ids),
            sampling=SamplingParams(**given_sampling(request.sampling)),
            slo=self._slo(),
            arrived=now,
            deadline=now + timeout_s,
            speculation=SpeculationMode.parse(request.speculation),
            output_token_ids=self.token_ids,
            is_repeated=True,
            # Clients may have tokens that the store lacks, and each may have come to another one.
            one_token_events=self.is_stored,
            limits=self.limits,
        )


class Sent(NamedTuple):
    """An event as a reader gets it."""

    event: Event
    event_id: str
    #: Whether the reader has it already.
    is_seen: bool
