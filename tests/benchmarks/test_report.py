"""The engine benchmark's tables."""

from __future__ import annotations

import json
from pathlib import Path

from peers.report import Report, cells_table, leaders_table, phases_table
from peers.statistics import Cell, Phase, Timing


def made(peer: str, ttft_ms: float, tpot_ms: float, *, drafts: bool = False, at_once: int = 1) -> Cell:
    return Cell(peer, drafts, 256, at_once, ttft_ms, tpot_ms, 2.0 if drafts else 1.0,
                (Timing(ttft_ms, tpot_ms, 64, 63),))  # fmt: skip


CELLS = [
    made("transformers", 200, 50),
    made("vLLM", 100, 30),
    made("vLLM, n-gram drafts", 120, 10, drafts=True),
    made("tandem, speculation off", 50, 15),
    made("tandem, speculation global", 60, 20, drafts=True),
]


def rows(table: str) -> list[list[str]]:
    return [[word.strip() for word in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_ratios_say_how_many_times_faster_than_transformers_a_system_is() -> None:
    by_system = {row[2]: row for row in rows(cells_table(CELLS))}
    assert by_system["transformers"][3:7] == ["200", "1.00x", "50.0", "1.00x"]
    assert by_system["vLLM, n-gram drafts"][3:8] == ["120", "1.67x", "10.0", "5.00x", "2.00"]


def test_without_transformers_there_are_times_but_no_ratios() -> None:
    (row,) = rows(cells_table([made("vLLM", 100, 30)]))
    assert row[3:7] == ["100", "", "30.0", ""]


def test_lines_of_one_load_stay_together() -> None:
    cells = [made("a", 1, 1), made("b", 1, 1), made("a", 1, 1, at_once=4)]
    assert [(row[1], row[2]) for row in rows(cells_table(cells))] == [("1", "a"), ("1", "b"), ("4", "a")]


def test_leaders_compare_like_with_like() -> None:
    by_question = {row[2]: row for row in rows(leaders_table(CELLS))}
    assert by_question["TTFT"][3:] == ["50.0 (speculation off)", "100 (vLLM)", "2.00x"]
    assert by_question["TPOT without drafts"][3:] == ["15.0 (speculation off)", "30.0 (vLLM)", "2.00x"]
    # Being behind shows.
    assert by_question["TPOT"][3:] == ["15.0 (speculation off)", "10.0 (vLLM, n-gram drafts)", "0.67x"]


def test_phases_are_compared_with_before() -> None:
    phases = [
        Phase("vLLM", "before", 64, 10.0, 10.0, 12.0, 4000.0),
        Phase("vLLM", "during", 20, 200.0, 190.0, 300.0, 4000.0),
        Phase("llama.cpp", "during", 1, 4000.0, 4000.0, 4000.0, 4000.0),
    ]
    assert [row[4] for row in rows(phases_table(phases))] == ["1.00x", "20.00x", ""]


def test_a_missing_peer_is_named_with_its_reason(tmp_path: Path) -> None:
    report = Report("command", "hardware", "method", missing={"vLLM": "cannot be installed: no such wheel"})
    report.cells += CELLS
    report.write(tmp_path / "folder" / "name")
    assert "**Missing: vLLM.** cannot be installed: no such wheel" in report.markdown()
    assert (tmp_path / "folder" / "name.md").read_text() == report.markdown()
    written = json.loads((tmp_path / "folder" / "name.json").read_text())
    assert written["missing"] == report.missing
    assert [c["peer"] for c in written["cells"]] == [c.peer for c in CELLS]
