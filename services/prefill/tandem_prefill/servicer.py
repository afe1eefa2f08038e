"""PrefillService: one call computes one prompt.

    check the layout -> open the transfer -> queue in the engine -> heartbeats while it computes
    -> first token, at once -> the stream stays open until the last frame is credited -> end

A decode pod that drains serves this too, so that other pods get the KV of its requests.

However the call ends (cancelled by the decode pod, an error, a lost peer), the request leaves the engine,
the transfer is aborted and the blocks are released.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import grpc
from tandem_core import codec
from tandem_core.errors import InvalidRequestError
from tandem_core.prefix_hash import cache_salt
from tandem_core.sampling import SamplingParams
from tandem_engine.assemble import EngineParts
from tandem_engine.engine import StepOutput
from tandem_engine.loop import EngineLoop, wait_for_future
from tandem_engine.request import Request
from tandem_engine.transport.base import Ticket, TransferState
from tandem_engine.transport.codec import ticket_from_proto
from tandem_engine.transport.outgoing import KVSender, OutgoingTransfer
from tandem_pod.engine_watch import leave_if_stuck
from tandem_pod.requests import HEARTBEAT_S, due_at, is_read, read_request
from tandem_pod.status import pod_status
from tandem_proto.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tandem_service.tls import belongs_to_peer
from tandem_service.tracing import Tracing

from tandem_prefill.kv_streaming import KVStreamer
from tandem_prefill.metrics import PrefillMetrics


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(
        self,
        parts: EngineParts,
        loop: EngineLoop,
        sender: KVSender,
        streamer: KVStreamer,
        metrics: PrefillMetrics,
        tracing: Tracing,
        pod_id: str,
        *,
        only_to_caller: bool = True,
    ) -> None:
        #: Whether KV is sent only to the host that called Prefill.
        self._only_to_caller = only_to_caller
        self._parts = parts
        self._loop = loop
        self._sender = sender
        self._streamer = streamer
        self._metrics = metrics
        self._tracing = tracing
        self._pod_id = pod_id
        self._num_open_calls = 0
        self._num_calls = 0

    async def Prefill(  # noqa: N802
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse],
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self._parts.layout.check(request.ticket.layout_fingerprint, request.ticket.layout_description)
        max_model_len = self._parts.manifest.max_model_len
        _check_blocks(request.ticket, math.ceil(max_model_len / self._parts.layout.block_size))
        reading = read_request(self._to_request, request, max_model_len)
        try:
            while not await is_read(reading):
                yield prefill_pb2.PrefillResponse(progress=prefill_pb2.PrefillProgress())
        finally:
            reading.cancel()
        prompt = reading.result()
        ticket = ticket_from_proto(request.ticket)
        if self._only_to_caller:
            _check_owner(ticket, context)
        transfer = self._sender.open(ticket)
        self._num_open_calls += 1
        self._num_calls += 1
        arrived_ns = time.monotonic_ns()
        outcome, has_token = "failed", False
        headers = context.invocation_metadata() or ()
        trace = self._tracing.begin(headers, "prefill pod", "queue", started_ns=arrived_ns)
        try:
            first_token: Future[StepOutput] = Future()
            # The engine's thread runs this after its current step, which may be long.
            queued = self._loop.call(lambda: self._start(prompt, transfer, first_token))
            for settled in (queued, first_token):
                async for heartbeat in self._heartbeats_until(settled, prompt, transfer, context):
                    yield heartbeat
                settled.result()
            finished = self._finished(prompt, transfer, first_token.result(), arrived_ns)
            has_token = True
            trace.stage("prefill", at_ns=prompt.first_scheduled_ns)
            trace.stage("send KV")
            sent = transfer.finish()
            yield prefill_pb2.PrefillResponse(finished=finished)
            self._metrics.queue_seconds.observe(finished.queue_ns / 1e9)
            self._metrics.prefill_seconds.observe(finished.compute_ns / 1e9)
            async for heartbeat in self._heartbeats_until(sent, prompt, transfer, context):
                yield heartbeat
            sent.result()
            outcome = "ok"
            self._metrics.prompt_tokens.inc(prompt.num_prompt_tokens)
            self._metrics.cached_tokens.inc(prompt.num_cached_tokens)
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except Exception as error:
            trace.fail(type(error).__name__)
            raise
        finally:
            self._num_open_calls -= 1
            trace.set(
                {
                    "tandem.outcome": outcome,
                    "tandem.prompt.tokens": prompt.num_prompt_tokens,
                    "tandem.prompt.cached_tokens": prompt.num_cached_tokens,
                    "tandem.kv.sent_bytes": transfer.sent_bytes,
                    "tandem.preemptions": prompt.num_preemptions,
                }
            )
            if not has_token and prompt.first_scheduled_ns is not None:
                trace.stage("prefill", at_ns=prompt.first_scheduled_ns)
            trace.stage("release")
            self._metrics.requests.labels(outcome).inc()
            self._metrics.sent_bytes.inc(transfer.sent_bytes)
            self._metrics.preemptions.inc(prompt.num_preemptions)
            transfer.abort()  # does nothing after a finished transfer
            try:
                await asyncio.shield(self._loop.call_async(lambda: self._end(prompt.request_id)))
            finally:
                trace.end()

    @property
    def num_open_calls(self) -> int:
        return self._num_open_calls

    async def GetPrefillStatus(  # noqa: N802
        self,
        request: prefill_pb2.GetPrefillStatusRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse],
    ) -> prefill_pb2.GetPrefillStatusResponse:
        await leave_if_stuck(self._loop, context)
        return prefill_pb2.GetPrefillStatusResponse(status=self.status())

    def status(self) -> common_pb2.PodStatus:
        status = pod_status(self._parts, self._loop, pod_id=self._pod_id, role="prefill")
        status.usage.transfers_open = max(self._sender.open_transfers, self._streamer.num_open)
        status.usage.streams_open = self._num_open_calls
        status.requests_total = self._num_calls
        return status

    async def _heartbeats_until(
        self,
        settled: Future[Any],
        prompt: Request,
        transfer: OutgoingTransfer,
        context: grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse],
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """A heartbeat every HEARTBEAT_S until the future settles; raises TransferError if the transfer
        fails."""
        while not await wait_for_future(settled, HEARTBEAT_S):
            if transfer.state is TransferState.FAILED:  # the rest of the work would be useless
                transfer.done.result()
            await leave_if_stuck(self._loop, context, prompt.request_id)
            yield prefill_pb2.PrefillResponse(
                progress=prefill_pb2.PrefillProgress(
                    computed_tokens=prompt.num_computed_tokens,
                    sent_bytes=transfer.sent_bytes,
                    computed_layers=self._streamer.num_computed_layers,
                )
            )

    def _finished(
        self, prompt: Request, transfer: OutgoingTransfer, output: StepOutput, arrived_ns: int
    ) -> prefill_pb2.PrefillFinished:
        finished_ns = time.monotonic_ns()
        started_ns = prompt.first_scheduled_ns or arrived_ns
        return prefill_pb2.PrefillFinished(
            first_token_id=output.token_ids[0],
            logprobs=next(iter(codec.logprobs_to_proto(output.logprobs, self._parts.tokenizer)), None),
            cached_tokens=prompt.num_cached_tokens,
            queue_ns=max(started_ns - arrived_ns, 0),
            compute_ns=finished_ns - started_ns,
            sent_bytes=transfer.sent_bytes,
            pod_id=self._pod_id,
            preemptions=prompt.num_preemptions,
        )

    def _to_request(self, message: prefill_pb2.PrefillRequest) -> Request:
        sampling = SamplingParams(**codec.given_sampling(message.sampling))
        if sampling.beam_search is not None:
            raise InvalidRequestError(
                "beam_search", "is not for prefill pods, which compute one next token; leave it out"
            )
        num_output = len(message.output_token_ids) + 1
        return Request(
            # Unique per call: a request may be retried here while an earlier call for it is still ending.
            request_id=f"{message.request_id}#{secrets.token_hex(8)}",
            prompt_token_ids=list(message.prompt_token_ids),
            # Samples the same first token, and no second one.
            sampling=replace(
                sampling, max_tokens=num_output, min_tokens=min(sampling.min_tokens, num_output), stop=()
            ),
            output_token_ids=list(message.output_token_ids),
            cache_salt=cache_salt(message.tenant, self._parts.manifest.revision, salt=message.cache_salt),
            eos_token_ids=self._parts.eos_token_ids,
            tenant=message.tenant,
            guide=self._parts.guide_state(sampling.guide),
            due=due_at(message),
        )

    # The following methods run on the engine's thread.

    def _start(self, prompt: Request, transfer: OutgoingTransfer, first_token: Future[StepOutput]) -> None:
        def on_output(output: StepOutput | Exception) -> None:
            if isinstance(output, Exception):
                first_token.set_exception(output)
            else:
                first_token.set_result(output)

        self._loop.listen(prompt.request_id, on_output)
        self._streamer.open(prompt.request_id, transfer)
        self._listen()
        self._loop.engine.add(prompt)

    def _end(self, request_id: str) -> None:
        self._loop.forget(request_id)
        self._streamer.close(request_id)
        self._listen()

    def _listen(self) -> None:
        # Set only while needed, because a step without a listener computes all layers in one call.
        is_needed = self._streamer.num_open > 0
        self._loop.engine.layer_listener = self._streamer.on_layer_done if is_needed else None


def _check_blocks(ticket: prefill_pb2.KvTicket, most: int) -> None:
    """InvalidRequestError for more blocks than a context has, each of which takes memory here."""
    num_blocks = max((len(group.blocks) for group in ticket.wanted_blocks), default=0)
    if num_blocks > most:
        raise InvalidRequestError(
            "ticket.wanted_blocks",
            f"are {num_blocks}, but the context has {most}; send those of the prompt",
        )


def _check_owner(
    ticket: Ticket, context: grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]
) -> None:
    """InvalidRequestError unless the ticket's KV goes back to the caller.

    A caller could otherwise make this pod connect anywhere and send a tenant's KV to a third party.
    """
    host = ticket.endpoint.removeprefix("tcp://").rpartition(":")[0]
    if not belongs_to_peer(host, context.peer(), context.auth_context()):
        raise InvalidRequestError(
            "ticket.endpoint",
            f"{ticket.endpoint!r} is not on the caller's host ({context.peer()}); start the decode pod with "
            "--kv-host set to the address from which it calls, or to a name in its certificate",
        )
