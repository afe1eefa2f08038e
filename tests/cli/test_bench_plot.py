"""The picture of one run: what its panels show, and where their ticks stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tandem_cli.bench.plot import draw, run_figure
from tandem_cli.bench.record import RequestRecord
from tandem_core.slo import SloTarget

matplotlib = pytest.importorskip("matplotlib")

SLO = SloTarget("chat", ttft_s=1.0, tpot_s=0.15)


def record(index: int, status: str = "OK") -> RequestRecord:
    return RequestRecord(
        index, "d", status, "", sent_s=0.1 * index, ttft_s=0.2, e2e_s=1.2, gaps_s=(), prompt_tokens=9,
        output_tokens=11, text="", speculation=None, slo=SLO,
    )  # fmt: skip


@pytest.mark.parametrize("num_requests", [1, 2, 7, 100])
def test_the_timeline_has_ticks_at_requests_alone(num_requests: int) -> None:
    matplotlib.use("Agg")
    figure = run_figure([record(index) for index in range(num_requests)])
    timeline = figure.axes[2]
    low, high = sorted(timeline.get_ylim())
    shown = [tick for tick in timeline.get_yticks() if low <= tick <= high]
    assert shown, "some request has a tick"
    assert all(tick == int(tick) and 0 <= tick < num_requests for tick in shown)
    matplotlib.pyplot.close(figure)


def test_ttft_e2e_and_tpot_are_shown_with_their_objectives() -> None:
    matplotlib.use("Agg")
    figure = run_figure([record(0), record(1), record(2, status="TIMEOUT")])
    seconds, milliseconds, _ = figure.axes
    labels = seconds.get_legend_handles_labels()[1] + milliseconds.get_legend_handles_labels()[1]
    assert labels == ["TTFT", "TTFT objective", "E2E", "TPOT", "TPOT objective"]
    curve, objective = milliseconds.get_lines()
    assert curve.get_xdata()[-1] == pytest.approx(100.0), "1 s for the 10 tokens after the first"
    assert curve.get_ydata()[-1] == pytest.approx(2 / 3), "the request that failed keeps the curve below 1"
    assert objective.get_xdata()[0] == pytest.approx(150.0)
    matplotlib.pyplot.close(figure)


def test_a_run_without_an_answer_is_drawn_too(tmp_path: Path) -> None:
    draw(tmp_path / "run.png", [record(0, status="TIMEOUT")], "nothing came")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
