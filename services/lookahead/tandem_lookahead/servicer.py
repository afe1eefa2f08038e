"""The gRPC face: one Sync stream per decode pod and namespace, and what `tandem lookahead` asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
from tandem_drafting.spans import AcceptedSpan
from tandem_drafting.text_store import TextStore
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc

from tandem_lookahead import codec
from tandem_lookahead.follower import FollowerLaggingError
from tandem_lookahead.hub import LookaheadHub, TooManyNamespacesError
from tandem_lookahead.metrics import LookaheadMetrics
from tandem_lookahead.namespace import NamespaceForest
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
    codec.BadMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    TooManyNamespacesError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FollowerLaggingError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreUnavailableError: grpc.StatusCode.UNAVAILABLE,
    WrongGenerationError: grpc.StatusCode.ABORTED,
}

#: Imported text is taken up to this many tokens at a time.
_IMPORT_TOKENS = 20_000
_MAX_IMPORT_BYTES = 256 << 20


class LookaheadServicer(lookahead_pb2_grpc.LookaheadServiceServicer):
    """Translates between streams and the hub."""

    def __init__(self, hub: LookaheadHub, metrics: LookaheadMetrics, *, pod_id: str, redis_kind: str) -> None:
        self._hub = hub
        self._metrics = metrics
        self._pod_id = pod_id
        self._redis_kind = redis_kind
        self._num_streams = 0

    async def Sync(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.SyncRequest], context: _SyncContext
    ) -> AsyncIterator[pb.SyncResponse]:
        requests = aiter(request_iterator)
        try:
            hello = codec.decode_hello(await anext(requests))
        except StopAsyncIteration:
            return
        forest = await self._hub.open(hello.namespace)
        follower = await self._hub.follow(forest, hello)
        receiving = asyncio.create_task(self._receive(requests, forest))
        receiving.add_done_callback(lambda _: follower.close())
        self._count_streams(+1)
        try:
            async for update in follower.updates():
                for message in update.messages():
                    yield message
            if receiving.done() and not receiving.cancelled():
                receiving.result()  # what the pod did wrong becomes the call's status
        finally:
            self._count_streams(-1)
            forest.unfollow(follower)
            receiving.cancel()
            if follower.is_lagging:
                self._metrics.subscribers_lagging.inc()

    async def GetLookaheadStatus(  # noqa: N802
        self, request: pb.GetLookaheadStatusRequest, context: _StatusContext
    ) -> pb.GetLookaheadStatusResponse:
        forests = self._hub.forests
        return pb.GetLookaheadStatusResponse(
            pod_id=self._pod_id,
            redis_connected=self._hub.is_connected,
            redis_kind=self._redis_kind,
            namespaces=[await self._status(forest) for forest in forests],
            streams_open=self._num_streams,
            spans_received_total=self._hub.num_received,
            spans_dropped_total=self._hub.num_dropped,
        )

    async def ExportNamespace(  # noqa: N802
        self, request: pb.ExportNamespaceRequest, context: _ExportContext
    ) -> AsyncIterator[pb.ExportNamespaceResponse]:
        forest = await self._hub.open(codec.decode_namespace(request.namespace))
        shared = await forest.shared()
        for at in range(0, len(shared.payload), codec.SNAPSHOT_CHUNK_BYTES):
            yield pb.ExportNamespaceResponse(payload=shared.payload[at : at + codec.SNAPSHOT_CHUNK_BYTES])
        for tables in forest.tables.values():
            yield pb.ExportNamespaceResponse(tables=codec.encode_tables(tables))

    async def ImportNamespace(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ImportNamespaceRequest], context: _ImportContext
    ) -> pb.ImportNamespaceResponse:
        namespace, chunks, tables = None, bytearray(), []
        async for request in request_iterator:
            match request.WhichOneof("message"):
                case "namespace":
                    namespace = codec.decode_namespace(request.namespace)
                case "payload":
                    chunks += request.payload
                case "tables":
                    tables.append(codec.decode_tables(request.tables))
            if len(chunks) > _MAX_IMPORT_BYTES:
                raise codec.BadMessageError(
                    f"payload: more than {_MAX_IMPORT_BYTES >> 20} MiB; export less, with a lower --max-bytes"
                )
        if namespace is None:
            raise codec.BadMessageError("namespace: missing; it says where the text belongs")
        try:
            store = await asyncio.to_thread(TextStore.from_bytes, bytes(chunks), 2**62)
        except ValueError as error:
            raise codec.BadMessageError(f"payload: {error}") from error
        forest = await self._hub.open(namespace)
        batch: list[AcceptedSpan] = []
        for run in store.runs():
            for at in range(0, len(run.tokens), _IMPORT_TOKENS):
                batch.append(AcceptedSpan(run.name, at, tuple(run.tokens[at : at + _IMPORT_TOKENS])))
                if sum(len(span.token_ids) for span in batch) >= _IMPORT_TOKENS:
                    await self._hub.add_shared(forest, batch)
                    batch = []
        if batch:
            await self._hub.add_shared(forest, batch)
        for learnt in tables:
            await self._hub.offer_tables(forest, learnt)
        return pb.ImportNamespaceResponse(num_tokens=store.num_tokens)

    async def PurgeTenant(  # noqa: N802
        self, request: pb.PurgeTenantRequest, context: _PurgeContext
    ) -> pb.PurgeTenantResponse:
        if not request.tenant:
            raise codec.BadMessageError("tenant: empty; name the tenant whose text is to be removed")
        return pb.PurgeTenantResponse(num_namespaces=await self._hub.purge(request.tenant))

    async def _status(self, forest: NamespaceForest) -> pb.NamespaceStatus:
        compacted_at = forest.compacted_at
        return pb.NamespaceStatus(
            namespace=codec.encode_namespace(forest.namespace),
            num_runs=forest.text.num_runs,
            num_tokens=forest.text.num_tokens,
            num_shared_tokens=forest.text.num_shared_tokens,
            tokens_total=forest.num_merged,
            num_bytes=forest.text.num_bytes,
            num_followers=forest.num_followers,
            compaction_age_s=time.monotonic() - compacted_at if compacted_at is not None else None,
            lag_s=await self._hub.lag_s(forest),
            table_observations=max((tables.num_observations for tables in forest.tables.values()), default=0),
        )

    async def _receive(self, requests: AsyncIterator[pb.SyncRequest], forest: NamespaceForest) -> None:
        async for request in requests:
            message = codec.decode_message(request)
            if isinstance(message, codec.Tables):
                await self._hub.offer_tables(forest, message)
            else:
                self._hub.submit(forest, message)

    def _count_streams(self, change: int) -> None:
        self._num_streams += change
        self._metrics.streams_open.set(self._num_streams)
