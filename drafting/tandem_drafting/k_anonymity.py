"""Finds the text of a namespace that k distinct requests generated; the work is done in C++
(csrc/k_anonymity.h).

    append(run, request, tokens)  ->  shared spans of the run that are new or grew

The guarantee: k distinct requests hold each span as a whole, the run's own request included. So k requests
generated every n-gram within it, of any length. The filter may miss text: where a text is frequent, a search
looks only at the latest positions, and a span may be cut.

Equal calls in equal order give equal spans.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_drafting import native

_POINTER, _INT32, _INT64, _UINT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
_SIGNATURES: native.Signatures = {
    "tandem_k_anonymity_new": (_POINTER, (_INT32,)),
    "tandem_k_anonymity_free": (None, (_POINTER,)),
    "tandem_k_anonymity_append": (_INT32, (_POINTER, _INT32, _UINT64, _POINTER, _INT64, _POINTER)),
    "tandem_k_anonymity_restore": (None, (_POINTER, _INT32, _UINT64, _POINTER, _INT64, _INT32, _INT32)),
    "tandem_k_anonymity_drop": (None, (_POINTER, _INT32)),
    "tandem_k_anonymity_read": (None, (_POINTER, _INT32, _INT64, _INT64, _POINTER)),
    "tandem_k_anonymity_bytes": (_INT64, (_POINTER,)),
}
native.declare(native.LIBRARY, _SIGNATURES)


@dataclass(frozen=True)
class SharedSpan:
    """Tokens [begin, end) of a run."""

    begin: int
    end: int
    #: A run of another request that holds its beginning; None: the span grew, or k is 1.
    supporter: int | None = None


class KAnonymityFilter:
    """Holds the text that it was given. Not thread-safe."""

    def __init__(self, min_requests: int) -> None:
        """A text is shared when `min_requests` (k) requests hold it; with 1 each run is one span."""
        if min_requests < 1:
            raise ValueError(f"min_requests is {min_requests}, must be at least 1")
        self._library = native.LIBRARY
        self._handle = self._library.tandem_k_anonymity_new(min_requests)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.tandem_k_anonymity_free(self._handle)

    def append(self, run: int, request: int, token_ids: Sequence[int]) -> list[SharedSpan]:
        """Appends to a run (31 bits); its first tokens assign it to `request` (64 bits)."""
        ids = _ids(token_ids)
        found = (_INT32 * (3 * len(ids) + 3))()
        count = self._library.tandem_k_anonymity_append(
            self._handle, run, request, ids.buffer_info()[0], len(ids), found
        )
        return [
            SharedSpan(found[at], found[at + 1], found[at + 2] if found[at + 2] >= 0 else None)
            for at in range(0, 3 * count, 3)
        ]

    def restore(self, run: int, request: int, token_ids: Sequence[int], last: SharedSpan | None) -> None:
        """Appends tokens of which the shared spans are known; `last` is the one that ends last."""
        ids = _ids(token_ids)
        begin, end = (last.begin, last.end) if last is not None else (0, 0)
        self._library.tandem_k_anonymity_restore(
            self._handle, run, request, ids.buffer_info()[0], len(ids), begin, end
        )

    def drop(self, run: int) -> None:
        """Forgets a run, which no longer supports others. Ignores an unknown one."""
        self._library.tandem_k_anonymity_drop(self._handle, run)

    def read(self, run: int, begin: int, end: int) -> array[int]:
        """Tokens [begin, end) of a run."""
        ids = array("i", bytes(4 * (end - begin)))
        self._library.tandem_k_anonymity_read(self._handle, run, begin, end, ids.buffer_info()[0])
        return ids

    @property
    def memory_bytes(self) -> int:
        return int(self._library.tandem_k_anonymity_bytes(self._handle))


def _ids(token_ids: Sequence[int]) -> array[int]:
    return token_ids if isinstance(token_ids, array) else array("i", token_ids)
