"""Pods of one machine measure their steps in turn."""

import fcntl
import os
import threading
from pathlib import Path

import pytest
from tandem_pod import step_costs
from waiting import pause

ALONE = {"decodes": True, "shares_cores": False}


class Engine:
    """Counts those that measure at once."""

    running = most = finished = 0

    def measure_costs(self, *, decodes: bool, slowed_by: float) -> None:
        self.slowed_by = slowed_by
        Engine.running += 1
        Engine.most = max(Engine.most, Engine.running)
        pause(0.05)
        Engine.running -= 1
        Engine.finished += 1


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    for name in ("running", "most", "finished"):
        monkeypatch.setattr(Engine, name, 0)
    home = tmp_path / "home"
    home.mkdir()
    return home


def test_one_after_the_other():
    threads = [threading.Thread(target=step_costs.measure, args=(Engine(),), kwargs=ALONE) for _ in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (Engine.finished, Engine.most) == (3, 1)


def test_a_pod_that_is_stopped_meanwhile_holds_the_others_for_a_limited_time(home, monkeypatch):
    monkeypatch.setattr(step_costs, "_TURN_S", 0.1)
    descriptor = os.open(home, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    step_costs.measure(Engine(), **ALONE)
    os.close(descriptor)
    assert Engine.finished == 1


def test_without_the_folder_nobody_waits(home):
    home.rmdir()
    step_costs.measure(Engine(), **ALONE)
    assert Engine.finished == 1


@pytest.mark.parametrize(("num_cores", "slowed_by"), [(1, 2.0), (2, 1.5), (16, 1.0625)])
def test_a_gateway_and_clients_on_the_same_cores_take_their_part(monkeypatch, num_cores, slowed_by):
    monkeypatch.setattr("tandem_pod.step_costs.usable_cpus", lambda: num_cores)
    alone, beside = Engine(), Engine()
    step_costs.measure(alone, decodes=True, shares_cores=False)
    step_costs.measure(beside, decodes=True, shares_cores=True)
    assert (alone.slowed_by, beside.slowed_by) == (1.0, slowed_by)
