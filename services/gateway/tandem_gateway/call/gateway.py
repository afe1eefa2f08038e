"""Runs one request, from the caller's message to the receipt, for both APIs.

ReceivedRequest --prepare_*--> TokenizedRequest --run--> DecodeChunk*, DecodeFinished
                  check, template,               admission, relay, TTFT,
                  tokenize                       receipt, metrics
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import structlog
from tandem_core.codec import slo_to_proto
from tandem_core.contracts import RefusalReason
from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.model.conversation import DEFAULT_OPTIONS, ChatOptions, Message
from tandem_core.model.piece_cache import PieceCache
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.sampling import MAX_BAD_WORDS, MAX_STOP_CHARS, check_token_ids
from tandem_core.speculation import SpeculationMode
from tandem_proto.v1 import decode_pb2, gateway_pb2
from tandem_service.tracing import Headers, RequestTrace, Tracing, current
from tandem_service.version import software_version

from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.miss_cause import miss_cause
from tandem_gateway.admission.quotas import TokenRates
from tandem_gateway.auth import Caller
from tandem_gateway.call import trace_attributes
from tandem_gateway.call.choices import Running, num_places, num_sequences, relay_choices
from tandem_gateway.call.guide_checks import GuideChecks
from tandem_gateway.call.relay import Relay
from tandem_gateway.call.tenant_threads import TenantThreads
from tandem_gateway.dashboard.ended import EndedRequests
from tandem_gateway.errors import (
    GATEWAY_STOPS,
    REQUEST_ERRORS,
    ContextLengthError,
    GatewayError,
    Outcome,
    OverloadedError,
    UnknownModelError,
    presentation,
)
from tandem_gateway.fleet.pods import Fleet
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import (
    NS_PER_S,
    USUAL_TOKENS,
    Event,
    ReceivedRequest,
    TokenizedRequest,
    complete_sampling,
)
from tandem_gateway.settings import GatewaySettings
from tandem_gateway.tools.choice import NO_TOOLS, ToolChoice
from tandem_gateway.tools.form import AnswerForms

#: Longer texts are tokenized in a thread, so that the event loop is not blocked.
INLINE_CHARS = 4096
#: Number of these threads; a text as long as the context takes up to seconds.
_TOKENIZING_THREADS = 2
#: Limits on texts in these threads and their queue, in texts of maximum length.
MAX_TOKENIZING, MAX_TOKENIZING_OF_TENANT = 64, 8
#: JSON writes a control character in six bytes.
_JSON_ESCAPE_BYTES = 6
#: Most messages in one chat.
MAX_MESSAGES = 1024
#: Bytes allowed for names, parameters and the messages' roles.
_OTHER_FIELDS_BYTES = 256 * 1024
_TOKENIZING_RETRY_S = 1.0


def max_message_bytes(tokenizer: Tokenizer, *, is_json: bool) -> int:
    """Limit on a request before it is parsed: the longest text, escaped for JSON, plus the other fields."""
    escaped = _JSON_ESCAPE_BYTES if is_json else 1
    return tokenizer.max_text_bytes * escaped + _OTHER_FIELDS_BYTES


class Gateway:
    """Prepares, runs and completes requests. Belongs to one event loop."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        fleet: Fleet,
        admission: Admission,
        relay: Relay,
        metrics: GatewayMetrics,
        ended: EndedRequests,
        settings: GatewaySettings,
        tracing: Tracing,
    ) -> None:
        self.tokenizer = tokenizer
        self.manifest = tokenizer.manifest
        self.fleet = fleet
        self.settings = settings
        #: Values of the SamplingParams fields that a request leaves out.
        self.recommended_sampling = self.manifest.sampling if settings.generation_config == "auto" else {}
        self._forms = AnswerForms(tokenizer, settings.tool_format, splits_reasoning=settings.split_reasoning)
        self._admission = admission
        self._rates = TokenRates()
        self._num_received = 0
        self._relay = relay
        self._tracing = tracing
        self._metrics = metrics
        self._ended = ended
        self._pieces = PieceCache()
        self.tokenizing = TenantThreads(_TOKENIZING_THREADS, "tokenize")
        self._guides = GuideChecks()
        #: Ids of running requests; the pods need them to be unique.
        self._running_ids: set[str] = set()
        self._log = structlog.get_logger("tandem.gateway")
        #: On a console, a line per request would hide all others.
        self._request_level = logging.INFO if settings.log_format == "json" else logging.DEBUG

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts and logs the errors raised before `run`, by outcome."""
        try:
            yield
        except REQUEST_ERRORS as error:
            self.turned_away(error)
            trace = current()
            trace.fail_stage(presentation(error).code)
            trace.fail(presentation(error).code)
            raise

    def turned_away(self, error: InvalidRequestError | GatewayError) -> None:
        """Counts and logs a call that was refused before it became a well-formed request."""
        self._metrics.refused(error)
        shown = presentation(error)
        # The message is left out, because it may quote the caller's text.
        field = {"field": error.field} if isinstance(error, InvalidRequestError) else {}
        self._log.log(self._request_level, "request", outcome=shown.outcome.value, code=shown.code, **field)

    def begin_trace(self, headers: Headers, kind: str, *, started_ns: int) -> RequestTrace:
        """Begins the trace of an authenticated call for an answer; `kind` as in AnswerRecord."""
        name = f"{trace_attributes.operation(kind)} {self.manifest.name}"
        trace = self._tracing.begin(headers, name, "receive", started_ns=started_ns, is_entry=True)
        if trace.is_recording:
            trace.set(trace_attributes.of_call(kind, self.manifest.name))
        return trace

    async def prepare_chat(
        self,
        received: ReceivedRequest,
        messages: Sequence[Message],
        choice: ToolChoice = NO_TOOLS,
        options: ChatOptions = DEFAULT_OPTIONS,
    ) -> TokenizedRequest:
        """Checks, renders and tokenizes a chat. The tools of `choice` replace those in `options`.

        Raises InvalidRequestError, ForbiddenError.
        """
        current().stage("tokenize")
        self.check_model(received.model)
        token_ids = await self.encode_chat(received, messages, choice, options)
        received = self._forms.with_sampling(received, choice)
        request = self._tokenized(received, token_ids, field="messages")
        content = request.sampling.guide
        fault = partial(self._guides.fault, received.caller)
        guide = await self._forms.guide(choice, content, token_ids, fault)
        form = self._forms.of(choice, token_ids, is_guided=guide is not content)
        request = dataclasses.replace(request, form=form)
        if guide is not content:
            sampling = dataclasses.replace(request.sampling, guide=guide)
            request = dataclasses.replace(request, sampling=sampling)
        return await self._with_checked_guide(received, request)

    async def encode_chat(
        self,
        received: ReceivedRequest,
        messages: Sequence[Message],
        choice: ToolChoice = NO_TOOLS,
        options: ChatOptions = DEFAULT_OPTIONS,
    ) -> list[int]:
        """Renders and tokenizes a chat, which may exceed the context. The tools of `choice` replace those in
        `options`. Raises InvalidRequestError, OverloadedError."""
        if not messages:
            raise InvalidRequestError("messages", "is empty; send at least one message")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequestError(
                "messages", f"{len(messages)} messages are over the limit of {MAX_MESSAGES}; send fewer"
            )
        texts = [text for message in messages for text in message.texts()]
        texts += [json.dumps(tool.definition, ensure_ascii=False) for tool in choice.tools]
        if options.template_arguments:
            texts.append(json.dumps(options.template_arguments, ensure_ascii=False))
        options = dataclasses.replace(options, tools=choice.tools)
        return await self._encode(
            received,
            texts,
            "messages",
            lambda: self.tokenizer.encode_chat(
                messages, options, cache=self._pieces, tenant=received.caller.tenant
            ),
        )

    async def prepare_text(self, received: ReceivedRequest, text: str) -> TokenizedRequest:
        """Checks and tokenizes a plain text. Raises InvalidRequestError, ForbiddenError."""
        current().stage("tokenize")
        self.check_model(received.model)
        token_ids = await self._encode(
            received,
            [text],
            "prompt",
            lambda: self.tokenizer.encode(text, add_special_tokens=received.add_special_tokens),
        )
        request = self._tokenized(received, token_ids, field="prompt")
        return await self._with_checked_guide(received, request)

    async def prepare_tokens(self, received: ReceivedRequest, token_ids: Sequence[int]) -> TokenizedRequest:
        """Checks a prompt of token ids. Raises InvalidRequestError, ForbiddenError."""
        current().stage("tokenize")
        self.check_model(received.model)
        check_token_ids("prompt", token_ids, self.manifest.vocab_size)
        request = self._tokenized(received, token_ids, field="prompt")
        return await self._with_checked_guide(received, request)

    async def _with_checked_guide(
        self, received: ReceivedRequest, request: TokenizedRequest
    ) -> TokenizedRequest:
        """The request. Raises InvalidRequestError, naming the unsupported part, for a guide that cannot be
        used."""
        if request.sampling.guide is not None:
            await self._guides.check(received.caller, request.sampling.guide)
        return request

    async def count_text(self, caller: Caller, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenizes a text without answering it. Raises InvalidRequestError, OverloadedError."""
        return await self._encode(
            caller,
            [text],
            "prompt",
            lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens),
        )

    async def _encode(
        self,
        asking: ReceivedRequest | Caller,
        texts: Sequence[str],
        field: str,
        encode: Callable[[], list[int]],
    ) -> list[int]:
        """Runs `encode`, in a thread for long texts. Raises OverloadedError, and ContextLengthError for texts
        that cannot fit, without tokenizing them."""
        num_chars, limit = sum(map(len, texts)), self.tokenizer.max_text_bytes
        if num_chars > limit or (num_chars * 4 > limit and sum(len(text.encode()) for text in texts) > limit):
            however = f"your prompt is too long: it has more than {limit} bytes. Shorten the prompt."
            raise ContextLengthError(field, self.manifest.max_model_len, however)
        if num_chars <= INLINE_CHARS:
            return encode()
        caller = asking if isinstance(asking, Caller) else asking.caller
        tenant, waiting = caller.tenant, self.tokenizing.waiting
        of_tenant = (MAX_TOKENIZING if caller.is_anyone else MAX_TOKENIZING_OF_TENANT) * limit
        if waiting[tenant] + num_chars > of_tenant or waiting.total() + num_chars > MAX_TOKENIZING * limit:
            if isinstance(asking, ReceivedRequest):
                self._metrics.refused_early(caller.slo(asking.slo_class, asking.objectives).name, tenant)
            raise OverloadedError(
                f"texts of {waiting[tenant]} characters wait to be tokenized, limit {of_tenant}; try again "
                "later",
                _TOKENIZING_RETRY_S,
                RefusalReason.TOKENIZING,
            )
        return await self.tokenizing.run(caller, encode, num_chars)

    def check_model(self, name: str) -> None:
        """Raises UnknownModelError unless `name` is the served model, one of its aliases, or empty."""
        served = self.manifest.name
        aliases = self.settings.model_alias
        if name and name != served and not any(fnmatchcase(name, alias) for alias in aliases):
            raise UnknownModelError(
                "model", f"{quoted(name)} is not served here; use {served!r} or leave it empty"
            )

    def _tokenized(
        self, received: ReceivedRequest, token_ids: Sequence[int], *, field: str
    ) -> TokenizedRequest:
        if not token_ids:
            raise InvalidRequestError(field, "is empty; send at least one token")
        manifest = self.manifest
        slo = received.caller.slo(received.slo_class, received.objectives)
        if received.truncate_to is not None:
            token_ids = token_ids[-self._num_kept(received) :]
        sampling = complete_sampling(
            self._with_bad_texts(received),
            prompt_field=field,
            num_prompt_tokens=len(token_ids),
            max_model_len=manifest.max_model_len,
            vocab_size=manifest.vocab_size,
            recommended=self.recommended_sampling,
        )
        timeout_s = self.settings.request_timeout_s
        if received.timeout_s is not None:
            timeout_s = min(timeout_s, received.timeout_s)
        request = TokenizedRequest(
            request_id=received.request_id,
            tenant=received.caller.tenant,
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            slo=slo,
            arrived=received.arrived,
            deadline=received.arrived + timeout_s,
            speculation=SpeculationMode.parse(received.speculation),
            limits=self.settings.tenant_limits(received.caller),
            cache_salt=received.cache_salt,
        )
        trace = current()
        if trace.is_recording:
            trace.set(trace_attributes.of_request(request))
        return request

    def _num_kept(self, received: ReceivedRequest) -> int:
        """Number of tokens to keep of a truncated prompt."""
        if received.truncate_to is not None and received.truncate_to > 0:
            return received.truncate_to
        context = self.manifest.max_model_len
        room: int = received.sampling.get("max_tokens", context)
        return context - (room if room < context else min(USUAL_TOKENS, context // 2))

    def _with_bad_texts(self, received: ReceivedRequest) -> Mapping[str, Any]:
        """Adds the texts of bad_words to the sampling fields as token ids, with and without a leading
        space."""
        if not received.bad_texts:
            return received.sampling
        words = dict.fromkeys(received.sampling.get("bad_words", ()))
        if len(received.bad_texts) + len(words) > MAX_BAD_WORDS:
            raise InvalidRequestError("bad_words", f"has more than {MAX_BAD_WORDS} entries; leave some out")
        for text in received.bad_texts:
            if not text.strip() or len(text) > MAX_STOP_CHARS:
                raise InvalidRequestError(
                    "bad_words", f"{quoted(text)} is blank or has more than {MAX_STOP_CHARS} characters"
                )
            plain, spaced = (
                tuple(self.tokenizer.encode(prefix + text.lstrip(), add_special_tokens=False))
                for prefix in ("", " ")
            )
            words[plain] = None
            if spaced[-len(plain) :] != plain:
                words[spaced] = None
        return {**received.sampling, "bad_words": tuple(words)}

    async def run(
        self, requests: Sequence[TokenizedRequest], on_accepted: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[Event, None]:
        """Yields the events of all choices of one call. Close the generator to cancel them. `on_accepted`:
        see Admission.slot.

        All choices are admitted together; each choice, or each beam, takes one place. Raises OverloadedError,
        DeadlineError, UnavailableError, UpstreamError.
        """
        if requests[0].request_id in self._running_ids:
            suffix = secrets.token_hex(4)
            requests = [
                dataclasses.replace(request, request_id=f"{request.request_id}-{suffix}")
                for request in requests
            ]
        first = requests[0]
        self._running_ids.add(first.request_id)
        self._num_received += 1
        running = [Running(request, self._metrics.of(request)) for request in requests]
        trace = current()
        trace.begin_work("admission queue")
        outcome = Outcome.ERROR
        num_prompt = sum(len(prompt) for prompt in {request.prompt_token_ids for request in requests})
        if trace.is_recording:
            trace.set(trace_attributes.of_choices(len(requests), num_prompt))
        #: Computed tokens for each one of an answer: a beam search computes more texts than it returns.
        computed = num_sequences(requests) / len(requests)
        #: Tokens that the tenant's quota holds for the call, its prompt tokens, and tokens of answers so
        #: far.
        num_held = num_computed = num_relayed = 0
        per_minute = first.limits.tokens_per_minute
        #: Fields of a refusal; a reference to the error itself would form a cycle with this frame.
        refusal: dict[str, str] = {}
        try:
            num_wanted = num_prompt + round(computed * sum(map(self._num_held, requests)))
            self._rates.take(first.tenant, per_minute, num_wanted)
            num_held = num_wanted
            # If the longest prompt, computed last, meets the objectives, all others do.
            longest = max(requests, key=lambda one: len(one.prompt_token_ids))
            num_others = num_prompt - len(longest.prompt_token_ids)
            places = num_places(requests, self.settings.max_in_flight)
            async with self._admission.slot(longest, places, num_others, on_accepted) as admitted:
                num_computed = num_prompt
                for choice in running:
                    choice.admitted(admitted)
                num_left = len(running)
                async with aclosing(relay_choices(self._relay, running, places)) as events:
                    async for choice, event in events:
                        event.choice = choice.request.choice
                        if isinstance(event, decode_pb2.DecodeFinished):
                            self._complete(choice, event, admitted)
                            num_left -= 1
                            if not num_left:
                                break  # the last event is sent after the places are released
                        elif choice.relayed(len(event.token_ids)):
                            num_relayed += len(event.token_ids)
                            if num_prompt + num_relayed > num_held:  # only the context limits it
                                self._rates.charge(first.tenant, per_minute, USUAL_TOKENS)
                                num_held += USUAL_TOKENS
                            is_first = admitted.first_at is None
                            num_before = len(choice.request.output_token_ids)
                            admitted.placed.gained(num_before + choice.num_tokens, choice.first_at)
                            if is_first:
                                self._admission.started(admitted)
                        yield event
            if num_left:  # the relay promises a DecodeFinished for each
                raise GatewayError("the answer has no end")
            outcome = Outcome.OK
            self._count_answers(running)
            if trace.is_recording:
                trace.set(trace_attributes.of_answer(running, self.manifest.name))
            yield event
        except REQUEST_ERRORS as error:
            outcome = presentation(error).outcome
            if isinstance(error, OverloadedError):
                refusal = {"reason": error.reason.value, "message": str(error)}
            for choice in running:
                choice.metrics.failed(error)
            trace.fail_stage(presentation(error).code)
            trace.fail(presentation(error).code)
            trace.set(trace_attributes.of_incomplete(running, error))
            raise
        except (asyncio.CancelledError, GeneratorExit) as end:
            if any(choice.end is None for choice in running):
                # gRPC cancels the call both at the caller's deadline and when the caller leaves.
                outcome = Outcome.DEADLINE if time.monotonic() >= first.deadline else Outcome.CANCELLED
                if GATEWAY_STOPS in end.args:
                    outcome = Outcome.UNAVAILABLE
                is_in_time = outcome is Outcome.CANCELLED and all(
                    choice.end is not None or choice.metrics.is_in_time for choice in running
                )
                trace.set(trace_attributes.of_incomplete(running, is_in_time=is_in_time))
                if outcome is Outcome.DEADLINE:
                    trace.fail("deadline_exceeded")
                elif outcome is Outcome.UNAVAILABLE:
                    trace.fail("unavailable")
            raise
        except Exception:
            trace.fail("internal_error")
            raise
        finally:
            self._running_ids.discard(first.request_id)
            num_computed += round(computed * sum(choice.num_tokens for choice in running))
            self._rates.charge(first.tenant, per_minute, num_computed - num_held)
            for choice in running:
                of_choice = Outcome.OK if choice.end is not None else outcome
                choice.metrics.ended(of_choice)
                receipt = None if choice.end is None else choice.end.receipt
                self._ended.add(
                    choice.request,
                    of_choice,
                    receipt,
                    was_admitted=choice.is_admitted,
                    refusal=refusal.get("message", ""),
                )
            trace.set({"tandem.outcome": outcome.value})
            trace.end_work("respond")
            self._log_end(running, outcome, refusal)

    def _num_held(self, request: TokenizedRequest) -> int:
        """Tokens of an answer that the tenant's quota holds when it begins: its maximum. For an answer that
        only the context limits, the quota holds more as tokens come, because few answers use a long
        context."""
        most = request.sampling.max_tokens
        is_limited = len(request.prompt_token_ids) + most < self.manifest.max_model_len
        return most if is_limited else min(most, USUAL_TOKENS)

    def _count_answers(self, running: Sequence[Running]) -> None:
        """Counts the answers of each prompt; for a resumed call only those that it completed."""
        num_tokens: defaultdict[int, list[int]] = defaultdict(list)
        for choice in running:
            if choice.end is not None:
                prompt = choice.request.choice - choice.request.rank
                num_tokens[prompt].append(choice.end.receipt.output_tokens)
        for of_prompt in num_tokens.values():
            self._metrics.answered(of_prompt)

    def _log_end(self, running: Sequence[Running], outcome: Outcome, refusal: Mapping[str, str]) -> None:
        first = running[0].request
        receipts = [choice.end.receipt for choice in running if choice.end is not None]
        details: dict[str, int | float | bool | str] = {"choices": len(running)} if len(running) > 1 else {}
        if len(receipts) == len(running):
            details |= {
                "output_tokens": sum(receipt.output_tokens for receipt in receipts),
                "ttft_s": round(min(receipt.ttft_ns for receipt in receipts) / NS_PER_S, 4),
                "slo_met": all(receipt.slo_met for receipt in receipts),
            }
        missed = next((receipt for receipt in receipts if not receipt.slo_met), None)
        if missed is not None:
            details |= {"slo_miss_cause": missed.slo_miss_cause, "slo_miss_reason": missed.slo_miss_reason}
        details |= refusal
        self._log.log(
            self._request_level,
            "request",
            request_id=first.request_id,
            outcome=outcome.value,
            tenant=first.tenant,
            slo_class=first.slo.name,
            prompt_tokens=len(first.prompt_token_ids),
            e2e_s=round(time.monotonic() - first.arrived, 4),
            **details,
        )

    def fleet_status(self, caller: Caller) -> gateway_pb2.GetFleetStatusResponse:
        """Lists the pods. Only operators see the pods' prompts, whose request ids belong to all tenants."""
        return gateway_pb2.GetFleetStatusResponse(
            pods=[pod.to_proto(with_prompts=caller.is_operator) for pod in self.fleet.pods()],
            requests_queued=self._admission.queue.num_waiting,
            requests_running=self._admission.queue.num_in_flight,
            requests_total=self._num_received,
            version=software_version(),
            unix_seconds=time.time(),
            slo_classes=[slo_to_proto(slo) for slo in self._metrics.slo_classes.values()],
        )

    def _complete(self, choice: Running, end: decode_pb2.DecodeFinished, admitted: Admitted) -> None:
        """Adds the gateway's fields to the pod's receipt: queue time, TTFT and E2E at the gateway, SLO.

        Only the choice that admission predicted gets the predictions.
        """
        now = time.monotonic()
        choice.end, receipt = end, end.receipt
        request, is_judged = choice.request, choice.request.choice == admitted.request.choice
        forecast = admitted.forecast if is_judged else None
        e2e_s = now - request.arrived
        ttft_s = (choice.first_at or now) - request.arrived
        # Only tokens of this computation; a resumed answer also has earlier ones.
        num_output = receipt.output_tokens - len(request.output_token_ids)
        tpot_s = (e2e_s - ttft_s) / (num_output - 1) if num_output > 1 else 0.0
        miss = request.slo.miss(ttft_s, tpot_s, e2e_s)
        receipt.request_id = request.request_id
        receipt.queue_ns += round(admitted.queued_s * NS_PER_S) + choice.waited_ns
        receipt.ttft_ns = round(ttft_s * NS_PER_S)
        receipt.e2e_ns = round(e2e_s * NS_PER_S)
        receipt.prompt_tokens = len(request.prompt_token_ids)
        receipt.seed = request.sampling.seed
        receipt.slo.CopyFrom(slo_to_proto(request.slo))
        receipt.slo_met = not miss
        receipt.slo_miss_reason = miss
        if miss:
            receipt.slo_miss_cause = miss_cause(
                receipt,
                # A request that was expected to be late exceeds no prediction.
                None if request.is_late else admitted.forecast,
                is_late_start=ttft_s > request.slo.ttft_s > 0,
                is_late_end=e2e_s > request.slo.e2e_s > 0,
            )
        if admitted.is_widened:
            receipt.slo_widened = True
            receipt.slo_asked.CopyFrom(slo_to_proto(choice.asked))
        if forecast is not None:
            judged_s = admitted.judged_at - request.arrived
            receipt.predicted_ttft_p50_ns = round((judged_s + forecast.ttft.p50) * NS_PER_S)
            receipt.predicted_ttft_p90_ns = round((judged_s + forecast.ttft.high) * NS_PER_S)
            receipt.predicted_e2e_p50_ns = round((judged_s + forecast.e2e.p50) * NS_PER_S)
            receipt.predicted_e2e_p90_ns = round((judged_s + forecast.e2e.high) * NS_PER_S)
        if is_judged:
            self._admission.ended(admitted, e2e_s=e2e_s, num_tokens=receipt.output_tokens)
        choice.metrics.finished(end)
