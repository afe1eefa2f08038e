"""Service-level objectives: what each class promises, and by how much a request missed it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class SloTarget:
    """Objectives of one request in seconds; 0 means none."""

    name: str
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0

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


SLO_CLASSES = MappingProxyType(
    {
        "interactive": SloTarget("interactive", ttft_s=2.5, e2e_s=5.0),
        "chat": SloTarget("chat", ttft_s=1.0, tpot_s=0.150),
        "batch": SloTarget("batch"),
    }
)
