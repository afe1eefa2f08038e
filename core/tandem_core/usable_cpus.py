"""How many threads can compute at once in this process. Without torch: `tandem up` asks too."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The CPUs that this process may use, or its container's quota, rounded up, if that is less.

    With more threads than the quota, all of them stop for the rest of each period.
    """
    cpus = len(os.sched_getaffinity(0))
    for read in (_quota, _quota_v1):
        try:
            quota_us, period_us = read(cgroup)
        except (OSError, ValueError):  # "max", no number, where there is no quota
            continue
        if quota_us > 0 and period_us > 0:  # version 1 has -1 for no quota
            cpus = min(cpus, max(1, math.ceil(quota_us / period_us)))
    return cpus


def _quota(cgroup: Path) -> tuple[int, int]:
    quota_us, period_us = (cgroup / "cpu.max").read_text().split()
    return int(quota_us), int(period_us)


def _quota_v1(cgroup: Path) -> tuple[int, int]:
    folder = cgroup / "cpu"
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
