"""The objectives by which a request is judged: relative ones in seconds, and none tighter than this system
can meet without load, unless the request is strict."""

from __future__ import annotations

from collections.abc import Mapping

from tandem_core.slo import SloTarget


def resolve(slo: SloTarget, alone: Mapping[str, float], slack: float) -> tuple[SloTarget, bool]:
    """The objectives in seconds, and whether any was widened. `alone`: seconds that the request takes without
    load, by name. An objective is at least `slack` times that, unless it is strict or relative; 0: unchanged.
    """
    resolved = slo.resolved(**{f"{name}_s": seconds for name, seconds in alone.items()})
    if slo.is_strict or not slack:
        return resolved, False
    least = {
        f"{name}_s": 0.0 if getattr(slo, f"{name}_slowdown") else slack * seconds
        for name, seconds in alone.items()
    }
    widened = resolved.widened(**least)
    return widened, widened != resolved


def missed_alone(slo: SloTarget, alone: Mapping[str, float], times: float = 1.0) -> str:
    """The objective that would be missed without any load, even if it were `times` as long; "" if none."""
    for name in ("ttft", "tpot", "e2e"):
        if 0 < times * getattr(slo, f"{name}_s") < alone[name]:
            return name
    return ""
