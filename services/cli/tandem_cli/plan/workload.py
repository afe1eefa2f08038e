"""The requests of a plan: Poisson arrivals of given lengths, or a recorded trace at another rate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_cli.bench.traces import TraceEntry


@dataclass(frozen=True)
class PlannedRequest:
    arrival_s: float
    prompt_tokens: int
    #: Prompt tokens that are in a prefix cache.
    cached_tokens: int
    output_tokens: int


def poisson(
    rate: float,
    count: int,
    prompt_tokens: int,
    output_tokens: int,
    *,
    cached_tokens: int = 0,
    spread: float,
    seed: int,
) -> list[PlannedRequest]:
    """`count` requests at `rate` a second; lengths vary by up to `spread` of the mean, evenly."""
    rng = random.Random(seed)
    now, requests = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt, output = (
            max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))
            for mean in (prompt_tokens, output_tokens)
        )
        requests.append(PlannedRequest(now, prompt, min(cached_tokens, prompt - 1), output))
    return requests


def of_trace(
    entries: Sequence[TraceEntry], rate: float | None, prompt_tokens: int, output_tokens: int
) -> list[PlannedRequest]:
    """The trace scaled to the mean rate `rate`; the given lengths where the trace has none."""
    duration = entries[-1].arrival_s or 1.0
    scale = 1.0 if rate is None else len(entries) / duration / rate
    return [
        PlannedRequest(
            entry.arrival_s * scale,
            entry.prompt_tokens or prompt_tokens,
            0,
            entry.output_tokens or output_tokens,
        )
        for entry in entries
    ]
