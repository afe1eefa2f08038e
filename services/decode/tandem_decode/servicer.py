"""DecodeService: one call runs one request, from its prompt to its receipt.

    validate -> compute the prompt (on a prefill pod, or here) -> stream every step's tokens as text ->
    receipt

A beam search streams nothing before its end; then one event has all its texts, the best first.

A request may contain the beginning of its answer, which a lost pod had sent. It is computed like a part of
the prompt, and the stream continues after it.

A draining pod announces this in every stream and continues to compute. The gateway moves the answer to
another pod, which fetches the KV here (PrefillService), so that the pod can stop within seconds.

The call owns the request. However it ends (end of text, a stop string, cancellation, an error), the engine
forgets the request and releases everything it held.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import grpc
from tandem_core import codec
from tandem_core.contracts import computes_locally
from tandem_core.errors import InvalidRequestError, InvariantError
from tandem_core.model.detokenizer import StreamingDetokenizer
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.prefix_hash import cache_salt
from tandem_core.sampling import FinishReason, SamplingParams
from tandem_core.speculation import SpeculationMode
from tandem_engine.assemble import EngineParts
from tandem_engine.beam_search import Hypothesis
from tandem_engine.engine import StepOutput
from tandem_engine.loop import EngineLoop
from tandem_engine.prompt_scores import PromptScores
from tandem_engine.request import Request
from tandem_engine.scheduler import append_tokens, text_end
from tandem_engine.transport.incoming import KVReceiver
from tandem_engine.transport.outgoing import KVSender
from tandem_pod.engine_watch import leave_if_stuck
from tandem_pod.requests import HEARTBEAT_S, due_at, end_due_at, is_read, read_request, token_objective
from tandem_pod.status import decode_cost, pod_status
from tandem_prefill.servicer import PrefillServicer
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tandem_service.tracing import RequestTrace, Tracing, current

from tandem_decode.handoff import Attempts, Handoff, HandoffResult
from tandem_decode.lookahead_sync import LookaheadSync
from tandem_decode.metrics import DecodeMetrics
from tandem_decode.receipt import RequestRecord
from tandem_decode.settings import DecodeSettings

#: Time for the next pod to fetch KV after the last request has left a draining pod.
_LINGER_S = 1.0
_DRAIN_CHECK_S = 0.05


class _OutputQueue:
    """One request's step outputs, from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[StepOutput | Exception] = asyncio.Queue()

    def put(self, output: StepOutput | Exception) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, output)

    async def get(self, timeout_s: float) -> StepOutput | None:
        """The next output; None after the timeout. Raises the exception that ended the engine."""
        try:
            async with asyncio.timeout(timeout_s):
                output = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(output, Exception):
            raise output
        return output


