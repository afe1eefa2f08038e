"""The supervisor against real, tiny child processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from processes import is_alive
from prometheus_client import CollectorRegistry
from tandem_cli.up import health
from tandem_cli.up.supervisor import (
    Health,
    Process,
    ProcessSpec,
    RestartPolicy,
    StartupError,
    Supervisor,
    describe_exit,
    spawn,
)
from tandem_service.metrics import MetricsServer
from waiting import pause_async, run_ready_tasks, until, wait_until

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
QUICK = RestartPolicy(first_delay_s=0.02, longest_delay_s=0.1)


def spec(name: str, code: str, *arguments: str) -> ProcessSpec:
    return ProcessSpec(
        role="decode",
        name=name,
        command=(sys.executable, "-I", "-S", "-c", code, *arguments),
        ports={"grpc": 1},
        health_target="127.0.0.1:1",
    )


class Watched:
    """A supervisor and its reports. A process counts as ready once it has printed a line."""

    def __init__(
        self,
        stages: Sequence[Sequence[ProcessSpec]],
        policy: RestartPolicy,
        grace_s: float,
        spawn: Callable[[ProcessSpec], Process] = spawn,
    ) -> None:
        self.lines: list[tuple[str, str]] = []
        self.events: list[tuple[str, str]] = []
        #: Names of the processes that answer no probe.
        self.silent: set[str] = set()
        #: Names of processes whose next probe fails here.
        self.unreadable: set[str] = set()
        self.supervisor = Supervisor(
            stages,
            probe=self._probe,
            on_line=lambda process, line: self.lines.append((process.name, line)),
            on_event=lambda process, message: self.events.append((process.name, message)),
            on_change=lambda: None,
            policy=policy,
            grace_s=grace_s,
            spawn=spawn,
        )

    async def _probe(self, process: ProcessSpec) -> Health:
        if process.name in self.unreadable:
            self.unreadable.remove(process.name)
            raise OSError("no descriptor is left")
        if process.name in self.silent:
            return Health.SILENT
        ready = any(name == process.name for name, _ in self.lines)
        return Health.SERVING if ready else Health.NOT_SERVING

    def pids(self, name: str) -> list[int]:
        """Empty while the process is dead."""
        return [c.pid for c in self.supervisor.children if c.spec.name == name and c.pid is not None]

    def pid(self, name: str) -> int:
        (pid,) = self.pids(name)
        return pid


@asynccontextmanager
async def running(
    *stages: Sequence[ProcessSpec],
    policy: RestartPolicy = QUICK,
    grace_s: float = 5.0,
    spawn: Callable[[ProcessSpec], Process] = spawn,
) -> AsyncIterator[Watched]:
    watched = Watched(stages, policy, grace_s, spawn)
    watched.supervisor.start()
    try:
        yield watched
    finally:
        await watched.supervisor.stop()


async def test_processes_start_together_and_are_ready_when_their_probes_succeed() -> None:
    slow = "import time; time.sleep(0.3); print('up', flush=True); time.sleep(60)"
    started = time.monotonic()
    async with running([spec("a", slow)], [spec("b", slow), spec("c", slow)]) as watched:
        await watched.supervisor.wait_ready()
        assert 0.3 <= time.monotonic() - started < 0.85
        assert {name for name, _ in watched.lines} == {"a", "b", "c"}
        assert all(child.ready.is_set() for child in watched.supervisor.children)


async def test_lines_of_both_output_streams_arrive_and_an_unfinished_last_one() -> None:
    code = "import sys; print('out'); sys.stdout.flush(); sys.stderr.write('err\\nlast'); sys.exit(2)"
    async with running([spec("a", code)]) as watched:
        with pytest.raises(StartupError):
            await watched.supervisor.wait_ready()
        assert watched.lines == [("a", "out"), ("a", "err"), ("a", "last")]


async def test_a_killed_process_is_started_again_under_another_pid() -> None:
    async with running([spec("a", SLEEP)]) as watched:
        await watched.supervisor.wait_ready()
        before = watched.pid("a")
        os.kill(before, signal.SIGKILL)
        await until(lambda: len(watched.lines) == 2)
        assert watched.pid("a") != before
        assert any("was killed by SIGKILL" in message for _, message in watched.events)


async def test_a_process_that_falls_silent_is_killed_and_started_again() -> None:
    policy = RestartPolicy(first_delay_s=0.05, hung_after_s=0.3)
    async with running([spec("a", SLEEP), spec("b", SLEEP)], policy=policy) as watched:
        await watched.supervisor.wait_ready()
        hung, other = watched.pid("a"), watched.pid("b")
        os.kill(hung, signal.SIGSTOP)
        watched.silent.add("a")
        await until(lambda: any("has not answered" in message for _, message in watched.events))
        watched.silent.clear()
        await until(lambda: watched.pids("a") not in ([], [hung]))
        assert watched.pid("b") == other


async def test_a_process_that_drains_for_long_is_left_alone() -> None:
    async with running([spec("a", SLEEP)], policy=RestartPolicy(hung_after_s=0.1)) as watched:
        await watched.supervisor.wait_ready()
        watched.lines.clear()  # it reports that it does not serve
        await pause_async(1.5)
        assert not any("killed" in message for _, message in watched.events)


async def test_a_process_whose_restart_fails_is_started_again() -> None:
    num_starts = 0

    def failing_spawn(process: ProcessSpec) -> Process:
        nonlocal num_starts
        num_starts += 1
        if num_starts in (2, 3, 4, 5):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return spawn(process)

    async with running([spec("d", SLEEP)], spawn=failing_spawn) as watched:
        await watched.supervisor.wait_ready()
        old = watched.pid("d")
        os.kill(old, signal.SIGKILL)
        await until(lambda: watched.pids("d") not in ([], [old]))
        assert num_starts == 6
        assert not watched.supervisor.failed.done()
        assert sum("Resource temporarily unavailable" in text for _, text in watched.events) == 4


async def test_a_process_that_cannot_be_started_at_all_fails_with_the_reason() -> None:
    def failing_spawn(process: ProcessSpec) -> Process:
        raise OSError(12, "Cannot allocate memory")

    async with running([spec("d", SLEEP)], spawn=failing_spawn) as watched:
        with pytest.raises(StartupError, match=r"d cannot start: it cannot be run: .*Cannot allocate memory"):
            await watched.supervisor.wait_ready()


async def test_a_process_that_cannot_be_watched_is_started_again() -> None:
    async with running([spec("d", SLEEP)]) as watched:
        await watched.supervisor.wait_ready()
        old = watched.pid("d")
        watched.unreadable.add("d")
        await until(lambda: watched.pids("d") not in ([], [old]), limit_s=10)
        await watched.supervisor.wait_ready()
        assert any("no descriptor is left" in text for _, text in watched.events)


async def test_a_line_without_end_is_cut() -> None:
    endless = "import sys, time; sys.stdout.write('x' * 300_000); sys.stdout.flush(); time.sleep(60)"
    async with running([spec("d", endless)]) as watched:
        await until(lambda: len(watched.lines) > 1)
        assert {set(line) == {"x"} and len(line) <= 1 << 17 for _, line in watched.lines} == {True}


def test_the_backoff_doubles_up_to_its_limit() -> None:
    policy = RestartPolicy(first_delay_s=0.2, longest_delay_s=5.0)
    assert [policy.delay_s(n) for n in range(1, 8)] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


async def test_a_process_that_was_ready_is_restarted_however_often_it_dies() -> None:
    code = "import time; print('up', flush=True); time.sleep(0.1)"
    async with running([spec("a", code)]) as watched:
        await until(lambda: len(watched.lines) >= 5)
        assert not watched.supervisor.failed.done()


async def test_bad_settings_fail_at_once_with_the_last_lines() -> None:
    code = "import sys; sys.exit(2)"
    complaint = "import sys; print('error: --kv-port is bad', file=sys.stderr); sys.exit(2)"
    for program in (code, complaint):
        async with running([spec("ok", SLEEP)], [spec("bad", program)]) as watched:
            with pytest.raises(StartupError, match="bad cannot start: it ended with code 2") as error:
                await watched.supervisor.wait_ready()
            assert ("--kv-port is bad" in str(error.value)) == (program is complaint)
            assert not any(name == "bad" and "again" in message for name, message in watched.events)


async def test_a_process_that_dies_before_it_is_ready_fails_after_a_few_deaths() -> None:
    async with running([spec("bad", "import sys; sys.exit(1)")]) as watched:
        with pytest.raises(StartupError, match="code 1"):
            await watched.supervisor.wait_ready()
        assert sum("starting again" in message for _, message in watched.events) == 2


async def test_a_command_that_does_not_exist_is_named() -> None:
    missing = ProcessSpec("decode", "bad", ("/nonexistent/tandem-decode",), {"grpc": 1}, "127.0.0.1:1")
    async with running([missing]) as watched:
        await until(lambda: bool(watched.lines))
        assert watched.lines[0] == (
            "bad",
            "cannot start /nonexistent/tandem-decode: No such file or directory",
        )


async def test_stages_end_one_after_another_by_sigterm(tmp_path: Path) -> None:
    log = tmp_path / "ends"
    code = """
