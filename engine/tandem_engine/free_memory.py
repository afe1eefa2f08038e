"""How much RAM there is for this process. Without torch: `tandem up` asks too."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process can still get: the machine's, or its container's if that is less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int((cgroup / limit_file).read_text())  # "max", no number, where there is no limit
            used = int((cgroup / used_file).read_text())
            stat = dict(line.split() for line in (cgroup / used_file).with_name("memory.stat").open())
        except (OSError, ValueError):
            continue
        return min(available, max(0, limit - used + int(stat.get(reclaimable, 0))))
    return available
