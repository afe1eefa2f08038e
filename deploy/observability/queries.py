"""Every expression of the dashboards and rules: which names and labels it uses, and what Prometheus answers.

    .venv/bin/python deploy/observability/queries.py --url http://127.0.0.1:9090 --out report.md

asks a Prometheus that has scraped a system under load for a minute or more, and writes panel by panel what
came.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from tandem_service.metric_table import FOREIGN_SERIES, TABLE

HERE = Path(__file__).resolve().parent
#: Labels that Prometheus itself adds, `namespace` in Kubernetes; `le` is a histogram's edge.
_SCRAPE_LABELS = frozenset({"job", "instance", "namespace", "le"})
#: What Grafana replaces in a query.
VARIABLES = {"$__rate_interval": "1m", "$__range": "5m", "$slo_class": "interactive"}


@dataclass(frozen=True)
class Expression:
    """One query of a panel, or one of a rule."""

    place: str
    name: str
    text: str
    #: Whether it belongs to an alert, which has no result while all is well: its series are queried instead.
    is_alert: bool = False

    @property
    def filled(self) -> str:
        text = self.text
        for variable, value in VARIABLES.items():
            text = text.replace(variable, value)
        return text


def of_dashboard(path: Path) -> Iterator[Expression]:
    board = json.loads(path.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield Expression(board["title"], panel["title"], target["expr"])


def of_rules(path: Path) -> Iterator[Expression]:
    for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            yield Expression(f"rules, {group['name']}", name, rule["expr"], "alert" in rule)


def all_expressions(folder: Path = HERE) -> list[Expression]:
    """The expressions of the committed files."""
    dashboards = sorted((folder / "dashboards").glob("*.json"))
    found = [expression for path in dashboards for expression in of_dashboard(path)]
    return [*found, *of_rules(folder / "rules.yml")]


def known_series(expressions: list[Expression]) -> dict[str, frozenset[str] | None]:
    """Series that may be asked for with their labels; None: any."""
    known: dict[str, frozenset[str] | None] = dict.fromkeys(FOREIGN_SERIES)
    known |= {e.name: frozenset({"slo_class"}) for e in expressions if ":" in e.name}
    return known | {name: frozenset(row.labels) for row in TABLE for name in row.series}


def selectors(node: Any) -> Iterator[promql.VectorSelector]:
    """Every series that the parsed expression asks for."""
    match node:
        case promql.VectorSelector():
            yield node
        case promql.MatrixSelector():
            yield node.vector_selector
        case promql.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from selectors(node.expr)
        case promql.Call():
            for argument in node.args:
                yield from selectors(argument)


def _groupings(node: Any) -> Iterator[tuple[set[str], Any]]:
    """Labels that an aggregation keeps, with what it aggregates."""
    match node:
        case promql.AggregateExpr():
            if node.modifier is not None:
                yield set(node.modifier.labels), node.expr
            yield from _groupings(node.expr)
        case promql.BinaryExpr():
            yield from _groupings(node.lhs)
            yield from _groupings(node.rhs)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from _groupings(node.expr)
        case promql.Call():
            for argument in node.args:
                yield from _groupings(argument)


def faults(expression: Expression, known: dict[str, frozenset[str] | None]) -> list[str]:
    """What cannot be right whatever the data: syntax, unknown series, unknown labels."""
    where = f"{expression.place}, {expression.name}"
    try:
        parsed = promql.parse(expression.filled)
    except ValueError as error:
        return [f"{where}: {error}"]
    found = []
    for selector in selectors(parsed):
        if selector.name not in known:
            found.append(f"{where}: no process serves {selector.name}")
        elif (labels := known[selector.name]) is not None:
            used = {matcher.name for matcher in selector.matchers.matchers}
            found += [
                f"{where}: {selector.name} has no label {name}" for name in used - labels - _SCRAPE_LABELS
            ]
    for kept, inner in _groupings(parsed):
        have = set(_SCRAPE_LABELS)
        for selector in selectors(inner):
            have |= known.get(str(selector.name)) or frozenset()
        found += [f"{where}: aggregates by {name}, which no series in it has" for name in kept - have]
    return found


@dataclass(frozen=True)
class Answer:
    expression: Expression
    asked: str
    num_series: int
    #: With a number, not NaN, which is what a rate of nothing divided by nothing is.
    num_numbers: int
    error: str = ""

    @property
    def is_good(self) -> bool:
        return not self.error and self.num_numbers > 0

    @property
    def verdict(self) -> str:
        return self.error or ("ok" if self.is_good else "only NaN" if self.num_series else "EMPTY")


def ask(url: str, query: str) -> tuple[int, int, str]:
    """Number of series, of those with a number, and the error."""
    data = urllib.parse.urlencode({"query": query}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/api/v1/query", data, timeout=30) as response:
            body = json.load(response)
    except urllib.error.HTTPError as error:
        return 0, 0, json.load(error).get("error", str(error))
    result = body["data"]["result"]
    if body["data"]["resultType"] == "scalar":
        return 1, 1, ""
    return len(result), sum(not math.isnan(float(series["value"][1])) for series in result), ""


def run(url: str, expressions: list[Expression]) -> list[Answer]:
    """Each expression once; of an alert, each series that it asks for."""
    answers = []
    for expression in expressions:
        asked = [expression.filled]
        if expression.is_alert:
            asked = sorted({str(one) for one in selectors(promql.parse(expression.filled))})
        answers += [Answer(expression, query, *ask(url, query)) for query in asked]
    return answers


def to_markdown(answers: list[Answer]) -> str:
    good = sum(answer.is_good for answer in answers)
    lines = [
        "# Every query of the dashboards and rules, against a live Prometheus",
        "",
        f"{good} of {len(answers)} answered with numbers; 0 per second is one. An alert's expression is "
        "empty while all is well, so the series that it asks for are listed instead.",
        "",
        "After a minute of load on all processes. `tests/e2e/test_observability.py` (in `make test-all`) "
        "makes it with a tiny model. With another system: `make serve`, "
        "`make observe`, `tandem bench serve`, `.venv/bin/python deploy/observability/queries.py --out "
        "FILE`. Quantiles of times that nothing took within the minute are NaN.",
        "",
        "| where | panel or rule | query | series | verdict |",
        "|---|---|---|---|---|",
    ]
    for answer in answers:
        query = answer.asked.replace("|", "\\|")
        lines.append(
            f"| {answer.expression.place} | {answer.expression.name} | `{query}` | {answer.num_series} | "
            f"{answer.verdict} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:9090")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    answers = run(arguments.url, all_expressions())
    report = to_markdown(answers)
    if arguments.out is None:
        print(report)
    else:
        arguments.out.write_text(report, encoding="utf-8")
    bad = [answer for answer in answers if not answer.is_good]
    for answer in bad:
        print(f"{answer.expression.place}, {answer.expression.name}: {answer.verdict}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