import signal, sys, time
def end(*_):
    time.sleep(0.05)
    with open(sys.argv[2], "a") as file:
        file.write(sys.argv[1] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""
    stages = [[spec(name, code, name, str(log))] for name in ("gateway", "decode", "prefill", "redis")]
    async with running(*stages) as watched:
        await watched.supervisor.wait_ready()
    assert log.read_text().split() == ["gateway", "decode", "prefill", "redis"]


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace_period() -> None:
    async with running([spec("a", STUBBORN)], grace_s=0.2) as watched:
        await watched.supervisor.wait_ready()
        pid = watched.pid("a")
        started = time.monotonic()
    assert not is_alive(pid)
    assert 0.2 <= time.monotonic() - started < 3.0
    assert ("a", "did not end in time: killed") in watched.events


async def test_stop_at_once_ends_the_grace_period() -> None:
    async with running([spec("a", STUBBORN)], grace_s=30.0) as watched:
        await watched.supervisor.wait_ready()
        stopping = asyncio.create_task(watched.supervisor.stop())
        await run_ready_tasks()
        watched.supervisor.stop_at_once()
        await asyncio.wait_for(stopping, 3.0)


async def test_other_processes_of_its_session_end_with_a_process() -> None:
    code = (
        "import subprocess, sys, time; "
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True); "
        "time.sleep(60)"
    )
    async with running([spec("a", code)]) as watched:
        await watched.supervisor.wait_ready()
        grandchild = int(watched.lines[0][1])
        os.kill(watched.pid("a"), signal.SIGKILL)
        await until(lambda: not is_alive(grandchild))


