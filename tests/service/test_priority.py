"""Changing the priority sets the nice value of the process and of its session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tandem_gateway.settings import GatewaySettings
from tandem_service.priority import change_nice, wait_for_offers
from tandem_service.settings import load

SCRIPT = """
import os
from tandem_service.priority import change_nice
change_nice({nice})
print(os.nice(0))
try:
    print(open("/proc/self/autogroup").read().split()[-1])
except OSError:
    print("none")
"""


OFFERS = """
import os, threading
from tandem_service.priority import wait_for_offers
wait_for_offers()
later = []
thread = threading.Thread(target=lambda: later.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(os.sched_getscheduler(0), *later)
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
    change_nice(3, autogroup=tmp_path / "absent" / "autogroup")
    assert given == [3]


def test_without_permission_the_priority_stays_and_a_line_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(nice: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "nice", denied)
    autogroup = tmp_path / "autogroup"
    autogroup.write_text("unchanged")
    change_nice(-5, autogroup)
    assert autogroup.read_text() == "unchanged"
    assert "CAP_SYS_NICE" in capsys.readouterr().out


def test_a_gateway_parses_a_negative_value_as_a_separate_argument(capsys: pytest.CaptureFixture[str]) -> None:
    """The form that `tandem up` uses."""
    others = ["--model", "model", "--decode", "localhost:1"]
    assert load(GatewaySettings, [*others, "--nice", "-5"]).nice == -5
    with pytest.raises(SystemExit):
        load(GatewaySettings, [*others, "--nice", "-21"])
    assert "--nice (or TANDEM_NICE) is '-21'" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system does not have the policy")
def test_a_process_that_waits_for_yields_preempts_no_other() -> None:
    command = [sys.executable, "-P", "-c", OFFERS]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(os.SCHED_BATCH)] * 2


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system does not have the policy")
def test_a_process_without_permission_for_the_policy_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def denied(_: int, policy: int, __: object) -> None:
        asked.append(policy)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", denied)
    wait_for_offers()
    assert asked == [os.SCHED_BATCH]
