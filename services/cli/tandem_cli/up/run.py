"""`tandem up`: runs the whole system on one machine.

ports are free -> processes start together -> all SERVING -> banner; a process that dies is restarted;
Ctrl-C or SIGTERM: gateway, decode, prefill, lookahead and Redis end in this order
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import time
from pathlib import Path

from tandem_service.tls import PodTls, Role

from tandem_cli.up import health, redis_server
from tandem_cli.up.log_view import LogView
from tandem_cli.up.options import FleetOptions
from tandem_cli.up.state_file import FleetRecord, PodRecord, StateFile
from tandem_cli.up.supervisor import ProcessSpec, StartupError, Supervisor
from tandem_cli.up.up_plan import (
    PortInUseError,
    ProcessPlan,
    certificate_files,
    check_ports,
    plan_fleet,
    reachable,
)

#: Interval of the check whether the pods' certificates need renewal.
RENEWAL_INTERVAL_S = 3600.0


def run_fleet(options: FleetOptions, model_name: str, state_path: Path) -> int:
    """Serves until a signal; returns the exit code. Raises PortInUseError before it starts a process."""
    plan = plan_fleet(options)
    check_ports(plan, options.host)
    for folder in (options.redis_dir, redis_server.answers_dir(options.redis_dir)):
        socket = redis_server.socket_path(folder)
        if not options.redis_url and asyncio.run(redis_server.answers(str(socket))):
            raise PortInUseError(f"another fleet's Redis server uses {folder}; stop that fleet")
    redis_server.make_folders(options.redis_dir)
    if options.tls_dir is not None:
        from tandem_cli.up import certificates

        certificates.prepare(options.tls_dir)
    view = LogView(sys.stdout, options.log_format)
    try:
        return asyncio.run(_Fleet(options, plan, view, StateFile(state_path), model_name).run())
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
        self._stop = asyncio.Event()
        self._supervisor: Supervisor | None = None

    async def run(self) -> int:
        started = time.monotonic()
        folder = self._options.tls_dir
        tls = PodTls(certificate_files(folder, Role.OPERATOR)) if folder is not None else None
        supervisor = self._supervisor = Supervisor(
            self._plan.stages,
            probe=functools.partial(health.probe, tls=tls),
            on_line=lambda spec, line: self._view.line(spec.role, spec.name, line),
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
                self._view.banner(banner(self._options, self._model_name, time.monotonic() - started))
                self._view.event("fleet", f"ready after {time.monotonic() - started:.1f} s")
                await asyncio.wait([stop, supervisor.failed], return_when=asyncio.FIRST_COMPLETED)
                if supervisor.failed.done():
                    supervisor.failed.result()
            return 0
        except StartupError as error:
            with contextlib.suppress(OSError):
                print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
        finally:
            ready.cancel()
            stop.cancel()
            renewing.cancel()
            self._view.event("fleet", "stopping")
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
        self._view.event(spec.name, message)

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


def banner(options: FleetOptions, model_name: str, seconds: float) -> str:
    """Shows the addresses and example commands."""
    host = reachable(options.host)
    grpc_target, http_target = f"{host}:{options.grpc_port}", f"{host}:{options.http_port}"
    if options.serves_tls:
        url = f"https://{http_target}"
        chat = f"tandem chat --target https://{grpc_target} --ca CA.pem"
        curl, python, grpcurl = (
            "curl --cacert CA.pem",
            "SSL_CERT_FILE=CA.pem python",
            "grpcurl -cacert CA.pem",
        )
    else:
        url = f"http://{http_target}"
        chat = "tandem chat" if grpc_target == "127.0.0.1:20051" else f"tandem chat --target {grpc_target}"
        curl, python, grpcurl = "curl", "python", "grpcurl -plaintext"
    key = "none"
    if options.api_keys_file is not None:
        key, curl, chat = "KEY", f"{curl} -H 'Authorization: Bearer KEY'", f"{chat} --api-key KEY"
        grpcurl += " -H 'Authorization: Bearer KEY'"
    pods = f"{options.num_prefill} prefill, {options.num_decode} decode, speculation {options.speculation}"
    return f"""
  Tandem serves {model_name} ({pods}); ready after {seconds:.1f} s
    gRPC  {grpc_target}   tandem.v1.GatewayService
    HTTP  {url}   OpenAI API; also /dashboard, /health, /metrics

  {chat}

  {curl} -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model_name}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'

  {python} -c "
  from openai import OpenAI
  client = OpenAI(base_url='{url}/v1', api_key='{key}')
  print(client.chat.completions.create(model='{model_name}', max_tokens=64,
      messages=[{{'role': 'user', 'content': 'Hello'}}]).choices[0].message.content)"

  {grpcurl} -d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}' \\
    {grpc_target} tandem.v1.GatewayService/Chat

  Ctrl-C stops everything.
"""