async def test_stopping_during_the_backoff_starts_no_process() -> None:
    policy = RestartPolicy(first_delay_s=30.0)
    async with running([spec("a", SLEEP)], policy=policy) as watched:
        await watched.supervisor.wait_ready()
        os.kill(watched.pid("a"), signal.SIGKILL)
        await until(lambda: any("starting again" in message for _, message in watched.events))
        await asyncio.wait_for(watched.supervisor.stop(), 2.0)
    assert len(watched.lines) == 1


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from tandem_cli.up.supervisor import Health, ProcessSpec, Supervisor
async def yes(spec): return Health.SERVING
async def main():
    command = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)")
    specs = [ProcessSpec("decode", n, command, {"grpc": 1}, "127.0.0.1:1") for n in "ab"]
    nothing = lambda *_: None
    supervisor = Supervisor([specs], probe=yes, on_line=nothing, on_event=nothing, on_change=nothing)
    supervisor.start()
    await supervisor.wait_ready()
    print(*(child.pid for child in supervisor.children), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        try:
            assert len(pids) == 2
            assert all(is_alive(pid) for pid in pids)
            process.kill()
            process.wait()
            wait_until(lambda: not any(is_alive(pid) for pid in pids))
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_exits_are_described_in_words() -> None:
    assert describe_exit(3) == "ended with code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"


async def test_a_process_that_does_not_become_ready_is_killed_and_started_again() -> None:
    policy = RestartPolicy(first_delay_s=0.05, start_limit_s=0.5, max_deaths_before_ready=9)
    async with running([spec("a", "import time; time.sleep(60)")], policy=policy) as watched:
        await until(lambda: len(watched.pids("a")) == 1)
        before = watched.pids("a")
        await until(lambda: ("a", "not ready after 0 s: killed") in watched.events)
        await until(lambda: watched.pids("a") not in ([], before))


async def test_a_gateway_is_probed_at_a_port_without_callers() -> None:
    serving = threading.Event()
    server = MetricsServer(
        CollectorRegistry(), "127.0.0.1", 0, is_ready=lambda: True, is_serving=serving.is_set
    )
    gateway = replace(spec("gateway-0", ""), health_target=f"http://127.0.0.1:{server.port}")
    try:
        assert await health.probe(gateway) is Health.NOT_SERVING
        serving.set()
        assert await health.probe(gateway) is Health.SERVING
        server._loop = asyncio.new_event_loop()  # never runs, like a hung process
        assert await health.probe(gateway) is Health.SILENT
        server._loop.close()
    finally:
        await asyncio.to_thread(server.close)
    assert await health.probe(gateway) is Health.SILENT
