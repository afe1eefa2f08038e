"""Serves the `vllm:*` rows of the table that have the data of other rows.

At a scrape the samples of the sources are added up over the labels that the twin does not have. So nothing
is counted twice, and both names always agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from tandem_service.metric_rows import Row
from tandem_service.metric_table import TABLE, VLLM_LABELS


def serve_twins(registry: CollectorRegistry, *, model_name: str) -> None:
    """All of them, once their sources are in the registry."""
    for row in TABLE:
        if row.sources:
            registry.register(_Twin(row, registry, vllm_labels(model_name)))


def vllm_labels(model_name: str) -> tuple[str, ...]:
    """Values of VLLM_LABELS: vLLM numbers its engines behind one address; here there is one."""
    return model_name, "0"


class _Twin(Collector):
    def __init__(self, row: Row, registry: CollectorRegistry, values: tuple[str, ...]) -> None:
        self._row = row
        self._constant = dict(zip(VLLM_LABELS, values, strict=True))
        #: Labels of a sample of a source -> label of the twin; `le` is a histogram's edge.
        self._kept = {"le": "le"} | {row.label_of[name]: name for name in row.label_of}
        self._sources = [(source, registry.restricted_registry(source.row.series)) for source in row.sources]

    def describe(self) -> Iterable[Metric]:
        return [self._row.family()]

    def collect(self) -> Iterable[Metric]:
        sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        exemplars: dict[tuple[str, tuple[tuple[str, str], ...]], Exemplar] = {}
        if self._row.kind == "counter" and not self._row.label_of:
            sums["", ()] = 0.0  # also before the first event, so that rates have it
        for source, registry in self._sources:
            for family in registry.collect():
                for sample in family.samples:
                    if all(sample.labels.get(name) == value for name, value in source.where.items()):
                        labels = tuple(
                            (self._kept[name], value)
                            for name, value in sample.labels.items()
                            if name in self._kept
                        )
                        key = sample.name.removeprefix(source.row.name), labels
                        sums[key] += sample.value
                        if sample.exemplar is not None:
                            exemplars[key] = sample.exemplar
        family = self._row.family()
        for key, value in sums.items():
            suffix, labels = key
            all_labels = {**self._constant, **dict(labels)}
            family.add_sample(self._row.name + suffix, all_labels, value, exemplar=exemplars.get(key))
        return [family]
