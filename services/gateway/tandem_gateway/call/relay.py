"""Streams one request from a decode pod, and continues it on another pod if the pod is lost.

    choose pod -> Decode(request, tokens so far) -> DecodeChunk, ..., DecodeFinished
       ^               |
       +-- the pod is lost: the relay tries another pod, or waits for one. If two pods of either role crashed
       |   with the request since its last token, or four went silent, the request may be the cause and is not
       |   tried again, except once more if others may be the cause too (suspects.py). A refused connection or
       |   a cancellation, while draining or because of other requests, does not count as a crash
       +-- the pod drains: the relay moves to another pod as soon as there is one, which fetches the KV from
       |   the draining pod
       +-- FAILED_PRECONDITION, the request exceeds the pod's KV pool: the relay tries another pod; if every
           pod is too small, it raises ContextLengthError

The next pod gets the tokens so far and sends the tokens after them. These equal the tokens that the lost pod
would have sent, because a token depends only on prompt, output, parameters and seed. A beam search has no
tokens before its end, so the next pod starts again and finds the same texts. Closing the generator cancels
the call, and the pod frees its resources.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TypeAlias

import grpc
import grpc.aio
import structlog
from tandem_core.codec import sampling_to_proto
from tandem_core.contracts import MAX_CRASHES, RefusalReason
from tandem_core.errors import InvalidRequestError
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tandem_service import tracing
from tandem_service.interceptors import REQUEST_ID_KEY

from tandem_gateway.call.silence import Silence
from tandem_gateway.call.suspects import Suspect, Suspects
from tandem_gateway.errors import (
    ContextLengthError,
    CrashingRequestError,
    DeadlineError,
    GatewayError,
    LossCause,
    OverloadedError,
    UnavailableError,
    UpstreamError,
)
from tandem_gateway.fleet.load import Placed
from tandem_gateway.fleet.pods import Fleet, Role
from tandem_gateway.fleet.routing import Route, Router
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import Event, TokenizedRequest

#: Retry-after in seconds of a request that a full pod refused.
_POD_FULL_RETRY_S = 1.0
#: A pod sends something every 0.25 s; one that sends nothing for this long has stopped or cannot be reached.
_SILENCE_LIMIT_S = 1.0
#: Time for a pod to end the call after its last event.
_END_LIMIT_S = 1.0
#: Statuses of calls to a lost pod; a draining pod cancels its running calls.
_POD_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
#: Weight of a silent pod, in crashes. A pod reports a hanging engine, so silence more likely means a failed
#: host or network.
_SILENCE_CRASHES = 0.5
_FINISH_REASONS = frozenset(common_pb2.FinishReason.values()) - {common_pb2.FINISH_REASON_UNSPECIFIED}

DecodeCall: TypeAlias = "grpc.aio.UnaryStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]"


class _LostError(Exception):
    """The pod is lost. `accepted`: it had accepted the call; `crashes`: the weight of the loss in crashes."""

    def __init__(self, message: str, cause: LossCause, *, accepted: bool, crashes: float = 0.0) -> None:
        super().__init__(message)
        self.cause = cause
        self.accepted = accepted
        self.crashes = crashes


class _TooSmallError(Exception):
    """The request exceeds the pod's KV pool of `num_tokens` tokens."""

    def __init__(self, num_tokens: int, details: str) -> None:
        super().__init__(details)
        self.num_tokens = num_tokens


def _cut_off(error: UnavailableError, request: TokenizedRequest, num_tokens: int) -> UnavailableError:
    return UnavailableError(
        f"{error}; the answer stops after {num_tokens} tokens, and seed {request.sampling.seed} repeats it"
    )


