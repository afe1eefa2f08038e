"""Schedules of requests.

open loop    times drawn before the run, independent of the answers
replay       recorded times, scaled by a factor
closed loop  N requests in flight at any time
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class OpenLoop:
    """Mean requests per second, > 0.

    The gaps follow a gamma distribution whose shape is `burstiness`, as in vLLM's benchmark: 1 is a Poisson
    process, less comes in bursts, more is steadier, and infinity is constant. The gaps' coefficient of
    variation is 1 / sqrt(burstiness). Equal seeds give the same pattern at every rate.
    """

    rate: float
    seed: int
    burstiness: float = 1.0

    def departures_s(self, num_requests: int) -> list[float]:
        """Seconds after the start at which each request leaves; the first at 0."""
        generator = random.Random(self.seed)
        times, now = [], 0.0
        for _ in range(num_requests):
            times.append(now)
            if math.isinf(self.burstiness):
                now += 1 / self.rate
            else:
                now += generator.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
        return times


@dataclass(frozen=True)
class Replay:
    """Times of a trace in seconds since its first request, `speed` times as fast as recorded."""

    times_s: tuple[float, ...]
    speed: float = 1.0

    def departures_s(self, num_requests: int) -> list[float]:
        """Times of the first `num_requests`, at most the number in the trace."""
        return [time_s / self.speed for time_s in self.times_s[:num_requests]]


@dataclass(frozen=True)
class ClosedLoop:
    concurrency: int


Schedule = OpenLoop | Replay | ClosedLoop
