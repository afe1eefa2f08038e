"""The page and the picture of `slo.py`, computed from its runs alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from curves import draw_curves, pooled_records
from reporting import describe_objectives, markdown_table, page
from tandem_cli.bench.record import OK, RequestRecord
from tandem_cli.bench.stats import (
    Percentiles,
    Run,
    Summary,
    calibration,
    fairness,
    refusals,
    summarise,
)
from tandem_core.slo import DEFAULT_SLO_CLASSES

#: The parts whose runs differ in the load.
SHAPES = ("poisson", "bursts", "trace")
#: The part of clients that wait, without a warm-up.
FRESH = "fresh"
#: Before a part's name: refused requests that were sent again behind all others.
PROBE = "refused in "
READING = """\
"Of admitted": share of the requests not refused that met the objectives of their class by the client's clock;
in brackets those of the receipt, which the gateway widens if the machine could not meet them without load.
Goodput is requests/s in time; "of peak" is its share of the configuration's highest goodput with these
arrivals. Refusal times are measured by the client. "Wrongly": a sample of refused requests is sent again at
once at lowest priority (without objectives); those that meet the objectives of their class were refused
wrongly. A prediction held if the time that the gateway measured was at most the prediction at admission; a
calibrated p90 holds for 90 %."""


def finish(runs: Sequence[Run], out: Path, plot: Path | None) -> None:
    """Writes the page and the picture, and prints the page."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(report(runs))
    print(out.read_text())
    curves = [run for run in runs if run.point.workload == "poisson"]
    if plot is not None and curves:
        draw_curves(plot, curves, "Poisson arrivals")


def _about(runs: Sequence[Run]) -> str:
    records = [record for run in runs for record in run.records]
    answered = [record.prompt_tokens for record in records if record.prompt_tokens]
    mean = sum(answered) / len(answered) if answered else 0.0
    limits = "; ".join(f"{slo.name}: {describe_objectives(slo)}" for slo in DEFAULT_SLO_CLASSES.values())
    return (
        f"Retail dialogues, prompts of {mean:.0f} tokens on average, {max(r.max_tokens for r in records)} "
        f"output tokens. Objectives: {limits}."
    )


def report(runs: Sequence[Run]) -> str:
    """All tables, from the runs alone."""
    capacity = next((run.summary.requests_per_s for run in runs if run.point.workload == "capacity"), None)
    measured = "" if capacity is None else f" Capacity: {capacity:.3g} requests/s."
    sections = [
        ("Overload", overload_table(runs, capacity)),
        ("Retry-after honoured", retry_table(runs)),
        ("Predictions that held", calibration_table(runs, capacity)),
        ("A noisy tenant", fairness_table(runs)),
        ("A system that was just started", fresh_table(runs)),
    ]
    tables = "\n\n".join(f"## {title}\n\n{table}" for title, table in sections if table)
    return page("SLOs under overload", tables, f"{_about(runs)}{measured}\n{READING}")


def overload_table(runs: Sequence[Run], capacity: float | None) -> str:
    shapes = [run for run in runs if run.point.workload in SHAPES]
    rows = []
    systems = list(dict.fromkeys(run.system for run in runs))
    # The runs are in the order in which configurations took turns.
    shapes.sort(
        key=lambda run: (SHAPES.index(run.point.workload), run.point.rate or 0.0, systems.index(run.system))
    )
    for run in shapes:
        summary, refused = run.summary, refusals(run.records)
        peers = [
            other.summary.goodput_requests_per_s
            for other in shapes
            if (other.point.workload, other.system) == (run.point.workload, run.system)
        ]
        goodput = summary.goodput_requests_per_s
        rows.append(
            [
                run.point.workload,
                _load(run, capacity),
                run.system,
                str(summary.num_sent),
                f"{summary.num_refused / summary.num_sent:.0%}",
                f"{_share(summary.attainment_of_admitted)} ({_share(kept_promises(run.records))})",
                f"{summary.attainment:.3f}",
                f"{goodput:.3g}",
                f"{goodput / max(peers):.0%}" if max(peers) else "-",
                _ms(refused.latency_s),
                _wrongly_refused(run, runs),
                _seconds(summary.ttft_s),
            ]
        )
    head = (
        "arrivals", "load", "configuration", "sent", "refused", "of admitted", "of all", "goodput", "of peak",
        "refusal ms p50 / p99", "wrongly", "TTFT s p50 / p99",
    )  # fmt: skip
    return markdown_table(head, rows) if rows else ""


def _wrongly_refused(run: Run, runs: Sequence[Run]) -> str:
    point = run.point._replace(workload=f"{PROBE}{run.point.workload}")
    probed = [
        record
        for other in runs
        if (other.point, other.system) == (point, run.system)
        for record in other.records
    ]
    return f"{sum(record.is_met() for record in probed)} of {len(probed)}" if probed else "-"


def kept_promises(records: Sequence[RequestRecord]) -> float | None:
    """Share of the answers not refused that met the objectives of their receipt; None without a receipt."""
    admitted = [record for record in records if not record.is_refused]
    if not any(record.promise for record in admitted):
        return None
    return sum(record.promise is not None and record.is_met(record.promise.slo) for record in admitted) / len(
        admitted
    )


