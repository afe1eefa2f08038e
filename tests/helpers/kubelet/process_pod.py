"""One pod: a process with an address of its own, probed and stopped as the kubelet does it.

start()      startup probe until it succeeds; then readiness and liveness probes; a process that ends, or
             whose liveness probe fails, is started again
delete()     terminating at once; preStop; SIGTERM; SIGKILL when the grace period, which began with the
             deletion, is over
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tandem_cli.up import redis_server
from tandem_service import parent_death

from kubelet.manifests import Probe, Template
from kubelet.service_proxy import pipe


def _expanded(text: str, values: Mapping[str, str]) -> str:
    """With the value of NAME for $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], text)


class ProcessPod:
    def __init__(
        self,
        name: str,
        workload: str,
        node: str,
        zone: str,
        address: str,
        template: Template,
        *,
        hosts: Mapping[str, str],
        paths: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, str]],
        environment: Mapping[str, str],
        bin_folder: Path,
        folder: Path,
        on_change: Callable[[], None],
    ) -> None:
        """`hosts` are addresses of names in variables, `paths` folders of this machine by mount path."""
        self.name, self.workload, self.node, self.zone = name, workload, node, zone
        self.address, self.template = address, template
        self._environment, self._bin_folder, self._folder = environment, bin_folder, folder
        self._hosts = hosts
        self._paths = {**paths, **{mount: str(self._mounted(mount)) for mount, _ in template.secrets}}
        self.write_secrets(secrets)
        self._on_change = on_change
        self.is_ready = False
        self.is_terminating = False
        self.is_gone = False
        self.num_restarts = 0
        self.was_killed = False
        self.deleted_at = 0.0
        self.gone_at = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._tls_end: asyncio.Server | None = None
        self._running: asyncio.Task[None] | None = None
        self._deleting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name=self.name)

    def write_secrets(self, secrets: Mapping[str, Mapping[str, str]]) -> None:
        """The files of the mounted ones; each is replaced as a whole."""
        for mount, name in self.template.secrets:
            folder = self._mounted(mount)
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in secrets[name].items():
                (folder / f".{file}").write_text(text)
                (folder / f".{file}").replace(folder / file)

    def _mounted(self, mount: str) -> Path:
        return self._folder / f"{self.name}-files" / mount.strip("/")

    def delete(self) -> None:
        """Does nothing when called again."""
        if self._deleting is None:
            self.is_terminating, self.deleted_at = True, time.monotonic()
            self._deleting = asyncio.create_task(self._stop())
            self._on_change()

    async def kill(self) -> None:
        """Without any grace, for the end of a test."""
        for task in (self._running, self._deleting):
            if task is not None:
                task.cancel()
        self._close_tls_end()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _close_tls_end(self) -> None:
        if self._tls_end is not None:
            self._tls_end.close()

    def log(self) -> str:
        return (self._folder / f"{self.name}.log").read_text(errors="replace")

    async def _run(self) -> None:
        while True:
            await self._start_process()
            assert self._process is not None
            probing = asyncio.create_task(self._probe())
            await self._process.wait()
            probing.cancel()
            self._set_ready(False)
            if self.is_terminating:
                return
            self.num_restarts += 1
            await asyncio.sleep(min(10.0, 0.5 * 2**self.num_restarts))

    async def _start_process(self) -> None:
        values = {name: self._local(value) for name, value in self.template.environment}
        # A value may name a variable, whose value names none.
        values = {name: _expanded(value, values) for name, value in values.items()}
        program, *arguments = (_expanded(self._local(part), values) for part in self.template.command)
        if program == "valkey-server":
            command = await self._redis(arguments)
        else:
            command = [str(self._bin_folder / program), *arguments]
            values["TANDEM_HOST"] = self.address  # the pod's own network
        base = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *parent_death.command_prefix(signal.SIGKILL),
                *command,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=base | dict(self._environment) | values,
            )

    async def _redis(self, arguments: list[str]) -> list[str]:
        """Its command line. The server of a wheel has no TLS, so that is ended before it."""
        data = self._folder / f"{self.name}-data"
        data.mkdir(exist_ok=True)
        arguments[arguments.index("/data")] = str(data)
        command = [str(redis_server.find_server()), *arguments, "--bind", self.address]
        if "--tls-port" in command:
            first, last = command.index("--tls-port"), command.index("--tls-auth-clients") + 2
            given = dict(zip(command[first:last:2], command[first + 1 : last : 2], strict=True))
            socket = str(redis_server.socket_path(data))
            command[first:last] = ["--unixsocket", socket]
            if self._tls_end is None:
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.load_cert_chain(given["--tls-cert-file"], given["--tls-key-file"])
                self._tls_end = await asyncio.start_server(
                    lambda reader, writer: pipe(reader, writer, asyncio.open_unix_connection(socket)),
                    self.address,
                    int(given["--tls-port"]),
                    ssl=context,
                )
        return command

    def _local(self, value: str) -> str:
        value = {"<status.podIP>": self.address, "<metadata.name>": self.name}.get(value, value)
        for mounted, folder in self._paths.items():
            value = value.replace(mounted, folder)
        for name, address in self._hosts.items():
            value = re.sub(rf"(?<!k8s:)(^|@|//|,){re.escape(name)}:", rf"\g<1>{address}:", value)
        return value

    async def _probe(self) -> None:
        for _ in range(self.template.startup.failure_threshold):
            await asyncio.sleep(self.template.startup.period_s)
            if await self._succeeds(self.template.startup):
                break
        else:
            self._restart()
            return
        # Succeeds at once, then in its period; it goes on while the pod terminates.
        await asyncio.gather(
            self._follow(self.template.readiness, self._set_ready),
            self._follow(self.template.liveness, lambda is_live: None if is_live else self._restart()),
        )

    async def _follow(self, probe: Probe, tell: Callable[[bool], None]) -> None:
        num_failures = 0
        while True:
            if await self._succeeds(probe):
                num_failures = 0
                tell(True)
            else:
                num_failures += 1
                if num_failures == probe.failure_threshold:
                    tell(False)
            await asyncio.sleep(probe.period_s)

    async def _succeeds(self, probe: Probe) -> bool:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(probe.timeout_s):
                reader, writer = await asyncio.open_connection(self.address, probe.port)
                try:
                    if not probe.path:
                        return True
                    writer.write(f"GET {probe.path} HTTP/1.0\r\nHost: {self.address}\r\n\r\n".encode())
                    return (await reader.readline()).split(b" ")[1:2] == [b"200"]
                finally:
                    writer.close()
        return False

    def _set_ready(self, is_ready: bool) -> None:
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._on_change()

    def _restart(self) -> None:
        if self._process is not None and not self.is_terminating and self._process.returncode is None:
            print(f"{self.name}: probes failed, killed", file=sys.stderr)
            self._process.kill()

    async def _stop(self) -> None:
        await asyncio.sleep(self.template.pre_stop_s)
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(self.deleted_at + self.template.grace_s - time.monotonic()):
                    await self._process.wait()
            except TimeoutError:
                self.was_killed = True
                self._process.kill()
                await self._process.wait()
        if self._running is not None:
            self._running.cancel()
        self._close_tls_end()
        self.is_ready, self.is_gone, self.gone_at = False, True, time.monotonic()
        self._on_change()
