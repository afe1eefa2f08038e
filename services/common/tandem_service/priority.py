"""A process steps back behind others of its machine that have deadlines.

A prompt is seconds of arithmetic on every core; beside it, a decode step waits for each of its threads to get
a core back, 300 times. Given little weight, prefill still takes all that decoding leaves.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: Where the kernel groups processes by session ("autogroup"), nice values count within a group alone, and
#: this file sets the group's own.
_AUTOGROUP = Path("/proc/self/autogroup")


def step_back(nice: int) -> None:
    """Raise this process's nice value by `nice` (0 changes nothing); threads started later inherit it."""
    if nice == 0:
        return
    os.nice(nice)
    # Absent in kernels without it, and refused where a container forbids it: then the value above must do.
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(nice))
