"""The gRPC face: one Sync stream per decode pod and namespace, and the status call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc

from tandem_lookahead import codec
from tandem_lookahead.hub import LookaheadHub, TooManyNamespacesError
from tandem_lookahead.metrics import LookaheadMetrics
from tandem_lookahead.namespace import FollowerLaggingError, NamespaceForest

if TYPE_CHECKING:
    import grpc.aio

    _SyncContext = grpc.aio.ServicerContext[pb.SyncRequest, pb.SyncResponse]
    _StatusContext = grpc.aio.ServicerContext[pb.GetLookaheadStatusRequest, pb.GetLookaheadStatusResponse]

SERVICE_NAME = "tandem.v1.LookaheadService"

STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    codec.BadMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    TooManyNamespacesError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FollowerLaggingError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


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
        forest = await self._hub.open(hello.namespace.key)
        follower = await self._hub.follow(forest, hello.have_position)
        receiving = asyncio.create_task(self._receive(requests, forest))
        receiving.add_done_callback(lambda _: follower.close())
        self._count_streams(+1)
        try:
            async for update in follower.updates():
                for message in codec.encode_update(update):
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
        return pb.GetLookaheadStatusResponse(
            pod_id=self._pod_id,
            redis_connected=self._hub.is_connected,
            redis_kind=self._redis_kind,
            namespaces=[
                pb.NamespaceStatus(
                    namespace=forest.key,
                    num_nodes=forest.num_tokens,
                    tokens_total=forest.num_learnt,
                    snapshot_version=forest.version,
                    memory_bytes=forest.memory_bytes,
                )
                for forest in self._hub.forests
            ],
            streams_open=self._num_streams,
            spans_received_total=self._hub.num_received,
            spans_dropped_total=self._hub.num_dropped,
        )

    async def _receive(self, requests: AsyncIterator[pb.SyncRequest], forest: NamespaceForest) -> None:
        async for request in requests:
            self._hub.submit(forest, codec.decode_spans(request))

    def _count_streams(self, change: int) -> None:
        self._num_streams += change
        self._metrics.streams_open.set(self._num_streams)
