"""HTTP: /v1/chat/completions, /v1/completions, /v1/models as OpenAI's clients expect them.

key -> body bytes (limited) -> ReceivedRequest -> TokenizedRequest -> run
    stream    waits for the first event before it sends the status line, so that a refusal is a 429
    else      collects all events, then sends one JSON object
the client disconnects at any point -> the run and the call to the pod are closed
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import TypeVar

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from tandem_proto.v1 import decode_pb2

from tandem_gateway.auth import ApiKeys
from tandem_gateway.errors import REQUEST_ERRORS, BodyTooLargeError, GatewayError
from tandem_gateway.gateway import Gateway
from tandem_gateway.http_stream import SSE_DONE, EventStream, sse, until_disconnect
from tandem_gateway.openai_models import ChatBody, CompletionBody, parse_body
from tandem_gateway.openai_render import ChatRenderer, CompletionRenderer, Renderer, error_json
from tandem_gateway.request import Event, ReceivedRequest, TokenizedRequest

BodyT = TypeVar("BodyT", ChatBody, CompletionBody)


class OpenAiApi:
    """The routes; mount `router` in an app that renders the errors of tandem_gateway.errors."""

    def __init__(self, gateway: Gateway, keys: ApiKeys) -> None:
        self._gateway = gateway
        self._keys = keys
        self._started = int(time.time())
        self.router = APIRouter(prefix="/v1")
        self.router.add_api_route("/chat/completions", self._chat, methods=["POST"])
        self.router.add_api_route("/completions", self._complete, methods=["POST"])
        self.router.add_api_route("/models", self._models, methods=["GET"])
        self.router.add_api_route("/models/{name:path}", self._model, methods=["GET"])

    async def _chat(self, request: Request) -> Response:
        arrived = time.monotonic()
        with self._gateway.counting_refusals():
            received, body = await self._read(request, ChatBody, arrived)
            tokenized = await self._gateway.prepare_chat(received, body.chat_messages())
        return await self._answer(request, body, tokenized, ChatRenderer)

    async def _complete(self, request: Request) -> Response:
        arrived = time.monotonic()
        with self._gateway.counting_refusals():
            received, body = await self._read(request, CompletionBody, arrived)
            prompt = body.single_prompt()
            if isinstance(prompt, str):
                tokenized = await self._gateway.prepare_text(received, prompt)
            else:
                tokenized = await self._gateway.prepare_tokens(received, prompt)
        return await self._answer(request, body, tokenized, CompletionRenderer)

    async def _models(self, request: Request) -> JSONResponse:
        self._keys.authenticate(request.headers.get("authorization", ""))
        return JSONResponse({"object": "list", "data": [self._model_json()]})

    async def _model(self, request: Request, name: str) -> JSONResponse:
        self._keys.authenticate(request.headers.get("authorization", ""))
        self._gateway.check_model(name)
        return JSONResponse(self._model_json())

    def _model_json(self) -> dict[str, str | int]:
        manifest = self._gateway.manifest
        return {
            "id": manifest.name,
            "object": "model",
            "created": self._started,
            "owned_by": "tandem",
            "max_model_len": manifest.max_model_len,
            "revision": manifest.revision,
        }

    async def _read(
        self, request: Request, kind: type[BodyT], arrived: float
    ) -> tuple[ReceivedRequest, BodyT]:
        """Checks key, size and content, in this order. Raises InvalidRequestError or GatewayError."""
        caller = self._keys.authenticate(request.headers.get("authorization", ""))
        body = parse_body(kind, await self._read_body(request))
        received = ReceivedRequest(
            request_id=request.state.request_id,
            caller=caller,
            model=body.model or "",
            sampling=body.given_sampling(),
            slo_class=body.slo_class or "",
            arrived=arrived,
            speculation=body.speculation or "",
        )
        return received, body

    async def _read_body(self, request: Request) -> bytes:
        limit = self._gateway.settings.max_body_bytes
        message = f"is over the limit of {limit} bytes; shorten the prompt"
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLargeError("body", message)
        parts = bytearray()
        async for part in request.stream():
            parts += part
            if len(parts) > limit:
                raise BodyTooLargeError("body", message)
        return bytes(parts)

    async def _answer(
        self,
        request: Request,
        body: ChatBody | CompletionBody,
        tokenized: TokenizedRequest,
        kind: type[Renderer],
    ) -> Response:
        renderer = kind(tokenized, self._gateway.manifest.name, self._gateway.tokenizer.token_bytes)
        events = self._gateway.run(tokenized)
        try:
            if not body.stream:
                return await until_disconnect(request.receive, _whole(events, renderer))
            first = await until_disconnect(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        answer = _stream(first, events, renderer, with_usage=body.wants_usage_chunk)
        return EventStream(request, answer, source=events)


async def _whole(events: AsyncGenerator[Event, None], renderer: Renderer) -> Response:
    chunks: list[decode_pb2.DecodeChunk] = []
    async for event in events:
        if isinstance(event, decode_pb2.DecodeFinished):
            return JSONResponse(renderer.whole(chunks, event))
        chunks.append(event)
    raise GatewayError("the answer has no end")


async def _stream(
    first: Event, events: AsyncGenerator[Event, None], renderer: Renderer, *, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes. An error after the first event becomes an event of its own."""
    try:
        event = first
        while isinstance(event, decode_pb2.DecodeChunk):
            if event.text or event.logprobs:  # nothing to show while a character is incomplete
                yield sse(renderer.chunk(event, with_usage_field=with_usage))
            event = await anext(events)
        yield sse(renderer.finish(event, with_usage_field=with_usage))
        if with_usage:
            yield sse(renderer.usage_chunk(event))
        yield SSE_DONE
    except REQUEST_ERRORS as error:
        yield sse(error_json(error))
    except Exception as error:
        structlog.get_logger("tandem.http").exception("unexpected exception", exc_info=error)
        yield sse(error_json(GatewayError("internal error; the server's log has it under the request id")))
