"""Accepted tokens between decode pods and the lookahead service, and the names that they travel under."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from functools import lru_cache

#: Number of remembered names; more than a pod has requests at once.
_NUM_REMEMBERED = 4096


@dataclass(frozen=True)
class AcceptedSpan:
    """Consecutive tokens of a sequence; `offset` is the index of the first one."""

    #: Name of the sequence. From a pod: the request's name. To a pod: the shared sequence's.
    run: str
    offset: int
    token_ids: tuple[int, ...]
    #: The tokens are of the request's prompt, not of its output.
    is_prompt: bool = False


class RequestNames:
    """Maps request ids to 64-bit names that differ between pods and say nothing about the id.

    A request's id belongs to its caller and never leaves the pod.
    """

    def __init__(self) -> None:
        key = secrets.token_bytes(16)

        @lru_cache(_NUM_REMEMBERED)
        def name(request_id: str) -> str:
            return hashlib.blake2b(request_id.encode(), digest_size=8, key=key).hexdigest()

        self._name = name

    def of(self, request_id: str) -> str:
        """Equal ids give equal names. Thread-safe."""
        return self._name(request_id)
