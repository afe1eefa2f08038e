"""Encodes JSON as bytes and as server-sent events that simple clients can parse.

Many clients read a stream line by line, and some split lines like Python's str.splitlines. The JSON of an
event therefore has no line break of any kind: JSON escapes control characters, and this module escapes the
others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

#: Encodes like Starlette's JSONResponse.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_CONTAINERS = (dict, list, tuple)
#: Unicode line breaks that JSON permits in strings, and halves of surrogate pairs, which a model may write in
#: a call and UTF-8 cannot encode.
_ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
SSE_DONE = b"data: [DONE]\n\n"


def json_bytes(value: object, *, in_steps: bool = False) -> bytes:
    """Encodes JSON on one line; `in_steps`: in many short calls of the encoder, so that other threads run in
    between."""
    if not in_steps:
        return _encoded(value).encode()
    encoded = bytearray()
    for part in _parts(value):
        encoded += part.encode()
    return bytes(encoded)


def _encoded(value: object) -> str:
    text = _ENCODER.encode(value)
    return text if text.isascii() else _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _parts(value: object) -> Iterator[str]:
    """A value without nested lists or objects is one part."""
    if isinstance(value, dict) and any(isinstance(part, _CONTAINERS) for part in value.values()):
        yield "{"
        for index, (name, part) in enumerate(value.items()):
            yield f"{',' if index else ''}{_encoded(name)}:"
            yield from _parts(part)
        yield "}"
    elif isinstance(value, (list, tuple)) and any(isinstance(part, _CONTAINERS) for part in value):
        yield "["
        for index, part in enumerate(value):
            yield "," if index else ""
            yield from _parts(part)
        yield "]"
    else:
        yield _encoded(value)


def sse(event: Mapping[str, object], event_id: str = "", *, in_steps: bool = False) -> bytes:
    """Encodes one server-sent event with a JSON body."""
    head = f"id: {event_id}\n".encode() if event_id else b""
    return head + b"data: " + json_bytes(event, in_steps=in_steps) + b"\n\n"
