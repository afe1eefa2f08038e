"""`benchmarks/engine.py` with a fake OpenAI server as another system."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from engine_loads import Load, Prompts
from fake_peers import SERVER, peer
from machine import AMX
from tandem_cli.bench.options import BenchOptions
from toy_floors import PEAKS, SPEC, WEIGHTS

import engine
from engine import Bench, Report

ALONE = Load(64, 1, rounds=2)
SHARED = Load(96, 2, rounds=1, shared_tokens=32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Half a second of all cores otherwise.
    monkeypatch.setattr(engine, "measure_peaks", lambda: PEAKS)


@pytest.fixture
def report() -> Report:
    return Report("tiny", SPEC, {"floor, int8": WEIGHTS}, PEAKS)


def table(report: Report) -> list[list[str]]:
    lines = [line for line in report.markdown().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_system_is_measured_and_one_that_does_not_start_is_named(report: Report) -> None:
    prompts = Prompts(BenchOptions(model=""))
    with contextlib.ExitStack() as stack:
        bench = Bench(report)
        bench.start(peer("works", SERVER), stack)
        bench.start(peer("broken", "raise SystemExit('no such model')"), stack)
        bench.measure(ALONE, prompts)
        bench.measure(SHARED, prompts)
        bench.interfere(prompts, 64, 96)
    assert list(report.rows) == [ALONE, SHARED, "ITL, during 96 tokens"]
    assert {tuple(row) for row in report.rows.values()} == {("works",)}
    assert report.missing == {"broken": "its process ended: no such model"}
    assert any(line.startswith("Missing: broken") for line in report.markdown().splitlines())


def test_the_page_is_one_table_with_a_row_for_each_load_and_floors_beside_the_systems(report: Report) -> None:
    report.rows = {ALONE: {"A": "1 / 2 / 3", "B": "4 / 5 / 6"}, "ITL": {"B": "7 / 8"}}
    head, _, alone, itl = table(report)
    assert head == ["load", "A", "B", "floor, int8"]
    assert alone[:3] == ["64 tokens, concurrency 1", "1 / 2 / 3", "4 / 5 / 6"]
    # Memory of 1,000 bytes/s: weights, and for a step 32 bytes for each of 64 + 32 tokens before it.
    ttft, tpot, _ = alone[3].split(" / ")
    assert int(tpot) == 1000 + 32 * (64 + 32)
    assert int(ttft) > 1000
    assert itl == ["ITL", "-", "7 / 8", "-"]
    assert len(report.markdown().splitlines()) <= 60


def test_the_state_of_amx_is_a_column_where_there_is_amx(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter((6.13, 24.2))
    monkeypatch.setattr(engine, "amx_tile_ns", lambda: next(states))
    with contextlib.ExitStack() as stack:
        bench = Bench(report)
        bench.start(peer("works", SERVER), stack)
        bench.measure(ALONE, Prompts(BenchOptions(model="")))
    head, _, alone = table(report)
    assert (head[-1], alone[-1]) == (AMX, "6.1 / 24.2")
