"""Percentiles, throughput, goodput, attainment and fairness of a run.

Attainment is the share of all requests sent that met their SLO; failed, refused and timed-out requests count
as missed. Goodput is the output of requests within their SLO, per second of the run. Times count from the
first attempt of a request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    """Drafting figures pooled over all requests."""

    #: Tokens per verification pass, without the first token of each request.
    mean_accepted_length: float
    #: Share of steps that accepted a draft token.
    iteration_hit_rate: float
    #: Share of draft tokens that were accepted; 0 without draft tokens.
    token_hit_rate: float
    drafted: int
    accepted_by_source: Mapping[str, int]


@dataclass(frozen=True)
class Summary:
    """Figures of a run, or of one class or tenant. Latencies are those of succeeded requests, in seconds."""

    num_sent: int
    num_ok: int
    #: Requests whose last attempt the overloaded server refused.
    num_refused: int
    num_met: int
    #: Failures by status.
    failures: Mapping[str, int]
    #: Duration of the run: from the first request sent to the last end.
    duration_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    #: Share of all sent that met the objectives, in [0, 1].
    attainment: float
    #: Share of requests not refused that met the objectives; None if all were refused.
    attainment_of_admitted: float | None
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    #: None when no receipt reports a step.
    drafts: DraftFigures | None


@dataclass(frozen=True)
class Refusals:
    """Refusals by an overloaded server, over all attempts."""

    count: int
    latency_s: Percentiles | None
    #: Refused attempts after which the request was sent again, and those of them that were then admitted.
    num_honoured: int
    num_then_admitted: int
    #: TTFT from the last attempt, of requests that were sent more than once and succeeded.
    ttft_from_last_s: Percentiles | None
    #: Share of all sent that met the objectives, counted from the last attempt.
    attainment_from_last: float


@dataclass(frozen=True)
class Fairness:
    """Jain's index over tenants: 1 if all are equal, 1/n if one of n has everything.

    The first index is over goodput in tokens; the second over requests within their SLO, divided by the
    tenant's fair share of them. The fair share is max-min: the total is divided equally, and a share that a
    tenant does not use goes to the others.
    """

    jain_of_goodput: float
    jain_of_fair_share: float


@dataclass(frozen=True)
class Calibration:
    """Shares of answers whose measured time was at most the prediction: .9 for a calibrated p90."""

    count: int
    ttft_p50: float | None
    ttft_p90: float | None
    e2e_p50: float | None
    e2e_p90: float | None


@dataclass(frozen=True)
class Run:
    """One round of a system at a point."""

    point: Point
    round: int
    system: str
    summary: Summary
    records: tuple[RequestRecord, ...]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of ascending values, linear between neighbours (numpy's default)."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def duration_of(records: Sequence[RequestRecord]) -> float:
    """Seconds from the first request sent to the last one ended."""
    started = min(record.sent_s for record in records)
    return max(record.sent_s + record.e2e_s for record in records) - started


def summarise(records: Sequence[RequestRecord], duration_s: float | None = None) -> Summary:
    """Figures of at least one record. duration_s: that of the run, if `records` are a part of it."""
    good = [record for record in records if record.is_ok]
    met = [record for record in records if record.is_met()]
    num_refused = sum(record.is_refused for record in records)
    if duration_s is None:
        duration_s = duration_of(records)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_admitted = len(records) - num_refused
    return Summary(
        num_sent=len(records),
        num_ok=len(good),
        num_refused=num_refused,
        num_met=len(met),
        failures=dict(Counter(record.status for record in records if not record.is_ok)),
        duration_s=duration_s,
        ttft_s=Percentiles.of([record.ttft_s for record in good if record.ttft_s is not None]),
        tpot_s=Percentiles.of([record.tpot_s for record in good if record.tpot_s is not None]),
        itl_s=Percentiles.of([gap for record in good for gap in record.gaps_s]),
        e2e_s=Percentiles.of([record.e2e_s for record in good]),
        requests_per_s=len(good) * per_s,
        input_tokens_per_s=sum(record.prompt_tokens for record in good) * per_s,
        output_tokens_per_s=sum(record.output_tokens for record in good) * per_s,
        attainment=len(met) / len(records),
        attainment_of_admitted=len(met) / num_admitted if num_admitted else None,
        goodput_requests_per_s=len(met) * per_s,
        goodput_tokens_per_s=sum(record.output_tokens for record in met) * per_s,
        drafts=draft_figures(good),
    )


def by_class(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    return _grouped(records, lambda record: record.slo.name)


def by_tenant(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    return _grouped(records, lambda record: record.tenant)


def _grouped(records: Sequence[RequestRecord], name_of: Callable[[RequestRecord], str]) -> dict[str, Summary]:
    duration_s = duration_of(records)
    names = sorted({name_of(record) for record in records})
    return {
        name: summarise([record for record in records if name_of(record) == name], duration_s)
        for name in names
    }


def refusals(records: Sequence[RequestRecord]) -> Refusals:
    """Refusals of at least one record."""
    honoured = [
        (attempt, later)
        for record in records
        for attempt, later in zip(record.attempts, record.attempts[1:], strict=False)
        if attempt.is_refused
    ]
    refused = [attempt for record in records for attempt in record.attempts if attempt.is_refused]
    again = [record for record in records if record.is_ok and record.last_sent_s > 0]
    return Refusals(
        count=len(refused),
        latency_s=Percentiles.of([attempt.ended_s - attempt.sent_s for attempt in refused]),
        num_honoured=len(honoured),
        num_then_admitted=sum(not later.is_refused for _, later in honoured),
        ttft_from_last_s=Percentiles.of(
            [record.ttft_s - record.last_sent_s for record in again if record.ttft_s is not None]
        ),
        attainment_from_last=sum(record.is_met(since_s=record.last_sent_s) for record in records)
        / len(records),
    )


def fairness(records: Sequence[RequestRecord]) -> Fairness | None:
    """Fairness between tenants; None for fewer than two tenants, or if no request met its SLO."""
    tenants = by_tenant(records)
    total = sum(summary.num_met for summary in tenants.values())
    if len(tenants) < 2 or not total:
        return None
    shares = fair_shares(total, {name: summary.num_sent for name, summary in tenants.items()})
    return Fairness(
        jain([summary.goodput_tokens_per_s for summary in tenants.values()]),
        jain([summary.num_met / shares[name] for name, summary in tenants.items()]),
    )


def jain(values: Sequence[float]) -> float:
    """Jain's index of values >= 0, not all 0."""
    return float(sum(values) ** 2 / (len(values) * sum(value * value for value in values)))


