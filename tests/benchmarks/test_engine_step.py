"""The table of step times, and how an engine is named on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_step import Line, floors_ms, parse_config, step_table
from machine import AMX
from toy_floors import PEAKS, SPEC, WEIGHTS


def cells(row: str) -> list[str]:
    return [word.strip() for word in row.strip("|").split("|")]


def test_steps_are_compared_with_one_row_and_with_their_floor() -> None:
    line = Line(512, "tandem", {1: 10, 8: 11, 16: 15}, {1: 5, 8: 5.125, 16: 6})
    head, _, row = map(cells, step_table([line]).splitlines())
    assert head[2:] == [
        *("n=1 ms", "n=8 ms", "n=16 ms", "T_8/T_1", "T_16/T_1"),
        *("floor n=1", "floor n=8", "floor n=16"),
    ]
    assert row == ["512", "tandem", "10.00", "11.00", "15.00", "1.10", "1.50", "5.00", "5.12", "6.00"]
    with_amx = step_table([replace(line, amx="6.1 / 24.2")]).splitlines()
    assert (cells(with_amx[0])[-1], cells(with_amx[2])[-1]) == (AMX, "6.1 / 24.2")


def test_the_floor_of_a_draft_is_a_pass_with_logits_for_all_its_rows() -> None:
    by_rows = floors_ms(SPEC, WEIGHTS, PEAKS, context=64)
    # Memory of 1,000 bytes/s: the weights, and 63 tokens of 32 bytes.
    assert by_rows[1] == pytest.approx(1e3 * (1000 + 63 * 32) / 1e3)
    # A machine that reads at once: two operations for each weight of layers and head, and attention to 49 to
    # 64 tokens.
    computing = floors_ms(SPEC, WEIGHTS, replace(PEAKS, read_bytes_per_s=1e9), context=64)
    projections, attention = 2 * 16 * (2 * 432 + 8 * 50), 2 * 2 * 8 * 2 * sum(range(49, 65))
    assert computing[16] == pytest.approx(1e3 * (projections / 16e3 + attention / 4e3))


def test_a_config_sets_fields_of_the_engine() -> None:
    config = parse_config(Path("model"), "dtype=float32,threads=1")
    assert (config.model, config.dtype, config.threads, config.max_draft_nodes) == (
        Path("model"),
        "float32",
        1,
        15,
    )


def test_an_option_that_the_engine_does_not_have_is_refused() -> None:
    with pytest.raises(SystemExit, match="no option 'colour'; it has model, dtype"):
        parse_config(Path("model"), "colour=green")
