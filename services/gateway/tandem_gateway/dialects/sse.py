"""JSON as bytes, and server-sent events of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

#: Encodes like Starlette's JSONResponse.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_CONTAINERS = (dict, list, tuple)
SSE_DONE = b"data: [DONE]\n\n"


def json_bytes(value: object, *, in_steps: bool = False) -> bytes:
    """Encodes JSON; `in_steps`: in many short calls of the encoder, so that other threads run in between."""
    return "".join(_parts(value) if in_steps else [_ENCODER.encode(value)]).encode()


def _parts(value: object) -> Iterator[str]:
    """A value without nested lists or objects is one part."""
    if isinstance(value, dict) and any(isinstance(part, _CONTAINERS) for part in value.values()):
        yield "{"
        for index, (name, part) in enumerate(value.items()):
            yield f"{',' if index else ''}{_ENCODER.encode(name)}:"
            yield from _parts(part)
        yield "}"
    elif isinstance(value, (list, tuple)) and any(isinstance(part, _CONTAINERS) for part in value):
        yield "["
        for index, part in enumerate(value):
            yield "," if index else ""
            yield from _parts(part)
        yield "]"
    else:
        yield _ENCODER.encode(value)


def sse(event: Mapping[str, object], event_id: str = "", *, in_steps: bool = False) -> bytes:
    """Encodes one server-sent event with a JSON body."""
    head = f"id: {event_id}\n".encode() if event_id else b""
    return head + b"data: " + json_bytes(event, in_steps=in_steps) + b"\n\n"
