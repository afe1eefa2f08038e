"""Pictures: how TTFT and E2E of a run are spread and who ran when; curves over several rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tandem_core.slo import SloTarget

from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.stats import Percentiles, Run, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MET, _MISSED, _FAILED = "#2a7f4f", "#d98c21", "#b3261e"


def draw(path: Path, records: Sequence[RequestRecord], title: str) -> None:
    """Write a PNG. Left: shares of TTFT and E2E; middle: of TPOT; the objectives are dashed lines if all
    requests have the same. Right: the timeline."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = run_figure(records)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run_figure(records: Sequence[RequestRecord]) -> Figure:
    from matplotlib import pyplot as plt

    figure: Figure = plt.figure(figsize=(17, 5), constrained_layout=True)
    seconds, milliseconds, timeline = figure.subplots(1, 3)
    good = [record for record in records if record.is_ok]
    slos = {record.slo for record in records}
    slo = slos.pop() if len(slos) == 1 else SloTarget("")
    ttft = [record.ttft_s for record in good if record.ttft_s is not None]
    tpot = [1e3 * record.tpot_s for record in good if record.tpot_s is not None]
    _draw_shares(seconds, "TTFT", ttft, len(records), slo.ttft_s, "C0")
    _draw_shares(seconds, "E2E", [record.e2e_s for record in good], len(records), slo.e2e_s, "C1")
    _draw_shares(milliseconds, "TPOT", tpot, len(records), slo.tpot_s and 1e3 * slo.tpot_s, "C2")
    for panel, name, unit in ((seconds, "TTFT and E2E", "seconds"), (milliseconds, "TPOT", "milliseconds")):
        panel.set(title=name, xlabel=unit, ylabel="share of all sent", ylim=(0, 1.02), xlim=(0, None))
        panel.margins(x=0.05)
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="best")
    _draw_timeline(timeline, records)
    return figure


def _draw_shares(
    panel: Axes, label: str, values: Sequence[float], num_sent: int, limit: float | None, colour: str
) -> None:
    """Shares of all sent: failures, and answers without the metric, keep the curve below 1."""
    if values:
        shares = [(rank + 1) / num_sent for rank in range(len(values))]
        panel.step([0.0, *sorted(values)], [0.0, *shares], where="post", label=label, color=colour)
    if limit:
        panel.axvline(limit, color=colour, linestyle="--", linewidth=1, label=f"{label} objective")


def _draw_timeline(panel: Axes, records: Sequence[RequestRecord]) -> None:
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    for row, record in enumerate(records):
        first_s = record.e2e_s if record.ttft_s is None else record.ttft_s
        colour = _MET if record.is_met() else _MISSED if record.is_ok else _FAILED
        panel.barh(row, first_s, left=record.sent_s, color=colour, alpha=0.35, height=0.8)
        panel.barh(row, record.e2e_s - first_s, left=record.sent_s + first_s, color=colour, height=0.8)
    # Half a row beyond the first and the last one: a tick stands at requests only.
    panel.set(xlabel="seconds since the start", ylabel="request", ylim=(-0.5, max(0.5, len(records) - 0.5)))
    panel.invert_yaxis()
    panel.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    meanings = ((_MET, "SLO met"), (_MISSED, "SLO missed"), (_FAILED, "failed"))
    panel.legend(handles=[Patch(color=colour, label=label) for colour, label in meanings])
    panel.set_title("Timeline, pale until the first token")


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
