"""Sets the CPU priority of a process relative to others on the same machine.

A prefill step occupies every core for seconds. Beside it with equal priority, a decode step waits up to 300
times for a thread to get its core back. At low priority prefill still gets all CPU time that decoding
leaves. A gateway uses little CPU time, in turns of a few milliseconds that clients wait for.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import structlog

#: If the kernel groups processes by session ("autogroup"), nice values only count within a group, and this
#: file sets the nice value of the group.
_AUTOGROUP = Path("/proc/self/autogroup")


def change_nice(nice: int, autogroup: Path = _AUTOGROUP) -> None:
    """Adds `nice` to this process's nice value (0 changes nothing); threads started later inherit it.

    Less than 0 needs CAP_SYS_NICE; without it the priority stays, and a line is logged.
    """
    if nice == 0:
        return
    try:
        os.nice(nice)
    except PermissionError:
        structlog.get_logger().info("priority stays: a negative nice value needs CAP_SYS_NICE", nice=nice)
        return
    # Absent without autogroup, and read-only in some containers; then only the nice value above applies.
    with contextlib.suppress(OSError):
        autogroup.write_text(str(nice))
