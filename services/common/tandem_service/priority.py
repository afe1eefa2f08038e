"""Sets the CPU priority of a process relative to others on the same machine, and when it takes its turn.

A prefill step occupies every core for seconds. Beside it with equal priority, a decode step waits again and
again for a thread to get its core back. At low priority prefill still gets all CPU time that decoding
leaves. A gateway uses little CPU time, in turns of a millisecond or less that clients wait for.

The threads of a decode step offer their cores many times in a millisecond (kernels/csrc/team.h), each time
between two pieces of work, when no other thread waits for what it does. A process that waits for such an
offer delays a step less than one that interrupts a piece (docs/decisions/priorities.md).
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


def wait_for_offers() -> None:
    """Threads of this process that wake up wait for a core that is idle, or that is offered by the thread
    which has it, rather than interrupt that (SCHED_BATCH); those started later inherit it. Without an offer
    they have their turn when the other one's is over, after 3 ms or so. Nothing changes where the system does
    not have the policy, or forbids it."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
