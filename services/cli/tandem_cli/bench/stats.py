"""Percentiles, throughput, goodput and attainment of a run.

Attainment is the share of all requests sent that met their SLO; failed and refused requests count as missed.
Goodput is the output of requests within their SLO, per second of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem_core.slo import SloTarget

from tandem_cli.bench.options import Point
from tandem_cli.bench.record import RequestRecord


@dataclass(frozen=True)
class Percentiles:
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None for no values."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(
            sum(ordered) / len(ordered),
            percentile(ordered, 50),
            percentile(ordered, 90),
            percentile(ordered, 99),
        )


@dataclass(frozen=True)
class DraftFigures:
    """Drafting, pooled over all requests."""

    #: Tokens per verification pass, without the first token of each request.
    mean_accepted_length: float
    #: Share of steps that accepted a guess.
    iteration_hit_rate: float
    #: Share of guesses that were accepted; 0 without guesses.
    token_hit_rate: float
    drafted: int
    accepted_by_source: Mapping[str, int]


@dataclass(frozen=True)
class Summary:
    """A whole run. Latencies are over requests that succeeded; durations in seconds."""

    num_sent: int
    num_ok: int
    #: Failures by status.
    failures: Mapping[str, int]
    #: From the first request sent to the last one ended.
    duration_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    slo: str
    #: Share of all sent that met the objective, in [0, 1].
    attainment: float
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    #: None when no receipt reports a step.
    drafts: DraftFigures | None


@dataclass(frozen=True)
class Run:
    """One speculation mode's requests of one round. mode "": the pods' default."""

    point: Point
    round: int
    mode: str
    summary: Summary
    records: tuple[RequestRecord, ...]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of ascending values, linear between neighbours (numpy's default)."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def meets(record: RequestRecord, slo: SloTarget) -> bool:
    """Whether the request succeeded within every objective. An empty answer's first token is its end."""
    if not record.is_ok:
        return False
    ttft_s = record.e2e_s if record.ttft_s is None else record.ttft_s
    return slo.miss(ttft_s, record.tpot_s or 0.0, record.e2e_s) == ""


def summarise(records: Sequence[RequestRecord], slo: SloTarget) -> Summary:
    """Figures of a run with at least one record."""
    good = [record for record in records if record.is_ok]
    within = [record for record in records if meets(record, slo)]
    started = min(record.sent_s for record in records)
    duration_s = max(record.sent_s + record.e2e_s for record in records) - started
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Summary(
        num_sent=len(records),
        num_ok=len(good),
        failures=dict(Counter(record.status for record in records if not record.is_ok)),
        duration_s=duration_s,
        ttft_s=Percentiles.of([record.ttft_s for record in good if record.ttft_s is not None]),
        tpot_s=Percentiles.of([record.tpot_s for record in good if record.tpot_s is not None]),
        itl_s=Percentiles.of([gap for record in good for gap in record.gaps_s]),
        e2e_s=Percentiles.of([record.e2e_s for record in good]),
        requests_per_s=len(good) * per_s,
        input_tokens_per_s=sum(record.prompt_tokens for record in good) * per_s,
        output_tokens_per_s=sum(record.output_tokens for record in good) * per_s,
        slo=slo.name,
        attainment=len(within) / len(records),
        goodput_requests_per_s=len(within) * per_s,
        goodput_tokens_per_s=sum(record.output_tokens for record in within) * per_s,
        drafts=draft_figures(good),
    )


def draft_figures(good: Sequence[RequestRecord]) -> DraftFigures | None:
    """Over requests that succeeded; None when no receipt reports a step."""
    told = [(record, record.speculation) for record in good if record.speculation is not None]
    steps = sum(speculation.decode_steps for _, speculation in told)
    if steps == 0:
        return None
    drafted = sum(speculation.drafted_tokens for _, speculation in told)
    accepted = sum(speculation.accepted_tokens for _, speculation in told)
    sources: Counter[str] = Counter()
    for _, speculation in told:
        sources.update(speculation.accepted_by_source)
    return DraftFigures(
        mean_accepted_length=sum(max(0, record.output_tokens - 1) for record, _ in told) / steps,
        iteration_hit_rate=sum(speculation.hit_steps for _, speculation in told) / steps,
        token_hit_rate=accepted / drafted if drafted else 0.0,
        drafted=drafted,
        accepted_by_source=dict(sorted(sources.items())),
    )
