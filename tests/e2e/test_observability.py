"""Every query of every panel and rule, asked of a Prometheus that has watched a system under load."""

from __future__ import annotations

import concurrent.futures
import json
import random
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import observe
import pytest
import queries
from processes import free_port
from toy_models import VOCABULARY, prompt_of
from waiting import wait_until

if TYPE_CHECKING:
    from conftest import RunningFleet

MISSING = [name for name in ("prometheus", "prometheus-alertmanager") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.wide,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"not on PATH: {', '.join(MISSING)}; on Debian `apt-get install {' '.join(MISSING)}`",
    ),
]

#: Long enough for the windows of the queries, which are a minute.
LOAD_S = 75.0
CLASSES = ("interactive", "chat", "batch")


@pytest.fixture
def watched(start_fleet, tiny_model: Path, tmp_path: Path) -> Iterator[tuple[RunningFleet, observe.Options]]:
    with start_fleet(tiny_model, tmp_path) as fleet:
        options = observe.Options(
            fleet.state_path, tmp_path / "observe", free_port(), free_port(), scrape_interval_s=1.0
        )
        processes = observe.start(options)
        try:
            observe.wait_ready(options, processes)
            yield fleet, options
        finally:
            observe.stop(processes)
    assert all(process.poll() is not None for process in processes)


def load(fleet: RunningFleet, until: float, seed: int) -> int:
    """One client of all classes: short prompts that come again, whose answers are shared text, and new ones
    that are long enough for the prefill pod. Returns the number of answers."""
    rng, num_ok = random.Random(seed), 0
    with httpx.Client(base_url=fleet.url, timeout=60, trust_env=False) as client:
        while time.monotonic() < until:
            prompt = prompt_of(100, start=rng.randrange(4))
            if rng.random() < 0.5:
                prompt = [rng.randrange(10, VOCABULARY) for _ in range(64)] + prompt_of(600)
            body = {"prompt": prompt, "max_tokens": 40, "slo_class": rng.choice(CLASSES), "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code in (200, 429), answer.text  # a busy machine may refuse
            num_ok += answer.status_code == 200
            time.sleep(0.05)
    return num_ok


def test_no_panel_and_no_rule_is_empty(watched: tuple[RunningFleet, observe.Options], tmp_path: Path) -> None:
    fleet, options = watched
    url = f"http://127.0.0.1:{options.prometheus_port}"
    until = time.monotonic() + LOAD_S
    with concurrent.futures.ThreadPoolExecutor() as pool:
        counts = list(pool.map(lambda seed: load(fleet, until, seed), range(3)))
    assert sum(counts) > 15, counts

    def api(path: str) -> object:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/api/v1/{path}", timeout=30) as response:
            return json.load(response)["data"]

    assert {target["labels"]["job"]: target["health"] for target in api("targets")["activeTargets"]} == {
        f"tandem-{role}": "up" for role in ("gateway", "decode", "prefill", "lookahead")
    }
    expressions = queries.all_expressions()
    # The recorded ratios of long windows come with the second evaluation of their group.
    wait_until(lambda: all(a.is_good for a in queries.run(url, expressions)) or time.monotonic() > until + 45,
               limit_s=90, interval_s=5)  # fmt: skip
    answers = queries.run(url, expressions)
    (tmp_path / "dashboards.md").write_text(queries.to_markdown(answers))
    bad = [
        f"{a.expression.place}, {a.expression.name}: {a.asked}: {a.verdict}" for a in answers if not a.is_good
    ]
    assert bad == []
    known = set(queries.known_series(expressions))
    served = set(api("label/__name__/values"))
    assert {name for name in served if name.startswith(("tandem_", "vllm:", "slo_class:"))} <= known
    firing = {alert["labels"]["alertname"] for alert in api("alerts")["alerts"] if alert["state"] == "firing"}
    assert firing <= {"TandemErrorBudgetBurnPage", "TandemErrorBudgetBurnTicket"}, "the system is healthy"
