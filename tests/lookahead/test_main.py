"""The service as a process: ready at once, ends on SIGTERM, and its death is harmless to pods."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import free_port
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc
from waiting import wait_until

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


def started(port: int, redis_url: str, *flags: str) -> Service:
    """Returns once the service says SERVING. It finds Redis through REDIS_URL."""
    command = [sys.executable, "-P", "-m", "tandem_lookahead.main"]
    flags = ("--min-requests", "1", *flags)  # so that one request's text is shared
    process = subprocess.Popen(
        [*command, "--port", str(port), "--drain-s", "1", *flags],
        env=os.environ | {"REDIS_URL": redis_url},
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
        wait_until(
            lambda: stub.GetLookaheadStatus(pb.GetLookaheadStatusRequest()).redis_connected, interval_s=0.05
        )
        return stub.GetLookaheadStatus(pb.GetLookaheadStatusRequest())


def test_sigterm_ends_it(tmp_path):
    with started(free_port(), f"unix://{tmp_path}/nobody.sock") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


async def test_a_killed_service_comes_back_to_its_pods_with_all_text(fleet):
    port, url = free_port(), (await fleet.redis()).url
    at = f"127.0.0.1:{port}"
    with await asyncio.to_thread(started, port, url) as process:
        sender, _ = await fleet.pod_at(at)
        _, mirror = await fleet.pod_at(at)
        sender.push("before", 0, ANSWER)
        await fleet.until(lambda: mirror.count(ANSWER[:4]) == 1)
        process.kill()
        await fleet.until(lambda: not sender.connected)
        sender.push("during", 0, ANSWER)
    with await asyncio.to_thread(started, port, url):
        await fleet.until(lambda: mirror.count(ANSWER[:4]) == 2)
        _, late = await fleet.pod_at(at)
        await fleet.until(lambda: late.count(ANSWER[:4]) == 2)
        assert sender.dropped == 0


async def test_the_flag_wins_over_redis_url(fleet, tmp_path):
    given = await fleet.redis()
    port = free_port()
    nobody = f"unix://{tmp_path}/nobody.sock"
    with await asyncio.to_thread(started, port, nobody, "--redis-url", given.url):
        await asyncio.to_thread(connected_status, port)


def test_without_a_redis_url_it_says_so_and_ends_with_code_2():
    command = [sys.executable, "-P", "-m", "tandem_lookahead.main"]
    environment = {key: value for key, value in os.environ.items() if "REDIS_URL" not in key}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment)
    assert ended.returncode == 2
    assert "--redis-url" in ended.stdout + ended.stderr


def test_a_bad_setting_is_one_sentence_and_exit_code_2():
    command = [sys.executable, "-P", "-m", "tandem_lookahead.main", "--max-bytes", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert "--max-bytes" in ended.stderr


def test_it_needs_no_torch():
    code = "import sys, tandem_lookahead.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=20).returncode == 0
