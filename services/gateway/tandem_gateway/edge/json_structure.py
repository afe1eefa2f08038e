"""Limits the number of values in a JSON body before it is parsed.

Parsing holds the GIL, and so blocks all streams, for microseconds per object; a few megabytes can hold enough
objects for seconds. Counting bytes is fast and gives an upper bound. Only bodies with many braces or commas,
which may be inside strings, are examined closely, in a thread that releases the GIL.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tandem_core.errors import InvalidRequestError

#: On a slow machine, parsing takes up to 5 us per container and 1 us per value; together less than 50 ms.
_MAX_CONTAINERS = 4096
_MIN_VALUES = 40_000


@dataclass(frozen=True)
class JsonLimits:
    #: Objects and lists.
    max_containers: int = _MAX_CONTAINERS
    #: All values in them.
    max_values: int = _MIN_VALUES

    @classmethod
    def for_context(cls, max_model_len: int) -> JsonLimits:
        """Allows a prompt of token ids as long as the context."""
        return cls(max_values=max(_MIN_VALUES, max_model_len + _MAX_CONTAINERS))


async def check_structure(body: bytes, limits: JsonLimits) -> None:
    """Raises InvalidRequestError for a body with too many values. Accepts invalid JSON."""
    containers, values = _count(body, 0, len(body))
    if containers > limits.max_containers or values > limits.max_values:
        await asyncio.to_thread(_check_closely, body, limits)


def _count(body: bytes, start: int, end: int) -> tuple[int, int]:
    containers = body.count(b"{", start, end) + body.count(b"[", start, end)
    return containers, body.count(b",", start, end)


def _check_closely(body: bytes, limits: JsonLimits) -> None:
    """Counts outside of strings. Raises InvalidRequestError."""
    containers = values = at = 0
    while at < len(body):
        quote = body.find(b'"', at)
        end = len(body) if quote < 0 else quote
        more_containers, more_values = _count(body, at, end)
        containers, values = containers + more_containers, values + more_values
        if containers > limits.max_containers:
            raise InvalidRequestError(
                "body", f"holds more than {limits.max_containers} objects and lists, the limit; send fewer"
            )
        if values > limits.max_values:
            raise InvalidRequestError(
                "body", f"holds more than {limits.max_values} values, the limit; send fewer"
            )
        at = _end_of_string(body, end)


def _end_of_string(body: bytes, quote: int) -> int:
    """The position after the string that begins at this quote."""
    at = quote + 1
    while True:
        at = body.find(b'"', at)
        if at < 0:
            return len(body)
        num_backslashes = 0
        while body[at - 1 - num_backslashes] == 0x5C and num_backslashes < at - quote - 1:
            num_backslashes += 1
        at += 1
        if num_backslashes % 2 == 0:
            return at
