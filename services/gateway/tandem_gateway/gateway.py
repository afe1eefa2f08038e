"""One request from the caller's words to the receipt; what both front ends share.

Ask --prepare_*--> Job --run--> Chunk*, End
     check, template,    admission, relay, TTFT,
     tokenize            receipt, metrics
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import structlog
from tandem_core import errors
from tandem_core.model.chat_template import Message
from tandem_core.model.tokenizer import Tokenizer

from tandem_gateway.admission import Admission
from tandem_gateway.auth import Caller
from tandem_gateway.errors import (
    GatewayError,
    InvalidRequestError,
    Outcome,
    UnknownModelError,
)
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.predictor import Predictor
from tandem_gateway.relay import Relay
from tandem_gateway.request import NS_PER_S, Chunk, End, Event, Job, SamplingOptions
from tandem_gateway.slo import choose_slo

#: Longer texts are tokenized in a thread, so that the event loop goes on relaying meanwhile.
_INLINE_CHARS = 16_384
#: A caller that has not taken its answer so long after the deadline is cut off.
_READ_GRACE_S = 5.0


@dataclass(frozen=True)
class Limits:
    max_body_bytes: int
    max_messages: int
    request_timeout_s: float


@dataclass(frozen=True)
class Ask:
    """What every request says besides its prompt. `arrived` in monotonic seconds; `timeout_s` None: the
    caller sets no deadline."""

    request_id: str
    caller: Caller
    model: str
    options: SamplingOptions
    slo_class: str
    arrived: float
    timeout_s: float | None = None
    speculation: str = ""


class Gateway:
    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        admission: Admission,
        relay: Relay,
        predictor: Predictor,
        metrics: GatewayMetrics,
        limits: Limits,
    ) -> None:
        self.tokenizer = tokenizer
        self.manifest = tokenizer.manifest
        self.limits = limits
        self.admission = admission
        self.num_received = 0
        self._relay = relay
        self._predictor = predictor
        self._metrics = metrics
        #: Ids of running requests; the pods need them to be unique.
        self._running_ids: set[str] = set()
        self._log = structlog.get_logger("tandem.gateway")

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Around everything before `run`: a GatewayError raised inside is counted by its outcome."""
        try:
            yield
        except GatewayError as error:
            self._metrics.ended(error.outcome)
            raise

    async def prepare_chat(self, ask: Ask, messages: Sequence[Message]) -> Job:
        """Check, render and tokenize a chat. Raises InvalidRequestError and its kin."""
        self.check_model(ask.model)
        if not messages:
            raise InvalidRequestError("messages", "is empty; send at least one message")
        limit = self.limits.max_messages
        if len(messages) > limit:
            raise InvalidRequestError(
                "messages", f"{len(messages)} messages are over the limit of {limit}; send fewer"
            )
        try:
            if sum(len(message.content) for message in messages) > _INLINE_CHARS:
                token_ids = await asyncio.to_thread(self.tokenizer.encode_chat, messages)
            else:
                token_ids = self.tokenizer.encode_chat(messages)
        except errors.InvalidRequestError as error:
            raise InvalidRequestError(error.field, str(error).removeprefix(f"{error.field}: ")) from error
        return self._job(ask, token_ids, field="messages")

    async def prepare_text(self, ask: Ask, text: str) -> Job:
        """Check and tokenize a plain text. Raises InvalidRequestError and its kin."""
        self.check_model(ask.model)
        if len(text) > _INLINE_CHARS:
            token_ids = await asyncio.to_thread(self.tokenizer.encode, text)
        else:
            token_ids = self.tokenizer.encode(text)
        return self._job(ask, token_ids, field="prompt")

    async def prepare_tokens(self, ask: Ask, token_ids: Sequence[int]) -> Job:
        """Check a prompt of token ids. Raises InvalidRequestError and its kin."""
        self.check_model(ask.model)
        vocab_size = self.manifest.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError("prompt", f"token id {token_id} is outside [0, {vocab_size})")
        return self._job(ask, token_ids, field="prompt")

    def check_model(self, name: str) -> None:
        """Raises UnknownModelError unless `name` is the served model or empty."""
        served = self.manifest.name
        if name and name != served:
            raise UnknownModelError(name, served)

    def _job(self, ask: Ask, token_ids: Sequence[int], *, field: str) -> Job:
        if not token_ids:
            raise InvalidRequestError(field, "is empty; send at least one token")
        manifest = self.manifest
        slo = choose_slo(ask.slo_class, ask.caller)
        sampling = ask.options.resolve(
            prompt_field=field,
            num_prompt_tokens=len(token_ids),
            max_model_len=manifest.max_model_len,
            vocab_size=manifest.vocab_size,
        )
        timeout_s = self.limits.request_timeout_s
        if ask.timeout_s is not None:
            timeout_s = min(timeout_s, ask.timeout_s)
        return Job(
            request_id=ask.request_id,
            tenant=ask.caller.tenant,
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            slo=slo,
            arrived=ask.arrived,
            deadline=ask.arrived + timeout_s,
            speculation=ask.speculation,
        )

    async def run(self, job: Job) -> AsyncGenerator[Event, None]:
        """Admission, the pods, the receipt. Close the generator to cancel the request.

        Raises OverloadedError, DeadlineError, UnavailableError, UpstreamError.
        """
        if job.request_id in self._running_ids:
            job = dataclasses.replace(job, request_id=f"{job.request_id}-{secrets.token_hex(4)}")
        self._running_ids.add(job.request_id)
        self.num_received += 1
        self._metrics.received(job.slo)
        outcome = Outcome.ERROR
        end: End | None = None
        try:
            async with self.admission.place(job):
                admitted_at = time.monotonic()
                self._metrics.admitted(job.slo, admitted_at - job.arrived)
                first_at: float | None = None
                async with aclosing(self._relay.stream(job)) as events:
                    async for event in events:
                        if isinstance(event, Chunk):
                            if first_at is None and event.token_ids:
                                first_at = time.monotonic()
                            with _taken_in_time(job):
                                yield event
                        else:
                            end = self._complete(job, event, admitted_at, first_at)
                            break
            if end is None:  # the relay promises an End
                raise GatewayError("the answer has no end")
            outcome = Outcome.OK
            self._metrics.finished(end.receipt)
            yield end
        except GatewayError as error:
            outcome = error.outcome
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if end is None:
                # A deadline of the caller cancels the call just as its leaving does.
                outcome = Outcome.DEADLINE if time.monotonic() >= job.deadline else Outcome.CANCELLED
            raise
        finally:
            self._running_ids.discard(job.request_id)
            self._metrics.ended(outcome)
            self._log_end(job, outcome, end)

    def _complete(self, job: Job, end: End, admitted_at: float, first_at: float | None) -> End:
        """The pod's receipt with what only the gateway knows: its queue, TTFT and E2E as the caller sees
        them, and whether the objectives were met."""
        now = time.monotonic()
        queued_s = admitted_at - job.arrived
        e2e_s = now - job.arrived
        ttft_s = (first_at or now) - job.arrived
        num_output = end.receipt.output_tokens
        tpot_s = (e2e_s - ttft_s) / (num_output - 1) if num_output > 1 else 0.0
        miss = job.slo.miss(ttft_s, tpot_s, e2e_s)
        receipt = dataclasses.replace(
            end.receipt,
            request_id=job.request_id,
            queue_ns=end.receipt.queue_ns + round(queued_s * NS_PER_S),
            ttft_ns=round(ttft_s * NS_PER_S),
            e2e_ns=round(e2e_s * NS_PER_S),
            prompt_tokens=len(job.prompt_token_ids),
            seed=job.sampling.seed,
            slo=job.slo,
            slo_met=not miss,
            slo_miss_reason=miss,
        )
        self._predictor.observe(receipt, queued_s=queued_s)
        return dataclasses.replace(end, receipt=receipt)

    def _log_end(self, job: Job, outcome: Outcome, end: End | None) -> None:
        details = {} if end is None else {
            "output_tokens": end.receipt.output_tokens,
            "ttft_s": round(end.receipt.ttft_ns / NS_PER_S, 4),
            "slo_met": end.receipt.slo_met,
        }  # fmt: skip
        self._log.info(
            "request",
            request_id=job.request_id,
            outcome=outcome.value,
            tenant=job.tenant,
            slo_class=job.slo.name,
            prompt_tokens=len(job.prompt_token_ids),
            e2e_s=round(time.monotonic() - job.arrived, 4),
            **details,
        )


@contextmanager
def _taken_in_time(job: Job) -> Iterator[None]:
    """Around a yield: cancels the task that takes the event if it does not come back for the next.

    A client that stops reading holds the task in its send, with the request's place; nothing else ends that
    when the client has set no deadline of its own.
    """
    taker = asyncio.current_task()
    if taker is None:
        yield
        return
    timer = asyncio.get_running_loop().call_at(job.deadline + _READ_GRACE_S, taker.cancel)
    try:
        yield
    finally:
        timer.cancel()
