# ruff: noqa: N802  (the methods are named by the .proto)
"""GatewayService: the gRPC API of the gateway.

The server's interceptor maps the errors of tandem_gateway.errors to gRPC statuses by STATUS_CODES.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol, TypeGuard, TypeVar

import grpc
from tandem_core.codec import given_sampling, slo_from_proto
from tandem_core.errors import InvalidRequestError, quoted
from tandem_proto.v1 import answers_pb2, common_pb2, decode_pb2, gateway_pb2, gateway_pb2_grpc
from tandem_service.interceptors import Metadata, current_request_id

from tandem_gateway.answers.answer import Answer
from tandem_gateway.answers.answers import Answers
from tandem_gateway.auth import ApiKeys, Caller, authorization
from tandem_gateway.call.gateway import Gateway
from tandem_gateway.dialects.grpc_messages import to_messages, to_options, to_tool_choice
from tandem_gateway.dialects.prompt_logprobs import check_size, echoed_text, without_output
from tandem_gateway.edge.json_structure import JsonLimits
from tandem_gateway.errors import PRESENTATIONS
from tandem_gateway.request import (
    ReceivedRequest,
    TokenizedRequest,
    check_cache_salt,
    check_call,
    check_request_id,
)
from tandem_gateway.tools.answer_parser import AnswerDelta, AnswerParser, parsers_of

SERVICE_NAME = "tandem.v1.GatewayService"
RECEIPT_KEY = "tandem-receipt-bin"
_Request = gateway_pb2.ChatRequest | gateway_pb2.GenerateRequest
ResponseT = TypeVar("ResponseT", gateway_pb2.ChatResponse, gateway_pb2.GenerateResponse)

STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    error: presentation.status for error, presentation in PRESENTATIONS.items()
}


class CallContext(Protocol):
    """The part of gRPC's context that the methods use; the Connect protocol implements it too."""

    def invocation_metadata(self) -> Metadata | None: ...

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> None: ...

    def time_remaining(self) -> float | None:
        """Seconds to the caller's deadline; None: there is none."""


def caller_of(keys: ApiKeys, metadata: Metadata) -> Caller:
    """Raises UnauthenticatedError."""
    headers = {name: value for name, value in metadata if isinstance(value, str)}
    return keys.authenticate(authorization(headers))


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    def __init__(self, gateway: Gateway, answers: Answers, keys: ApiKeys) -> None:
        self._gateway = gateway
        self._answers = answers
        self._keys = keys

    async def Chat(
        self, request: gateway_pb2.ChatRequest, context: CallContext
    ) -> AsyncIterator[gateway_pb2.ChatResponse]:
        async with aclosing(self._answer(request, context, gateway_pb2.ChatResponse)) as responses:
            async for response in responses:
                yield response

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: CallContext
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        async with aclosing(self._answer(request, context, gateway_pb2.GenerateResponse)) as responses:
            async for response in responses:
                yield response

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: CallContext
    ) -> gateway_pb2.ListModelsResponse:
        self._caller(context)
        manifest = self._gateway.manifest
        model = gateway_pb2.ModelInfo(
            name=manifest.name,
            revision=manifest.revision,
            max_model_len=manifest.max_model_len,
            recommended_sampling=common_pb2.SamplingParams(**self._gateway.recommended_sampling),
        )
        return gateway_pb2.ListModelsResponse(models=[model])

    async def GetFleetStatus(
        self, request: gateway_pb2.GetFleetStatusRequest, context: CallContext
    ) -> gateway_pb2.GetFleetStatusResponse:
        return self._gateway.fleet_status(self._caller(context))

    async def _answer(
        self, request: _Request, context: CallContext, kind: type[ResponseT]
    ) -> AsyncGenerator[ResponseT, None]:
        started_ns = time.monotonic_ns()
        headers = context.invocation_metadata() or ()
        trace = self._gateway.begin_trace(headers, _kind(request), started_ns=started_ns)
        receipts: list[tuple[str, bytes]] = []
        try:
            with self._gateway.counting_refusals():
                answer, position = await self._find_or_begin(request, context)
            parsers, shown = parsers_of(answer.record), answer.record.shown
            #: The prompt's text by choice, until the choice's first text.
            echoed = dict(enumerate(list(shown.echoed_texts) * answer.num_choices))
            async with aclosing(self._answers.read(answer, position)) as events:
                async for event, event_id, is_seen in events:
                    if shown.hides_output:
                        event = without_output(event)
                    parser = parsers[event.choice]
                    if isinstance(event, decode_pb2.DecodeChunk):
                        part = parser.push(event.text)
                        prefix = echoed.pop(event.choice, "")
                        if not is_seen:
                            yield kind(chunk=_chunk(event, part, prefix, event_id))
                        continue
                    receipts.append((RECEIPT_KEY, event.receipt.SerializeToString()))
                    context.set_trailing_metadata(tuple(receipts))
                    if not is_seen or answer.num_choices == 1:
                        yield kind(end=_end(event, parser, event_id))
        finally:
            trace.end()

    async def _find_or_begin(self, request: _Request, context: CallContext) -> tuple[Answer, tuple[int, ...]]:
        """The answer, and the caller's position in it."""
        received = self._received(request, context)
        tenant, limits = received.caller.tenant, self._gateway.settings.tenant_limits(received.caller)
        kind = _kind(request)
        if request.last_event_id:
            return await self._answers.find(tenant, request.last_event_id, kind, limits)
        if isinstance(request, gateway_pb2.ChatRequest):
            _check_counts(request)
        key, digest = request.idempotency_key, b""
        if key:
            content = copy.deepcopy(request)
            content.ClearField("request_id")
            digest = hashlib.sha256(kind.encode() + content.SerializeToString(deterministic=True)).digest()
            joined = await self._answers.join(tenant, key, digest, limits)
            if joined is not None:
                return joined, ()
        tokenized = await self._tokenize(received, request)
        check_size([tokenized], request.n or 1)
        shown = answers_pb2.ShownAs(hides_output=_wants_only_prompt(request))
        if _is_echo(request):
            given = request.token_ids.ids if request.WhichOneof("prompt") == "token_ids" else request.text
            shown.echoed_texts.append(echoed_text(self._gateway.tokenizer, given, received, tokenized))
        answer = await self._answers.begin(
            [tokenized], kind=kind, num_choices=request.n or 1, shown=shown, key=key, payload_sha256=digest
        )
        return answer, ()

    async def _tokenize(self, received: ReceivedRequest, request: _Request) -> TokenizedRequest:
        if isinstance(request, gateway_pb2.ChatRequest):
            messages, options = to_messages(request), to_options(request)
            return await self._gateway.prepare_chat(received, messages, to_tool_choice(request), options)
        if request.WhichOneof("prompt") == "token_ids":
            return await self._gateway.prepare_tokens(received, request.token_ids.ids)
        return await self._gateway.prepare_text(received, request.text)

    def _caller(self, context: CallContext) -> Caller:
        return caller_of(self._keys, context.invocation_metadata() or ())

    def _received(self, request: _Request, context: CallContext) -> ReceivedRequest:
        arrived = time.monotonic()
        caller = self._caller(context)
        check_request_id(request.request_id)
        check_cache_salt(request.cache_salt)
        sampling = given_sampling(request.sampling)
        beams = sampling.get("beam_search")
        check_call(
            request.n or 1,
            beam_width=None if beams is None else beams.width,
            echoes=_is_echo(request),
            detokenizes=sampling.get("detokenize") is not False,
        )
        if _wants_only_prompt(request):
            sampling["max_tokens"] = 1
        return ReceivedRequest(
            request_id=request.request_id or current_request_id(),
            caller=caller,
            model=request.model,
            sampling=sampling,
            slo_class=_slo_class(request),
            arrived=arrived,
            timeout_s=context.time_remaining(),
            speculation=request.speculation,
            objectives=slo_from_proto(request.slo),
            cache_salt=request.cache_salt,
        )


