"""Wraps every gRPC call of a server: request id, access log, counters, exception -> status.

call in -> request id from metadata, or a new one; bound to the log context; sent back at once
        -> caller's role, where calls need one (see `tls`)
        -> on a public server: the gate, which sees the metadata alone; then the message is received
        -> handler
        -> exception?  mapped type         -> its status, with the exception's message
                       undecodable bytes   -> INVALID_ARGUMENT; the handler is not called
                       context.abort()     -> passes
                       cancellation        -> passes (the client left, or its deadline passed)
                       anything else       -> INTERNAL with the request id; the traceback is logged only
                       one with a `retry_after_s` -> also the trailing metadata say so, in milliseconds;
                       with a `reason`, that too
        -> one access line, one count
"""

from __future__ import annotations

import asyncio
import enum
import re
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry

from tandem_service import metric_table
from tandem_service.tls import Role, roles_of

REQUEST_ID_KEY = "tandem-request-id"
#: Metadata key of the time after which to retry a refused call; OpenAI's HTTP clients use a header of this
#: name.
RETRY_AFTER_KEY = "retry-after-ms"
REFUSAL_REASON_KEY = "refusal-reason"

#: Accepted request ids; any other (log injection, megabytes) is replaced.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")

#: Methods logged at debug level regardless of the outcome: those called every second, and the gateway's
#: requests, which have their own log line.
_QUIET = re.compile(r"^/grpc\.|/Get\w*Status$|GatewayService/(Chat|Generate)$")
#: Outcomes logged at debug level: no fault of the called process.
_QUIET_CODES = ("OK", "CANCELLED")

#: Pairs of key and value of a call.
Metadata = Iterable[tuple[str, str | bytes]]

#: Health and reflection bypass the gate, so that probes need no key: these calls are short or few.
_OPEN_METHODS = "/grpc."
_OPEN_MESSAGE_S = 1.0
_MAX_OPEN_STREAMS = 32
#: Size limit of a message that needs no key.
_MAX_OPEN_BYTES = 1024

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Context = grpc.aio.ServicerContext[Any, Any]


def new_request_id() -> str:
    return uuid.uuid4().hex


def request_id_or_new(given: str) -> str:
    """`given` if it is a valid request id, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else new_request_id()


def current_request_id() -> str:
    """The id of the call being handled; "" outside of one."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


class MalformedRequestError(Exception):
    """The bytes of a request are not a valid message of its method."""


class CallerError(Exception):
    """The role in the caller's certificate may not call the method."""


class TooManyStreamsError(Exception):
    """Too many streams of health and reflection are open."""

    retry_after_s = 1.0


