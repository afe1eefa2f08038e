"""Streams one request from a decode pod, and fails over to another pod if the pod is lost.

    choose pod -> Decode(...) -> DecodeChunk, ..., DecodeFinished
       ^               |
       +-- pod lost before the first token: tries another pod, or waits for one. If two pods crashed with
       |   the request, it may be the cause and is not sent to a third one. A refused connection or a
       |   cancellation while draining is no crash
       +-- FAILED_PRECONDITION, the request exceeds the pod's KV pool: tries another pod; if every pod is
           too small, raises ContextLengthError

Closing the generator cancels the call, and the pod frees its resources. There is no failover after the first
token: UnavailableError names the seed that repeats the text.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import grpc
import grpc.aio
import structlog
from tandem_core.codec import sampling_to_proto
from tandem_core.errors import InvalidRequestError
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tandem_service.interceptors import REQUEST_ID_KEY

from tandem_gateway.errors import (
    ContextLengthError,
    DeadlineError,
    GatewayError,
    OverloadedError,
    UnavailableError,
    UpstreamError,
)
from tandem_gateway.fleet import Fleet, Role
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import Event, TokenizedRequest
from tandem_gateway.routing import Route, Router

#: Retry-after of a request that its pod refused as full.
_POD_FULL_RETRY_S = 1.0
#: Statuses of a lost pod; a draining pod cancels its running calls.
_POD_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
#: Crashes with one request after which it is considered the cause.
_MAX_LOST_PODS = 2
_FINISH_REASONS = frozenset(common_pb2.FinishReason.values()) - {common_pb2.FINISH_REASON_UNSPECIFIED}


class _LostError(Exception):
    """The pod is lost. `accepted`: it had accepted the call; `crashed`: and then died."""

    def __init__(self, cause: grpc.aio.AioRpcError, *, accepted: bool) -> None:
        super().__init__(f"{cause.code().name}: {cause.details()}")
        self.accepted = accepted
        self.crashed = accepted and cause.code() is grpc.StatusCode.UNAVAILABLE


class _TooSmallError(Exception):
    """The request exceeds the pod's KV pool of `num_tokens` tokens."""

    def __init__(self, num_tokens: int, details: str) -> None:
        super().__init__(details)
        self.num_tokens = num_tokens


