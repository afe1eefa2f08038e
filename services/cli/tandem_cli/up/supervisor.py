"""Runs the child processes of `tandem up` and restarts those that die.

    start()       spawns all processes, each watched by its own task
    wait_ready()  returns when all processes have served once
    silence       a process that does not answer its probe for `hung_after_s` is killed
    a death       is logged, and the process is restarted after a backoff (0.2 s doubling to 5 s; 0.2 s again
                  after a life of 30 s). A process that cannot be started, watched or read for lack of
                  memory or descriptors counts as dead. If it keeps dying before it was ready, or refuses
                  its settings (exit code 2), `failed` resolves
    stop()        SIGTERM stage by stage; SIGKILL for processes that do not end within `grace_s`

Each child has its own session, so Ctrl-C in the terminal reaches only the supervisor. If the supervisor dies,
even by SIGKILL, the kernel ends the children (`parent_death`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem_service import parent_death

#: Interval between probes of a process that is not ready or does not answer, and of a healthy one.
_PROBE_INTERVAL_S, _WATCH_INTERVAL_S = 0.1, 1.0

#: A line that a process prints is cut after this many bytes.
_MAX_LINE = 1 << 16

#: Exit code of a pod that refuses its settings; it is not restarted.
EXIT_BAD_SETTINGS = 2

#: Time until the processes of a stage are killed; they drain for 10 s by default.
GRACE_S = 12.0

#: Limits how long OpenMP threads spin after an operation: idle pods would occupy the cores of busy ones.
#: Measured time of a step: 53 ms (50-55 ms with the default, 70 ms without spinning).
POD_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000"}


@dataclass(frozen=True)
class ProcessSpec:
    """One child process."""

    role: str
    name: str
    command: tuple[str, ...]
    #: Port by purpose ("grpc", "http", "kv", "metrics").
    ports: Mapping[str, int]
    #: host:port of its grpc.health.v1, the URL of a gateway's metrics port, or that of Redis' unix socket.
    health_target: str


@dataclass(frozen=True)
class RestartPolicy:
    """Delays between a death and the next start, and limits of silence and of deaths before readiness."""

    first_delay_s: float = 0.2
    longest_delay_s: float = 5.0
    #: A death after this lifetime resets the backoff.
    forgiven_after_s: float = 30.0
    max_deaths_before_ready: int = 3
    #: Silence after which a ready process counts as hung.
    hung_after_s: float = 5.0
    #: Time after which a process that is not ready counts as hung; a large model takes minutes to load.
    start_limit_s: float = 1800.0

    def delay_s(self, deaths_in_a_row: int) -> float:
        """Wait before the start that follows the n-th death in a row, n >= 1."""
        return float(min(self.longest_delay_s, self.first_delay_s * 2 ** (deaths_in_a_row - 1)))


class Health(enum.Enum):
    """The result of a probe."""

    SERVING = "serving"
    #: The process starts or drains.
    NOT_SERVING = "not serving"
    SILENT = "silent"


Process = subprocess.Popen[bytes]


def spawn(spec: ProcessSpec) -> Process:
    """Starts the process in its own session."""
    return subprocess.Popen(
        [*parent_death.command_prefix(signal.SIGKILL), *spec.command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        umask=0o077,  # their files may hold callers' texts
        # Prints a traceback if native code crashes.
        env={**POD_ENVIRONMENT, **os.environ, "PYTHONFAULTHANDLER": "1"},
    )


class StartupError(Exception):
    """A process does not start; the message contains its last lines."""


class Child:
    """State of one process; only its supervisor changes it."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.process: Process | None = None
        self.ready = asyncio.Event()
        self.was_ever_ready = False
        self.last_lines: deque[str] = deque(maxlen=12)

    @property
    def pid(self) -> int | None:
        """Pid while the process runs."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None


class Supervisor:
    """Runs `stages` of processes; later stages are stopped later. Belongs to one event loop.

    `on_line(spec, line)` gets each line that a process prints, `on_event(spec, message)` each event of it;
    `on_change()` is called when a pid changes. They must not raise.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[ProcessSpec]],
        *,
        probe: Callable[[ProcessSpec], Awaitable[Health]],
        on_line: Callable[[ProcessSpec, str], None],
        on_event: Callable[[ProcessSpec, str], None],
        on_change: Callable[[], None],
        policy: RestartPolicy | None = None,
        grace_s: float = GRACE_S,
        spawn: Callable[[ProcessSpec], Process] = spawn,
    ) -> None:
        self._stages = [[Child(spec) for spec in stage] for stage in stages]
        self._probe = probe
        self._on_line = on_line
        self._on_event = on_event
        self._on_change = on_change
        self._policy = policy or RestartPolicy()
        self._grace_s = grace_s
        self._spawn = spawn
        self._stopping = asyncio.Event()
        self._kill_now = asyncio.Event()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        #: Resolves with StartupError when a process does not start.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    def start(self) -> None:
        """Spawns every process and watches it."""
        for child in self.children:
            keeper = self._keepers[child.spec.name] = asyncio.create_task(self._keep(child))
            keeper.add_done_callback(functools.partial(self._keeper_ended, child))

    def _keeper_ended(self, child: Child, keeper: asyncio.Task[None]) -> None:
        """Ends the fleet if the task that watches a process failed."""
        if not keeper.cancelled() and keeper.exception() is not None and not self.failed.done():
            error = StartupError(f"the supervisor of {child.spec.name} failed: {keeper.exception()!r}")
            self.failed.set_exception(error)

    async def wait_ready(self) -> None:
        """Waits until each probe has succeeded; raises StartupError if a process does not start."""
        everyone = asyncio.create_task(self._everyone_ready())
        try:
            await asyncio.wait([everyone, self.failed], return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                self.failed.result()
        finally:
            everyone.cancel()

    async def _everyone_ready(self) -> None:
        for child in self.children:
            await child.ready.wait()

    def stop_at_once(self) -> None:
        """Ends the grace period of a running `stop`."""
        self._kill_now.set()

    async def stop(self) -> None:
        """Ends all processes and their sessions; returns when they have ended."""
        self._stopping.set()
        for stage in self._stages:
            for child in stage:
                if child.pid is not None:
                    child.process.terminate()  # type: ignore[union-attr]  # a pid has a process
            keepers = [self._keepers[child.spec.name] for child in stage if child.spec.name in self._keepers]
            if keepers:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended_or_killed(keepers), self._grace_s)
                for child in stage:
                    if child.pid is not None:
                        is_late = not self._kill_now.is_set()
                        self._on_event(child.spec, "did not end in time: killed" if is_late else "killed")
                        child.process.kill()  # type: ignore[union-attr]
                await asyncio.wait(keepers)
        if not self.failed.done():
            self.failed.cancel()

    async def _ended_or_killed(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """Waits until all have ended, or `stop_at_once` is called."""
        killed = asyncio.create_task(self._kill_now.wait())
        gone = asyncio.create_task(_finished(keepers))
        try:
            await asyncio.wait([killed, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            killed.cancel()
            gone.cancel()

    async def _keep(self, child: Child) -> None:
        """Starts the process, and restarts it after each death, until `stop` or failure."""
        deaths_in_a_row = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                code = await self._run_once(child)
                how = describe_exit(code)
            except OSError as error:
                code, how = -1, f"cannot be run: {error}"
            if self._stopping.is_set():
                return
            lived_s = time.monotonic() - started
            deaths_in_a_row = 1 if lived_s >= self._policy.forgiven_after_s else deaths_in_a_row + 1
            if not child.was_ever_ready and (
                code == EXIT_BAD_SETTINGS or deaths_in_a_row >= self._policy.max_deaths_before_ready
            ):
                self._fail(child, how)
                return
            delay_s = self._policy.delay_s(deaths_in_a_row)
            self._on_event(child.spec, f"{how} after {lived_s:.1f} s; starting again in {delay_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _run_once(self, child: Child) -> int:
        """Runs the process once; returns its exit code, negative for a signal. Raises OSError."""
        spec = child.spec
        process = child.process = self._spawn(spec)
        self._on_change()
        reader = asyncio.create_task(self._pump_lines(child, process))
        prober = asyncio.create_task(self._watch_health(child, process))
        for task in (reader, prober):
            task.add_done_callback(functools.partial(self._watcher_ended, child, process))
        try:
            return await wait_for_exit(process)
        finally:
            prober.cancel()
            child.ready.clear()
            # Ends remaining processes of the session. This also closes the pipe.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            await asyncio.wait({reader}, timeout=0.5)
            reader.cancel()
            self._on_change()

    def _watcher_ended(self, child: Child, process: Process, task: asyncio.Task[None]) -> None:
        """A process whose output or health cannot be read is started again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_event(child.spec, f"cannot be watched: {error!r}: killed")
            process.kill()

    async def _watch_health(self, child: Child, process: Process) -> None:
        """Sets `ready`, and later kills the process if it hangs."""
        started = time.monotonic()
        while await self._probe(child.spec) is not Health.SERVING:
            if time.monotonic() - started > self._policy.start_limit_s:
                self._on_event(child.spec, f"not ready after {self._policy.start_limit_s:.0f} s: killed")
                process.kill()
                return
            await asyncio.sleep(_PROBE_INTERVAL_S)
        child.ready.set()
        child.was_ever_ready = True
        answered = time.monotonic()
        self._on_event(child.spec, f"ready after {answered - started:.1f} s")
        while (
            silent_s := time.monotonic() - answered
        ) < self._policy.hung_after_s or self._stopping.is_set():
            await asyncio.sleep(_PROBE_INTERVAL_S if silent_s > 1.0 else _WATCH_INTERVAL_S)
            if await self._probe(child.spec) is not Health.SILENT:
                answered = time.monotonic()
        self._on_event(child.spec, f"has not answered for {silent_s:.0f} s: killed")
        process.kill()

    async def _pump_lines(self, child: Child, process: Process) -> None:
        assert process.stdout is not None
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), process.stdout
        )
        try:
            rest = b""
            while chunk := await stream.read(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _MAX_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._take_line(child, line[:_MAX_LINE])
            if rest:
                self._take_line(child, rest)
        finally:
            transport.close()

    def _take_line(self, child: Child, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        child.last_lines.append(text)
        self._on_line(child.spec, text)

    def _fail(self, child: Child, how: str) -> None:
        if not self.failed.done():
            tail = "\n".join(f"    {line}" for line in child.last_lines)
            self.failed.set_exception(
                StartupError(f"{child.spec.name} cannot start: it {how}. Its last lines:\n{tail}")
            )


async def _finished(tasks: Sequence[asyncio.Task[None]]) -> bool:
    await asyncio.wait(tasks)
    return True


async def wait_for_exit(process: Process) -> int:
    """Exit code of the process, negative for a signal. Does not wait for its pipes to close."""
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


def describe_exit(code: int) -> str:
    """ "ended with code 3", "was killed by SIGKILL"."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
