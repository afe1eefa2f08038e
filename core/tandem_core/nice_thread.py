"""Low-priority threads for callers' work that must not slow down the steps of a pod."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

#: Beside other threads, one with this niceness gets a tenth of a core.
_NICENESS = 10


def nice_threads(number: int, name: str) -> ThreadPoolExecutor:
    """A pool of threads with low priority, if the system supports thread priorities (Linux)."""
    return ThreadPoolExecutor(number, thread_name_prefix=name, initializer=_be_nice)


def _be_nice() -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
