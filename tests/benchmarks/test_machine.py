"""The machine's peaks, and the state of AMX units."""

from __future__ import annotations

import machine
import pytest
import torch
from machine import Peaks, amx_cell, amx_tile_ns, measure_peaks, tile_ns


def test_a_type_is_multiplied_as_a_wider_one_where_that_is_faster() -> None:
    peaks = Peaks(1e9, {torch.float32: 200e9, torch.bfloat16: 150e9, torch.int8: 300e9})
    assert [peaks.fastest(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8)] == [
        200e9,
        200e9,
        300e9,
    ]


def test_the_best_of_two_measurements_is_kept_figure_by_figure() -> None:
    first = Peaks(1e9, {torch.float32: 2e9, torch.bfloat16: 9e9})
    second = Peaks(3e9, {torch.float32: 1e9, torch.bfloat16: 10e9})
    assert first.best(second) == Peaks(3e9, {torch.float32: 2e9, torch.bfloat16: 10e9})
    assert str(first) == "reads 1.0 GB/s and multiplies at 2 in float32, 9 in bfloat16 (10^9 operations/s)"


def test_peaks_are_measured_in_types_with_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PEAK_SIZE", 64)
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    peaks = measure_peaks()
    assert list(peaks.ops_per_s) == [torch.float32, torch.bfloat16, torch.int8]
    assert min(peaks.read_bytes_per_s, *peaks.ops_per_s.values()) > 0


def test_the_rate_of_products_tells_the_state_of_amx() -> None:
    # Two cores at 5,400 and at 1,386 GFLOP/s.
    fast, slow = (tile_ns(2 * 1024**3 / rate, 2) for rate in (5.4e12, 1.386e12))
    assert (fast, slow) == (pytest.approx(6.07, abs=0.01), pytest.approx(23.6, abs=0.1))
    assert amx_cell(fast, slow) == "6.1 / 23.6"


def test_the_probe_runs_only_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROBE_SIZE", 64)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert amx_tile_ns() is None
    assert amx_cell(None, None) == ""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert (amx_tile_ns() or 0) > 0
