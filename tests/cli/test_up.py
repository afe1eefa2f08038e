"""`tandem up` from start to end, with small pods that really serve grpc.health.v1 in place of the real ones.

Everything else is real: the command, its supervisor, ports, signals and the state file. The pods of this
test live as console scripts beside a Python of their own, which is where `tandem up` looks for them.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from model_folders import make_folder
from processes import is_alive
from tandem_cli.models import note_prepared
from tandem_cli.targets import running
from tandem_cli.up import health
from tandem_cli.up.options import FleetOptions
from tandem_cli.up.state_file import FleetRecord, read_state
from tandem_cli.up.supervisor import Health
from tandem_cli.up.up_plan import PortInUseError, check_ports, plan_fleet
from waiting import wait_until

POD = """#!{python}
import signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))  # of a flag without a value, what follows it
if arguments.get("--block-size") == "128":
    print("Traceback of a crash", "the cause", sep="\\n", flush=True)
    sys.exit(2)
server = grpc.server(ThreadPoolExecutor(2))
servicer = health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port("127.0.0.1:" + arguments.get("--port", arguments.get("--grpc-port")))
class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
if "--metrics-port" in arguments:
    ready = ThreadingHTTPServer(("127.0.0.1", int(arguments["--metrics-port"])), Ready)
    threading.Thread(target=ready.serve_forever, daemon=True).start()
def end(*_):
    print("draining", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
server.start()
print("listening", flush=True)
signal.pause()
"""


def free_base_port() -> int:
    """Start of a range whose ports used by a small fleet are free now."""
    for base in range(21000, 60000, 1500):
        offsets = (0, 100, 200, 300, 1000, 1100, 1300, 1400, 900, 901)
        try:
            for offset in offsets:
                with socket.create_server(("127.0.0.1", base + offset)):
                    pass
        except OSError:
            continue
        return base
    raise AssertionError("no free ports for a fleet")


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """A virtual environment with this one's packages and fake pods; returns its python."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "lib").symlink_to(Path(sys.prefix) / "lib")
    (venv / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    python = venv / "bin/python"
    python.symlink_to(Path(sys.executable).resolve())
    for role in ("gateway", "decode", "prefill", "lookahead"):
        script = venv / f"bin/tandem-{role}"
        script.write_text(POD.format(python=python))
        script.chmod(0o755)
    model = make_folder(tmp_path / "home/models/m", name="m")
    (model / "model-float32.safetensors").touch()
    note_prepared(model, "auto", "auto", "model-float32.safetensors")
    return python


class Up:
    """A running `tandem up`."""

    def __init__(self, process: subprocess.Popen[str], state: Path, log: Path) -> None:
        self.process = process
        self.state_path = state
        self._log = log

    def log(self) -> str:
        return self._log.read_text()

    def state(self) -> FleetRecord | None:
        return read_state(self.state_path) if self.state_path.exists() else None

    def wait_for(self, condition: Callable[[FleetRecord], bool], timeout_s: float = 30) -> FleetRecord:
        def is_so() -> bool:
            state = self.state()
            return state is not None and condition(state)

        try:
            wait_until(is_so, limit_s=timeout_s, interval_s=0.05)
        except AssertionError:
            raise AssertionError(f"not so within {timeout_s} s:\n{self.log()}") from None
        state = self.state()
        assert state is not None
        return state


@contextmanager
def up(python: Path, *arguments: str, stdout: int | None = None) -> Iterator[Up]:
    """`stdout`: a descriptor in place of the log file."""
    home = python.parents[2] / "home"
    base = free_base_port()
    ports = ("--base-port", str(base), "--grpc-port", str(base + 900), "--http-port", str(base + 901))
    command = [python, "-P", "-m", "tandem_cli.main", "up", "--model", "m", *ports, *arguments]
    log = home / "up.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out if stdout is None else stdout,
            stderr=out,
            text=True,
            env={**os.environ, "TANDEM_HOME": str(home)},
        )
    try:
        yield Up(process, home / "run" / f"{base + 900}.json", log)
    finally:
        process.kill()
        process.wait()


def test_a_fleet_starts_serves_and_ends(installation: Path) -> None:
    with up(installation, "--decode", "2") as fleet:
        ready = fleet.wait_for(lambda state: state.ready)
        assert ready.supervisor_pid == fleet.process.pid
        assert sorted(pod.name for pod in ready.pods) == [
            "decode-0",
            "decode-1",
            "gateway-0",
            "lookahead",
            "prefill-0",
            "redis",
            "redis-answers",
        ]
        pids = [pod.pid for pod in ready.pods if pod.pid is not None]
        assert len(pids) == 7
        assert all(is_alive(pid) for pid in pids)
        wait_until(lambda: "curl http://127.0.0.1:" in fleet.log())  # printed after the state is written
        assert "prefill-0  | listening" in fleet.log()
        assert "redis" not in fleet.log().replace("redis: ready", "").replace("redis-answers: ready", "")

        (prefill,) = ready.pids("prefill")
        os.kill(prefill, signal.SIGKILL)
        again = fleet.wait_for(lambda state: state.pids("prefill") not in ([], [prefill]))
        assert "prefill-0: was killed by SIGKILL" in fleet.log()
        assert [pod.pid for pod in again.pods if pod.role != "prefill"] == [
            pod.pid for pod in ready.pods if pod.role != "prefill"
        ]

        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(30) == 0
        assert fleet.state() is None
        assert not any(is_alive(pod.pid) for pod in again.pods if pod.pid is not None)
        drained = [line.split()[0] for line in fleet.log().splitlines() if line.endswith("| draining")]
        assert drained[0] == "gateway-0"
        assert set(drained[1:3]) == {"decode-0", "decode-1"}
        assert drained[-1] == "lookahead"
        assert fleet.log().splitlines()[-1].endswith("draining"), "nothing of Redis"
        assert "Ctrl-C again stops at once" in fleet.log()


def test_a_fleet_that_cannot_start_names_the_reason_and_leaves_no_process(installation: Path) -> None:
    with up(installation, "--set", "decode.block-size=128") as fleet:
        assert fleet.process.wait(30) == 1
        assert "error: decode-0 cannot start: it ended with code 2. Its last lines:\n" in fleet.log()
        assert fleet.log().endswith("    the cause\n")
        assert fleet.state() is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--set", "gateway.maxqueue=5"), "--set gateway.maxqueue=5: .* did you mean gateway.max-queue?"),
        (("--set", "decode.max_batc=5"), "--set decode.max_batc=5: .* did you mean decode.max-batch?"),
        (("--set", "gateway.max-queue=some"), "--set gateway.max-queue=some: .* must be an integer"),
        (("--set", "lookahead.min-requests=0"), "--set lookahead.min-requests=0: .* must be at least 1"),
        (("--max-model-len", "9000000"), "--max-model-len 9000000: m has a context of"),
        (("--api-keys-file", "{bad}"), "bad:1: tenent: is unknown; did you mean tenant\\?"),
        (("--set", "gateway.slo-classes-file={bad}"), "bad: .*give 1 to 16 classes like"),
        (("--host", "192.0.2.1", "--insecure", "--no-api-keys"), "--host 192.0.2.1: .*an address of this"),
    ],
)
def test_settings_are_checked_before_any_process_starts(
    installation: Path, tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    bad = tmp_path / "bad"
    bad.write_text(f'{{"key_sha256": "{"0" * 64}", "tenent": "acme"}}\n')
    with up(installation, *(word.format(bad=bad) for word in arguments)) as fleet:
        assert fleet.process.wait(30) in (1, 2)
        (line,) = fleet.log().splitlines()
        assert re.search(f"^error: .*{complaint}", line), line


def kill_decode_pod(fleet: Up, state: FleetRecord) -> None:
    """Kills the decode pod and waits until its successor serves."""
    (pid,) = state.pids("decode")
    target = next(f"127.0.0.1:{pod.ports['grpc']}" for pod in state.pods if pod.role == "decode")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: asyncio.run(health.check(target)) is Health.SERVING, limit_s=30, interval_s=0.1)