def retry_table(runs: Sequence[Run]) -> str:
    rows = []
    for run in [run for run in runs if run.point.workload == "retry"]:
        found = refusals(run.records)
        share = found.num_then_admitted / found.num_honoured if found.num_honoured else None
        again = [record for record in run.records if len(record.attempts) > 1]
        waits = Percentiles.of([record.last_sent_s for record in again])
        rows.append(
            [
                run.system,
                str(run.summary.num_sent),
                str(found.num_honoured),
                _share(share),
                _seconds(waits),
                f"{run.summary.attainment:.3f}",
                f"{found.attainment_from_last:.3f}",
            ]
        )
    head = (
        "configuration", "sent", "sent again", "then admitted", "waited s p50 / p99", "in time of all",
        "counted from the last attempt",
    )  # fmt: skip
    return markdown_table(head, rows) if rows else ""


def fresh_table(runs: Sequence[Run]) -> str:
    """Each start of a configuration, in the order in which they were made."""
    rows = []
    starts = [run for run in runs if run.point.workload == FRESH]
    for system in dict.fromkeys(run.system for run in starts):
        own = [run for run in starts if run.system == system]
        records = [record for run in own for record in run.records]
        refused_s = [
            record.sent_s + attempt.sent_s
            for record in records
            for attempt in record.attempts
            if attempt.is_refused
        ]
        ended_s = [record.e2e_s for record in records if record.status == OK]
        rows.append(
            [
                system,
                ", ".join(f"{run.summary.num_met} of {run.summary.num_sent}" for run in own),
                str(sum(len(record.attempts) > 1 for record in records)),
                str(sum(record.is_refused for record in records)),
                f"{max(ended_s):.2f}" if ended_s else "-",
                f"{min(refused_s):.1f} to {max(refused_s):.1f}" if refused_s else "-",
            ]
        )
    head = (
        "configuration", "in time, by start", "sent again", "refused in the end", "slowest answer, s",
        "refusals, s after the first request",
    )  # fmt: skip
    return markdown_table(head, rows) if rows else ""


def calibration_table(runs: Sequence[Run], capacity: float | None) -> str:
    """By class over all loads, and by load over all classes."""
    rows = []
    opened = [run for run in runs if run.point.rate is not None and not run.point.workload.startswith(PROBE)]
    for system in dict.fromkeys(run.system for run in opened):
        here = [run for run in opened if run.system == system]
        records = pooled_records(here)
        groups = {
            f"class {name}": [record for record in records if record.slo.name == name]
            for name in DEFAULT_SLO_CLASSES
        }
        for load in dict.fromkeys(_load(run, capacity) for run in here):
            groups[load] = pooled_records([run for run in here if _load(run, capacity) == load])
        for name, group in groups.items():
            if (found := calibration(group)) is not None:
                shares = (found.ttft_p50, found.ttft_p90, found.e2e_p50, found.e2e_p90)
                rows.append([system, name, str(found.count), *(_share(share) for share in shares)])
    head = ("configuration", "of", "predictions", "TTFT p50", "TTFT p90", "E2E p50", "E2E p90")
    return markdown_table(head, rows) if rows else ""


def neighbours(runs: Sequence[Run], noisy: Run) -> list[Summary]:
    """Figures of the other tenants: alone, with the third one's share, and with four times its share."""
    cases = [
        next(run for run in runs if (run.point.workload, run.system) == (part, noisy.system))
        for part in ("alone", "fair")
    ]
    quiet = {record.tenant for record in cases[0].records}
    # Requests without objectives wait for those with objectives, of any tenant.
    return [
        summarise(
            [
                record
                for record in run.records
                if record.tenant in quiet and (record.slo.ttft_s or record.slo.tpot_s or record.slo.e2e_s)
            ]
        )
        for run in (*cases, noisy)
    ]


def fairness_table(runs: Sequence[Run]) -> str:
    rows = []
    for noisy in [run for run in runs if run.point.workload == "noisy"]:
        of_others = neighbours(runs, noisy)
        fair = fairness(noisy.records)
        p99s = [summary.ttft_s.p99 if summary.ttft_s else math.nan for summary in of_others]
        rows.append(
            [
                noisy.system,
                *(_seconds(summary.ttft_s) for summary in of_others),
                f"{p99s[2] / p99s[1]:.2f}",
                " / ".join(f"{summary.attainment:.3f}" for summary in of_others),
                "-" if fair is None else f"{fair.jain_of_fair_share:.3f}",
                "-" if fair is None else f"{fair.jain_of_goodput:.3f}",
            ]
        )
    head = (
        "configuration", "others' TTFT s p50 / p99, of classes with objectives: alone",
        "the third tenant sends its share", "it sends four times its share", "p99 ratio of the last two",
        "others in time", "Jain, of the fair share",
        "Jain, of goodput",
    )  # fmt: skip
    return markdown_table(head, rows) if rows else ""


def _load(run: Run, capacity: float | None) -> str:
    rate = run.point.rate or 0.0
    return f"{rate / capacity:.2g}x" if capacity else f"{rate:.3g}/s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _seconds(values: Percentiles | None) -> str:
    return "-" if values is None else f"{values.p50:.2f} / {values.p99:.2f}"


def _ms(values: Percentiles | None) -> str:
    return "-" if values is None else f"{1e3 * values.p50:.1f} / {1e3 * values.p99:.1f}"
