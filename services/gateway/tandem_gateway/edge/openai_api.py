"""HTTP: /v1/chat/completions, /v1/completions, /v1/responses and /v1/models for OpenAI's clients,
/v1/messages for Anthropic's.

key -> body bytes (limited) -> ReceivedRequest -> TokenizedRequest -> run
    stream    the status line when admission has accepted the request, or has let it wait in the queue;
              pings while there are no events
    else      collects all events, then sends one JSON object
X-Event-Ids      -> the stream's events have ids
Last-Event-ID    -> the rest of a cut stream with ids; the body is not read
Idempotency-Key  -> the answer of the first request with this key and body
the client disconnects -> the call to the pod ends, unless there is such a key
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, contextmanager
from functools import partial
from typing import TypeAlias

import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.model.conversation import ChatOptions
from tandem_core.slo import LONGEST_OBJECTIVE_S, SloTarget
from tandem_proto.v1 import decode_pb2
from tandem_service.tasks import end_tasks

from tandem_gateway.admission.quotas import OpenCalls
from tandem_gateway.answers.answer import Answer, Sent
from tandem_gateway.answers.answer_store import decode_event
from tandem_gateway.answers.answers import Answers
from tandem_gateway.auth import ApiKeys, Caller, authorization
from tandem_gateway.call.gateway import MAX_MESSAGES, Gateway
from tandem_gateway.dialects.chat_dialect import ChatDialectBody
from tandem_gateway.dialects.fields import Ignored, rename
from tandem_gateway.dialects.messages_models import MessagesBody
from tandem_gateway.dialects.messages_render import MessagesRenderer
from tandem_gateway.dialects.openai_models import ChatBody, CompletionBody, parse_json
from tandem_gateway.dialects.openai_render import ChatRenderer, CompletionRenderer, Json, Renderer
from tandem_gateway.dialects.prompt_logprobs import check_size, echoed_text
from tandem_gateway.dialects.responses_models import ResponsesBody
from tandem_gateway.dialects.responses_render import ResponsesRenderer
from tandem_gateway.dialects.sse import json_bytes
from tandem_gateway.edge.http_stream import EventStream, until_disconnect
from tandem_gateway.edge.request_body import max_body_bytes, read_body
from tandem_gateway.errors import REQUEST_ERRORS, GatewayError
from tandem_gateway.request import Event, ReceivedRequest, TokenizedRequest, with_seed
from tandem_gateway.tools.choice import ToolChoice

AnyBody: TypeAlias = ChatBody | CompletionBody | ResponsesBody | MessagesBody
_DIALECTS: tuple[tuple[str, type[AnyBody], type[Renderer]], ...] = (
    ("/v1/chat/completions", ChatBody, ChatRenderer),
    ("/v1/completions", CompletionBody, CompletionRenderer),
    ("/v1/responses", ResponsesBody, ResponsesRenderer),
    ("/v1/messages", MessagesBody, MessagesRenderer),
)
_EVENT_IDS, _LAST_EVENT_ID, _IDEMPOTENCY_KEY = "x-event-ids", "last-event-id", "idempotency-key"
_SLO_CLASS, _SLO_STRICT = "x-slo-class", "x-slo-strict"
_SLO_TTFT, _SLO_TPOT, _SLO_E2E = "x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-e2e-ms"
_SLO_HEADERS = (_SLO_CLASS, _SLO_TTFT, _SLO_TPOT, _SLO_E2E, _SLO_STRICT)
#: Time after admission in which a pod refuses requests that it cannot compute; a later refusal is an event of
#: the stream.
_POD_REFUSES_S = 0.25
_MAX_OBJECTIVE_MS = LONGEST_OBJECTIVE_S * 1000
#: Limit on the events of an answer that is not streamed. As JSON objects they take forty times as much, with
#: 20 log probabilities each.
_MAX_WHOLE_BYTES = 8 << 20
#: Larger answers are rendered in a thread, and beyond the second limit one at a time.
_INLINE_BYTES, _LARGE_BYTES = 16 * 1024, 1 << 20
_LARGE = ThreadPoolExecutor(1, "large-answer")


class OpenAiApi:
    """Mount `routes` in an app that renders the errors of tandem_gateway.errors."""

    def __init__(self, gateway: Gateway, answers: Answers, keys: ApiKeys, calls: OpenCalls) -> None:
        self._gateway = gateway
        self._calls = calls
        self._answers = answers
        self._keys = keys
        self._started = int(time.time())
        self.routes = [
            *(
                Route(path, partial(self._answer, body, renderer), methods=["POST"])
                for path, body, renderer in _DIALECTS
            ),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
        ]

    async def _models(self, request: Request) -> JSONResponse:
        caller = self._keys.authenticate(authorization(request.headers))
        aliases = [alias for alias in self._gateway.settings.model_alias if "*" not in alias]
        names = [self._gateway.manifest.name, *aliases]
        return JSONResponse({"object": "list", "data": [self._model_json(caller, name) for name in names]})

    async def _model(self, request: Request) -> JSONResponse:
        caller = self._keys.authenticate(authorization(request.headers))
        name = request.path_params["name"]
        self._gateway.check_model(name)
        return JSONResponse(self._model_json(caller, name))

    def _model_json(self, caller: Caller, name: str) -> Json:
        manifest, settings = self._gateway.manifest, self._gateway.settings
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "tandem",
            "root": manifest.name,
            "parent": None,
            "max_model_len": manifest.max_model_len,
            "revision": manifest.revision,
            "recommended_sampling": self._gateway.recommended_sampling,
            "limits": {
                "max_body_bytes": max_body_bytes(self._gateway),
                "max_output_tokens": manifest.max_model_len - 1,
                "max_messages": MAX_MESSAGES,
                "request_timeout_s": settings.request_timeout_s,
                "tokens_per_minute": caller.tokens_per_minute,
                "max_requests": settings.tenant_limits(caller).places,
            },
        }

    async def _answer(
        self, body_kind: type[AnyBody], renderer_kind: type[Renderer], request: Request
    ) -> Response:
        position: tuple[int, ...] = ()
        is_streamed = True
        started_ns, kind = time.monotonic_ns(), renderer_kind.answer_kind
        caller = self._keys.authenticate(authorization(request.headers))
        async with AsyncExitStack() as held:
            with self._gateway.counting_refusals():
                held.enter_context(self._calls.hold(caller))
                self._gateway.begin_trace(request.headers.items(), kind, started_ns=started_ns)
                last_event_id = request.headers.get(_LAST_EVENT_ID)
                if last_event_id is not None:
                    limits = self._gateway.settings.tenant_limits(caller)
                    answer, position = await self._answers.find(caller.tenant, last_event_id, kind, limits)
                else:
                    answer, is_streamed = await self._begin(request, caller, body_kind, kind)
            renderer = renderer_kind(
                answer.record, self._gateway.manifest.name, self._gateway.tokenizer.token_bytes
            )
            reading = self._answers.read(answer, position, is_whole=not is_streamed)
            events = await held.enter_async_context(aclosing(reading))
            if not is_streamed:
                return await until_disconnect(request.receive, _whole(answer, events, renderer))
            first = asyncio.create_task(_first_new(events, renderer))
            held.push_async_callback(end_tasks, [first])
            await until_disconnect(request.receive, _decided(first, answer))
            if first.done():
                first.result()
            stream = _stream(first, events, renderer, with_usage=answer.record.with_usage)
            ping = renderer.ping(has_ids=answer.is_kept)
            return EventStream(request, stream, held=held.pop_all(), ping=ping)

    async def _begin(
        self, request: Request, caller: Caller, body_kind: type[AnyBody], kind: str
    ) -> tuple[Answer, bool]:
        """The answer to the body, and whether to stream it. Raises InvalidRequestError or GatewayError."""
        payload = await read_body(request, self._gateway)
        # Objectives begin after the body, because the client determines how long sending it takes.
        arrived = time.monotonic()
        given = parse_json(body_kind, payload)
        request.state.ignored = ignored = Ignored(
            is_strict=self._gateway.settings.strict_fields, names=body_kind.field_names
        )
        body = given.checked(ignored)
        self._gateway.check_model(body.model or "")
        is_streamed = bool(body.stream)
        key, digest = request.headers.get(_IDEMPOTENCY_KEY, ""), b""
        if key:
            digest = hashlib.sha256(request.url.path.encode() + b"\0" + payload).digest()
            limits = self._gateway.settings.tenant_limits(caller)
            joined = await self._answers.join(caller.tenant, key, digest, limits)
            if joined is not None:
                if isinstance(body, ChatBody):
                    self._chat_options(body, ignored)
                return joined, is_streamed
        with _naming(body.sent_names, body_kind.field_names):
            sampling = with_seed(body.given_sampling())
        received = ReceivedRequest(
            request_id=body.request_id or request.state.request_id,
            caller=caller,
            model=body.model or "",
            sampling=sampling,
            slo_class=_slo_class(body, request.headers),
            arrived=arrived,
            speculation=body.speculation or "",
            objectives=_objectives(request.headers),
            bad_texts=body.bad_texts,
            truncate_to=body.truncate_prompt_tokens,
            add_special_tokens=body.add_special_tokens is not False,
            cache_salt=body.cache_salt or "",
        )
        with _naming(body.sent_names, body_kind.field_names):
            prompts = await until_disconnect(request.receive, self._tokenize(received, body, ignored))
        check_size(prompts, body.num_choices)
        shown = body.shown()
        shown.model = body.model or ""
        if isinstance(given, ChatDialectBody):
            shown.MergeFrom(given.shown())
        if isinstance(body, CompletionBody) and body.echo:
            shown.echoed_texts.extend(
                echoed_text(self._gateway.tokenizer, given, received, prompt)
                for given, prompt in zip(body.prompts(), prompts, strict=True)
            )
        answer = await self._answers.begin(
            prompts,
            kind=kind,
            num_choices=body.num_choices,
            with_usage=body.wants_usage_chunk,
            shown=shown,
            is_resumable=is_streamed and _flag(request.headers, _EVENT_IDS),
            key=key,
            payload_sha256=digest,
        )
        return answer, is_streamed

    async def _tokenize(
        self, received: ReceivedRequest, body: ChatBody | CompletionBody, ignored: Ignored
    ) -> list[TokenizedRequest]:
        """The requests, one for each prompt."""
        if isinstance(body, ChatBody):
            tools, options = self._chat_options(body, ignored)
            return [await self._gateway.prepare_chat(received, body.chat_messages(), tools, options)]
        return [
            await (
                self._gateway.prepare_text(received, prompt)
                if isinstance(prompt, str)
                else self._gateway.prepare_tokens(received, prompt)
            )
            for prompt in body.prompts()
        ]

    def _chat_options(self, body: ChatBody, ignored: Ignored) -> tuple[ToolChoice, ChatOptions]:
        """Adds the fields of templates and tools that have no effect to `ignored`."""
        options = body.chat_options(self._gateway.tokenizer.template_variables, ignored)
        return body.chosen_tools(ignored), options


@contextmanager
def _naming(*names: Mapping[str, str]) -> Iterator[None]:
    """Renames fields in errors: from a chat's names to the request's and then to its API's."""
    try:
        yield
    except InvalidRequestError as error:
        for one in names:
            rename(error, one)
        raise


