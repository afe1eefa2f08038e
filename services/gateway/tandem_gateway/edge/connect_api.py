"""HTTP: GatewayService in the Connect protocol, the default of `buf curl`.

https://connectrpc.com/docs/protocol. The gRPC servicer implements the methods; this module only reads and
writes the wire format:

    POST /SERVICE/METHOD                        application/json, application/proto
        one message, one response               errors are JSON, with the HTTP status of their code
    POST /SERVICE/METHOD                        application/connect+json, application/connect+proto
        one message, responses in envelopes     errors are in the last envelope; the HTTP status is 200

Compressed envelopes get `unimplemented`, as the protocol requires. Methods do not accept GET. There is no
reflection, because it is a bidirectional stream, which HTTP/1.1 does not support.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tandem_core.errors import quoted
from tandem_proto.v1 import gateway_pb2
from tandem_service import interceptors
from tandem_service.interceptors import REQUEST_ID_KEY, MalformedRequestError, Metadata

from tandem_gateway.admission.quotas import OpenCalls
from tandem_gateway.auth import ApiKeys
from tandem_gateway.call.gateway import Gateway
from tandem_gateway.dialects.sse import json_bytes
from tandem_gateway.edge.grpc_api import STATUS_CODES, GatewayServicer, caller_of
from tandem_gateway.edge.http_stream import ClientGoneError, PartedResponse, until_disconnect
from tandem_gateway.edge.request_body import check_values, max_body_bytes, read_bytes
from tandem_gateway.errors import DeadlineError

#: Head of an envelope: flags, then the length of the message as a big-endian number.
_HEAD_BYTES = 5
_END_STREAM = 2
_CODECS = ("json", "proto")
_TIMEOUT_MS = re.compile(r"[0-9]{1,10}")
#: Longer messages are converted from and to JSON in a thread, because it takes milliseconds.
_LONG_BYTES = 16 * 1024

_HTTP_STATUS: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.UNAUTHENTICATED: 401,
}


class UnimplementedError(Exception):
    """A part of the protocol that this server does not implement."""


_STATUS_CODES = {
    **interceptors.STATUS_CODES,
    **STATUS_CODES,
    UnimplementedError: grpc.StatusCode.UNIMPLEMENTED,
}


class Context:
    """The part of gRPC's context that the servicer uses."""

    def __init__(self, request: Request) -> None:
        """Raises MalformedRequestError, UnimplementedError."""
        version = request.headers.get("connect-protocol-version", "1")
        if version != "1":
            raise MalformedRequestError(f"Connect-Protocol-Version is {quoted(version)}; send 1")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise UnimplementedError(f"Content-Encoding is {quoted(encoding)}; send identity")
        self._metadata = tuple(request.headers.items())
        self._ends_at: float | None = None
        self.trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()
        timeout_ms = request.headers.get("connect-timeout-ms")
        if timeout_ms is not None:
            if not _TIMEOUT_MS.fullmatch(timeout_ms):
                raise MalformedRequestError(
                    f"Connect-Timeout-Ms is {quoted(timeout_ms)}; send milliseconds, at most 10 digits"
                )
            self._ends_at = asyncio.get_running_loop().time() + int(timeout_ms) / 1000

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self.trailing_metadata = trailing_metadata

    def time_remaining(self) -> float | None:
        """Seconds to the caller's deadline; None: there is none."""
        if self._ends_at is None:
            return None
        return max(0.0, self._ends_at - asyncio.get_running_loop().time())


