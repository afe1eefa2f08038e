"""HTTP: /v1/chat/completions, /v1/completions, /v1/models as OpenAI's clients expect them.

body bytes (limited) -> parse -> key -> Job -> run
    stream    the first event is awaited before the status line, so that a refusal is a real 429
    else      collected, then one JSON object
the client disconnects at any point -> the run is closed, and with it the call to the pod
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import TypeVar

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tandem_gateway.auth import ApiKeys
from tandem_gateway.errors import BodyTooLargeError, GatewayError
from tandem_gateway.gateway import Ask, Gateway
from tandem_gateway.http_stream import SSE_DONE, EventStream, sse, until_disconnect
from tandem_gateway.openai_models import ChatBody, CompletionBody, parse_body
from tandem_gateway.openai_render import ChatRenderer, CompletionRenderer, Renderer, error_json
from tandem_gateway.request import Chunk, End, Event, Job

BodyT = TypeVar("BodyT", ChatBody, CompletionBody)


class OpenAiApi:
    """The routes; mount `router` in an app that renders GatewayError."""

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
            ask, body = await self._read(request, ChatBody, arrived)
            job = await self._gateway.prepare_chat(ask, body.chat_messages())
        return await self._answer(request, body, job, ChatRenderer)

    async def _complete(self, request: Request) -> Response:
        arrived = time.monotonic()
        with self._gateway.counting_refusals():
            ask, body = await self._read(request, CompletionBody, arrived)
            prompt = body.single_prompt()
            if isinstance(prompt, str):
                job = await self._gateway.prepare_text(ask, prompt)
            else:
                job = await self._gateway.prepare_tokens(ask, prompt)
        return await self._answer(request, body, job, CompletionRenderer)

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

    async def _read(self, request: Request, kind: type[BodyT], arrived: float) -> tuple[Ask, BodyT]:
        """Key first, then size, then content. Raises GatewayError."""
        caller = self._keys.authenticate(request.headers.get("authorization", ""))
        body = parse_body(kind, await self._read_body(request))
        ask = Ask(
            request_id=request.state.request_id,
            caller=caller,
            model=body.model or "",
            options=body.sampling_options(),
            slo_class=body.slo_class or "",
            arrived=arrived,
            speculation=body.speculation or "",
        )
        return ask, body

    async def _read_body(self, request: Request) -> bytes:
        limit = self._gateway.limits.max_body_bytes
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
        self, request: Request, body: ChatBody | CompletionBody, job: Job, kind: type[Renderer]
    ) -> Response:
        renderer = kind(job, self._gateway.manifest.name, self._gateway.tokenizer.token_bytes)
        events = self._gateway.run(job)
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
    chunks: list[Chunk] = []
    async for event in events:
        if isinstance(event, End):
            return JSONResponse(renderer.whole(chunks, event))
        chunks.append(event)
    raise GatewayError("the answer has no end")


async def _stream(
    first: Event, events: AsyncGenerator[Event, None], renderer: Renderer, *, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes. An error after the first event can only be told inside the stream."""
    try:
        event = first
        while isinstance(event, Chunk):
            if event.text or event.logprobs:  # tokens whose text is still incomplete say nothing here
                yield sse(renderer.chunk(event, with_usage_field=with_usage))
            event = await anext(events)
        yield sse(renderer.finish(event, with_usage_field=with_usage))
        if with_usage:
            yield sse(renderer.usage_chunk(event))
        yield SSE_DONE
    except GatewayError as error:
        yield sse(error_json(error))
    except Exception as error:
        structlog.get_logger("tandem.http").exception("unexpected exception", exc_info=error)
        yield sse(error_json(GatewayError("internal error; the server's log has it under the request id")))
