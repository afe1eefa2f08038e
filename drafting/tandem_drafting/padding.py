"""Sizes on the wire: messages are filled up to a power of two, so that lengths tell nothing of tokens.

How many messages there are, and when, is not hidden.
"""

from __future__ import annotations

LEAST_BYTES = 256


def num_padding_bytes(size: int, least: int = LEAST_BYTES) -> int:
    """How many zeros a protobuf field with a one-byte tag must hold, so that a message of `size` bytes
    without it becomes a power of two, at least `least`. 0: it needs no such field."""
    wanted = max(least, 1 << (size - 1).bit_length()) if size else least
    while wanted != size:
        room = wanted - size - 1  # behind the tag
        for length_bytes in range(1, 5):  # of the field's own length, 7 bits each
            count = room - length_bytes
            if count > 0 and -(-count.bit_length() // 7) == length_bytes:
                return count
        wanted *= 2  # just too full: no count of zeros comes out at this size
    return 0
