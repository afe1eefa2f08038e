"""Pods that start by fork are processes like others."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import is_alive
from tandem_cli.chaos.fork_server import ForkServer
from tandem_cli.supervisor import ProcessSpec, wait_for_exit
from waiting import wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """What it has started ends with it."""
    server = ForkServer()
    yield server
    process = server.spawn(LOOKAHEAD)
    lines_until(process, b"listening")
    server.close()
    wait_until(lambda: not is_alive(process.pid), limit_s=30)
    process.stdout.close()


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
    assert b"error: unrecognized arguments: --no-such-flag" in process.stdout.read()


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
