"""The tables of the CPU kernels' times."""

from __future__ import annotations

import torch
from kernels_cpu import Line, measure_attention, measure_experts, table
from machine import Peaks

PEAKS = Peaks(10e9, {torch.bfloat16: 200e9, torch.float32: 100e9})


def line(case: str, num_rows: int, ours: float, peer_dtype: torch.dtype = torch.bfloat16) -> Line:
    return Line(
        (case,), num_rows, ours, torch=2 * ours, num_bytes=10**7, num_flops=10**8, peer_dtype=peer_dtype
    )


def test_a_line_is_compared_with_torch_with_one_row_and_with_what_the_machine_can_do() -> None:
    lines = [line("a", 1, 0.002), line("a", 8, 0.003), line("b", 1, 0.004, torch.float32)]
    rows = [
        [word.strip() for word in row.strip("|").split("|")]
        for row in table(["weights"], "M", "F.linear", lines, PEAKS).splitlines()[2:]
    ]
    assert rows[0] == ["a", "1", "2.00", "4.00", "2.00x", "1.00", "5.0", "50%", "50", "25%"]
    assert rows[1][5] == "1.50"
    # The share of the float32 peak.
    assert rows[2][5:] == ["1.00", "2.5", "25%", "25", "25%"]


def test_attention_is_measured_after_its_results_are_checked() -> None:
    for num_rows in (1, 4, 40):
        lines = measure_attention(context=64, num_seqs=2, num_rows=num_rows, num_layers=1)
        assert [(seen.case, seen.num_rows) for seen in lines] == [
            (("64", "2", cache), num_rows) for cache in ("bfloat16", "int8")
        ]
        assert all(seen.ours > 0 and seen.torch > 0 for seen in lines)


def test_experts_are_measured_with_the_bytes_of_those_chosen() -> None:
    lines = measure_experts(num_experts=4, hidden=64, inner=32, top_k=2)
    router, of_expert = 4 * 64 * 4, 3 * 64 * 32 * 2
    cases = [(name, rows) for name in ("bfloat16", "4 bit") for rows in (1, 4, 16)]
    assert [(*seen.case, seen.num_rows) for seen in lines] == cases
    assert lines[0].num_bytes == 2 * of_expert + router
    assert lines[1].num_bytes <= 4 * of_expert + router
