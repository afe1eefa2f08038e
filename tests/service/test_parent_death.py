"""The command keeps its pid and output, and the kernel ends it with its parent."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tandem_service import parent_death

PARENT = """
import signal, subprocess, sys, time
from tandem_service import parent_death
prefix = parent_death.command_prefix(signal.Signals(int(sys.argv[1])))
child = subprocess.Popen([*prefix, *sys.argv[2:]], stdout=sys.stdout)
time.sleep(60)
"""
#: Prints that it runs, and the signal with which it ends.
CHILD = """
import os, pathlib, signal, sys, time
def ended(number, frame):
    pathlib.Path(sys.argv[1]).write_text(str(number))
    os._exit(0)
signal.signal(signal.SIGTERM, ended)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG exists on Linux only")
@pytest.mark.parametrize(
    ("death_signal", "heard"), [(signal.SIGTERM, str(int(signal.SIGTERM))), (signal.SIGKILL, None)]
)
def test_a_child_ends_when_its_parent_is_killed(
    tmp_path: Path, death_signal: signal.Signals, heard: str | None
) -> None:
    said = tmp_path / "signal"
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, str(int(death_signal)), sys.executable, "-c", CHILD, str(said)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.ppid() == parent.pid, "exec keeps the pid"
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive
    assert (said.read_text() if said.exists() else None) == heard


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG exists on Linux only")
def test_a_command_whose_parent_has_ended_does_not_start(tmp_path: Path) -> None:
    *head, _ = parent_death.command_prefix(signal.SIGKILL)
    # Not this process, as if the parent had died between fork and the request.
    ended = subprocess.run([*head, "0", "touch", str(tmp_path / "started")], check=False)
    assert ended.returncode == 0
    assert not (tmp_path / "started").exists()


def test_exit_code_and_output_are_those_of_the_command() -> None:
    ended = subprocess.run(
        [*parent_death.command_prefix(signal.SIGKILL), "sh", "-c", "echo hello; exit 7"],
        capture_output=True,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == (b"hello\n", 7)


def test_a_command_that_does_not_exist_is_named() -> None:
    ended = subprocess.run(
        [*parent_death.command_prefix(signal.SIGKILL), "no-such-command"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.strip() == "cannot start no-such-command: No such file or directory"
