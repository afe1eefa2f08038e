"""DecodeService: one call is one request, from its prompt to its receipt.

    validate -> compute the prompt (a handoff, or here) -> relay every step's tokens as text -> receipt

The call owns the request. However it ends (the text, a stop string, cancellation, a fault), `_end` runs on
the engine's thread and nothing of the request is left.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc
from tandem_core import codec
from tandem_core.errors import InvalidRequestError
from tandem_core.model.detokenizer import StreamingDetokenizer
from tandem_core.prefix_hash import cache_salt
from tandem_core.sampling import FinishReason
from tandem_core.speculation import SpeculationMode
from tandem_engine.assemble import EngineParts
from tandem_engine.engine import StepOutput
from tandem_engine.loop import EngineLoop
from tandem_engine.request import Request
from tandem_engine.transport.incoming import KVReceiver
from tandem_pod.codec import books_to_proto
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc

from tandem_decode.handoff import Handoff, HandoffResult
from tandem_decode.metrics import DecodeMetrics
from tandem_decode.receipt import RequestRecord
from tandem_decode.settings import DecodeSettings
from tandem_decode.sharing import Sharing

T = TypeVar("T")


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(
        self,
        settings: DecodeSettings,
        parts: EngineParts,
        loop: EngineLoop,
        receiver: KVReceiver,
        handoff: Handoff,
        sharing: Sharing,
        metrics: DecodeMetrics,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._loop = loop
        self._receiver = receiver
        self._handoff = handoff
        self._sharing = sharing
        self._metrics = metrics
        self._streams = 0
        self._requests = 0
        self._drafted = 0
        self._accepted = 0

    async def Decode(  # noqa: N802
        self,
        request: decode_pb2.DecodeRequest,
        context: grpc.aio.ServicerContext[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse],
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        state = self._to_request(request)
        self._sharing.open(state.tenant)
        self._sharing.push_prompt(state.tenant, state.request_id, state.prompt_token_ids)
        record = RequestRecord(state, request.request_id, self._settings.pod_id)
        self._streams += 1
        self._requests += 1
        outcome = "failed"
        try:
            outputs: asyncio.Queue[StepOutput | Exception] = asyncio.Queue()
            event_loop = asyncio.get_running_loop()
            await self._on_engine(
                lambda: self._loop.listen(
                    state.request_id,
                    lambda output: (event_loop.call_soon_threadsafe(outputs.put_nowait, output), None)[1],
                )
            )
            record.handed_off(await self._compute_prompt(state, request))
            detokenizer = StreamingDetokenizer(
                self._parts.tokenizer, state.sampling.stop, min_tokens=state.sampling.min_tokens
            )
            reason, stop_reason, num_tokens = None, "", 0
            while reason is None:
                output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                text = detokenizer.push(output.token_ids)
                # What a draft brought beyond a stop string would not be there without the draft.
                output = output.truncated(detokenizer.num_tokens - num_tokens)
                self._sharing.push(state.tenant, state.request_id, num_tokens, output.token_ids)
                num_tokens = detokenizer.num_tokens
                record.step(output)
                if detokenizer.stopped is not None:
                    reason, stop_reason = FinishReason.STOP, detokenizer.stopped
                    # Not waited for: the engine shall not spend another step on it.
                    self._loop.call(lambda: self._loop.forget(state.request_id))
                elif output.finished:
                    reason, stop_reason = state.finish_reason or FinishReason.STOP, state.stop_reason
                    text += detokenizer.flush()
                yield decode_pb2.DecodeResponse(
                    chunk=decode_pb2.DecodeChunk(
                        text=text,
                        token_ids=output.token_ids,
                        logprobs=codec.logprobs_to_proto(output.logprobs, self._parts.tokenizer),
                    )
                )
            outcome = reason.value
            yield decode_pb2.DecodeResponse(
                finished=decode_pb2.DecodeFinished(
                    reason=codec.finish_reason_to_proto(reason),
                    stop_reason=stop_reason,
                    receipt=record.receipt(),
                )
            )
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        finally:
            self._streams -= 1
            self._count(record, outcome)
            # Shielded: the call may be gone, the blocks must still come back.
            await asyncio.shield(self._on_engine(lambda: self._loop.forget(state.request_id)))

    async def GetDecodeStatus(  # noqa: N802
        self,
        request: decode_pb2.GetDecodeStatusRequest,
        context: grpc.aio.ServicerContext[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse],
    ) -> decode_pb2.GetDecodeStatusResponse:
        return decode_pb2.GetDecodeStatusResponse(status=await self.status())

    async def _compute_prompt(self, state: Request, message: decode_pb2.DecodeRequest) -> HandoffResult:
        """Hands the prompt to a prefill pod unless too little of it is uncached to be worth the way."""
        engine = self._loop.engine
        if message.prefill_targets:
            engine.check_tokens(state)
            cached, busy = await self._on_engine(
                lambda: (
                    engine.blocks.count_cached(state.prompt_token_ids, state.cache_salt),
                    engine.has_work(),
                )
            )
            limit = self._settings.local_prefill_tokens
            if not busy:
                limit = max(limit, self._settings.idle_prefill_tokens)
            if state.num_prompt_tokens - cached >= limit:
                return await self._handoff.run(state, message)
            self._metrics.local_prefills.labels("short").inc()
        else:
            self._metrics.local_prefills.labels("no prefill pod").inc()
        await self._on_engine(lambda: engine.add(state))
        return HandoffResult()

    async def status(self) -> common_pb2.PodStatus:
        """The pod's state and books, read between two steps of the engine."""
        return await self._on_engine(self._status)

    def _to_request(self, message: decode_pb2.DecodeRequest) -> Request:
        room = self._parts.manifest.max_model_len - len(message.prompt_token_ids)
        return Request(
            # Unique per call: the caller's id may come twice, here or at another gateway, and two calls must
            # not share a listener, a block table or a place in the forest.
            request_id=f"{message.request_id}#{secrets.token_hex(8)}",
            prompt_token_ids=list(message.prompt_token_ids),
            sampling=codec.sampling_from_proto(message.sampling, default_max_tokens=max(room, 1)),
            cache_salt=cache_salt(message.tenant, self._parts.manifest.revision),
            eos_token_ids=self._parts.eos_token_ids,
            tenant=message.tenant,
            speculation=_strategy(message.speculation),
        )

    def _count(self, record: RequestRecord, outcome: str) -> None:
        metrics, receipt = self._metrics, record.receipt()
        metrics.requests.labels(outcome).inc()
        metrics.output_tokens.inc(receipt.output_tokens)
        metrics.drafted_tokens.inc(receipt.drafted_tokens)
        metrics.received_bytes.inc(receipt.transfer_bytes)
        metrics.prefill_retries.inc(receipt.prefill_retries)
        for source, count in receipt.accepted_by_source.items():
            metrics.accepted_tokens.labels(source).inc(count)
        if receipt.prefill_pod:
            metrics.transfer_seconds.observe(receipt.transfer_ns / 1e9)
        if receipt.output_tokens > 1:
            metrics.tpot_seconds.observe(receipt.decode_ns / 1e9 / (receipt.output_tokens - 1))
        self._drafted += receipt.drafted_tokens
        self._accepted += receipt.accepted_tokens

    def _status(self) -> common_pb2.PodStatus:
        engine, manifest = self._loop.engine, self._parts.manifest
        books = books_to_proto(self._loop)
        books.transfers_open = self._receiver.open_transfers
        books.credit_bytes_outstanding = self._receiver.credit_outstanding_bytes
        books.streams_open = self._streams
        return common_pb2.PodStatus(
            pod_id=self._settings.pod_id,
            role="decode",
            model=manifest.name,
            model_revision=manifest.revision,
            max_model_len=manifest.max_model_len,
            block_size=self._parts.layout.block_size,
            books=books,
            kv_free_ratio=(books.blocks_free + books.blocks_cached) / books.blocks_total,
            step_seconds=engine.decode_step_seconds,
            prefill_tokens_per_second=engine.prefill_tokens_per_second,
            requests_total=self._requests,
            drafted_tokens_total=self._drafted,
            accepted_tokens_total=self._accepted,
        )

    def _on_engine(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._loop.call(function))


def _strategy(name: str) -> SpeculationMode | None:
    """None for "": as the pod drafts."""
    try:
        return SpeculationMode(name) if name else None
    except ValueError:
        known = ", ".join(strategy.value for strategy in SpeculationMode)
        raise InvalidRequestError("speculation", f"{name!r} is unknown; use one of {known}") from None
