"""Limits the number of values in a JSON body before it is parsed.

Parsing holds the GIL, and so blocks all streams, for microseconds per object; a few megabytes can hold enough
objects for seconds. Counting bytes is fast and gives an upper bound. Only bodies with many braces or commas,
which may be inside strings, are examined closely, in a thread.
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
    """Raises InvalidRequestError for a body with too many values. Accepts most invalid JSON."""
    containers, values = _count(body)
    if containers > limits.max_containers or values > limits.max_values:
        await asyncio.to_thread(_check_closely, body, limits)


def _count(body: bytes) -> tuple[int, int]:
    return body.count(b"{") + body.count(b"["), body.count(b",")


def _check_closely(body: bytes, limits: JsonLimits) -> None:
    """Counts outside of strings. Raises InvalidRequestError.

    Each step is one call of C: 8 MiB take at most 50 ms in all.
    """
    # What is left of a run of backslashes escapes the next character.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Each value has a key at most, and each container one value more than commas.
    most_strings = 2 * (limits.max_values + limits.max_containers) + 1
    if unescaped.count(b'"') > 2 * most_strings:
        containers, values = 0, limits.max_values + 1
    else:
        containers, values = _count(b"".join(unescaped.split(b'"')[::2]))
    if containers > limits.max_containers:
        raise InvalidRequestError(
            "body", f"holds more than {limits.max_containers} objects and lists, the limit; send fewer"
        )
    if values > limits.max_values:
        raise InvalidRequestError(
            "body", f"holds more than {limits.max_values} values, the limit; send fewer"
        )
