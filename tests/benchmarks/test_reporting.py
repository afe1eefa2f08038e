"""What a results page names: the hardware and the command."""

from __future__ import annotations

import pytest
from reporting import describe_command, describe_features


@pytest.mark.parametrize(
    ("flags", "features"),
    [
        ({"avx2", "fma"}, "avx2"),
        ({"avx2", "avx512f", "amx_tile", "amx_int8", "amx_bf16"}, "avx2, avx512f, amx"),
        ({"avx2", "amx_tile", "amx_int8"}, "avx2"),
        (set(), "no known vector instructions"),
    ],
)
def test_features_are_named_where_all_their_flags_are_there(flags: set[str], features: str) -> None:
    assert describe_features(flags) == features


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("", "python benchmarks/slo.py --out page.md"),
        ("/x/tests/helpers", "PYTHONPATH=tests/helpers python benchmarks/slo.py --out page.md"),
    ],
)
def test_the_command_names_no_folder_of_a_machine(
    path: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr("sys.argv", ["/y/benchmarks/slo.py", "--out", "/z/page.md"])
    assert describe_command() == command
