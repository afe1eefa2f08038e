"""Counters of many processes as one, over time.

increase of a process   value - last value; after a restart, when the value is lower, the value
a new process           adds nothing at its first scrape, because its counts may be old
total                   sum of all increases since the scaler's start, which never falls
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping


class Totals:
    """Totals by name, at each of the last `keep_s` seconds' scrapes."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._last: dict[str, Mapping[str, float]] = {}
        self._totals: dict[str, float] = {}
        self._past: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, now: float, processes: Mapping[str, Mapping[str, float]]) -> None:
        """Adds the counters of the processes that answered, by target. The others keep their last values, so
        that their increase counts when they answer again."""
        for target, counters in processes.items():
            last = self._last.get(target)
            if last is not None:
                for name, value in counters.items():
                    before = last.get(name, 0.0)
                    increase = value - before if value >= before else value
                    self._totals[name] = self._totals.get(name, 0.0) + increase
            self._last[target] = counters
        self._past.append((now, dict(self._totals)))
        while len(self._past) > 2 and self._past[1][0] <= now - self._keep_s:
            self._past.popleft()

    def forget(self, targets: set[str]) -> None:
        """Drops the last values of processes that have ended."""
        for target in targets:
            self._last.pop(target, None)

    def targets(self) -> set[str]:
        return set(self._last)

    def increase(self, name: str, seconds: float) -> float:
        """Increase over the last `seconds`, or since the first scrape."""
        return self._totals.get(name, 0.0) - self._before(seconds)[1].get(name, 0.0)

    def covered(self, seconds: float) -> float:
        """The time that `increase` covers."""
        return self._past[-1][0] - self._before(seconds)[0] if self._past else 0.0

    def rate(self, name: str, seconds: float) -> float:
        """Per second."""
        covered = self.covered(seconds)
        return self.increase(name, seconds) / covered if covered else 0.0

    def _before(self, seconds: float) -> tuple[float, dict[str, float]]:
        """The last scrape that is at least `seconds` old, or else the first one."""
        if not self._past:
            return 0.0, {}
        since = self._past[-1][0] - seconds
        index = bisect_right([at for at, _ in self._past], since + 1e-6) - 1
        return self._past[max(index, 0)]
