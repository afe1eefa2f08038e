"""Rows of the metric table, and the Prometheus objects that processes make from them.

    CounterRow, GaugeRow, HistogramRow   counted where `make(registry)` was called, or read by `view`
    Source                               the row whose samples another row shows (`metric_twins`)

The rows themselves are in `metric_table`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector


class Process(enum.Enum):
    """The kinds of processes that serve metrics."""

    GATEWAY = "gateway"
    DECODE = "decode"
    PREFILL = "prefill"
    LOOKAHEAD = "lookahead"
    SCALER = "scaler"


class Unit(enum.Enum):
    """Units of metrics."""

    SECONDS = "seconds"
    BYTES = "bytes"
    TOKENS = "tokens"
    REQUESTS = "requests"
    RATIO = "ratio"
    COUNT = "count"


#: Values by values of the labels, in the order of the row's labels.
Values = Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class Source:
    """Data of another row: its samples with these labels, added up over all other labels."""

    row: Row
    where: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One metric. A counter's name ends with `_total`; a histogram's has no `_bucket`, `_sum` or `_count`."""

    name: str
    help: str
    labels: tuple[str, ...]
    unit: Unit
    served_by: tuple[Process, ...]
    #: Not empty: the metric has no data of its own.
    sources: tuple[Source, ...] = ()
    #: For labels whose names differ, the label of `sources`.
    label_of: Mapping[str, str] = field(default_factory=dict)

    kind: ClassVar[str] = ""
    _suffixes: ClassVar[tuple[str, ...]] = ("",)

    def __post_init__(self) -> None:
        if self.name.endswith("_total") != (self.kind == "counter"):
            raise ValueError(f"{self.name}: a counter's name ends with _total, and no other's")

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series, as queries use them."""
        return tuple(self.name + suffix for suffix in self._suffixes)

    def family(self) -> Metric:
        """Without samples."""
        return Metric(self.name.removesuffix("_total"), self.help, self.kind)

    def view(self, registry: CollectorRegistry, read: Callable[[], Values]) -> None:
        """Serves values that are counted elsewhere. `read` is called at each scrape, in the pods on a thread
        of its own; it must not wait for anything."""
        registry.register(_View(self, read))


class CounterRow(Row):
    kind = "counter"

    def make(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.name, self.help, self.labels, registry=registry)


class GaugeRow(Row):
    kind = "gauge"

    def make(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.help, self.labels, registry=registry)


@dataclass(frozen=True)
class HistogramRow(Row):
    #: Upper edges, without infinity.
    buckets: tuple[float, ...] = ()

    kind = "histogram"
    _suffixes = ("_bucket", "_sum", "_count")

    def make(self, registry: CollectorRegistry, edges: Iterable[float] = ()) -> Histogram:
        """`edges`: more of them, such as the targets of an operator's SLO classes."""
        buckets = with_targets(self.buckets, edges)
        return Histogram(self.name, self.help, self.labels, buckets=buckets, registry=registry)


class _View(Collector):
    def __init__(self, row: Row, read: Callable[[], Values]) -> None:
        self._row, self._read = row, read

    def describe(self) -> Iterable[Metric]:
        return [self._row.family()]

    def collect(self) -> Iterable[Metric]:
        family = self._row.family()
        for values, value in self._read().items():
            family.add_sample(self._row.name, dict(zip(self._row.labels, values, strict=True)), value)
        return [family]


def with_targets(base: Iterable[float], targets: Iterable[float]) -> tuple[float, ...]:
    """Adds all targets of the SLO classes, so that "share under 2.5 s" is exact."""
    return tuple(sorted({*base, *(target for target in targets if target)}))
