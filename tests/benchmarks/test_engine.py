"""`benchmarks/engine.py` with a fake OpenAI server as the peer."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from fake_peers import SERVER, peer

from engine import Bench, Load, Prompts, Report


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_peer_is_measured_and_one_that_does_not_start_is_named() -> None:
    report = Report("tiny")
    with contextlib.ExitStack() as stack:
        bench = Bench(report)
        bench.start(peer("works", SERVER), stack)
        bench.start(peer("broken", "raise SystemExit('no such model')"), stack)
        bench.measure(Load(64, 1, rounds=2), Prompts(None))
        bench.interfere(Prompts(None))
    assert list(report.rows) == ["works"]
    assert set(report.rows["works"]) == {"64 tokens, concurrency 1", "ITL"}
    assert report.missing == {"broken": "its process ended: no such model"}
    lines = report.markdown().splitlines()
    assert lines[2] == "| system | 64 tokens, concurrency 1 | ITL |"
    assert any(line.startswith("Missing: broken") for line in lines)


def test_prompts_have_the_wanted_length_and_no_common_beginning() -> None:
    prompts = Prompts(None)
    made = [*prompts.make(200, 2), *prompts.make(200, 1)]
    assert len({prompt.messages[0].content.split("\n")[0] for prompt in made}) == 3
