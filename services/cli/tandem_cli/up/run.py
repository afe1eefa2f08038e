"""`tandem up`: runs the whole system on one machine.

ports are free -> processes start together -> all SERVING -> banner; a process that dies is restarted;
Ctrl-C or SIGTERM: gateway, decode, prefill, lookahead and Redis end in this order
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

from tandem_service.tls import PodTls, Role

from tandem_cli.up import health, redis_server
from tandem_cli.up.log_view import LogView
from tandem_cli.up.options import FleetOptions, OptionError
from tandem_cli.up.state_file import FleetRecord, PodRecord, StateFile
from tandem_cli.up.supervisor import GRACE_S, ProcessSpec, StartupError, Supervisor
from tandem_cli.up.up_plan import (
    PortInUseError,
    ProcessPlan,
    certificate_files,
    check_ports,
    plan_fleet,
    reachable,
    script,
)

#: Interval of the check whether the pods' certificates need renewal.
RENEWAL_INTERVAL_S = 3600.0


def run_fleet(options: FleetOptions, model_name: str, state_path: Path) -> None:
    """Serves until a signal. Raises PortInUseError or OptionError before it starts a process, and
    StartupError after the others have ended if one does not start."""
    plan = plan_fleet(options)
    check_ports(plan, options.host)
    for folder in (options.redis_dir, redis_server.answers_dir(options.redis_dir)):
        socket = redis_server.socket_path(folder)
        if not options.redis_url and asyncio.run(redis_server.answers(str(socket))):
            raise PortInUseError(f"another fleet's Redis server uses {folder}; stop that fleet")
    try:
        redis_server.make_folders(options.redis_dir)
    except OSError as error:
        raise OptionError(
            f"the folder of shared text {options.redis_dir} cannot be made ({error.strerror}); set "
            "TANDEM_HOME to another folder for all of Tandem's files"
        ) from error
    if options.tls_dir is not None:
        from tandem_cli.up import certificates

        certificates.prepare(options.tls_dir)
    view = LogView(sys.stdout, options.log_format)
    try:
        asyncio.run(_Fleet(options, plan, view, StateFile(state_path), model_name).run())
    finally:
        view.close()


class _Fleet:
    """Connects the supervisor with the log view, the state file and the signals."""

    def __init__(
        self, options: FleetOptions, plan: ProcessPlan, view: LogView, state: StateFile, model_name: str
    ) -> None:
        self._options = options
        self._plan = plan
        self._view = view
        self._state = state
        self._model_name = model_name
        self._ready = False
        #: After a failed start, the cause must be the last line.
        self._has_failed = False
        self._stop = asyncio.Event()
        self._supervisor: Supervisor | None = None

    async def run(self) -> None:
        started = time.monotonic()
        folder = self._options.tls_dir
        tls = PodTls(certificate_files(folder, Role.OPERATOR)) if folder is not None else None
        supervisor = self._supervisor = Supervisor(
            self._plan.stages,
            probe=functools.partial(health.probe, tls=tls),
            on_line=self._on_line,
            on_event=self._on_event,
            on_change=self._write_state,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        stop = asyncio.create_task(self._told_to_stop())
        ready = asyncio.create_task(supervisor.wait_ready())
        renewing = asyncio.create_task(self._renew_certificates())
        try:
            supervisor.start()
            await asyncio.wait({stop, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                self._ready = True
                self._write_state()
                self._view.event("fleet", f"ready after {time.monotonic() - started:.1f} s")
                self._view.banner(banner(self._options, self._model_name))
                await asyncio.wait([stop, supervisor.failed], return_when=asyncio.FIRST_COMPLETED)
                if supervisor.failed.done():
                    supervisor.failed.result()
        except StartupError:
            self._has_failed = True
            raise
        finally:
            ready.cancel()
            stop.cancel()
            renewing.cancel()
            if not self._has_failed:
                patience = f"waits up to {GRACE_S:.0f} s for running answers; Ctrl-C again stops at once"
                self._view.event("fleet", f"stopping: {patience}")
            await supervisor.stop()
            with contextlib.suppress(OSError):
                self._state.remove()
            with contextlib.suppress(asyncio.CancelledError, StartupError):
                await ready

    async def _renew_certificates(self) -> None:
        folder = self._options.tls_dir
        while folder is not None:
            await asyncio.sleep(RENEWAL_INTERVAL_S)
            from tandem_cli.up import certificates

            try:
                if certificates.renew(folder):
                    self._view.event("fleet", f"renewed the certificates in {folder}")
            except (OSError, ValueError) as error:
                self._view.event("fleet", f"the certificates in {folder} cannot be renewed: {error}")

    async def _told_to_stop(self) -> None:
        await self._stop.wait()

    def _on_signal(self) -> None:
        if self._stop.is_set() and self._supervisor is not None:
            self._supervisor.stop_at_once()
        self._stop.set()

    def _on_event(self, spec: ProcessSpec, message: str) -> None:
        if not self._has_failed:
            self._view.event(spec.name, message)

    def _on_line(self, spec: ProcessSpec, line: str) -> None:
        # Redis' output at start and end is routine; a failed start prints it with the cause.
        is_routine = spec.role.startswith("redis") and (self._stop.is_set() or not self._ready)
        if not (self._has_failed or is_routine):
            self._view.line(spec.role, spec.name, line)

    def _write_state(self) -> None:
        if self._supervisor is None:
            return
        pods = [
            PodRecord(child.spec.role, child.spec.name, child.pid, dict(child.spec.ports))
            for child in self._supervisor.children
        ]
        options = self._options
        own_redis = [spec.health_target for spec in self._plan.processes if spec.role.startswith("redis")]
        record = FleetRecord(
            supervisor_pid=os.getpid(),
            model=self._model_name,
            ready=self._ready,
            pods=tuple(pods),
            host=reachable(options.host),
            redis_url=next(iter(own_redis), options.redis_url),
            tls_dir="" if options.tls_dir is None else str(options.tls_dir),
            serves_tls=options.serves_tls,
        )
        try:
            self._state.write(record)
        except OSError as error:
            # Other commands find old pids until the next change.
            self._view.event("fleet", f"the state file cannot be written: {error}")


def banner(options: FleetOptions, model_name: str) -> str:
    """Addresses, and commands that run as they are printed."""
    host = reachable(options.host)
    grpc_target, http_target = f"{host}:{options.grpc_port}", f"{host}:{options.http_port}"
    program = script("tandem")
    is_in_path = Path(shutil.which("tandem") or "").resolve() == program.resolve()
    chat, curl = ("tandem" if is_in_path else shlex.quote(str(program))) + " chat", "curl"
    if options.grpc_port != FleetOptions.grpc_port or options.serves_tls:
        chat += " --target " + shlex.quote("https://" * options.serves_tls + grpc_target)
    url = f"http{'s' * options.serves_tls}://{http_target}"
    certificate = next((flag.value for flag in options.pod_flags if flag.flag == "tls-cert"), "")
    if options.serves_tls:
        # A certificate signed by an authority needs the authority's file instead.
        authorities = shlex.quote(str(Path(certificate).resolve()))
        chat, curl = f"{chat} --ca {authorities}", f"{curl} --cacert {authorities}"
    export = header = ""
    if options.api_keys_file is not None:
        export = "  export TANDEM_API_KEY=...   # a key of --api-keys-file; `tandem keys new` makes one\n\n"
        header = ' -H "Authorization: Bearer $TANDEM_API_KEY"'
    pods = f"{options.num_prefill} prefill, {options.num_decode} decode, speculation {options.speculation}"
    return f"""
  Tandem serves {model_name} ({pods})
    {url:<24}  OpenAI and Anthropic APIs under /v1; pages /docs and /dashboard
    {grpc_target:<24}  gRPC: tandem.v1.GatewayService

{export}  {chat}

  {curl} {shlex.quote(f"{url}/v1/chat/completions")} \\
    -H 'Content-Type: application/json'{header} \\
    -d '{{"model": "{model_name}", "temperature": 0,
         "messages": [{{"role": "user", "content": "What is 2+2?"}}]}}'

  Ctrl-C stops everything.
"""