class _TextStream:
    """One request's outputs as text, up to the first stop string or the engine's own end.

    The request's earlier output counts as already pushed.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._detokenizer = StreamingDetokenizer(tokenizer, request.sampling)
        self._detokenizer.push(request.output_token_ids)
        self.num_tokens = self._detokenizer.num_tokens
        self.finish_reason: FinishReason | None = None
        self.stop_reason = ""
        self.stop_token_id: int | None = None
        self._end(is_finished=request.finish_reason is not None)

    def push(self, output: StepOutput) -> tuple[StepOutput, str]:
        """The output up to a stop string, and the text that became final with it."""
        ends = output.finished and self._request.finish_reason is FinishReason.STOP
        text = self._detokenizer.push(output.token_ids, ends=ends)
        output = output.truncated(self._detokenizer.num_tokens - self.num_tokens)
        self.num_tokens = self._detokenizer.num_tokens
        if self._end(is_finished=output.finished):
            text += self._detokenizer.flush()  # nothing after a stop string
        return output, text if self._request.sampling.detokenize else ""

    def _end(self, *, is_finished: bool) -> bool:
        """Whether the text ends here: at a stop string, or because the engine finished the request."""
        if self._detokenizer.stopped is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, self._detokenizer.stopped
        elif is_finished:
            self.finish_reason = self._request.finish_reason or FinishReason.STOP
            self.stop_token_id = self._request.stop_token_id
            self.stop_reason = "" if self.stop_token_id is None else str(self.stop_token_id)
        return self.finish_reason is not None


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(
        self,
        settings: DecodeSettings,
        parts: EngineParts,
        loop: EngineLoop,
        receiver: KVReceiver,
        handoff: Handoff,
        lookahead: LookaheadSync,
        metrics: DecodeMetrics,
        prefill: PrefillServicer,
        sender: KVSender,
        tracing: Tracing,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._loop = loop
        self._receiver = receiver
        self._handoff = handoff
        self._lookahead = lookahead
        self._metrics = metrics
        self._prefill = prefill
        self._sender = sender
        self._tracing = tracing
        self._is_draining = False
        self._num_open_calls = 0
        self._num_calls = 0
        self._drafted = 0
        self._accepted = 0

    async def Decode(  # noqa: N802
        self,
        request: decode_pb2.DecodeRequest,
        context: grpc.aio.ServicerContext[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse],
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        if self._is_draining:
            await context.abort(grpc.StatusCode.CANCELLED, "the pod is stopping; send the request to another")
        if self._loop.is_stuck:
            await context.abort(grpc.StatusCode.CANCELLED, "the engine hangs; send the request to another")
        reading = read_request(self._to_request, request, self._parts.manifest.max_model_len)
        try:
            while not await is_read(reading):
                yield self._progress()
        finally:
            reading.cancel()
        state = reading.result()
        is_shared = not request.decode_retries and not request.choice
        record = RequestRecord(state, request.request_id, self._settings.pod_id)
        self._num_open_calls += 1
        self._num_calls += 1
        headers = context.invocation_metadata() or ()
        trace = self._tracing.begin(headers, "decode pod", "enter engine", started_ns=record.arrived_ns)
        outcome, is_complete = "failed", False
        self._lookahead.begin(state.tenant)
        try:
            if is_shared:
                self._lookahead.push_prompt(state.tenant, state.request_id, state.prompt_token_ids)
            outputs = _OutputQueue()
            stream = _TextStream(state, self._parts.tokenizer)
            if stream.finish_reason is None:  # else the earlier pod was lost after the last token
                attempts = record.attempts
                computing = asyncio.create_task(self._compute_prompt(state, request, outputs, attempts))
                news = asyncio.create_task(attempts.is_news.wait())
                try:
                    while not computing.done():
                        await asyncio.wait(
                            {computing, news},
                            timeout=HEARTBEAT_S,
                            return_when=asyncio.FIRST_COMPLETED,
                        )
                        if not computing.done():
                            await leave_if_stuck(self._loop, context, state.request_id)
                            num_failed = attempts.num_failed
                            yield self._progress(attempts)
                            attempts.reported(num_failed)
                        if news.done():
                            news = asyncio.create_task(attempts.is_news.wait())
                finally:
                    news.cancel()
                    if computing.cancel():
                        await asyncio.wait({computing})
                record.handed_off(computing.result())
            told_at = 0.0
            hypotheses: tuple[Hypothesis, ...] = ()
            while stream.finish_reason is None:
                new = await outputs.get(HEARTBEAT_S)
                if new is None:
                    await leave_if_stuck(self._loop, context, state.request_id)
                is_silent = self._is_draining or state.search is not None
                if new is None or (is_silent and time.monotonic() - told_at > HEARTBEAT_S):
                    told_at = time.monotonic()
                    is_computed = state.search is not None and record.has_tokens
                    yield self._progress(is_prompt_computed=is_computed)
                if new is None:
                    continue
                if state.search is not None:
                    if not record.has_tokens:
                        record.trace_prefill(trace)
                        trace.stage("decode")
                        yield self._progress(is_prompt_computed=True)
                    record.step(new)
                    hypotheses = new.hypotheses
                    if new.finished:
                        break
                    continue
                offset = stream.num_tokens
                chunks = [
                    self._chunk(stream, part)
                    for part in (new.split() if request.one_token_chunks else [new])
                    if stream.finish_reason is None
                ]
                # Tokens that a draft added after a stop string would not exist without the draft.
                output = new.truncated(stream.num_tokens - offset)
                if is_shared:
                    self._lookahead.push(state.tenant, state.request_id, offset, output.token_ids)
                if not record.has_tokens:
                    record.trace_prefill(trace)
                    trace.stage("decode")
                record.step(output)
                if stream.finish_reason is not None and not output.finished:
                    # Not awaited: after a stop string the engine must not spend another step on the request.
                    self._loop.call(lambda: self._loop.forget(state.request_id))
                for chunk in chunks:
                    yield decode_pb2.DecodeResponse(chunk=chunk)
            if state.finish_reason is not None and hypotheses:
                record.found(hypotheses[0])
                outcome, is_complete = state.finish_reason.value, True
                _trace_end(trace, record, outcome)
                yield decode_pb2.DecodeResponse(
                    beams=decode_pb2.DecodeBeams(
                        beams=[self._beam(state, one) for one in hypotheses], receipt=record.receipt()
                    )
                )
                return
            if stream.finish_reason is None:
                raise InvariantError("the engine ended a search that has found nothing")
            outcome, is_complete = stream.finish_reason.value, True
            if is_shared and trace.is_recording:
                self._lookahead.push_trace(state.tenant, dict(trace.metadata)["traceparent"])
            _trace_end(trace, record, outcome)
            yield decode_pb2.DecodeResponse(
                finished=decode_pb2.DecodeFinished(
                    reason=codec.finish_reason_to_proto(stream.finish_reason),
                    stop_reason=stream.stop_reason,
                    stop_token_id=stream.stop_token_id,
                    receipt=record.receipt(),
                )
            )
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except Exception as error:
            trace.fail(type(error).__name__)
            raise
        finally:
            self._num_open_calls -= 1
            if not is_complete:
                _trace_end(trace, record, outcome)
            self._lookahead.end(state.tenant)
            self._count(record, outcome)
            # Shielded: a cancelled call must still release its blocks.
            try:
                await asyncio.shield(self._loop.call_async(lambda: self._loop.forget(state.request_id)))
            finally:
                trace.end()

    async def hand_over(self) -> None:
        """Begins the drain; returns when every request has ended or left, and its KV is fetched."""
        self._is_draining = True
        busy_until = time.monotonic()
        while self._is_busy or time.monotonic() < busy_until:
            if self._is_busy:
                busy_until = time.monotonic() + _LINGER_S
            await asyncio.sleep(_DRAIN_CHECK_S)

    @property
    def _is_busy(self) -> bool:
        return self._num_open_calls > 0 or self._prefill.num_open_calls > 0

    def _chunk(self, stream: _TextStream, output: StepOutput) -> decode_pb2.DecodeChunk:
        offset = stream.num_tokens
        output, text = stream.push(output)
        return decode_pb2.DecodeChunk(
            text=text,
            token_ids=output.token_ids,
            offset=offset,
            logprobs=codec.logprobs_to_proto(output.logprobs, self._parts.tokenizer),
            prompt_logprobs=codec.prompt_logprobs_to_proto(output.prompt_logprobs),
        )

    def _beam(self, request: Request, found: Hypothesis) -> decode_pb2.DecodeBeam:
        reason, stop_token_id = text_end(request, found.token_ids[-1])
        detokenizer = StreamingDetokenizer(self._parts.tokenizer, request.sampling)
        text = detokenizer.push(found.token_ids, ends=reason is FinishReason.STOP) + detokenizer.flush()
        return decode_pb2.DecodeBeam(
            text=text if request.sampling.detokenize else "",
            token_ids=found.token_ids,
            logprobs=codec.logprobs_to_proto(found.logprobs, self._parts.tokenizer),
            reason=codec.finish_reason_to_proto(reason),
            stop_reason="" if stop_token_id is None else str(stop_token_id),
            stop_token_id=stop_token_id,
        )

    def _progress(
        self, attempts: Attempts | None = None, *, is_prompt_computed: bool = False
    ) -> decode_pb2.DecodeResponse:
        return decode_pb2.DecodeResponse(
            progress=decode_pb2.DecodeProgress(
                prefill_crashes=attempts.num_crashed if attempts else 0,
                prefill_failures=attempts.num_failed if attempts else 0,
                draining=self._is_draining,
                prompt_computed=is_prompt_computed,
            )
        )

    async def GetDecodeStatus(  # noqa: N802
        self,
        request: decode_pb2.GetDecodeStatusRequest,
        context: grpc.aio.ServicerContext[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse],
    ) -> decode_pb2.GetDecodeStatusResponse:
        await leave_if_stuck(self._loop, context)
        return decode_pb2.GetDecodeStatusResponse(status=self.status())

    async def _compute_prompt(
        self,
        state: Request,
        message: decode_pb2.DecodeRequest,
        outputs: _OutputQueue,
        attempts: Attempts,
    ) -> HandoffResult:
        """Hands the prompt to a prefill pod, unless `_why_here` says why not."""
        engine = self._loop.engine

        def begin() -> int | None:
            # Runs both in one call, because each call waits for the end of a step.
            self._loop.listen(state.request_id, outputs.put)
            reason = self._why_here(state, message)
            if reason is None:
                engine.check_tokens(state)
                return None
            engine.add(state)
            self._metrics.local_prefills.labels(reason).inc()
            return time.monotonic_ns()

        added_ns = await self._loop.call_async(begin)
        if added_ns is None:
            result = await self._handoff.run(state, message, attempts)
            if not result.prefill_pod:
                self._metrics.local_prefills.labels("no pod delivered").inc()
            return result
        current().stage("queue", at_ns=added_ns)
        return HandoffResult()

    def _why_here(self, state: Request, message: decode_pb2.DecodeRequest) -> str | None:
        """Why no prefill pod computes the prompt; None: one does. Called on the engine's thread."""
        if state.prompt_scores is not None:
            return "log probabilities"  # which a prefill pod does not send
        if not (message.prefill_targets or message.kv_source):
            return "no prefill pod"
        if self._parts.is_recurrent:
            return "recurrent state"  # which is not sent yet
        engine, settings = self._loop.engine, self._settings
        cached = engine.blocks.count_cached(state.tokens(0, state.num_tokens), state.cache_salt)
        is_short = computes_locally(
            state.num_tokens - cached,
            settings.local_prefill_tokens,
            settings.idle_prefill_tokens,
            is_idle=not engine.has_work(),
        )
        return "short" if is_short else None

    def _to_request(self, message: decode_pb2.DecodeRequest) -> Request:
        max_model_len = self._parts.manifest.max_model_len
        room = max_model_len - len(message.prompt_token_ids)
        sampling = SamplingParams(**{"max_tokens": max(room, 1)} | codec.given_sampling(message.sampling))
        request = Request(
            # Unique per call: callers may use an id twice, and two calls must not share a listener, a block
            # table or a sequence in the lookahead service.
            request_id=f"{message.request_id}#{secrets.token_hex(8)}",
            prompt_token_ids=list(message.prompt_token_ids),
            sampling=sampling,
            cache_salt=cache_salt(message.tenant, self._parts.manifest.revision, salt=message.cache_salt),
            eos_token_ids=self._parts.eos_token_ids,
            tenant=message.tenant,
            speculation=SpeculationMode.parse(message.speculation),
            guide=self._parts.guide_state(sampling.guide),
            due=due_at(message),
            token_s=token_objective(message),
            ends_by=end_due_at(message),
            num_expected=len(message.output_token_ids) + message.expected_tokens
            if message.expected_tokens
            else 0,
        )
        if message.output_token_ids and request.search is not None:
            raise InvalidRequestError(
                "output_token_ids", "cannot be continued by beam search, which begins anew; send none"
            )
        if not message.output_token_ids:
            request.prompt_scores = PromptScores.wanted(request.prompt_token_ids, sampling)
        else:  # its caller has them
            update = append_tokens(request, message.output_token_ids, max_model_len)
            if len(update.new_token_ids) < len(message.output_token_ids):
                raise InvalidRequestError(
                    "output_token_ids",
                    f"has {len(message.output_token_ids)} tokens, but the text ends after "
                    f"{len(update.new_token_ids)}; send the tokens of an answer to this request",
                )
        return request

    def _count(self, record: RequestRecord, outcome: str) -> None:
        metrics, receipt = self._metrics, record.receipt()
        metrics.requests.labels(outcome).inc()
        metrics.output_tokens.inc(receipt.output_tokens)
        metrics.steps.inc(receipt.decode_steps)
        metrics.drafts.inc(receipt.drafts)
        metrics.preemptions.inc(record.num_preemptions)
        metrics.received_bytes.inc(receipt.transfer_bytes)
        for kind, count in record.attempts.failures.items():
            metrics.handoffs.labels(kind.value).inc(count)
        for source, count in receipt.drafted_by_source.items():
            metrics.drafted_tokens.labels(source).inc(count)
        for position, count in record.drafted_at.items():
            metrics.drafted_at.labels(str(position)).inc(count)
        for position, count in record.accepted_at.items():
            metrics.accepted_at.labels(str(position)).inc(count)
        for source, count in receipt.accepted_by_source.items():
            metrics.accepted_tokens.labels(source).inc(count)
        if receipt.prefill_pod:
            metrics.handoffs.labels("ok").inc()
            metrics.transfer_seconds.observe(receipt.transfer_ns / 1e9)
        if receipt.output_tokens > 1:
            metrics.tpot_seconds.observe(receipt.decode_ns / 1e9 / (receipt.output_tokens - 1))
        self._drafted += receipt.drafted_tokens
        self._accepted += receipt.accepted_tokens

    def status(self) -> common_pb2.PodStatus:
        status = pod_status(self._parts, self._loop, pod_id=self._settings.pod_id, role="decode")
        status.usage.requests_waiting += self._handoff.num_reserving
        status.usage.transfers_open = self._receiver.open_transfers + self._sender.open_transfers
        status.usage.credit_bytes_outstanding = self._receiver.credit_outstanding_bytes
        status.usage.streams_open = self._num_open_calls
        status.decode_cost.CopyFrom(decode_cost(self._loop.engine))
        gained = self._loop.engine.tokens_per_step
        status.tokens_per_step = gained.mean
        status.tokens_per_step_by_batch.extend(gained.by_batch())
        status.local_prefill_tokens = self._settings.local_prefill_tokens
        status.idle_prefill_tokens = self._settings.idle_prefill_tokens
        status.requests_total = self._num_calls
        status.drafted_tokens_total = self._drafted
        status.accepted_tokens_total = self._accepted
        return status


def _trace_end(trace: RequestTrace, record: RequestRecord, outcome: str) -> None:
    """Ends the trace at the last token, or where the request ends without it."""
    if not trace.is_recording:
        return
    trace.set({"tandem.outcome": outcome})
    if record.has_tokens:
        trace.set_stage(record.trace_attributes())
    else:
        record.trace_prefill(trace)
    trace.stage("release")