def test_a_fleet_restarts_pods_after_the_reader_of_its_log_closed(installation: Path) -> None:
    reader, writer = os.pipe()
    with up(installation, "--decode", "1", stdout=writer) as fleet:
        os.close(writer)
        state = fleet.wait_for(lambda state: state.ready)
        os.close(reader)
        kill_decode_pod(fleet, state)
        fleet.process.terminate()
        assert fleet.process.wait(30) == 0
        assert fleet.state() is None
        assert fleet.log() == "", "nor a traceback"


def test_a_fleet_restarts_pods_when_its_state_cannot_be_written(installation: Path) -> None:
    with up(installation, "--decode", "1") as fleet:
        state = fleet.wait_for(lambda state: state.ready)
        assert fleet.state_path.stat().st_mode & 0o777 == 0o600
        folder = fleet.state_path.parent
        folder.rename(folder.with_name("moved"))
        folder.write_text("no folder")
        kill_decode_pod(fleet, state)
        assert "fleet: the state file cannot be written" in fleet.log()
        fleet.process.terminate()
        assert fleet.process.wait(30) == 0


def test_nothing_outlives_a_killed_fleet_and_no_command_finds_it(
    installation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with up(installation) as fleet:
        pids = [pod.pid for pod in fleet.wait_for(lambda state: state.ready).pods]
        monkeypatch.setenv("TANDEM_HOME", str(fleet.state_path.parents[1]))
        assert list(running()) == [fleet.state_path]
        port = fleet.state().pods[0].ports["grpc"]  # type: ignore[union-attr]
        with pytest.raises(PortInUseError, match=rf"`tandem up` \(process {fleet.process.pid}\) that"):
            check_ports(plan_fleet(FleetOptions(model_dir=Path("m"), grpc_port=port)), "127.0.0.1")
        fleet.process.kill()
        fleet.process.wait()
        assert fleet.state_path.exists() and not running()
        wait_until(lambda: not any(pid is not None and is_alive(pid) for pid in pids))
