"""Lowers the CPU priority of a process, so that decode pods on the same machine run first.

A prefill step occupies every core for seconds. Beside it with equal priority, a decode step waits up to 300
times for a thread to get its core back. At low priority prefill still gets all CPU time that decoding
leaves.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: If the kernel groups processes by session ("autogroup"), nice values only count within a group, and this
#: file sets the nice value of the group.
_AUTOGROUP = Path("/proc/self/autogroup")


def lower_priority(nice: int, autogroup: Path = _AUTOGROUP) -> None:
    """Raises this process's nice value by `nice` (0 changes nothing); threads started later inherit it."""
    if nice == 0:
        return
    os.nice(nice)
    # Absent without autogroup, and read-only in some containers; then only the nice value above applies.
    with contextlib.suppress(OSError):
        autogroup.write_text(str(nice))
