"""What a decode pod shows of its drafts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from tandem_decode.metrics import DecodeMetrics
from tandem_drafting.native import Reliability


def test_the_reliability_curve_is_three_series_by_tenth() -> None:
    registry = CollectorRegistry()
    metrics = DecodeMetrics(registry)
    metrics.show_reliability([Reliability(10 * n, 8 * n, 7 * n) for n in range(10)])
    metrics.show_reliability([Reliability(20 * n, 16 * n, 15 * n) for n in range(10)])
    for what, value in (("sent", 180), ("predicted", 144), ("accepted", 135)):
        assert registry.get_sample_value(f"tandem_draft_guesses_{what}_total", {"tenth": "0.9"}) == value