def _chunk(
    chunk: decode_pb2.DecodeChunk, part: AnswerDelta, prefix: str, event_id: str
) -> gateway_pb2.GeneratedChunk:
    return gateway_pb2.GeneratedChunk(
        text=prefix + part.content,
        reasoning=part.reasoning,
        tool_calls=_to_proto(part),
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        event_id=event_id,
        choice=chunk.choice,
        prompt_logprobs=chunk.prompt_logprobs if chunk.HasField("prompt_logprobs") else None,
    )


def _end(end: decode_pb2.DecodeFinished, parser: AnswerParser, event_id: str) -> gateway_pb2.GeneratedEnd:
    part = parser.finish(end)
    return gateway_pb2.GeneratedEnd(
        reason=common_pb2.FINISH_REASON_TOOL_CALLS if parser.ends_with_calls else end.reason,
        text=part.content,
        reasoning=part.reasoning,
        tool_calls=_to_proto(part),
        stop_reason=end.stop_reason,
        stop_token_id=end.stop_token_id if end.HasField("stop_token_id") else None,
        receipt=end.receipt,
        event_id=event_id,
        choice=end.choice,
    )


def _to_proto(part: AnswerDelta) -> list[gateway_pb2.ToolCallDelta]:
    return [
        gateway_pb2.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
        for call in part.calls
    ]


def _check_counts(request: gateway_pb2.ChatRequest) -> None:
    """Raises InvalidRequestError for more messages, tools and calls, or objects and lists in their JSON, than
    a JSON body may have, since converting each of them takes microseconds on the event loop."""
    limit = JsonLimits().max_containers
    num_outer = len(request.messages) + len(request.tools)
    if num_outer > limit or num_outer + sum(len(turn.tool_calls) for turn in request.messages) > limit:
        raise InvalidRequestError(
            "messages", f"are more than {limit} with the tools and all tool calls, the limit; send fewer"
        )
    texts = [request.template_arguments, *[tool.parameters for tool in request.tools]]
    if sum([text.count("{") + text.count("[") for text in texts]) > limit:
        raise InvalidRequestError(
            "tools", f"and template_arguments have more than {limit} objects and lists, the limit; send fewer"
        )


def _slo_class(request: _Request) -> str:
    named, also = request.slo_class, request.slo.name
    if named and also and named != also:
        raise InvalidRequestError("slo.name", f"is {quoted(also)}, but slo_class {quoted(named)}; send one")
    return named or also


def _is_echo(request: _Request) -> TypeGuard[gateway_pb2.GenerateRequest]:
    return isinstance(request, gateway_pb2.GenerateRequest) and request.echo


def _wants_only_prompt(request: _Request) -> bool:
    sampling = request.sampling
    return _is_echo(request) and sampling.HasField("max_tokens") and sampling.max_tokens == 0


def _kind(request: _Request) -> str:
    return "chat" if isinstance(request, gateway_pb2.ChatRequest) else "completion"
