"""One scrape of a process's /metrics, read by rows of the metric table."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from tandem_service.metric_rows import HistogramRow, Row


class Exposition:
    """Parsed metrics. Raises ValueError for text that is not an exposition."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def sum(self, row: Row, **where: str) -> float:
        """Sum over the samples with these labels; 0 without any. Skips NaN samples, which stand for unknown
        values."""
        return sum(value for _, value in self._matching(row.name, where))

    def by_label(self, row: Row, label: str, **where: str) -> dict[str, float]:
        """Sums by the values of a label."""
        sums: dict[str, float] = {}
        for labels, value in self._matching(row.name, where):
            sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def count(self, row: HistogramRow, **where: str) -> float:
        return sum(value for _, value in self._matching(f"{row.name}_count", where))

    def total(self, row: HistogramRow, **where: str) -> float:
        """Sum of the observed values."""
        return sum(value for _, value in self._matching(f"{row.name}_sum", where))

    def at_most(self, row: HistogramRow, limit: float, **where: str) -> float:
        """Observations up to the largest edge that is not above `limit`."""
        edges = sorted({float(labels["le"]) for labels, _ in self._matching(f"{row.name}_bucket", where)})
        edge = max((edge for edge in edges if edge <= limit * (1 + 1e-9)), default=None)
        if edge is None:
            return 0.0
        found = self._matching(f"{row.name}_bucket", where)
        return sum(value for labels, value in found if float(labels["le"]) == edge)

    def _matching(self, name: str, where: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
        for labels, value in self._samples.get(name, []):
            if where.items() <= labels.items() and not math.isnan(value):
                yield labels, value
