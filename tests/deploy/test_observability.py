"""Dashboards, alert rules and `make observe`: generated, well-formed, and about metrics that exist.

Without Prometheus: the committed files are those of the generator, Grafana's schema holds, every query names
series and labels of the table. With promtool also the rules' unit tests. tests/e2e/test_observability.py asks
a live Prometheus. Grafana is not here: that a dashboard looks right is not covered.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import alert_rules
import generate
import grafana_dashboards
import observe
import pytest
import queries
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from queries import Expression
from tandem_cli.up.state_file import FleetRecord, PodRecord
from tandem_service.metric_rows import Process
from tandem_service.metric_table import TABLE

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/observability"
BOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
RULES = FOLDER / "rules.yml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not on PATH; on Debian and Ubuntu it is in the package prometheus"
)


def test_the_committed_files_are_those_of_the_generator() -> None:
    made = generate.files()
    stale = [str(path.relative_to(ROOT)) for path, text in made.items() if path.read_text() != text]
    assert not stale, f"run `make observability` and commit {stale}"
    assert set(BOARDS) == {path for path in made if path.suffix == ".json"}, "one file for each dashboard"


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_keeps_to_grafanas_schema(path: Path) -> None:
    board = json.loads(path.read_text())
    again = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert again == board, "a field that the schema does not have is lost on the way"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"


def test_every_query_names_series_and_labels_that_are_served() -> None:
    expressions = queries.all_expressions()
    known = queries.known_series(expressions)
    assert len(expressions) > 100
    assert [fault for expression in expressions for fault in queries.faults(expression, known)] == []


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(rate(tandem_ttft_seconds_buckets[1m]))", "no process serves tandem_ttft_seconds_buckets"),
        ("sum(rate(tandem_requests_finished_total[1m]))", "no process serves tandem_requests_finished_total"),
        ('tandem_queue_length{slo_class="chat"}', "tandem_queue_length has no label slo_class"),
        ("sum by (class) (tandem_ttft_seconds_count)", "aggregates by class, which no series in it has"),
        ("sum(rate(tandem_ttft_seconds_bucket[1m])", "unclosed left parenthesis"),
    ],
)
def test_a_query_that_cannot_be_answered_is_found(query: str, fault: str) -> None:
    (found,) = queries.faults(Expression("board", "panel", query), queries.known_series([]))
    assert fault in found
    assert found.startswith("board, panel: ")


def test_a_renamed_metric_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = [row for row in TABLE if row.name != "tandem_goodput_tokens_total"]
    monkeypatch.setattr(queries, "TABLE", renamed)
    expressions = queries.all_expressions()
    known = queries.known_series(expressions)
    found = [fault for expression in expressions for fault in queries.faults(expression, known)]
    assert "no process serves tandem_goodput_tokens_total" in {fault.partition(": ")[2] for fault in found}


def test_every_panel_has_a_title_of_its_own_and_every_alert_says_what_to_do() -> None:
    for board in grafana_dashboards.BOARDS:
        titles = [panel.title for panel in board.panels()]
        assert len(titles) == len(set(titles)), board.title
    for alert in alert_rules.ALERTS:
        assert alert.severity in ("page", "ticket")
        assert alert.summary.endswith(".") and len(alert.action) > 40, alert.name


@needs_promtool
def test_prometheus_accepts_the_rules() -> None:
    checked = subprocess.run([str(PROMTOOL), "check", "rules", str(RULES)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "SUCCESS" in checked.stdout


@needs_promtool
def test_the_rules_fire_when_they_should_and_not_otherwise() -> None:
    here = Path(__file__)
    tests = [here.with_name(name) for name in ("alert_rules_test.yml", "alert_rules_days_test.yml")]
    tested = subprocess.run([str(PROMTOOL), "test", "rules", *tests], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    fired = {
        case["alertname"]
        for path in tests
        for group in yaml.safe_load(path.read_text())["tests"]
        for case in group["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert fired == {alert.name for alert in alert_rules.ALERTS}, "every alert is seen to fire"


RECORD = FleetRecord(
    1,
    "tiny",
    True,
    (
        PodRecord("gateway", "gateway-0", 2, {"grpc": 20051, "http": 8000, "metrics": 22400}),
        PodRecord("gateway", "gateway-1", 3, {"grpc": 20052, "http": 8001, "metrics": 22401}),
        PodRecord("decode", "decode-0", 4, {"grpc": 21200, "kv": 21300, "metrics": 22200}),
        PodRecord("redis", "redis", 5, {}),
    ),
)


def test_observe_scrapes_every_process_that_serves_metrics(tmp_path: Path) -> None:
    options = observe.Options(tmp_path / "s.json", tmp_path, scrape_interval_s=0.5)
    config = observe.prometheus_config(observe.targets(RECORD), options)
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert {name: job["static_configs"][0]["targets"] for name, job in jobs.items()} == {
        "tandem-decode": ["127.0.0.1:22200"],
        "tandem-gateway": ["127.0.0.1:22400", "127.0.0.1:22401"],
    }
    assert config["global"]["scrape_interval"] == "500ms"
    assert config["rule_files"] == [str(RULES)]


@needs_promtool
def test_prometheus_accepts_the_configuration(tmp_path: Path) -> None:
    options = observe.Options(tmp_path / "s.json", tmp_path)
    config = observe.prometheus_config(observe.targets(RECORD), options)
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    checked = subprocess.run([str(PROMTOOL), "check", "config", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_the_pod_monitor_selects_the_pods_of_the_manifests_and_names_their_jobs() -> None:
    kubectl = Path(sys.executable).parent / "kubectl"
    parts = {"resources": ["../base"], "components": ["../components/scaler"]}
    with tempfile.TemporaryDirectory(dir=ROOT / "deploy/k8s") as folder:
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(parts))
        command = [kubectl, "kustomize", folder]
        rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    monitor = yaml.safe_load((FOLDER / "podmonitor.yaml").read_text())
    (selected,) = monitor["spec"]["selector"]["matchExpressions"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    jobs, namespaces = set(), set()
    for manifest in yaml.safe_load_all(rendered):
        if manifest["kind"] not in ("Deployment", "StatefulSet"):
            continue
        template = manifest["spec"]["template"]
        ports = {port["name"] for c in template["spec"]["containers"] for port in c.get("ports", ())}
        if endpoint["port"] in ports:
            jobs.add(template["metadata"]["labels"][selected["key"]])
            namespaces.add(manifest["metadata"]["namespace"])
    assert jobs == set(selected["values"]) == {f"tandem-{process.value}" for process in Process}
    assert monitor["spec"]["jobLabel"] == selected["key"]
    assert namespaces == {monitor["metadata"]["namespace"]}


def run_observe(*flags: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "observe.py"), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "", **environment},
    )
    return done.returncode, done.stderr.strip()


def test_observe_says_in_one_sentence_what_is_missing(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    home = str(tmp_path / "home")
    assert run_observe(TANDEM_HOME=home) == (
        2,
        "error: no `tandem up` runs here; start it with `make serve`, or name its --state-file",
    )
    assert run_observe("--state-file", str(state), TANDEM_HOME=home) == (
        2,
        "error: prometheus is not installed; on Debian and Ubuntu run `apt-get install prometheus`, "
        "elsewhere put the project's binary on PATH",
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("prometheus", "alertmanager"):
        (programs / name).write_text("#!/bin/sh\nexit 1\n")
        (programs / name).chmod(0o755)
    code, said = run_observe("--state-file", str(state), TANDEM_HOME=home, PATH=str(programs))
    assert (code, said) == (
        2,
        f"error: --state-file {state} does not exist; `tandem up` writes it while it runs",
    )
