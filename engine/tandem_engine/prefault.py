"""Pre-faults KV pool pages ahead of use.

The kernel allocates and clears a page when it is first touched: 100 ms for a prompt of 4K tokens, 400 ms in a
virtual machine whose host does the same, on the threads that compute or receive. Here a thread of lowest
priority touches pages first, at most AHEAD_BYTES ahead, so a pool takes little more memory than it uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence

import torch

#: Two prompts of 4K tokens of the default model.
AHEAD_BYTES = 192 << 20
_PIECE = 2 << 20
_PAGE = 4096
#: Linux 5.14; not in Python 3.11's mmap.
_MADV_POPULATE_WRITE = 23


class Prefaulter:
    """Stays ahead of the highest block used in caches [num_blocks, ...] on the CPU."""

    def __init__(self, caches: Sequence[torch.Tensor], ahead_bytes: int = AHEAD_BYTES) -> None:
        self._caches = tuple(caches)
        self._num_blocks = len(caches[0])
        self._block_bytes = caches[0].nbytes // self._num_blocks
        self._ahead = max(1, ahead_bytes // (self._block_bytes * len(caches)))
        self._num_faulted = 0
        #: The running thread, or the last one; for tests.
        self.worker: threading.Thread | None = None
        self.will_use(0)

    def will_use(self, block_id: int) -> None:
        """Call before writing block_id; does nothing while enough memory ahead of it is faulted in."""
        if self._num_faulted == self._num_blocks or block_id + self._ahead // 2 < self._num_faulted:
            return
        first = max(self._num_faulted, block_id - self._ahead)
        self._num_faulted = min(self._num_blocks, block_id + self._ahead)
        if first < self._num_faulted:
            self.worker = threading.Thread(
                target=self._fault_in, args=(first, self._num_faulted), daemon=True
            )
            self.worker.start()

    def _fault_in(self, first: int, end: int) -> None:
        # On Linux a nice value belongs to a thread.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        libc = ctypes.CDLL(None)  # unlike mmap.madvise, it lets other threads run
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for cache in self._caches:
            at = (cache.data_ptr() + first * self._block_bytes) // _PAGE * _PAGE
            last = cache.data_ptr() + end * self._block_bytes
            while at < last:
                size = min(_PIECE, -(-(last - at) // _PAGE) * _PAGE)
                if libc.madvise(at, size, _MADV_POPULATE_WRITE):
                    return  # an older kernel, or no memory: pages are faulted in on first touch
                at += size
