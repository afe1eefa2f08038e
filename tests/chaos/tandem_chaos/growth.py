"""How far a process may grow between idle moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from tandem_chaos.violations import Violations

_WARM_MOMENTS = 4
#: Above what allocators keep and connections to restarted pods take.
_MEMORY_LIMIT_MIB = 64
_DESCRIPTOR_LIMIT = 32


@dataclass
class Growth:
    """Memory and descriptors of processes between idle moments.

    The first moments of a process are not compared: its caches and connections are still to come.
    """

    violations: Violations
    most_memory_mib: float = 0.0
    most_descriptors: int = 0
    _moments: Counter[int] = field(default_factory=Counter)
    _first: dict[int, tuple[float, int]] = field(default_factory=dict)

    def look(self, pids: Mapping[str, int]) -> None:
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                memory_mib, descriptors = process.memory_info().rss / (1 << 20), process.num_fds()
            except psutil.Error:
                continue  # it has just ended
            self._moments[pid] += 1
            if self._moments[pid] == _WARM_MOMENTS:
                self._first[pid] = memory_mib, descriptors
            if pid not in self._first:
                continue
            more_memory = memory_mib - self._first[pid][0]
            more_descriptors = descriptors - self._first[pid][1]
            self.most_memory_mib = max(self.most_memory_mib, more_memory)
            self.most_descriptors = max(self.most_descriptors, more_descriptors)
            if more_memory > _MEMORY_LIMIT_MIB or more_descriptors > _DESCRIPTOR_LIMIT:
                self.violations.add(
                    f"{name} has grown by {more_memory:.0f} MiB and {more_descriptors} descriptors; limits: "
                    f"{_MEMORY_LIMIT_MIB} MiB, {_DESCRIPTOR_LIMIT}"
                )
                del self._first[pid]
                self._moments[pid] = 0
