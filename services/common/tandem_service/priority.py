"""CPU priority and scheduling policy of a process relative to others on the same machine.

A prefill step occupies every core for seconds. With equal priority, threads of concurrent decode steps wait
repeatedly for a core. At low priority prefill still gets all CPU time that decoding leaves. A gateway uses
little CPU time, in slices of a millisecond or less that clients wait for.

The threads of a decode step yield their cores many times per millisecond (kernels/csrc/team.h), between
pieces of work, when no other thread waits for them. A process that waits for such a yield delays a step less
than one that preempts a piece (docs/decisions/priorities.md).
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
    """Sets SCHED_BATCH: threads of this process that wake up wait for an idle or offered core rather than
    interrupt the thread that runs on it. Threads started later inherit the policy.

    Without an offer they run when the other thread's time slice ends, after about 3 ms. Nothing changes where
    the system lacks the policy or forbids it.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
