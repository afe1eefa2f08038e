"""Token ids of the pieces of chats: the system prompt and earlier turns recur in each request."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

#: Characters of all pieces; a piece counts as this many more.
_MAX_CHARS, _PIECE_OVERHEAD = 1_000_000, 256


class PieceCache:
    """A thread-safe LRU over the pieces of all tenants. Each tenant finds only its own pieces, so that the
    duration of tokenizing does not reveal what others have sent."""

    def __init__(self, max_chars: int = _MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def ids(self, tenant: str, piece: str, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
        key = (tenant, piece)
        with self._lock:
            if key in self._ids:
                self._ids.move_to_end(key)
                return self._ids[key]
        ids = array("I", encode(piece))
        with self._lock:
            if key not in self._ids:  # another thread may have been faster
                self._ids[key] = ids
                self._num_chars += len(piece) + _PIECE_OVERHEAD
            while self._num_chars > self._max_chars:
                (_, oldest), _ = self._ids.popitem(last=False)
                self._num_chars -= len(oldest) + _PIECE_OVERHEAD
        return ids
