"""The GPU benchmark runs, checks and reports, on tiny shapes without a GPU; it is run where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/gpu_attention.py"


def run(*options: str) -> str:
    return subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *options], capture_output=True, text=True, check=True, timeout=200
    ).stdout


def test_a_dry_run_checks_measures_and_reports(tmp_path: Path) -> None:
    output = run("--dry-run", "--out", str(tmp_path / "result"))
    report = json.loads((tmp_path / "result.json").read_text())
    assert len(report["checks"]) == 6
    assert all(check["passed"] for check in report["checks"])
    measured = {(t["kv"], t["batch"], t["n"]) for t in report["times"] if t["peer"] == "tandem"}
    assert measured == {(kv, batch, n) for kv in ("bf16", "int8", "fp8") for batch in (1, 3) for n in (1, 8)}
    assert {t["n"] for t in report["times"] if t["peer"] == "sdpa"} == {1, 8}
    assert all(t["microseconds"] > 0 and t["of_copy"] > 0 for t in report["times"])
    assert sum("does not fit in memory" in what for what in report["left_out"]) == 4
    table = (tmp_path / "result.md").read_text()
    assert "| KV | heads | context | batch | n=1 | n=8 | T_8/T_1 | of copy, n=1 |" in table
    assert "| heads | context | batch | n | tandem | sdpa |" in table
    assert "6 of 6 checks passed" in table
    assert table in output


def test_what_the_time_did_not_suffice_for_is_listed(tmp_path: Path) -> None:
    output = run("--dry-run", "--budget", "0", "--out", str(tmp_path / "result"))
    report = json.loads((tmp_path / "result.json").read_text())
    assert not report["times"]
    assert sum("the time was over" in what for what in report["left_out"]) == 4 * 2 * 2
    assert output.count("left out: bf16 4/2 context 100 batch 1 n 1: the time was over") == 1
