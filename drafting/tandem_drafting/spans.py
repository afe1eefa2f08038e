"""Accepted tokens on their way to the lookahead service and back, and the names they travel under.

A request's id is its caller's and stays in its pod: outside, its text goes by a name that the pod makes up.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from functools import lru_cache

#: Requests whose names are remembered: more than a pod has at once.
_NUM_REMEMBERED = 4096


@dataclass(frozen=True)
class AcceptedSpan:
    """Consecutive tokens of a run; `offset` is the first one's index in it."""

    #: From a pod: the request's name; to a pod: the shared run's.
    run: str
    offset: int
    token_ids: tuple[int, ...]
    #: Of the request's prompt, not of what it generated.
    is_prompt: bool = False


class RequestNames:
    """Names of requests: 64 bits that differ from pod to pod and tell nothing of the id."""

    def __init__(self) -> None:
        key = secrets.token_bytes(16)

        @lru_cache(_NUM_REMEMBERED)
        def name(request_id: str) -> str:
            return hashlib.blake2b(request_id.encode(), digest_size=8, key=key).hexdigest()

        self._name = name

    def of(self, request_id: str) -> str:
        """The same name for the same id; any thread may ask."""
        return self._name(request_id)
