"""Resolves the objectives by which a request is judged. Relative objectives become seconds. Objectives that
an idle system could not meet are widened, unless the request is strict."""

from __future__ import annotations

from collections.abc import Mapping

from tandem_core.slo import SloTarget


def resolve(slo: SloTarget, alone: Mapping[str, float], slack: float) -> tuple[SloTarget, bool]:
    """Returns the objectives in seconds, and whether any was widened. `alone` has the times of the request on
    an idle system, by objective. An objective below `slack` times that is widened to it, unless the request
    is strict or the objective relative; with `slack` 0 none is."""
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
    """Names the first objective that an idle system would miss even if it were `times` as long; "": none."""
    for name in ("ttft", "tpot", "e2e"):
        if 0 < times * getattr(slo, f"{name}_s") < alone[name]:
            return name
    return ""
