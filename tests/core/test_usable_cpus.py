"""Threads follow the CPUs of the process and the quota of its container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tandem_core.usable_cpus import usable_cpus

CPUS = 64


@pytest.fixture(autouse=True)
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CPUS)))


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("max 100000", CPUS),
        ("9900000 100000", CPUS),
        ("", CPUS),
        (None, CPUS),
    ],
)
def test_a_quota_bounds_the_threads(tmp_path: Path, cpu_max: str | None, expected: int) -> None:
    if cpu_max is not None:
        (tmp_path / "cpu.max").write_text(f"{cpu_max}\n")
    assert usable_cpus(tmp_path) == expected


@pytest.mark.parametrize(("quota_us", "expected"), [(250_000, 3), (-1, CPUS)])
def test_a_quota_of_version_1_bounds_the_threads(tmp_path: Path, quota_us: int, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(tmp_path) == expected