async def _whole(answer: Answer, events: AsyncGenerator[Sent, None], renderer: Renderer) -> Response:
    """Raises InvalidRequestError if the answer would take too much memory as one object."""
    num_bytes = 0
    async with aclosing(events):
        async for sent in events:
            num_bytes += sent.event.ByteSize()
            if num_bytes > _MAX_WHOLE_BYTES:
                raise InvalidRequestError(
                    "stream",
                    f"must be true: the answer, with its log probabilities, is over {_MAX_WHOLE_BYTES >> 20} "
                    "MiB, the limit of one that is sent whole; or ask for fewer tokens, choices or logprobs",
                )

    def render() -> bytes:
        collected = list(map(decode_event, answer.events))
        return json_bytes(renderer.whole(collected), in_steps=num_bytes > _INLINE_BYTES)

    if num_bytes <= _INLINE_BYTES:
        return Response(render(), media_type=JSONResponse.media_type)
    thread = _LARGE if num_bytes > _LARGE_BYTES else None
    data = await asyncio.get_running_loop().run_in_executor(thread, render)
    return Response(data, media_type=JSONResponse.media_type)


async def _decided(first: asyncio.Task[Sent], answer: Answer) -> None:
    """Waits for the first event or an error, until the answer is certain to begin."""
    accepted = asyncio.create_task(answer.accepted())
    try:
        await asyncio.wait((first, accepted), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks([accepted])
    await asyncio.wait((first,), timeout=_POD_REFUSES_S)


async def _first_new(events: AsyncGenerator[Sent, None], renderer: Renderer) -> Sent:
    """The first event that the client lacks, or the last of all events. Earlier ones pass through the
    renderer, which keeps state."""
    last: Sent | None = None
    async for sent in events:
        if last is not None:
            await _render(last.event, renderer)
        last = sent
        if not sent.is_seen:
            break
    if last is None:
        raise GatewayError("the answer has no end")
    return last


async def _stream(
    first: Awaitable[Sent], events: AsyncGenerator[Sent, None], renderer: Renderer, *, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The stream's bytes. An error becomes an event without an id."""
    try:
        sent: Sent | None = await first
        while sent is not None:
            is_large = renderer.is_large([sent.event])
            rendered = await _render(sent.event, renderer)
            if rendered is not None and not sent.is_seen:
                yield (
                    await asyncio.to_thread(renderer.encode, rendered, sent.event_id, in_steps=True)
                    if is_large
                    else renderer.encode(rendered, sent.event_id)
                )
            sent = await anext(events, None)
        if with_usage:
            yield renderer.encode(renderer.usage_chunk())
        yield renderer.encode_end()
    except REQUEST_ERRORS as error:
        yield renderer.encode_error(error)
    except Exception as error:
        structlog.get_logger("tandem.http").exception("unexpected exception", exc_info=error)
        hidden = GatewayError("internal error; the server's log has it under the request id")
        yield renderer.encode_error(hidden)


async def _render(event: Event, renderer: Renderer) -> Json | None:
    """Renders the event as JSON; None: nothing to show yet."""
    if isinstance(event, decode_pb2.DecodeFinished):
        return renderer.finish(event)
    if renderer.is_large([event]):
        return await asyncio.to_thread(renderer.chunk, event)
    return renderer.chunk(event)


def _slo_class(body: ChatBody | CompletionBody, headers: Headers) -> str:
    """The class in the body or the header."""
    named = headers.get(_SLO_CLASS, "")
    if named and body.slo_class and named != body.slo_class:
        raise InvalidRequestError(
            _SLO_CLASS, f"is {quoted(named)}, but slo_class in the body is {quoted(body.slo_class)}; send one"
        )
    return named or body.slo_class or ""


def _objectives(headers: Headers) -> SloTarget:
    """The objectives in the request's headers. Raises InvalidRequestError."""
    unknown = [name for name in headers if name.startswith("x-slo-") and name not in _SLO_HEADERS]
    if unknown:
        raise InvalidRequestError(
            quoted(unknown[0]), f"is not a header of this API; use {', '.join(_SLO_HEADERS)}"
        )
    repeated = next((name for name in _SLO_HEADERS if len(headers.getlist(name)) > 1), None)
    if repeated is not None:
        raise InvalidRequestError(repeated, "is repeated; send it once")
    ttft_s, tpot_s, e2e_s = (_seconds(headers, name) for name in (_SLO_TTFT, _SLO_TPOT, _SLO_E2E))
    return SloTarget("", ttft_s, tpot_s, e2e_s, is_strict=_flag(headers, _SLO_STRICT))


def _flag(headers: Headers, name: str) -> bool:
    """Value of a boolean header; false if it is absent. Raises InvalidRequestError."""
    text = headers.get(name, "false")
    if text.lower() not in ("true", "false"):
        raise InvalidRequestError(name, f"is {quoted(text)}; send true or false")
    return text.lower() == "true"


def _seconds(headers: Headers, name: str) -> float:
    text = headers.get(name)
    if text is None:
        return 0.0
    try:
        # float() accepts 1_000, which JSON and HTTP do not.
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_OBJECTIVE_MS:
        raise InvalidRequestError(
            name, f"is {quoted(text)}; send a number of milliseconds over 0, at most {_MAX_OBJECTIVE_MS}"
        )
    return value / 1000
