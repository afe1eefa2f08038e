"""The GPU benchmark on the CPU: it checks, measures and reports tiny shapes."""

from __future__ import annotations

import pytest
import torch
from gpu_attention import HEAD, KV_DTYPES, Case, Step, check, run, tandem_calls

CPU = torch.device("cpu")


def rows(lines: list[str]) -> list[dict[str, str]]:
    return [
        dict(zip(HEAD, (cell.strip() for cell in line.strip("|").split("|")), strict=True)) for line in lines
    ]


def test_every_case_gets_a_row_and_peers_run_on_bf16() -> None:
    lines: list[str] = []
    cases = [Case(kv, 4, 2, 100, batch, n, 32, 16) for kv in KV_DTYPES for batch in (1, 3) for n in (1, 8)]
    assert run(cases, CPU, lines.append)
    table = rows(lines[1:])
    assert [(row["KV"], row["batch"], row["n"]) for row in table] == [
        (kv, batch, n) for kv in ("bf16", "int8", "fp8") for batch in "13" for n in "18"
    ]
    assert all(float(row["tandem µs"]) > 0 for row in table)
    assert all(row["T_n/T_1"] == "1.00" for row in table if row["n"] == "1")
    assert all((row["SDPA µs"] == "-") == (row["KV"] != "bf16") for row in table)


def test_a_failed_case_does_not_end_the_run() -> None:
    lines: list[str] = []
    cases = [Case("bf16", 3, 2, 20, 1, 1, 32, 16), Case("bf16", 4, 2, 20, 1, 1, 32, 16)]
    assert not run(cases, CPU, lines.append)
    assert [row["tandem µs"] == "ValueError" for row in rows(lines[1:])] == [True, False]


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_a_wrong_result_is_detected(kv: str) -> None:
    step = Step(Case(kv, 4, 2, 50, 2, 8, 32, 16), CPU)
    result = tandem_calls(step)[0]()
    check(step, result)
    result[-1, 0, 0] += 0.2
    with pytest.raises(ValueError, match="wrong result"):
        check(step, result)
