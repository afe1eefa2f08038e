"""Compares what a process serves at /metrics with the table of metrics."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client.parser import text_string_to_metric_families
from tandem_service.metric_rows import Process, Row
from tandem_service.metric_table import TABLE

#: Metrics of prometheus_client about the process.
_FOREIGN = ("process_", "python_")


def differences(exposition: str, process: Process, without: Collection[Row] = ()) -> list[str]:
    """Names that are served but not in the table, in the table but not served, or have another type or other
    labels. `without`: rows that this process need not serve now."""
    rows = {row.name: row for row in TABLE if process in row.served_by}
    found, faults = set(), []
    for family in text_string_to_metric_families(exposition):
        if family.name.startswith(_FOREIGN):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found.add(name)
        row = rows.get(name)
        if row is None:
            faults.append(f"{name} is served, but the table has no such row for the {process.value}")
            continue
        if family.type != row.kind:
            faults.append(f"{name} is served as a {family.type}, the table says {row.kind}")
        for sample in family.samples:
            labels = set(sample.labels) - {"le"}
            if sample.name not in row.series or labels != set(row.labels):
                faults.append(f"{name}: {sample.name} has the labels {sorted(labels)}, not {row.labels}")
    missing = rows.keys() - found - {row.name for row in without}
    return faults + [f"{name} is in the table, but not served" for name in sorted(missing)]
