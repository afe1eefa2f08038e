"""Writes what is generated from the table of metrics: dashboards, alert rules, the tables in the docs.

    .venv/bin/python deploy/observability/generate.py

Run it after a change of metric_table.py, grafana_dashboards.py or alert_rules.py, and commit the files. A
test compares them.
"""

from __future__ import annotations

import re
from pathlib import Path

import alert_rules
import grafana_dashboards
from tandem_service.metric_rows import Process
from tandem_service.metric_table import TABLE

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs" / "observability.md"


def files() -> dict[Path, str]:
    """Every generated file with its text."""
    made = {
        HERE / "dashboards" / f"{board.uid}.json": grafana_dashboards.to_json(board)
        for board in grafana_dashboards.BOARDS
    }
    made[HERE / "rules.yml"] = alert_rules.to_yaml()
    made[HERE / "prometheusrule.yaml"] = _prometheus_rule(made[HERE / "rules.yml"])
    docs = DOCS.read_text(encoding="utf-8")
    for name, table in (("metrics", _metrics()), ("vllm", _vllm()), ("alerts", _alerts())):
        docs = _between(docs, name, table)
    made[DOCS] = docs
    return made


def _prometheus_rule(rules: str) -> str:
    """The same rules as an object of Prometheus' operator."""
    head, _, groups = rules.partition("groups:")
    indented = f"groups:{groups}".rstrip().replace("\n", "\n  ")
    return (
        f"{head}apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: tandem\n"
        f"  namespace: tandem\nspec:\n  {indented}\n"
    )


def _between(docs: str, name: str, table: str) -> str:
    """Replaces what stands between the marks of this name."""
    pattern = re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- end -->)", re.DOTALL)
    found, count = pattern.subn(lambda match: f"{match[1]}\n{table}\n{match[2]}", docs)
    if count != 1:
        raise ValueError(f"{DOCS} needs exactly one `<!-- {name}: generated -->` with an end")
    return found


def _metrics() -> str:
    """A table for each set of processes, in the order of the metric table."""
    tables: dict[tuple[Process, ...], list[str]] = {}
    for row in TABLE:
        if row.name.startswith("tandem_"):
            lines = tables.setdefault(row.served_by, ["| name{labels} | type | meaning |", "|---|---|---|"])
            lines.append(f"| {_series(row.name, row.labels)} | {row.kind} | {row.help} |")
    return "\n".join(
        f"### {', '.join(process.value for process in processes)}\n\n" + "\n".join(lines) + "\n"
        for processes, lines in tables.items()
    )


def _vllm() -> str:
    lines = ["| name{further labels} | meaning | data |", "|---|---|---|"]
    for row in TABLE:
        if row.name.startswith("vllm:"):
            sources = ", ".join(
                _series(source.row.name, tuple(f'{k}="{v}"' for k, v in source.where.items()))
                for source in row.sources
            )
            lines.append(f"| {_series(row.name, row.labels[2:])} | {row.help} | {sources} |")
    return "\n".join(lines) + "\n"


def _series(name: str, labels: tuple[str, ...]) -> str:
    """A series as queries write it."""
    return f"`{name}{{{', '.join(labels)}}}`" if labels else f"`{name}`"


def _alerts() -> str:
    lines = ["| alert | severity | when | what to do |", "|---|---|---|---|"]
    above = ""
    for alert in alert_rules.ALERTS:
        # The namespace is in the alert's labels too.
        summary = re.sub(r"{{ with .*?{{ end }}", "", alert.summary)
        summary = re.sub(r"{{ \$(?:labels\.)?(\w+)[^}]*}}", r"*\1*", summary)
        action = "as above" if alert.action == above else alert.action
        above = alert.action
        lines.append(f"| {alert.name} | {alert.severity} | {summary} | {action} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
