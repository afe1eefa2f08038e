"""`tandem doctor` beside a real `tandem up`: nothing is wrong with it, until a process hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunningFleet

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.timeout(300)]


def doctor(fleet: RunningFleet) -> tuple[int, list[dict[str, str]]]:
    """Exit code and findings, but those about objectives and clocks: this machine may be slow."""
    script = Path(sys.executable).with_name("tandem")
    command = [str(script), "doctor", "--json", "--state-file", str(fleet.state_path)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert outcome.stdout, outcome.stderr
    findings = json.loads(outcome.stdout)
    return outcome.returncode, [one for one in findings if one["check"] not in ("objectives", "clocks")]


def test_a_healthy_fleet_has_nothing_and_a_hanging_pod_is_named(
    start_fleet, tiny_model: Path, tmp_path: Path
) -> None:
    """Two gateways that share the fleet's Redis, mutual TLS between the pods."""
    with start_fleet(tiny_model, tmp_path, "--gateways", "2", "--tls", "--threads", "1") as fleet:
        assert doctor(fleet) == (0, [])
        pid = fleet.pid("prefill")
        os.kill(pid, signal.SIGSTOP)
        try:
            code, findings = doctor(fleet)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert code == 1
        assert [one["check"] for one in findings] == ["reachable"]
        assert findings[0]["where"].startswith("prefill pod")
