"""Service-level objectives of classes and requests."""

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
    #: Whether a request is refused if the system cannot meet the objectives even without load.
    is_strict: bool = False
    #: Whether a late request waits, like one without objectives, instead of being refused. The receipt still
    #: compares it with its objectives. Never with `is_strict`.
    waits: bool = False
    #: Objectives as multiples of the time on an idle system ("slowdown"); 0 means none. Where an objective is
    #: given both ways, the longer time counts.
    ttft_slowdown: float = 0.0
    tpot_slowdown: float = 0.0
    e2e_slowdown: float = 0.0

    @property
    def refuses(self) -> bool:
        """Whether late requests are refused."""
        has_objectives = self.ttft_s or self.tpot_s or self.e2e_s or self.is_relative
        return bool(has_objectives and not self.waits)

    @property
    def is_relative(self) -> bool:
        """Whether an objective depends on the request's time on an idle system."""
        return bool(self.ttft_slowdown or self.tpot_slowdown or self.e2e_slowdown)

    def resolved(self, *, ttft_s: float, tpot_s: float, e2e_s: float) -> SloTarget:
        """Adds the relative objectives in seconds, for a request with these times on an idle system."""
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
        """Replaces objectives by those of `asked` that are not 0. A strict request does not wait."""
        return replace(
            self,
            ttft_s=asked.ttft_s or self.ttft_s,
            tpot_s=asked.tpot_s or self.tpot_s,
            e2e_s=asked.e2e_s or self.e2e_s,
            is_strict=asked.is_strict or self.is_strict,
            waits=self.waits and not asked.is_strict,
            ttft_slowdown=0.0 if asked.ttft_s else self.ttft_slowdown,
            tpot_slowdown=0.0 if asked.tpot_s else self.tpot_slowdown,
            e2e_slowdown=0.0 if asked.e2e_s else self.e2e_slowdown,
        )

    def miss(self, ttft_s: float, tpot_s: float, e2e_s: float) -> str:
        """The missed objectives and by how much; "" if all were met."""
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


#: Share of the requests of each class that should meet its SLO; the rest is the error budget.
ATTAINMENT_OBJECTIVE = 0.99
#: A day.
LONGEST_OBJECTIVE_S = 86_400
NO_OBJECTIVES = SloTarget("")
DEFAULT_SLO_CLASSES = MappingProxyType(
    {
        "standard": SloTarget("standard", ttft_s=2.5, e2e_s=5.0, waits=True),
        "interactive": SloTarget("interactive", ttft_s=2.5, e2e_s=5.0),
        "chat": SloTarget("chat", ttft_s=1.0, tpot_s=0.150),
        "batch": SloTarget("batch"),
    }
)
