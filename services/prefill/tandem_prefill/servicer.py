"""PrefillService: one call is one prompt.

    check the layout -> open the transfer -> queue in the engine -> heartbeats while it computes
    -> first token, at once -> the stream stays open until the last frame is credited -> end

Whatever ends the call early (the decode pod's cancellation, a fault, a lost peer), the request leaves the
engine, the transfer is aborted and the blocks are given back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar

import grpc
from tandem_core import codec
from tandem_core.prefix_hash import cache_salt
from tandem_core.sampling import SamplingParams
from tandem_engine.aio import wait_for_future
from tandem_engine.assemble import EngineParts
from tandem_engine.engine import StepOutput
from tandem_engine.loop import EngineLoop
from tandem_engine.request import Request
from tandem_engine.transport.base import TransferState
from tandem_engine.transport.codec import ticket_from_proto
from tandem_engine.transport.outgoing import KVSender, OutgoingTransfer
from tandem_pod.codec import books_to_proto
from tandem_proto.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

from tandem_prefill.kv_streaming import KVStreamer
from tandem_prefill.metrics import PrefillMetrics

T = TypeVar("T")
_HEARTBEAT_S = 0.25


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(
        self,
        parts: EngineParts,
        loop: EngineLoop,
        sender: KVSender,
        streamer: KVStreamer,
        metrics: PrefillMetrics,
        pod_id: str,
    ) -> None:
        self._parts = parts
        self._loop = loop
        self._sender = sender
        self._streamer = streamer
        self._metrics = metrics
        self._pod_id = pod_id
        self._streams = 0
        self._requests = 0

    async def Prefill(  # noqa: N802
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse],
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self._parts.layout.check(request.ticket.layout_fingerprint, request.ticket.layout_description)
        prompt = self._to_request(request)
        outgoing = self._sender.open(ticket_from_proto(request.ticket))
        self._streams += 1
        self._requests += 1
        arrived = time.monotonic_ns()
        outcome = "failed"
        try:
            outputs: asyncio.Queue[StepOutput | Exception] = asyncio.Queue()
            event_loop = asyncio.get_running_loop()
            entered = self._loop.call(
                lambda: self._start(
                    prompt,
                    outgoing,
                    lambda output: event_loop.call_soon_threadsafe(outputs.put_nowait, output),
                )
            )
            # The engine's thread takes the call after its current step, which may be long.
            while not await wait_for_future(entered, _HEARTBEAT_S):
                yield self._progress(prompt, outgoing)
            entered.result()
            while True:
                try:
                    async with asyncio.timeout(_HEARTBEAT_S):
                        output = await outputs.get()
                    break
                except TimeoutError:
                    if outgoing.state is TransferState.FAILED:  # nobody wants the rest of the work
                        outgoing.done.result()
                    yield self._progress(prompt, outgoing)
            if isinstance(output, Exception):
                raise output
            finished = time.monotonic_ns()
            drained = outgoing.finish()
            started = prompt.first_scheduled_ns or arrived
            yield prefill_pb2.PrefillResponse(
                finished=prefill_pb2.PrefillFinished(
                    first_token_id=output.token_ids[0],
                    logprobs=next(
                        iter(codec.logprobs_to_proto(output.logprobs, self._parts.tokenizer)), None
                    ),
                    cached_tokens=prompt.num_cached_tokens,
                    queue_ns=max(started - arrived, 0),
                    compute_ns=finished - started,
                    sent_bytes=outgoing.sent_bytes,
                    pod_id=self._pod_id,
                )
            )
            self._metrics.prefill_seconds.observe((finished - started) / 1e9)
            while not await wait_for_future(drained, _HEARTBEAT_S):
                yield self._progress(prompt, outgoing)
            drained.result()
            outcome = "ok"
            self._metrics.prompt_tokens.inc(prompt.num_prompt_tokens)
            self._metrics.cached_tokens.inc(prompt.num_cached_tokens)
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        finally:
            self._streams -= 1
            self._metrics.requests.labels(outcome).inc()
            self._metrics.sent_bytes.inc(outgoing.sent_bytes)
            outgoing.abort()  # a no-op after a finished transfer
            await asyncio.shield(self._on_engine(lambda: self._end(prompt.request_id)))

    async def GetPrefillStatus(  # noqa: N802
        self,
        request: prefill_pb2.GetPrefillStatusRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse],
    ) -> prefill_pb2.GetPrefillStatusResponse:
        return prefill_pb2.GetPrefillStatusResponse(status=await self.status())

    async def status(self) -> common_pb2.PodStatus:
        """The pod's state and books, read between two steps of the engine."""
        return await self._on_engine(self._status)

    def _to_request(self, message: prefill_pb2.PrefillRequest) -> Request:
        asked = codec.sampling_from_proto(message.sampling, default_max_tokens=1)
        return Request(
            # Unique per call: the same request may come again while an earlier call is being torn down.
            request_id=f"{message.request_id}#{secrets.token_hex(8)}",
            prompt_token_ids=list(message.prompt_token_ids),
            sampling=_first_token_only(asked),
            cache_salt=cache_salt(message.tenant, self._parts.manifest.revision),
            eos_token_ids=self._parts.eos_token_ids,
            tenant=message.tenant,
        )

    def _start(
        self,
        request: Request,
        outgoing: OutgoingTransfer,
        listener: Callable[[StepOutput | Exception], object],
    ) -> None:
        self._loop.listen(request.request_id, lambda output: (listener(output), None)[1])
        self._streamer.open(request.request_id, outgoing)
        self._loop.engine.add(request)

    def _end(self, request_id: str) -> None:
        self._loop.forget(request_id)
        self._streamer.close(request_id)

    def _progress(self, request: Request, outgoing: OutgoingTransfer) -> prefill_pb2.PrefillResponse:
        return prefill_pb2.PrefillResponse(
            progress=prefill_pb2.PrefillProgress(
                computed_tokens=request.num_computed_tokens,
                sent_bytes=outgoing.sent_bytes,
                computed_layers=self._streamer.num_computed_layers,
            )
        )

    def _status(self) -> common_pb2.PodStatus:
        books = books_to_proto(self._loop)
        books.transfers_open = max(self._sender.open_transfers, self._streamer.num_open)
        books.streams_open = self._streams
        return common_pb2.PodStatus(
            pod_id=self._pod_id,
            role="prefill",
            model=self._parts.manifest.name,
            model_revision=self._parts.manifest.revision,
            max_model_len=self._parts.manifest.max_model_len,
            block_size=self._parts.layout.block_size,
            books=books,
            kv_free_ratio=(books.blocks_free + books.blocks_cached) / books.blocks_total,
            prefill_tokens_per_second=self._loop.engine.prefill_tokens_per_second,
            requests_total=self._requests,
        )

    def _on_engine(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._loop.call(function))


def _first_token_only(sampling: SamplingParams) -> SamplingParams:
    """The same choice of the first token, and no second one."""
    return replace(sampling, max_tokens=1, min_tokens=min(sampling.min_tokens, 1), stop=())
