"""Reads a request's body within its limits of bytes, time and JSON values, before anything is parsed."""

from __future__ import annotations

import asyncio
import codecs

from starlette.datastructures import Headers
from starlette.requests import Request
from tandem_core.errors import quoted

from tandem_gateway.call.gateway import Gateway, max_message_bytes
from tandem_gateway.edge.json_structure import JsonLimits, check_structure
from tandem_gateway.errors import BodyTimeoutError, BodyTooLargeError, BodyTypeError


def max_body_bytes(gateway: Gateway, *, is_json: bool = True) -> int:
    return min(gateway.settings.max_body_bytes, max_message_bytes(gateway.tokenizer, is_json=is_json))


async def read_body(request: Request, gateway: Gateway) -> bytes:
    """Reads a JSON body. Raises BodyTypeError, BodyTooLargeError, BodyTimeoutError, InvalidRequestError."""
    _check_type(request.headers)
    body = await read_bytes(request, max_body_bytes(gateway), gateway.settings.read_timeout_s)
    body = body.removeprefix(codecs.BOM_UTF8)
    await check_values(body, gateway)
    return body


def _check_type(headers: Headers) -> None:
    """Raises BodyTypeError. A page of another site can send other types than JSON to a gateway without keys,
    and no browser would ask the gateway first."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BodyTypeError("content-type", f"is {quoted(kind)}; send application/json")
    coding = headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise BodyTypeError("content-encoding", f"is {quoted(coding)}; send the body uncompressed")


async def check_values(body: bytes, gateway: Gateway) -> None:
    """Raises InvalidRequestError for JSON with too many values."""
    await check_structure(body, JsonLimits.for_context(gateway.manifest.max_model_len))


async def read_bytes(request: Request, limit: int, timeout_s: float) -> bytes:
    """Reads a body of at most `limit` bytes. Raises BodyTooLargeError, BodyTimeoutError."""
    message = f"is over the limit of {limit} bytes; shorten the prompt"
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLargeError("body", message)
    parts = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                parts += part
                if len(parts) > limit:
                    raise BodyTooLargeError("body", message)
    except TimeoutError:
        raise BodyTimeoutError("body", f"has not arrived within {timeout_s:g} s; send it faster") from None
    return bytes(parts)
