"""Service-level objectives: what each class promises, and by how much a request missed it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class SloTarget:
    """Objectives of one request in seconds; 0 means none."""

    name: str
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0
    #: Whether a request is refused rather than served late on a machine that cannot meet it.
    is_strict: bool = False
    #: Objectives as multiples of what the request takes without load; 0 means none. Where an objective is
    #: given both ways, the longer time counts. For the ratio of a response time to that without load the
    #: field says slowdown.
    ttft_slowdown: float = 0.0
    tpot_slowdown: float = 0.0
    e2e_slowdown: float = 0.0

    @property
    def is_relative(self) -> bool:
        """Whether any objective is known only with what the request takes without load."""
        return bool(self.ttft_slowdown or self.tpot_slowdown or self.e2e_slowdown)

    def resolved(self, *, ttft_s: float, tpot_s: float, e2e_s: float) -> SloTarget:
        """The relative objectives in seconds too, of a request that takes so long without load."""
        return replace(
            self,
            ttft_s=max(self.ttft_s, self.ttft_slowdown * ttft_s),
            tpot_s=max(self.tpot_s, self.tpot_slowdown * tpot_s),
            e2e_s=max(self.e2e_s, self.e2e_slowdown * e2e_s),
        )

    def widened(self, *, ttft_s: float, tpot_s: float, e2e_s: float) -> SloTarget:
        """No objective tighter than the given one."""
        return replace(
            self,
            ttft_s=max(self.ttft_s, ttft_s) if self.ttft_s else 0.0,
            tpot_s=max(self.tpot_s, tpot_s) if self.tpot_s else 0.0,
            e2e_s=max(self.e2e_s, e2e_s) if self.e2e_s else 0.0,
        )

    def overridden(self, asked: SloTarget) -> SloTarget:
        """With the objectives that `asked` has; 0 there keeps this one's."""
        return replace(
            self,
            ttft_s=asked.ttft_s or self.ttft_s,
            tpot_s=asked.tpot_s or self.tpot_s,
            e2e_s=asked.e2e_s or self.e2e_s,
            is_strict=asked.is_strict or self.is_strict,
            ttft_slowdown=0.0 if asked.ttft_s else self.ttft_slowdown,
            tpot_slowdown=0.0 if asked.tpot_s else self.tpot_slowdown,
            e2e_slowdown=0.0 if asked.e2e_s else self.e2e_slowdown,
        )

    def miss(self, ttft_s: float, tpot_s: float, e2e_s: float) -> str:
        """ "" when every objective was met, else which were missed and by how much."""
        measured = (
            ("ttft", ttft_s, self.ttft_s),
            ("tpot", tpot_s, self.tpot_s),
            ("e2e", e2e_s, self.e2e_s),
        )
        return "; ".join(
            f"{name} {value:.3f} s exceeded {limit:g} s by {value - limit:.3f} s"
            for name, value, limit in measured
            if limit and value > limit
        )


#: Share of the requests of each class that is to meet its SLO; the rest is the error budget.
ATTAINMENT_OBJECTIVE = 0.99
#: A day.
LONGEST_OBJECTIVE_S = 86_400
NO_OBJECTIVES = SloTarget("")
DEFAULT_SLO_CLASSES = MappingProxyType(
    {
        "interactive": SloTarget("interactive", ttft_s=2.5, e2e_s=5.0),
        "chat": SloTarget("chat", ttft_s=1.0, tpot_s=0.150),
        "batch": SloTarget("batch"),
    }
)
