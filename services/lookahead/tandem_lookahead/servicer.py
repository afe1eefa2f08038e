"""The gRPC interface: one Sync stream per decode pod and namespace, and the requests of `tandem
lookahead`."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import grpc
from tandem_drafting.lookahead_protocol import (
    SNAPSHOT_CHUNK_BYTES,
    BadMessageError,
    snapshot_from_bytes,
    spans_from_proto,
)
from tandem_drafting.shared_corpus import SharedCorpus
from tandem_drafting.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc
from tandem_service.tracing import RequestTrace, Tracing

from tandem_lookahead.hub import LookaheadHub, TooManyNamespacesError
from tandem_lookahead.metrics import LookaheadMetrics
from tandem_lookahead.namespace import FollowerLaggingError, Namespace
from tandem_lookahead.store import StoreUnavailableError, WrongGenerationError

if TYPE_CHECKING:
    import grpc.aio

    _SyncContext = grpc.aio.ServicerContext[pb.SyncRequest, pb.SyncResponse]
    _StatusContext = grpc.aio.ServicerContext[pb.GetLookaheadStatusRequest, pb.GetLookaheadStatusResponse]
    _ExportContext = grpc.aio.ServicerContext[pb.ExportNamespaceRequest, pb.ExportNamespaceResponse]
    _ImportContext = grpc.aio.ServicerContext[pb.ImportNamespaceRequest, pb.ImportNamespaceResponse]
    _PurgeContext = grpc.aio.ServicerContext[pb.PurgeTenantRequest, pb.PurgeTenantResponse]

SERVICE_NAME = "tandem.v1.LookaheadService"

STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    BadMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    TooManyNamespacesError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FollowerLaggingError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreUnavailableError: grpc.StatusCode.UNAVAILABLE,
    WrongGenerationError: grpc.StatusCode.ABORTED,
}

#: A stream entry of imported text with this many tokens gets no further span.
_IMPORT_TOKENS = 20_000
_MAX_IMPORT_BYTES = 256 << 20


class LookaheadServicer(lookahead_pb2_grpc.LookaheadServiceServicer):
    """Translates between gRPC and the hub."""

    def __init__(
        self, hub: LookaheadHub, metrics: LookaheadMetrics, tracing: Tracing, *, pod_id: str
    ) -> None:
        self._hub = hub
        self._metrics = metrics
        self._tracing = tracing
        self._pod_id = pod_id
        self._num_streams = 0

    async def Sync(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.SyncRequest], context: _SyncContext
    ) -> AsyncIterator[pb.SyncResponse]:
        requests = aiter(request_iterator)
        try:
            first = await anext(requests)
        except StopAsyncIteration:
            return
        if first.WhichOneof("message") != "hello":
            raise BadMessageError("message: the first one on a stream must be hello")
        namespace = await self._hub.open(first.hello.namespace)
        follower = await self._hub.follow(namespace, first.hello)
        receiving = asyncio.create_task(self._receive(requests, namespace))
        receiving.add_done_callback(lambda _: follower.close())
        self._count_streams(+1)
        try:
            async for message in follower.messages():
                yield message
            if receiving.done() and not receiving.cancelled():
                receiving.result()  # an error of the pod becomes the call's status
        finally:
            self._count_streams(-1)
            namespace.unfollow(follower)
            receiving.cancel()
            if follower.is_lagging:
                self._metrics.subscribers_lagging.inc()

    async def GetLookaheadStatus(  # noqa: N802
        self, request: pb.GetLookaheadStatusRequest, context: _StatusContext
    ) -> pb.GetLookaheadStatusResponse:
        return pb.GetLookaheadStatusResponse(
            pod_id=self._pod_id,
            redis_connected=self._hub.is_connected,
            namespaces=[await self._status(namespace) for namespace in self._hub.namespaces],
            streams_open=self._num_streams,
            spans_received_total=self._hub.num_received,
            spans_dropped_total=self._hub.num_dropped,
        )

    async def ExportNamespace(  # noqa: N802
        self, request: pb.ExportNamespaceRequest, context: _ExportContext
    ) -> AsyncIterator[pb.ExportNamespaceResponse]:
        payload = await (await self._hub.open(request.namespace)).export()
        for at in range(0, len(payload), SNAPSHOT_CHUNK_BYTES):
            yield pb.ExportNamespaceResponse(payload=payload[at : at + SNAPSHOT_CHUNK_BYTES])

    async def ImportNamespace(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ImportNamespaceRequest], context: _ImportContext
    ) -> pb.ImportNamespaceResponse:
        payload = bytearray()
        async for request in request_iterator:
            payload += request.payload
            if len(payload) > _MAX_IMPORT_BYTES:
                raise BadMessageError(
                    f"payload: more than {_MAX_IMPORT_BYTES >> 20} MiB; export less, with a lower --max-bytes"
                )

        def parse() -> tuple[pb.Namespace, SharedCorpus]:
            message = snapshot_from_bytes(bytes(payload), pb.SharedCorpus)
            if not message.HasField("namespace"):
                raise ValueError("it names no namespace; make an export with `tandem lookahead export`")
            return message.namespace, SharedCorpus.from_proto(message, max_tokens=2**62)

        try:
            proto, corpus = await asyncio.to_thread(parse)
        except ValueError as error:
            raise BadMessageError(f"payload: {error}") from error
        namespace = await self._hub.open(proto)
        batch: list[AcceptedSpan] = []
        num_tokens = 0
        for span in corpus.spans():
            batch.append(span)
            num_tokens += len(span.token_ids)
            if num_tokens >= _IMPORT_TOKENS:
                await self._hub.add_import(namespace, batch)
                batch, num_tokens = [], 0
        if batch:
            await self._hub.add_import(namespace, batch)
        return pb.ImportNamespaceResponse(num_tokens=corpus.num_tokens)

    async def PurgeTenant(  # noqa: N802
        self, request: pb.PurgeTenantRequest, context: _PurgeContext
    ) -> pb.PurgeTenantResponse:
        if not request.tenant:
            raise BadMessageError("tenant: empty; name the tenant whose text should be removed")
        return pb.PurgeTenantResponse(num_namespaces=await self._hub.purge(request.tenant))

    async def _status(self, namespace: Namespace) -> pb.NamespaceStatus:
        corpus, snapshot_at = namespace.corpus, namespace.snapshot_at
        return pb.NamespaceStatus(
            namespace=namespace.proto,
            num_runs=corpus.num_sequences,
            num_tokens=corpus.num_tokens,
            num_shared_tokens=corpus.num_shared_tokens,
            tokens_total=namespace.num_merged,
            num_bytes=corpus.num_bytes,
            num_followers=namespace.num_followers,
            compaction_age_s=time.monotonic() - snapshot_at if snapshot_at is not None else None,
            lag_s=await self._hub.lag_s(namespace),
        )

    async def _receive(self, requests: AsyncIterator[pb.SyncRequest], namespace: Namespace) -> None:
        async for request in requests:
            if request.WhichOneof("message") != "spans":
                raise BadMessageError("message: only spans may follow the hello")
            spans = spans_from_proto(request.spans.spans)
            traces = [self._begin_trace(traceparent, spans) for traceparent in request.spans.traceparents]
            self._hub.submit(namespace, spans, traces)

    def _begin_trace(self, traceparent: str, spans: Sequence[AcceptedSpan]) -> RequestTrace:
        headers, started_ns = [("traceparent", traceparent)], time.monotonic_ns()

        def begin() -> RequestTrace:
            return self._tracing.begin(headers, "lookahead service", "store text", started_ns=started_ns)

        # The stream belongs to no request.
        trace = contextvars.copy_context().run(begin)
        trace.set({"tandem.lookahead.spans": len(spans)})
        return trace

    def _count_streams(self, change: int) -> None:
        self._num_streams += change
        self._metrics.streams_open.set(self._num_streams)
