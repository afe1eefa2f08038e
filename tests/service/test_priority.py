"""Lowering the priority sets the nice value of the process and of its session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tandem_service.priority import lower_priority

SCRIPT = """
import os
from tandem_service.priority import lower_priority
lower_priority({nice})
print(os.nice(0))
try:
    print(open("/proc/self/autogroup").read().split()[-1])
except OSError:
    print("none")
"""


def nice_values(nice: int) -> list[str]:
    process = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT.format(nice=nice)],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    return process.stdout.split()


def test_the_process_and_its_session_get_the_nice_value() -> None:
    before = os.nice(0)
    own, group = nice_values(6)
    assert int(own) == min(before + 6, 19)
    if group != "none" and Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() == "1":
        assert group == "6"


def test_zero_changes_nothing() -> None:
    own, group = nice_values(0)
    assert int(own) == os.nice(0)
    assert group in ("0", "none")


def test_without_autogroup_only_the_nice_value_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(os, "nice", given.append)
    lower_priority(3, autogroup=tmp_path / "absent" / "autogroup")
    assert given == [3]