#: Status codes of this module's errors.
STATUS_CODES: Mapping[type[Exception], grpc.StatusCode] = MappingProxyType(
    {
        MalformedRequestError: grpc.StatusCode.INVALID_ARGUMENT,
        CallerError: grpc.StatusCode.PERMISSION_DENIED,
        TooManyStreamsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


class _OpenStreams:
    """Bounds the number of streams without a key. Belongs to one event loop."""

    def __init__(self) -> None:
        self._num_open = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Held while the stream is open. Raises TooManyStreamsError."""
        if self._num_open >= _MAX_OPEN_STREAMS:
            raise TooManyStreamsError(
                f"{self._num_open} streams of health and reflection are open here, limit "
                f"{_MAX_OPEN_STREAMS}; use single calls"
            )
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1


@dataclass(frozen=True)
class Gate:
    """Admission of calls to a public server, before the message is received.

    `hold(metadata)` is a context for the duration of the call; it raises for a call that is not admitted. The
    message must arrive within `message_timeout_s`.
    """

    hold: Callable[[Metadata], AbstractContextManager[object]]
    message_timeout_s: float


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """See the module's diagram. `status_codes` is looked up by the exception's nearest base class.

    `callers`: the roles that may call each method; no role may call other methods. None: no check.

    `gate`: admits calls of Tandem's services, and bounds the number of others. None: no gate.
    """

    def __init__(
        self,
        status_codes: Mapping[type[Exception], grpc.StatusCode],
        registry: CollectorRegistry,
        callers: Mapping[str, Collection[Role]] | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._callers = callers
        self._gate = gate
        self._open_streams = _OpenStreams()
        self._status_codes = {**STATUS_CODES, **status_codes}
        self._calls = metric_table.GRPC_CALLS.make(registry)
        self._seconds = metric_table.GRPC_CALL_SECONDS.make(registry)
        self._log = structlog.get_logger("tandem.access")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return handler
        method = handler_call_details.method
        if self._gate is not None:
            return self._gated(method, handler, self._gate)
        decode = _decoder(handler)
        if handler.unary_unary or handler.stream_unary:
            call = cast(
                "Callable[[Any, _Context], Awaitable[Any]]", handler.unary_unary or handler.stream_unary
            )

            async def unary(request: Any, context: _Context) -> Any:
                async with self._around(method, context):
                    await self._open(method, context)
                    return await call(_decoded(request), context)

            make = (
                grpc.unary_unary_rpc_method_handler
                if handler.unary_unary
                else grpc.stream_unary_rpc_method_handler
            )
            return make(unary, decode, handler.response_serializer)

        calls = cast(
            "Callable[[Any, _Context], AsyncGenerator[Any, None]]",
            handler.unary_stream or handler.stream_stream,
        )

        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            # aclosing closes the handler's generator together with this one. gRPC runs this one to its end or
            # cancels it, but drops it unclosed when the call ends while a response is written. As nothing
            # else refers to it, it is then finalized at once: the event loop closes it in a new task.
            async with self._around(method, context):
                await self._open(method, context)
                async with aclosing(calls(_decoded(request), context)) as responses:
                    async for response in responses:
                        yield response

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.unary_stream
            else grpc.stream_stream_rpc_method_handler
        )
        return make(stream, decode, handler.response_serializer)

    def _gated(self, method: str, handler: _Handler, gate: Gate) -> _Handler:
        """Wraps the method as one that takes a stream, because gRPC waits without limit for the message of
        other methods before it calls them."""
        is_open = method.startswith(_OPEN_METHODS)
        call = cast(
            "Callable[[Any, _Context], Any]",
            handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream,
        )
        message_timeout_s = _OPEN_MESSAGE_S if is_open else gate.message_timeout_s

        def hold(context: _Context) -> AbstractContextManager[object]:
            if is_open:
                return self._open_streams.hold() if handler.response_streaming else nullcontext()
            return gate.hold(context.invocation_metadata() or ())

        async def gated(requests: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
            async with self._around(method, context):
                await self._open(method, context)
                with hold(context):
                    given = (
                        requests if handler.request_streaming else await _only(requests, message_timeout_s)
                    )
                    if not handler.response_streaming:
                        yield await call(given, context)
                        return
                    async with aclosing(call(given, context)) as responses:
                        async for response in responses:
                            yield response

        return grpc.stream_stream_rpc_method_handler(
            gated,
            _decoder(handler, raises=True, max_bytes=_MAX_OPEN_BYTES if is_open else None),
            handler.response_serializer,
        )

    @asynccontextmanager
    async def _around(self, method: str, context: _Context) -> AsyncIterator[None]:
        """Converts an error to the status of the call."""
        request_id = request_id_or_new(_metadata_value(context, REQUEST_ID_KEY))
        started = time.monotonic()
        code = "OK"
        # Read now: after a cancellation the C object may be gone, and reading it would crash the process.
        peer = context.peer()
        # gRPC runs each call in its own task, so nothing has to be reset afterwards.
        structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            yield
            code = _code_name(context)
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except grpc.aio.AbortError:
            code = _code_name(context)
            raise
        except Exception as error:
            status, message = translate(error, self._status_codes, request_id)
            code = status.name
            if metadata := refusal_metadata(error):
                context.set_trailing_metadata(metadata)
            # Not `abort`, whose error and frames form a reference cycle with the call: a hundred objects per
            # refusal, which the garbage collector frees in pauses of up to 20 ms.
            context.set_code(status)
            context.set_details(message)
        finally:
            seconds = time.monotonic() - started
            self._calls.labels(method, code).inc()
            self._seconds.labels(method).observe(seconds)
            is_quiet = code in _QUIET_CODES or _QUIET.search(method)
            log = self._log.debug if is_quiet else self._log.info
            log("call", method=method, code=code, seconds=round(seconds, 6), peer=peer)

    async def _open(self, method: str, context: _Context) -> None:
        """Sends the request id back. Raises CallerError."""
        await context.send_initial_metadata(((REQUEST_ID_KEY, current_request_id()),))
        self._check_caller(method, context)

    def _check_caller(self, method: str, context: _Context) -> None:
        if self._callers is None or method.startswith("/grpc."):
            return
        name = method.rpartition("/")[2]
        allowed = sorted(self._callers.get(name, ()))
        roles = sorted(roles_of(context.auth_context()))
        if not set(allowed) & set(roles):
            raise CallerError(
                f"{name} may be called by {' or '.join(allowed) or 'no role'}; the caller's certificate "
                f"states {', '.join(roles) or 'no role'}"
            )


def translate(
    error: Exception, status_codes: Mapping[type[Exception], grpc.StatusCode], request_id: str
) -> tuple[grpc.StatusCode, str]:
    """The status and message of a call that failed; logs an exception that is not in the table."""
    for base in type(error).__mro__:
        if base in status_codes:
            return status_codes[base], str(error)
    structlog.get_logger("tandem.access").exception("unexpected exception", exc_info=error)
    return (
        grpc.StatusCode.INTERNAL,
        f"internal error; the server's log has it under request id {request_id}",
    )


def refusal_metadata(error: Exception) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of a refused call: the reason and the retry-after, if known."""
    metadata: list[tuple[str, str]] = []
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        metadata.append((RETRY_AFTER_KEY, str(max(1, round(retry_after_s * 1000)))))
    if isinstance(reason := getattr(error, "reason", None), enum.Enum):
        metadata.append((REFUSAL_REASON_KEY, reason.value))
    return tuple(metadata)


async def _only(requests: AsyncIterator[Any], timeout_s: float) -> Any:
    """The message of a call that sends one. Raises MalformedRequestError."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(requests)
    except TimeoutError:
        raise MalformedRequestError(
            f"the message has not arrived within {timeout_s:g} s; send it faster"
        ) from None
    except StopAsyncIteration:
        raise MalformedRequestError("the call has no message; send the one that the method takes") from None


def _decoder(
    handler: _Handler, *, raises: bool = False, max_bytes: int | None = None
) -> Callable[[bytes], Any] | None:
    """The method's own deserializer, whose failure becomes a MalformedRequestError.

    gRPC decodes a single request before it calls the handler and turns an exception there into UNKNOWN,
    without counting the call. So the decoder returns the error in place of the request, and `_decoded`
    raises it inside the call. Requests of a stream are decoded inside the call, as the handler reads them;
    there, and where `raises` says so, it is raised at once.
    """
    deserialize = handler.request_deserializer
    if deserialize is None:
        return None

    def decode(raw: bytes) -> Any:
        if max_bytes is not None and len(raw) > max_bytes:
            raise MalformedRequestError(
                f"the request has {len(raw)} bytes, limit {max_bytes}; this method needs no more"
            )
        try:
            return deserialize(raw)
        except DecodeError as error:
            malformed = MalformedRequestError(
                f"the request is not a valid protobuf message: {error}; send the message that the method "
                "takes (strings must be UTF-8)"
            )
            if raises or handler.request_streaming:
                raise malformed from error
            return malformed

    return decode


def _decoded(request: Any) -> Any:
    if isinstance(request, MalformedRequestError):
        raise request
    return request


def _metadata_value(context: _Context, key: str) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == key and isinstance(value, str):
            return value
    return ""


def _code_name(context: _Context) -> str:
    """The status set on the context; gRPC keeps it as the enum or as its number."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((known.name for known in grpc.StatusCode if known.value[0] == code), "OK")
