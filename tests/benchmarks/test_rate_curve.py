"""`benchmarks/rate_curve.py` with fake OpenAI servers as the peers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from fake_peers import SERVER, peer
from peers import Roster
from rate_curve import Sweep
from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.records_file import read_runs


def test_systems_take_turns_at_each_rate_and_one_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["benchmarks/rate_curve.py"])
    options = BenchOptions(
        model="", num_requests=3, input_tokens=64, max_tokens=4, output=tmp_path / "r.jsonl",
    )  # fmt: skip
    roster = Roster()
    with contextlib.ExitStack() as stack:
        # The warm-up is the only request that this one answers.
        roster.start(peer("once", SERVER.replace("serve_forever()", "handle_request()")), stack)
        roster.start(peer("first", SERVER), stack)
        roster.start(peer("second", SERVER), stack)
        sweep = Sweep(options, (30.0, 60.0), 1, roster, tmp_path / "p.md", tmp_path / "c.png")
        sweep.measure()
    order = [(run.point.rate, run.system) for run in sweep.runs]
    assert order == [(30, "once"), (30, "first"), (30, "second"), (60, "second"), (60, "first")]
    assert [run.summary.num_ok for run in sweep.runs] == [0, 3, 3, 3, 3]
    assert read_runs(tmp_path / "r.jsonl") == sweep.runs
    page = (tmp_path / "p.md").read_text()
    assert page.count("| retail | 60 requests/s | ") == 2
    assert "Missing: once: nothing succeeded at 30 requests/s" in page
    assert "Objectives: TTFT 2.5 s, E2E 5 s" in page
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