def fair_shares(total: float, asked: Mapping[str, float]) -> dict[str, float]:
    """Max-min fair division of `total` > 0; no share exceeds what its tenant `asked` for (> 0)."""
    shares: dict[str, float] = {}
    left = min(total, sum(asked.values()))
    for num_done, name in enumerate(sorted(asked, key=lambda name: asked[name])):
        shares[name] = min(asked[name], left / (len(asked) - num_done))
        left -= shares[name]
    return shares


def calibration(records: Sequence[RequestRecord]) -> Calibration | None:
    """Calibration over answers whose receipt has a prediction; None if none has."""
    found = [record.promise for record in records if record.is_ok and record.promise is not None]
    found = [promise for promise in found if promise.ttft_p90_s is not None or promise.e2e_p90_s is not None]
    if not found:
        return None
    return Calibration(
        len(found),
        _share_within([(promise.ttft_s, promise.ttft_p50_s) for promise in found]),
        _share_within([(promise.ttft_s, promise.ttft_p90_s) for promise in found]),
        _share_within([(promise.e2e_s, promise.e2e_p50_s) for promise in found]),
        _share_within([(promise.e2e_s, promise.e2e_p90_s) for promise in found]),
    )


def _share_within(pairs: Sequence[tuple[float, float | None]]) -> float | None:
    known = [(actual, predicted) for actual, predicted in pairs if predicted is not None]
    return sum(actual <= predicted for actual, predicted in known) / len(known) if known else None


def draft_figures(good: Sequence[RequestRecord]) -> DraftFigures | None:
    """Drafting figures of succeeded requests; None if no receipt reports a step."""
    found = [(record, record.speculation) for record in good if record.speculation is not None]
    steps = sum(speculation.decode_steps for _, speculation in found)
    if steps == 0:
        return None
    drafted = sum(speculation.drafted_tokens for _, speculation in found)
    accepted = sum(speculation.accepted_tokens for _, speculation in found)
    sources: Counter[str] = Counter()
    for _, speculation in found:
        sources.update(speculation.accepted_by_source)
    return DraftFigures(
        mean_accepted_length=sum(max(0, record.output_tokens - 1) for record, _ in found) / steps,
        iteration_hit_rate=sum(speculation.hit_steps for _, speculation in found) / steps,
        token_hit_rate=accepted / drafted if drafted else 0.0,
        drafted=drafted,
        accepted_by_source=dict(sorted(sources.items())),
    )
