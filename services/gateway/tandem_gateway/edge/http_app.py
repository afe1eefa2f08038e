"""The HTTP application: all routes, request ids, errors, and cross-origin requests (CORS)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

import structlog
from google.protobuf.json_format import MessageToJson
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tandem_core.errors import InvalidRequestError
from tandem_service.interceptors import REQUEST_ID_KEY, request_id_or_new
from tandem_service.tracing import current

from tandem_gateway.admission.quotas import OpenCalls
from tandem_gateway.answers.answers import Answers
from tandem_gateway.auth import ApiKeys, authorization
from tandem_gateway.call.gateway import Gateway
from tandem_gateway.dashboard.history import History
from tandem_gateway.dashboard.routes import dashboard_routes
from tandem_gateway.dialects.messages_render import anthropic_error
from tandem_gateway.dialects.openai_render import Json, error_json
from tandem_gateway.edge.connect_api import ConnectApi
from tandem_gateway.edge.grpc_api import GatewayServicer
from tandem_gateway.edge.host_names import HostNamesMiddleware
from tandem_gateway.edge.http_stream import ClientGoneError
from tandem_gateway.edge.openai_api import OpenAiApi
from tandem_gateway.edge.paths import TrailingSlashMiddleware, hint
from tandem_gateway.edge.site.routes import site_routes
from tandem_gateway.edge.tokenize_api import TokenizeApi
from tandem_gateway.errors import (
    BodyTimeoutError,
    BodyTypeError,
    GatewayError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
    presentation,
)
from tandem_gateway.fleet.pods import Role

_REQUEST_ID_HEADER = "x-request-id"
#: Header that names the ignored fields of the body.
_IGNORED_HEADER = "x-tandem-ignored"
#: Headers that scripts of allowed origins may read.
_SHOWN_HEADERS = (
    *(_REQUEST_ID_HEADER, _IGNORED_HEADER, "retry-after", "retry-after-ms", "x-should-retry"),
    "x-refusal-reason",
)
#: nginx's status for a client that left, which never receives it.
_CLIENT_CLOSED_REQUEST = 499
#: Paths that support HEAD; others answer it with 405.
_HEAD_PATHS = frozenset({"/", "/health", "/ping", "/v1/models"})


class RequestIdMiddleware:
    """Reads or creates the request id, adds it to the log context, and returns it to the client. Ends the
    request's trace."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(_REQUEST_ID_HEADER) or headers.get(REQUEST_ID_KEY, "")  # Connect's header
        request_id = request_id_or_new(given)
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.bind_contextvars(request_id=request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered[_REQUEST_ID_HEADER] = request_id
                ignored = scope["state"].get("ignored")
                if ignored is not None and (names := ignored.header()):
                    answered[_IGNORED_HEADER] = names
                current().set({"http.response.status_code": message["status"]})
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            current().fail("internal_error")
            raise
        finally:
            current().end()  # the whole response is sent


def make_app(
    gateway: Gateway,
    answers: Answers,
    keys: ApiKeys,
    calls: OpenCalls,
    history: History,
    registry: CollectorRegistry,
) -> Starlette:
    settings = gateway.settings

    async def health(request: Request) -> Response:
        """200 while the gateway accepts requests and a decode pod is healthy."""
        num_pods = len(gateway.fleet.healthy(Role.DECODE))
        text = "ok" if num_pods else "no decode pod is healthy"
        if answers.is_draining:
            text = "the gateway is stopping"
        is_ready = text == "ok"
        return JSONResponse(
            {"status": text, "decode_pods": num_pods},
            status_code=200 if is_ready else 503,
            headers=None if is_ready else {"retry-after": "1"},
        )

    async def metrics(request: Request) -> Response:
        # It names every tenant, so it needs a key. Prometheus uses the port of --metrics-port, without keys.
        keys.authenticate_operator(authorization(request.headers))
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # Takes tens of milliseconds, for which streams must not wait.
        return Response(await asyncio.to_thread(encode, registry), media_type=content_type)

    async def fleet_status(request: Request) -> Response:
        caller = keys.authenticate(authorization(request.headers))
        body = MessageToJson(
            gateway.fleet_status(caller),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        return Response(body, media_type="application/json")

    routes = [
        *OpenAiApi(gateway, answers, keys, calls).routes,
        *TokenizeApi(gateway, keys, calls).routes,
        *ConnectApi(GatewayServicer(gateway, answers, keys), gateway, keys, calls).routes,
        *site_routes(
            model=gateway.manifest.name,
            max_model_len=gateway.manifest.max_model_len,
            requires_keys=settings.api_keys_file is not None,
        ),
        *dashboard_routes(history, keys, gateway_id=settings.pod_id, model=gateway.manifest.name),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/metrics", metrics),
        Route("/fleet", fleet_status),
    ]
    for route in routes:
        if route.methods and route.path not in _HEAD_PATHS:
            route.methods.discard("HEAD")
    app = Starlette(
        routes=routes,
        exception_handlers={
            InvalidRequestError: _refuse,
            GatewayError: _refuse,
            ClientDisconnect: _gone,  # left while sending its body
            ClientGoneError: _gone,
            HTTPException: _no_such_route,
            Exception: _unexpected,
        },
    )
    app.router.redirect_slashes = False
    app.add_middleware(TrailingSlashMiddleware)
    if settings.api_keys_file is None and not settings.no_api_keys:
        app.add_middleware(HostNamesMiddleware, allowed=settings.allowed_hosts)
    app.add_middleware(RequestIdMiddleware)
    if origins := settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_SHOWN_HEADERS,
        )
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequestError | GatewayError)
    headers = {}
    if isinstance(error, BodyTimeoutError):
        headers["connection"] = "close"  # the rest of the body is not read
    if isinstance(error, BodyTypeError):
        is_type = error.field == "content-type"
        headers |= {"accept-post": "application/json"} if is_type else {"accept-encoding": "identity"}
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, OverloadedError | UnavailableError):
        if error.retry_after_s is None:
            headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients follow it
        else:
            # RFC 9110 allows only whole seconds; OpenAI's client prefers the header in milliseconds.
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, round(error.retry_after_s * 1000)))
    if isinstance(error, OverloadedError):
        headers["x-refusal-reason"] = error.reason.value
    return _error_response(request, error_json(error), presentation(error).http_status, headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {route.path for route in request.app.routes if isinstance(route, Route)}
    message = hint(request.method, request.url.path, error, known)
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return _error_response(request, {"error": body}, error.status_code, error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    structlog.get_logger("tandem.http").exception("unexpected exception", exc_info=error)
    request_id = request.state.request_id
    hidden = GatewayError(f"internal error; the server's log has it under request id {request_id}")
    return _error_response(request, error_json(hidden), 500)


def _error_response(
    request: Request, body: Json, status: int, headers: Mapping[str, str] | None = None
) -> Response:
    """Anthropic's error object under /v1/messages, OpenAI's elsewhere, with Anthropic's `type`."""
    if request.url.path.startswith("/v1/messages"):
        body = anthropic_error(body, status, request.state.request_id)
    return JSONResponse({"type": "error", **body}, status_code=status, headers=headers)
