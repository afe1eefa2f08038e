# ruff: noqa: N802  (the methods are named by the .proto)
"""GatewayService: the gRPC face of the gateway.

Errors are raised as GatewayError and become statuses in the server's interceptor, through STATUS_CODES.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from tandem_proto.v1 import gateway_pb2, gateway_pb2_grpc
from tandem_service.interceptors import current_request_id, request_id_or_new

from tandem_gateway import codec
from tandem_gateway.auth import ApiKeys, Caller
from tandem_gateway.errors import GatewayError, InvalidRequestError, OverloadedError
from tandem_gateway.fleet_view import FleetView
from tandem_gateway.gateway import Ask, Gateway
from tandem_gateway.request import Chunk, Job

if TYPE_CHECKING:
    from typing import Any

    _Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME = "tandem.v1.GatewayService"
RECEIPT_KEY = "tandem-receipt-bin"
RETRY_AFTER_KEY = "retry-after-ms"


def _tree(root: type[GatewayError]) -> list[type[GatewayError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _tree(child))]


#: For PodServer: each exception's own status.
STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {kind: kind.status for kind in _tree(GatewayError)}


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    def __init__(self, gateway: Gateway, keys: ApiKeys, fleet_view: FleetView) -> None:
        self._gateway = gateway
        self._keys = keys
        self._fleet_view = fleet_view

    async def Chat(
        self, request: gateway_pb2.ChatRequest, context: _Context
    ) -> AsyncIterator[gateway_pb2.ChatResponse]:
        with self._gateway.counting_refusals():
            ask = self._ask(request, context)
            job = await self._gateway.prepare_chat(ask, codec.messages_from_proto(request))
        async with aclosing(self._answer(job, context)) as answer:
            async for event in answer:
                if isinstance(event, gateway_pb2.GeneratedEnd):
                    yield gateway_pb2.ChatResponse(end=event)
                else:
                    yield gateway_pb2.ChatResponse(chunk=event)

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        with self._gateway.counting_refusals():
            ask = self._ask(request, context)
            if request.WhichOneof("prompt") == "token_ids":
                job = await self._gateway.prepare_tokens(ask, request.token_ids.ids)
            else:
                job = await self._gateway.prepare_text(ask, request.text)
        async with aclosing(self._answer(job, context)) as answer:
            async for event in answer:
                if isinstance(event, gateway_pb2.GeneratedEnd):
                    yield gateway_pb2.GenerateResponse(end=event)
                else:
                    yield gateway_pb2.GenerateResponse(chunk=event)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: _Context
    ) -> gateway_pb2.ListModelsResponse:
        self._caller(context)
        manifest = self._gateway.manifest
        model = gateway_pb2.ModelInfo(
            name=manifest.name, revision=manifest.revision, max_model_len=manifest.max_model_len
        )
        return gateway_pb2.ListModelsResponse(models=[model])

    async def GetFleetStatus(
        self, request: gateway_pb2.GetFleetStatusRequest, context: _Context
    ) -> gateway_pb2.GetFleetStatusResponse:
        self._caller(context)
        return self._fleet_view.now()

    async def _answer(
        self, job: Job, context: _Context
    ) -> AsyncGenerator[gateway_pb2.GeneratedChunk | gateway_pb2.GeneratedEnd, None]:
        try:
            async with aclosing(self._gateway.run(job)) as events:
                async for event in events:
                    if isinstance(event, Chunk):
                        yield codec.chunk_to_proto(event)
                    else:
                        end = codec.end_to_proto(event)
                        context.set_trailing_metadata(((RECEIPT_KEY, end.receipt.SerializeToString()),))
                        yield end
        except OverloadedError as error:
            retry_after_ms = str(max(1, round(error.retry_after_s * 1000)))
            context.set_trailing_metadata(((RETRY_AFTER_KEY, retry_after_ms),))
            raise

    def _caller(self, context: _Context) -> Caller:
        for name, value in context.invocation_metadata() or ():
            if name == "authorization" and isinstance(value, str):
                return self._keys.authenticate(value)
        return self._keys.authenticate("")

    def _ask(self, request: gateway_pb2.ChatRequest | gateway_pb2.GenerateRequest, context: _Context) -> Ask:
        arrived = time.monotonic()
        caller = self._caller(context)
        if request.request_id and request_id_or_new(request.request_id) != request.request_id:
            raise InvalidRequestError(
                "request_id", "must be 1 to 128 letters, digits and . _ : / -; or leave it empty"
            )
        return Ask(
            request_id=request.request_id or current_request_id(),
            caller=caller,
            model=request.model,
            options=codec.options_from_proto(request.sampling),
            slo_class=request.slo_class,
            arrived=arrived,
            timeout_s=context.time_remaining(),
            speculation=request.speculation,
        )
