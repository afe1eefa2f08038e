"""Pods that start by fork are processes like others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import free_port, is_alive
from tandem_chaos.child_faults import BACKWARD, FORWARD, compile_wall_clock
from tandem_chaos.fork_server import ForkServer
from tandem_cli.up import health
from tandem_cli.up.supervisor import Health, ProcessSpec, wait_for_exit
from waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """What it has started ends with it."""
    server = ForkServer(compile_wall_clock(tmp_path_factory.mktemp("library")))
    yield server
    process = server.spawn(LOOKAHEAD)
    lines_until(process, b"listening")
    server.close()
    wait_until(lambda: not is_alive(process.pid), limit_s=30)
    process.stdout.close()


#: Ten tensors or more, 0.2 s each.
SLOW_START_S = 2.0


def spec(name: str, *flags: str) -> ProcessSpec:
    script = str(Path(sys.executable).with_name(f"tandem-{name}"))
    return ProcessSpec(name, name, (script, *flags), ports={}, health_target="127.0.0.1:1")


LOOKAHEAD = spec("lookahead", "--port", "0", "--redis-url", "unix:///nowhere", "--pod-id", "forked")


def lines_until(process, word: bytes) -> bytes:
    text = b""
    while word not in text:
        text += process.stdout.read(1 << 16)
    return text


async def test_its_exit_code_is_known_and_its_output_is_read(server: ForkServer) -> None:
    process = server.spawn(spec("gateway", "--no-such-flag"))
    assert await wait_for_exit(process) == 2
    assert b"error: --no-such-flag is unknown; --help lists the flags" in process.stdout.read()


async def test_signals_reach_it(server: ForkServer) -> None:
    process = server.spawn(LOOKAHEAD)
    lines_until(process, b"listening")
    process.kill()
    async with asyncio.timeout(30):
        assert await wait_for_exit(process) == -signal.SIGKILL
    process.stdout.close()


def test_other_programs_start_as_usual(server: ForkServer) -> None:
    process = server.spawn(
        ProcessSpec("redis", "redis", (sys.executable, "-c", "print('here')"), ports={}, health_target="")
    )
    assert process.stdout.read() == b"here\n"
    assert process.wait() == 0


async def test_its_wall_clock_jumps_and_jumps_back(server: ForkServer) -> None:
    process = server.spawn(LOOKAHEAD)
    lines_until(process, b"listening")
    for number, hours in ((FORWARD, 5), (BACKWARD, 0), (BACKWARD, -5)):
        expected = time.time() + 3600 * hours
        os.kill(process.pid, number)
        said = lines_until(process, b"has jumped to ")
        assert int(said.split()[-1]) == pytest.approx(expected, abs=600)
    process.kill()
    await wait_for_exit(process)
    process.stdout.close()


async def test_a_pod_with_a_slow_disk_does_not_serve_until_its_model_is_loaded(
    server: ForkServer, tiny_model: Path
) -> None:
    port = free_port()
    server.slow_next.add("prefill")
    started = time.monotonic()
    process = server.spawn(
        spec("prefill", "--model", str(tiny_model), "--port", str(port), "--num-blocks", "16")
    )
    seen = set()
    while (state := await health.check(f"127.0.0.1:{port}")) is not Health.SERVING:
        assert process.returncode is None
        seen.add(state)
        await asyncio.sleep(0.2)
    assert seen == {Health.SILENT}
    assert time.monotonic() - started > SLOW_START_S
    assert "prefill" not in server.slow_next, "once"
    process.kill()
    await wait_for_exit(process)
    process.stdout.close()
