"""The picture of a run: how TTFT and E2E are spread, and who ran when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem_core.slo import SloTarget

from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.stats import meets

_MET, _MISSED, _FAILED = "#2a7f4f", "#d98c21", "#b3261e"


def draw(path: Path, records: Sequence[RequestRecord], slo: SloTarget, title: str) -> None:
    """Write a PNG. Left: shares of TTFT and E2E with the objectives as dashed lines; right: the timeline."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    figure, (spread, timeline) = plt.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    good = [record for record in records if record.is_ok]
    series = (
        ("TTFT", [record.ttft_s for record in good if record.ttft_s is not None], slo.ttft_s, "C0"),
        ("E2E", [record.e2e_s for record in good], slo.e2e_s, "C1"),
    )
    for label, values, limit_s, colour in series:
        if values:
            # Shares of all sent: failures keep the curve below 1.
            shares = [(rank + 1) / len(records) for rank in range(len(values))]
            spread.step([0.0, *sorted(values)], [0.0, *shares], where="post", label=label, color=colour)
        if limit_s:
            spread.axvline(limit_s, color=colour, linestyle="--", linewidth=1, label=f"{label} objective")
    spread.set(xlabel="seconds", ylabel="share of all sent", ylim=(0, 1.02), xlim=(0, None))
    spread.set_title("Distribution")
    spread.margins(x=0.05)
    spread.legend(loc="best")
    spread.grid(alpha=0.3)

    for row, record in enumerate(records):
        first_s = record.e2e_s if record.ttft_s is None else record.ttft_s
        colour = _MET if meets(record, slo) else _MISSED if record.is_ok else _FAILED
        timeline.barh(row, first_s, left=record.sent_s, color=colour, alpha=0.35, height=0.8)
        timeline.barh(row, record.e2e_s - first_s, left=record.sent_s + first_s, color=colour, height=0.8)
    timeline.set(xlabel="seconds since the start", ylabel="request", ylim=(-1, len(records)))
    timeline.invert_yaxis()
    timeline.yaxis.set_major_locator(MaxNLocator(integer=True))
    meanings = ((_MET, "SLO met"), (_MISSED, "SLO missed"), (_FAILED, "failed"))
    timeline.legend(handles=[Patch(color=colour, label=label) for colour, label in meanings])
    timeline.set_title("Timeline, pale until the first token")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