class Relay:
    """Relays requests to decode pods. Belongs to one event loop."""

    def __init__(
        self, fleet: Fleet, router: Router, metrics: GatewayMetrics, *, failover_wait_s: float
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._metrics = metrics
        self._failover_wait_s = failover_wait_s
        self._log = structlog.get_logger("tandem.relay")
        self._planning = asyncio.Lock()
        self._silence = Silence(_SILENCE_LIMIT_S)
        self._suspects = Suspects()
        #: Tasks that read calls to their ends.
        self._ending: set[asyncio.Task[None]] = set()

    async def stream(
        self, request: TokenizedRequest, placed: Placed
    ) -> AsyncGenerator[Event | decode_pb2.DecodeBeams, None]:
        """Yields the events of the request, the last one a DecodeFinished; a beam search yields only one
        DecodeBeams. `placed`: the call's admitted request, which has the places of all its choices. Raises
        InvalidRequestError or GatewayError."""
        #: The route of the first attempt, to the pods that have or will have the prompt's KV.
        planned = placed.route if request.prompt_token_ids == placed.request.prompt_token_ids else None
        if is_part := request.request_id != placed.request.request_id:
            placed = placed.part(request)
            if planned is not None:
                planned = replace(planned, computes_prompt=planned.decode, start=planned.stop - 1)
        suspect = Suspect(self._suspects)
        try:
            async with aclosing(self._attempts(request, placed, planned, suspect)) as events:
                async for event in events:
                    if is_part and isinstance(event, decode_pb2.DecodeChunk):
                        placed.gained(placed.num_tokens + len(event.token_ids), time.monotonic())
                    yield event
        finally:
            suspect.clear()
            placed.leave()

    async def _attempts(
        self, request: TokenizedRequest, placed: Placed, planned: Route | None, suspect: Suspect
    ) -> AsyncGenerator[Event | decode_pb2.DecodeBeams, None]:
        """Yields the events from one pod after the other, until a pod has completed the answer. `planned`:
        the route of the first attempt."""
        #: Targets that failed. A pod that answers polls but no calls soon counts as healthy again; without
        #: this set, two such pods would alternate until the deadline.
        failed: frozenset[str] = frozenset()
        #: Pods that are too small, by target; they are never tried again.
        too_small: dict[str, _TooSmallError] = {}
        #: The answer so far.
        tokens = list(request.output_token_ids)
        num_lost = 0
        #: Crashes of pods of either role since the last token; a silent pod counts less than one.
        num_crashed = 0.0
        #: The draining pod that the answer has just left, which still has the KV.
        kv_source = ""
        #: End of the wait in the current outage; None: no outage.
        give_up_at: float | None = None
        trace, is_waiting = tracing.current(), False
        #: Time until the first pod was available.
        waited_ns, began_ns = 0, time.monotonic_ns()
        #: Sums over lost pods; see failover_ns of Receipt.
        decode_ns = failover_ns = 0
        #: Start of the current time without progress, after a loss.
        idle_since_ns: int | None = None
        while True:
            if num_crashed >= MAX_CRASHES:
                await self._wait_for_turn(suspect, request)
                give_up_at = None
            route = None
            if planned is not None and planned.decode.healthy:
                route = planned
                self._router.sent(request, route)
            planned = None
            route = route or await self._choose(request, failed, frozenset(too_small))
            if route is None:
                if give_up_at is None:
                    give_up_at = self._outage_ends(request)
                if not is_waiting:
                    trace.stage("wait for decode pod")
                    is_waiting = True
                try:
                    await self._wait_for_pod(request, give_up_at, too_small)
                except UnavailableError as error:
                    raise (_cut_off(error, request, len(tokens)) if tokens else error) from error
                continue
            if is_waiting and not num_lost:
                waited_ns = time.monotonic_ns() - began_ns
            if placed.route is not route:
                placed.move(route)
            if num_crashed:
                suspect.enter(route.decode.target, route.computes_prompt.target)
            num_before, num_crashed_before = len(tokens), num_crashed
            #: Number of failed calls of this pod to prefill pods.
            num_failed = 0
            is_waiting = False
            tried_ns, first_ns, last_ns = time.monotonic_ns(), 0, 0
            if idle_since_ns is not None:
                failover_ns += tried_ns - idle_since_ns
                idle_since_ns = None
            try:
                call = self._stream_from(route, request, tokens, num_lost, num_crashed, kv_source)
                kv_source = ""
                async with aclosing(call) as events:
                    async for event in events:
                        if isinstance(event, decode_pb2.DecodeProgress):
                            if event.prompt_computed:
                                placed.computed()
                            reported = max(event.prefill_failures, event.prefill_crashes)
                            if reported > num_failed:
                                num_failed = reported
                                self._fleet.note_failure()
                            if event.prefill_crashes:
                                num_crashed = num_crashed_before + event.prefill_crashes
                                self._check_crashes(num_crashed, len(tokens), suspect)
                            others = failed.union(too_small, (route.decode.target,))
                            if event.draining and self._router.has_decode_pod(others):
                                kv_source = route.decode.target
                                raise _LostError("it is draining", LossCause.DRAINING, accepted=True)
                            continue
                        if isinstance(event, decode_pb2.DecodeChunk):
                            placed.computed()
                            tokens += event.token_ids
                            if num_crashed:
                                suspect.clear()
                            num_crashed = 0.0
                            last_ns = time.monotonic_ns()
                            first_ns = first_ns or last_ns
                        else:
                            event.receipt.output_tokens += num_before
                            event.receipt.decode_retries = num_lost
                            event.receipt.queue_ns += waited_ns
                            event.receipt.decode_ns += decode_ns
                            event.receipt.failover_ns = failover_ns
                            self._metrics.count_work(event.receipt)
                        yield event
                return
            except _TooSmallError as error:
                self._log.info("decode pod is too small for the request", target=route.decode.target)
                trace.fail_stage("too small")
                too_small[route.decode.target] = error
                placed.leave()
            except _LostError as error:
                trace.set_stage({"tandem.loss.message": str(error)})
                trace.fail_stage(error.cause.value)
                # If one call is silent and the pod's other calls are not, the pod is not hung.
                is_alive = error.cause is LossCause.SILENT and route.decode.is_heard(_SILENCE_LIMIT_S / 2)
                if not is_alive:
                    is_expected = error.cause is LossCause.DRAINING
                    self._fleet.mark_dead(route.decode, str(error), is_expected=is_expected)
                    self._router.forget(route.decode)
                    failed |= {route.decode.target}
                placed.leave()
                num_lost += error.accepted
                num_crashed += error.crashes
                idle_since_ns = last_ns or tried_ns
                decode_ns += last_ns - first_ns
                failover_ns += first_ns - tried_ns if first_ns else 0
                self._check_crashes(num_crashed, len(tokens), suspect)
                if give_up_at is None or error.accepted:
                    give_up_at = self._outage_ends(request)
                self._log.warning(
                    "decode pod failed; trying another", target=route.decode.target, num_tokens=len(tokens)
                )
                self._metrics.failovers.labels(error.cause.value).inc()

    async def _choose(
        self, request: TokenizedRequest, failed: frozenset[str], too_small: frozenset[str]
    ) -> Route | None:
        """Chooses a route; one request at a time, because a plan takes milliseconds, and all requests of a
        lost pod, or all prompts of a call, need one at the same moment."""
        async with self._planning:
            await asyncio.sleep(0)
            # Without another pod, try one that failed and is healthy again.
            return self._router.choose(request, failed | too_small) or self._router.choose(request, too_small)

    async def _wait_for_turn(self, suspect: Suspect, request: TokenizedRequest) -> None:
        try:
            await suspect.wait_for_turn(request.deadline - time.monotonic())
        except TimeoutError:
            raise DeadlineError("the deadline passed while requests went on after crashes of pods") from None

    def _check_crashes(self, num_crashed: float, num_tokens: int, suspect: Suspect) -> None:
        if suspect.is_the_cause(num_crashed):
            raise CrashingRequestError(
                f"{MAX_CRASHES} pods crashed while they computed token {num_tokens + 1} of this request, or "
                f"{MAX_CRASHES / _SILENCE_CRASHES:g} went silent; the request may be the cause, so no other "
                "pod tries it"
            )

    def _outage_ends(self, request: TokenizedRequest) -> float:
        """Monotonic seconds at which an outage that begins now ends the request."""
        return min(time.monotonic() + self._failover_wait_s, request.deadline)

    async def _stream_from(
        self,
        route: Route,
        request: TokenizedRequest,
        tokens: Sequence[int],
        num_lost: int,
        num_crashed: float,
        kv_source: str,
    ) -> AsyncGenerator[Event | decode_pb2.DecodeBeams | decode_pb2.DecodeProgress, None]:
        """Yields the events from one pod, which continue after `tokens` from `num_lost` other pods.

        Raises _LostError, _TooSmallError, InvalidRequestError or GatewayError.
        """
        pod = route.decode
        trace = tracing.current()
        trace.call_stage(
            "call decode pod",
            pod.target,
            {"tandem.answer.tokens_before": len(tokens), "tandem.decode.retries": num_lost},
        )
        stub = decode_pb2_grpc.DecodeServiceStub(pod.channel)  # type: ignore[no-untyped-call]
        num_left, now, slo = route.tokens_left(len(tokens)), time.monotonic(), request.promised
        call = stub.Decode(
            decode_pb2.DecodeRequest(
                request_id=request.request_id,
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                prompt_token_ids=request.prompt_token_ids,
                sampling=sampling_to_proto(request.sampling),
                prefill_targets=[prefill.target for prefill in route.prefill],
                speculation=request.speculation or "",
                output_token_ids=tokens,
                decode_retries=num_lost + request.is_repeated,
                crashes=min(int(num_crashed), MAX_CRASHES - 1),
                kv_source=kv_source,
                one_token_chunks=request.one_token_events,
                due_seconds=request.due - now,
                token_seconds=slo.tpot_s,
                end_seconds=request.arrived + slo.e2e_s - now if slo.e2e_s else None,
                expected_tokens=num_left,
                choice=request.choice,
            ),
            timeout=max(0.001, request.deadline - time.monotonic()),
            metadata=((REQUEST_ID_KEY, request.request_id), *trace.metadata),
        )
        is_search = request.sampling.beam_search is not None
        for one in (pod, route.computes_prompt):
            one.works.entered(request.request_id)
        responses = aiter(call)
        is_accepted = is_finished = False
        try:
            while True:
                response = await self._silence.within(anext(responses))
                pod.heard_at = time.monotonic()
                is_accepted = True
                match response.WhichOneof("event"):
                    case "beams" if is_search and response.beams.beams:
                        is_finished = True
                        yield response.beams
                        return
                    case "chunk" | "finished" if is_search:
                        raise UpstreamError(
                            f"the decode pod {pod.target} has no beam search; do pod and gateway have the "
                            "same version?"
                        )
                    case "chunk" if self._continues(response.chunk, request, tokens, num_lost):
                        yield response.chunk
                    case "finished" if response.finished.reason in _FINISH_REASONS:
                        is_finished = True
                        yield response.finished
                        return
                    case "progress":
                        yield response.progress
                    case _:
                        raise UpstreamError(
                            f"the decode pod {pod.target} broke the protocol: a response without an event, "
                            "with an unknown finish reason, not after the tokens so far, or without the "
                            "prompt's log probabilities; do pod and gateway have the same version?"
                        )
        except StopAsyncIteration:
            raise UpstreamError(f"the decode pod {pod.target} ended the stream without a finish") from None
        except TimeoutError as error:
            message = f"it sent nothing for {_SILENCE_LIMIT_S:g} s"
            crashes = is_accepted * _SILENCE_CRASHES
            raise _LostError(message, LossCause.SILENT, accepted=is_accepted, crashes=crashes) from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                num_tokens = pod.load.total_blocks * pod.load.block_size
                raise _TooSmallError(num_tokens, error.details() or "") from error
            if error.code() not in _POD_GONE:
                raise self._translate(error, route) from error
            # A pod sends the request id as soon as it accepts the call.
            is_accepted = is_accepted or REQUEST_ID_KEY in (await call.initial_metadata())
            is_crashed = is_accepted and error.code() is grpc.StatusCode.UNAVAILABLE
            cause = LossCause.UNREACHABLE
            if is_accepted:
                cause = LossCause.CRASHED if is_crashed else LossCause.DRAINING
            message = f"{error.code().name}: {error.details()}"
            raise _LostError(message, cause, accepted=is_accepted, crashes=float(is_crashed)) from error
        finally:
            for one in (pod, route.computes_prompt):
                one.works.left(request.request_id)
            if is_finished:
                ending = asyncio.create_task(_read_to_end(call, responses))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            else:
                call.cancel()  # does nothing to a call that has ended

    def _continues(
        self,
        chunk: decode_pb2.DecodeChunk,
        request: TokenizedRequest,
        tokens: Sequence[int],
        num_lost: int,
    ) -> bool:
        """Whether the chunk follows `tokens`, and a first chunk has the prompt's log probabilities if the
        request asks for them."""
        if (num_lost or request.is_repeated) and chunk.offset != len(tokens):
            return False
        return bool(tokens) or request.sampling.prompt_logprobs is None or chunk.HasField("prompt_logprobs")

    async def _wait_for_pod(
        self, request: TokenizedRequest, give_up_at: float, too_small: Mapping[str, _TooSmallError]
    ) -> None:
        """Waits until the fleet changes. Raises ContextLengthError when every decode pod is too small for the
        request; at `give_up_at` UnavailableError or DeadlineError."""
        largest = max(too_small.values(), key=lambda error: (error.num_tokens, str(error)), default=None)
        listed = {pod.target for pod in self._fleet.pods() if pod.role is Role.DECODE}
        if largest is not None and listed <= too_small.keys():
            raise ContextLengthError(
                "max_tokens",
                largest.num_tokens,
                f"this request needs more: no decode pod can hold it. The largest one reports: {largest}",
            )
        left_s = give_up_at - time.monotonic()
        if left_s <= 0:
            if time.monotonic() >= request.deadline:
                raise DeadlineError("the deadline passed while no decode pod was available")
            reason = "" if largest is None else f" (the listed pods cannot hold it: {largest})"
            raise UnavailableError(f"no decode pod is available for the request{reason}; try again later")
        await self._fleet.wait_for_change(left_s)

    def _translate(self, error: grpc.aio.AioRpcError, route: Route) -> InvalidRequestError | GatewayError:
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT:
                field, separator, message = details.partition(": ")
                return InvalidRequestError(*((field, message) if separator else ("request", details)))
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return OverloadedError(details, _POD_FULL_RETRY_S, RefusalReason.POD_FULL)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineError("the deadline passed before the answer was complete")
            case _:
                target = route.decode.target
                self._log.error("decode failed", target=target, code=error.code().name, details=details)
                return UpstreamError(f"the decode pod {target} failed: {error.code().name}: {details}")


async def _read_to_end(call: DecodeCall, responses: AsyncIterator[decode_pb2.DecodeResponse]) -> None:
    """Reads after the last event until the pod ends the call; a dropped call would count as cancelled."""
    with suppress(TimeoutError, grpc.aio.AioRpcError):
        async with asyncio.timeout(_END_LIMIT_S):
            async for _ in responses:
                pass
    call.cancel()