@dataclass(frozen=True)
class Codec:
    """Reads and writes the messages of a method in the format of its content type."""

    method: MethodDescriptor
    name: str
    #: Whether unknown fields of JSON are refused. Those of the binary format never are.
    is_strict: bool = False

    async def decode(self, raw: bytes) -> Message:
        """Raises MalformedRequestError."""
        kind = message_factory.GetMessageClass(self.method.input_type)
        try:
            if self.name == "proto":
                return kind.FromString(raw)
            parse = partial(json_format.Parse, raw, kind(), ignore_unknown_fields=not self.is_strict)
            return await asyncio.to_thread(parse) if len(raw) > _LONG_BYTES else parse()
        except (DecodeError, json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedRequestError(
                f"the request is not a valid {self.method.input_type.name} in {self.name}: {error}; send the "
                "message that the method takes"
            ) from error

    async def encode(self, message: Message) -> bytes:
        if self.name == "proto":
            return message.SerializeToString()
        encode = partial(json_format.MessageToJson, message, indent=None, ensure_ascii=False)
        text = await asyncio.to_thread(encode) if message.ByteSize() > _LONG_BYTES else encode()
        return text.encode()


def envelope(payload: bytes, flags: int = 0) -> bytes:
    return bytes([flags]) + len(payload).to_bytes(_HEAD_BYTES - 1, "big") + payload


def only_message(body: bytes) -> bytes:
    """The message of a body that holds one envelope. Raises MalformedRequestError, UnimplementedError."""
    flags, size = body[:1], int.from_bytes(body[1:_HEAD_BYTES], "big")
    if flags == b"\1":
        raise UnimplementedError("compressed messages are not supported; send them uncompressed (identity)")
    if flags not in (b"", b"\0"):
        raise MalformedRequestError(f"an envelope has the flags {flags[0]}; a request must have the flags 0")
    if len(body) != _HEAD_BYTES + size:
        raise MalformedRequestError(
            f"the body has {len(body)} bytes, and its envelope {_HEAD_BYTES} + {size}; send the one message "
            "that the method takes, in one envelope"
        )
    return body[_HEAD_BYTES:]


class ConnectApi:
    """The routes; mount `routes` in an app that names the request."""

    def __init__(self, servicer: GatewayServicer, gateway: Gateway, keys: ApiKeys, calls: OpenCalls) -> None:
        self._gateway = gateway
        self._keys = keys
        self._calls = calls
        service = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]
        self.routes = [
            Route(
                f"/{service.full_name}/{method.name}",
                partial(self._call, method, getattr(servicer, method.name)),
                methods=["POST"],
            )
            for method in service.methods
        ]

    async def _call(
        self, method: MethodDescriptor, handler: Callable[..., Any], request: Request
    ) -> Response:
        prefix = "application/connect+" if method.server_streaming else "application/"
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        name = content_type.removeprefix(prefix)
        if not content_type.startswith(prefix) or name not in _CODECS:
            accepted = ", ".join(prefix + codec for codec in _CODECS)
            return Response(status_code=415, headers={"accept-post": accepted})
        codec = Codec(method, name, is_strict=self._gateway.settings.strict_fields)
        if method.server_streaming:
            return _StreamResponse(self, codec, handler, request)
        return await self._unary(codec, handler, request)

    async def _unary(
        self, codec: Codec, handler: Callable[..., Awaitable[Message]], request: Request
    ) -> Response:
        try:
            async with self.received(request, codec) as (message, context):
                response = await until_disconnect(request.receive, handler(message, context))
                body = await codec.encode(response)
        except (ClientDisconnect, ClientGoneError):
            raise
        except Exception as error:
            status, shown, metadata = _shown(error, request)
            headers = {f"trailer-{name}": value for name, value in metadata}
            return JSONResponse(shown, _HTTP_STATUS.get(status, 500), headers | _named(request))
        return Response(body, media_type=f"application/{codec.name}", headers=_named(request))

    @asynccontextmanager
    async def received(self, request: Request, codec: Codec) -> AsyncIterator[tuple[Message, Context]]:
        """Surrounds a call: authenticates, reads the message, and applies the deadline.

        Raises the gateway's errors, MalformedRequestError, UnimplementedError.
        """
        try:
            with self._calls.hold(caller_of(self._keys, request.headers.items())):
                context = Context(request)
                async with asyncio.timeout(context.time_remaining()):
                    yield await self._message(request, codec), context
        except TimeoutError:
            raise DeadlineError("the deadline of Connect-Timeout-Ms has passed; allow more time") from None

    async def _message(self, request: Request, codec: Codec) -> Message:
        is_json = codec.name == "json"
        limit = max_body_bytes(self._gateway, is_json=is_json)
        raw = await read_bytes(request, limit, self._gateway.settings.read_timeout_s)
        if codec.method.server_streaming:
            raw = only_message(raw)
        if is_json:
            await check_values(raw, self._gateway)
        return await codec.decode(raw)


class _StreamResponse(PartedResponse):
    """Streams the method's responses. Ends the call when the client disconnects or does not read."""

    def __init__(
        self,
        api: ConnectApi,
        codec: Codec,
        handler: Callable[..., AsyncGenerator[Message, None]],
        request: Request,
    ) -> None:
        super().__init__(f"application/connect+{codec.name}", _named(request))
        self._api = api
        self._codec = codec
        self._handler = handler
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end: dict[str, object] = {}
        try:
            await self.start(send)
            try:
                async with self._api.received(self._request, self._codec) as (message, context):
                    await until_disconnect(receive, self._send_all(self._handler(message, context), send))
                metadata: Metadata = context.trailing_metadata
            except (ClientDisconnect, ClientGoneError):
                raise
            except Exception as error:
                _, end["error"], metadata = _shown(error, self._request)
            shown: dict[str, list[str]] = {}
            for name, value in metadata:
                shown.setdefault(name, []).append(_header_value(value))
            if shown:
                end["metadata"] = shown
            body = envelope(json_bytes(end), _END_STREAM)
            await self.send_part(send, body, is_last=True)
        except (ClientDisconnect, ClientGoneError):
            return

    async def _send_all(self, responses: AsyncGenerator[Message, None], send: Send) -> None:
        async with aclosing(responses):
            async for response in responses:
                await self.send_part(send, envelope(await self._codec.encode(response)))


def _shown(
    error: Exception, request: Request
) -> tuple[grpc.StatusCode, dict[str, str], tuple[tuple[str, str], ...]]:
    """The status, the error as JSON, and the trailing metadata."""
    status, message = interceptors.translate(error, _STATUS_CODES, request.state.request_id)
    code = "canceled" if status is grpc.StatusCode.CANCELLED else status.name.lower()
    return status, {"code": code, "message": message}, interceptors.refusal_metadata(error)


def _named(request: Request) -> dict[str, str]:
    return {REQUEST_ID_KEY: request.state.request_id}


def _header_value(value: str | bytes) -> str:
    """Values of keys that end in -bin are base64 without padding."""
    return value if isinstance(value, str) else base64.b64encode(value).decode().rstrip("=")
