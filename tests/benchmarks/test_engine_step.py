"""The table of step times, and how an engine is named on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_step import parse_config, step_table


def test_steps_are_compared_with_one_row_and_with_the_last_system() -> None:
    table = step_table({(512, "tandem"): {1: 10, 8: 11, 16: 15}, (512, "HF"): {1: 50, 8: 55, 16: 60}})
    tandem, peer = ([word.strip() for word in line.strip("|").split("|")] for line in table.splitlines()[2:])
    assert tandem == ["512", "tandem", "10.00", "11.00", "15.00", "1.10", "1.50", "5.00x", "5.00x", "4.00x"]
    assert peer[-3:] == ["1.00x"] * 3


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
