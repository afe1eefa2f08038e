"""Tables and curves over the request rate, for several systems and rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from reporting import markdown_table
from tandem_cli.bench.options import Point
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.stats import Percentiles, Run, Summary

_RATE_HEAD = (
    "workload", "load", "system", "TTFT s p50 / p99", "TPOT ms p50 / p99", "requests/s", "goodput requests/s",
    "goodput tokens/s", "attainment", "of admitted", "refused", "succeeded",
)  # fmt: skip


def rate_table(runs: Sequence[Run]) -> str:
    """A row for each system at each rate: medians over rounds; counts are of all rounds."""
    rows: list[Sequence[str]] = []
    for point, system in points_and_systems(runs):
        here = [run.summary for run in runs if (run.point, run.system) == (point, system)]
        admitted = [s.attainment_of_admitted for s in here if s.attainment_of_admitted is not None]
        ttfts = [summary.ttft_s for summary in here if summary.ttft_s]
        tpots = [summary.tpot_s for summary in here if summary.tpot_s]
        num_sent = sum(summary.num_sent for summary in here)
        rows.append(
            [
                point.workload,
                point.load(),
                system,
                f"{_median((ttft.p50 for ttft in ttfts), '.2f')} / {_median((t.p99 for t in ttfts), '.2f')}",
                f"{_median((1e3 * t.p50 for t in tpots), '.1f')} / "
                f"{_median((1e3 * t.p99 for t in tpots), '.1f')}",
                _median((summary.requests_per_s for summary in here), ".3g"),
                _median((summary.goodput_requests_per_s for summary in here), ".3g"),
                _median((summary.goodput_tokens_per_s for summary in here), ".3g"),
                _median((summary.attainment for summary in here), ".3f"),
                _median(admitted, ".3f"),
                f"{sum(summary.num_refused for summary in here)} of {num_sent}",
                f"{sum(summary.num_ok for summary in here)} of {num_sent}",
            ]
        )
    return markdown_table(_RATE_HEAD, rows)


def points_and_systems(runs: Sequence[Run]) -> Iterator[tuple[Point, str]]:
    """Measured pairs; the systems of every point in the order of the first point."""
    measured = {(run.point, run.system) for run in runs}
    systems = list(dict.fromkeys(run.system for run in runs))
    for point in dict.fromkeys(run.point for run in runs):
        yield from ((point, system) for system in systems if (point, system) in measured)


def pooled_records(rounds: Sequence[Run]) -> list[RequestRecord]:
    """The records of several rounds, shifted as if each round began when the previous one ended."""
    records: list[RequestRecord] = []
    for run in rounds:
        shift_s = max((record.sent_s + record.e2e_s for record in records), default=0.0)
        records += [replace(record, sent_s=record.sent_s + shift_s) for record in run.records]
    return records


def draw_curves(path: Path, runs: Sequence[Run], title: str) -> None:
    """Write a PNG with TTFT, TPOT, goodput and attainment over the request rate, a colour for each system;
    medians over rounds. Solid: p50, dashed: p99; dotted: every request in time. All runs have a rate.
    Latencies are those of answered requests: attainment shows a system that refuses most."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    figure, panels = plt.subplots(1, 4, figsize=(19, 4.8), constrained_layout=True)
    rates = sorted({rate for run in runs if (rate := run.point.rate) is not None})
    for number, system in enumerate(dict.fromkeys(run.system for run in runs)):
        at: dict[float, list[Summary]] = {
            rate: [run.summary for run in runs if (run.point.rate, run.system) == (rate, system)]
            for rate in rates
        }
        colour = f"C{number % 10}"
        panels[2].plot([], [], color=colour, marker="o", label=system)  # its entry in the legend
        for panel, percentiles_of in zip(panels, (_ttft_s, _tpot_ms), strict=False):
            for which, style in (("p50", "-"), ("p99", "--")):
                _draw_line(
                    panel,
                    {
                        rate: [getattr(p, which) for summary in here if (p := percentiles_of(summary))]
                        for rate, here in at.items()
                    },
                    colour,
                    style,
                )
        goodput = {rate: [summary.goodput_requests_per_s for summary in here] for rate, here in at.items()}
        _draw_line(panels[2], goodput, colour, "-")
        attainment = {rate: [summary.attainment for summary in here] for rate, here in at.items()}
        _draw_line(panels[3], attainment, colour, "-")
    panels[2].plot(rates, rates, color="grey", linestyle=":", linewidth=1, label="all in time")
    panels[3].axhline(1.0, color="grey", linestyle=":", linewidth=1)
    names = (
        ("TTFT", "seconds"), ("TPOT", "milliseconds"), ("Goodput", "requests/s"),
        ("Attainment", "share of all sent"),
    )  # fmt: skip
    for panel, (name, unit) in zip(panels, names, strict=True):
        panel.set(title=name, xlabel="requests/s offered", ylabel=unit, xscale="log", ylim=(0, None))
        panel.xaxis.set_major_locator(FixedLocator(rates))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.grid(alpha=0.3)
    panels[2].legend(loc="best")
    styles = [Line2D([], [], color="grey", linestyle=style) for style in ("-", "--")]
    panels[0].legend(styles, ["p50", "p99"], loc="best")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _ttft_s(summary: Summary) -> Percentiles | None:
    return summary.ttft_s


def _tpot_ms(summary: Summary) -> Percentiles | None:
    tpot = summary.tpot_s
    return tpot and Percentiles(1e3 * tpot.mean, 1e3 * tpot.p50, 1e3 * tpot.p90, 1e3 * tpot.p99)


def _draw_line(panel: Any, values: Mapping[float, Sequence[float]], colour: str, style: str) -> None:
    """Medians of the values of each rate that has some."""
    points = [(rate, median(of_rate)) for rate, of_rate in values.items() if of_rate]
    marker = "o" if style == "-" else None
    if points:
        panel.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker=marker)


def _median(values: Iterable[float], form: str) -> str:
    known = list(values)
    return format(median(known), form) if known else "-"