class Relay:
    def __init__(
        self, fleet: Fleet, router: Router, metrics: GatewayMetrics, *, failover_wait_s: float
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._metrics = metrics
        self._failover_wait_s = failover_wait_s
        self._log = structlog.get_logger("tandem.relay")

    async def stream(self, request: TokenizedRequest) -> AsyncGenerator[Event, None]:
        """Events of the request, a DecodeFinished last. Raises InvalidRequestError or GatewayError."""
        failed: frozenset[str] = frozenset()
        #: By target; unlike a pod that failed, a pod that is too small is not tried again.
        too_small: dict[str, _TooSmallError] = {}
        num_crashed = 0
        #: End of the wait in the current outage; None: no outage.
        give_up_at: float | None = None
        while True:
            # Without another pod, try one that failed and is healthy again.
            route = self._router.choose(request, failed.union(too_small)) or self._router.choose(
                request, frozenset(too_small)
            )
            if route is None:
                if give_up_at is None:
                    give_up_at = self._outage_ends(request)
                await self._wait_for_pod(request, give_up_at, too_small)
                continue
            num_tokens = 0
            try:
                async with aclosing(self._stream_from(route, request)) as events:
                    async for event in events:
                        if isinstance(event, decode_pb2.DecodeChunk):
                            num_tokens += len(event.token_ids)
                        yield event
                return
            except _TooSmallError as error:
                self._log.info("decode pod is too small for the request", target=route.decode.target)
                too_small[route.decode.target] = error
            except _LostError as error:
                self._fleet.mark_dead(route.decode, str(error))
                self._router.forget(route.decode)
                if num_tokens:
                    raise UnavailableError(
                        f"the decode pod {route.decode.target} went away after {num_tokens} tokens; send the "
                        f"request again (with seed {request.sampling.seed} for the same text)"
                    ) from error
                num_crashed += error.crashed
                if num_crashed >= _MAX_LOST_PODS:
                    raise UnavailableError(
                        f"{num_crashed} decode pods went away while they computed this request, before its "
                        "first token; it is not tried on another one, since it may be the cause"
                    ) from error
                if give_up_at is None or error.accepted:
                    give_up_at = self._outage_ends(request)
                self._log.warning("decode pod failed; trying another", target=route.decode.target)
                self._metrics.failovers.inc()
                failed |= {route.decode.target}

    def _outage_ends(self, request: TokenizedRequest) -> float:
        """When to give up an outage that begins now."""
        return min(time.monotonic() + self._failover_wait_s, request.deadline)

    async def _stream_from(self, route: Route, request: TokenizedRequest) -> AsyncGenerator[Event, None]:
        """Events from one pod.

        Raises _LostError, _TooSmallError, InvalidRequestError or GatewayError.
        """
        pod = route.decode
        stub = decode_pb2_grpc.DecodeServiceStub(pod.channel)  # type: ignore[no-untyped-call]
        call = stub.Decode(
            decode_pb2.DecodeRequest(
                request_id=request.request_id,
                tenant=request.tenant,
                prompt_token_ids=request.prompt_token_ids,
                sampling=sampling_to_proto(request.sampling),
                prefill_targets=route.prefill_targets,
                speculation=request.speculation or "",
            ),
            timeout=max(0.001, request.deadline - time.monotonic()),
            metadata=((REQUEST_ID_KEY, request.request_id),),
        )
        pod.in_flight += 1
        try:
            async for response in call:
                match response.WhichOneof("event"):
                    case "chunk":
                        yield response.chunk
                    case "finished" if response.finished.reason in _FINISH_REASONS:
                        yield response.finished
                        return
                    case _:
                        raise UpstreamError(
                            f"the decode pod {pod.target} broke the protocol: a response without an event or "
                            "with an unknown finish reason; do pod and gateway have the same version?"
                        )
            raise UpstreamError(f"the decode pod {pod.target} ended the stream without a finish")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                num_tokens = pod.load.total_blocks * pod.load.block_size
                raise _TooSmallError(num_tokens, error.details() or "") from error
            if error.code() not in _POD_GONE:
                raise self._translate(error, route) from error
            # A pod sends the request id as soon as it accepts the call.
            accepted = REQUEST_ID_KEY in (await call.initial_metadata())
            raise _LostError(error, accepted=accepted) from error
        finally:
            pod.in_flight -= 1
            call.cancel()  # does nothing to a call that has ended

    async def _wait_for_pod(
        self, request: TokenizedRequest, give_up_at: float, too_small: Mapping[str, _TooSmallError]
    ) -> None:
        """Waits until the fleet changes. Raises ContextLengthError when every decode pod is too small for the
        request; at `give_up_at` UnavailableError or DeadlineError."""
        largest = max(too_small.values(), key=lambda error: (error.num_tokens, str(error)), default=None)
        listed = {pod.target for pod in self._fleet.pods() if pod.role is Role.DECODE}
        if largest is not None and listed <= too_small.keys():
            raise ContextLengthError(
                "max_tokens", f"no decode pod can hold this request; the largest says: {largest}"
            )
        left_s = give_up_at - time.monotonic()
        if left_s <= 0:
            if time.monotonic() >= request.deadline:
                raise DeadlineError("the deadline passed while no decode pod was there")
            reason = "" if largest is None else f" (those that are there cannot hold it: {largest})"
            raise UnavailableError(f"no decode pod is there to serve the request{reason}; try again later")
        await self._fleet.wait_for_change(left_s)

    def _translate(self, error: grpc.aio.AioRpcError, route: Route) -> InvalidRequestError | GatewayError:
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.INVALID_ARGUMENT:
                field, separator, message = details.partition(": ")
                return InvalidRequestError(*((field, message) if separator else ("request", details)))
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return OverloadedError(details, _POD_FULL_RETRY_S)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineError("the deadline passed before the answer was complete")
            case _:
                target = route.decode.target
                self._log.error("decode failed", target=target, code=error.code().name, details=details)
                return UpstreamError(f"the decode pod {target} failed: {error.code().name}: {details}")
