"""A real fleet: `tandem up` with its processes on free loopback ports, found through the state file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pod_usage
import psutil
import pytest
from processes import free_port
from tandem_cli.up.state_file import FleetRecord, read_state
from tandem_proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from waiting import wait_until

START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0


@dataclass(frozen=True)
class RunningFleet:
    state_path: Path
    grpc_target: str
    url: str
    log_path: Path

    @property
    def state(self) -> FleetRecord:
        return read_state(self.state_path)

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.grpc_target, options=[("grpc.enable_http_proxy", 0)])

    def gateway(self) -> gateway_pb2_grpc.GatewayServiceStub:
        return gateway_pb2_grpc.GatewayServiceStub(self.channel())

    def pid(self, role: str) -> int:
        (pid,) = self.state.pids(role)
        return pid

    def usage(self) -> dict[str, common_pb2.ResourceUsage]:
        usage = {}
        for pod in self.state.pods:
            if pod.role not in ("decode", "prefill"):
                continue
            channel = grpc.insecure_channel(f"127.0.0.1:{pod.ports['grpc']}")
            if pod.role == "decode":
                stub = decode_pb2_grpc.DecodeServiceStub(channel)
                answer = stub.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest(), timeout=10)
            else:
                stub = prefill_pb2_grpc.PrefillServiceStub(channel)
                answer = stub.GetPrefillStatus(prefill_pb2.GetPrefillStatusRequest(), timeout=10)
            usage[pod.name] = answer.status.usage
            channel.close()
        return usage

    def num_running(self) -> int:
        """Requests that the gateway has begun or queued."""
        view = self.gateway().GetFleetStatus(gateway_pb2.GetFleetStatusRequest(), timeout=10)
        return view.requests_running + view.requests_queued

    def assert_idle(self, within_s: float = 10.0) -> None:
        """Every block, credit and stream is given back, on both roles."""
        held: dict[str, object] = {}

        def is_idle() -> bool:
            held.update({name: pod_usage.held(usage) for name, usage in self.usage().items()})
            held["gateway"] = {"requests": self.num_running()} if self.num_running() else {}
            return not any(held.values())

        try:
            wait_until(is_idle, limit_s=within_s, interval_s=0.1)
        except AssertionError:
            raise AssertionError(f"still held after {within_s} s: {held}") from None


@contextmanager
def running_fleet(model_dir: Path, folder: Path, *flags: str) -> Iterator[RunningFleet]:
    """Starts the fleet, waits until it is ready, and ends it with SIGTERM; nothing may be left."""
    grpc_port, http_port = free_port(), free_port()
    state_path, log_path = folder / "fleet.json", folder / "fleet.log"
    script = Path(sys.executable).with_name("tandem")
    command = [str(script), "up", "--model", str(model_dir), "--dtype", "float32",
               "--grpc-port", str(grpc_port), "--http-port", str(http_port),
               "--base-port", str(_free_base_port()), "--state-file", str(state_path),
               # As on machines of their own, so that prompts of this length go through both pods.
               "--set", "decode.local-prefill-tokens=384", *flags]  # fmt: skip
    environment = os.environ | {"TANDEM_HOME": str(folder / "home")}
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    fleet = RunningFleet(state_path, f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}", log_path)
    try:
        _wait_ready(process, fleet)
        yield fleet
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_LIMIT_S) == 0, _tail(log_path)
        left = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert left == [], f"processes outlived the fleet: {left}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], fleet: RunningFleet) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, f"tandem up ended early:\n{_tail(fleet.log_path)}"
        if not fleet.state_path.exists() or not fleet.state.ready:
            return False
        assert httpx.get(f"{fleet.url}/health", timeout=5).status_code == 200
        # The gateway looks at its pods once a second.
        return all(pod["healthy"] for pod in httpx.get(f"{fleet.url}/fleet", timeout=5).json()["pods"])

    wait_until(is_ready, limit_s=START_LIMIT_S, interval_s=0.1)


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-40:])


def _free_base_port() -> int:
    """A base whose derived ports (up to +1400) are unlikely to be taken; `tandem up` checks them all."""
    return 20_000 + (os.getpid() * 37) % 9_000


@pytest.fixture(scope="session")
def start_fleet() -> Callable[..., AbstractContextManager[RunningFleet]]:
    return running_fleet
