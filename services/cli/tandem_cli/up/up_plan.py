"""Plans the processes of `tandem up`, their flags and their ports; starts nothing.

gateway i  gRPC 20051 + i, HTTP 8000 + i         redis, redis-answers  a unix socket, no port
prefill i  base + i         decode j     base + 100 + j
lookahead  base + 300       decode j's KV ingress  base + 200 + j       metrics  port + 1000
"""

from __future__ import annotations

import errno
import importlib
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem_core.usable_cpus import usable_cpus
from tandem_service.tls import PemFiles, Role

from tandem_cli.up import redis_server
from tandem_cli.up.options import ROLES, FleetOptions, OptionError
from tandem_cli.up.supervisor import ProcessSpec

_METRICS_OFFSET = 1000


class PortInUseError(Exception):
    """A port is taken; the message names it and the flag that changes it."""


@dataclass(frozen=True)
class ProcessPlan:
    """The processes in the order in which they are stopped: callers before callees."""

    stages: tuple[tuple[ProcessSpec, ...], ...]

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        return tuple(spec for stage in self.stages for spec in stage)


def plan_fleet(options: FleetOptions) -> ProcessPlan:
    """Plans gateways, decode pods and prefill pods; the lookahead service if drafts use the text of other
    requests; a Redis for that service, and one for the gateways' answers. Raises RedisNotFoundError."""
    return _Planner(options).plan()


#: Decode pods have priority over prefill pods on shared cores. Measured on two cores: TPOT of a short text
#: during the prefill of 3,840 tokens, and TTFT of that prefill: nice 0: 56 ms, 8 s; nice 3: 18 ms, 11 s;
#: nice 6: 10 ms, 11 s. TPOT without prefill: 7 ms.
_PREFILL_NICE = 6
#: Gateways have priority over pods on shared cores, where the machine allows it. Measured on two cores with
#: eight running answers, p99 of a refusal in the gateway: nice 0: 6.0 ms; nice -5: 4.5 ms; nice -10: 4.7 ms.
_GATEWAY_NICE = -5
#: Decode pods compute prompts with fewer uncached tokens themselves: on shared cores a prefill pod of lower
#: priority takes ten times as long for them, which predictions do not include
#: (docs/decisions/priorities.md). Longer prompts would delay all running answers by a second.
_LOCAL_PREFILL_TOKENS = 1_536


def _redis(name: str, folder: Path, *, is_persistent: bool) -> ProcessSpec:
    url = f"unix://{redis_server.socket_path(folder)}"
    command = redis_server.command(folder, is_persistent=is_persistent)
    return ProcessSpec(name, name, command, ports={}, health_target=url)


def _redis_flags(servers: Sequence[ProcessSpec]) -> list[str]:
    """A server of others is named by REDIS_URL, which the processes inherit: everyone can read flags, and the
    URL may have a password."""
    return [flag for server in servers for flag in ("--redis-url", server.health_target)]


class _Planner:
    def __init__(self, options: FleetOptions) -> None:
        self._options = options

    def plan(self) -> ProcessPlan:
        options = self._options
        prefill = tuple(self._prefill(index) for index in range(options.num_prefill))
        shares_text = options.speculation.uses_shared_text
        redis: tuple[ProcessSpec, ...] = ()
        if not options.redis_url and (shares_text or options.num_gateways > 1):
            answers_dir = redis_server.answers_dir(options.redis_dir)
            redis = (_redis("redis-answers", answers_dir, is_persistent=False),)
            if shares_text:
                redis += (_redis("redis", options.redis_dir, is_persistent=True),)
        lookahead = (self._lookahead(redis),) if shares_text else ()
        decode = tuple(self._decode(index, lookahead) for index in range(options.num_decode))
        redis_flags = _redis_flags(redis[:1])
        gateways = tuple(self._gateway(i, prefill, decode, redis_flags) for i in range(options.num_gateways))
        return ProcessPlan(tuple(stage for stage in (gateways, decode, prefill, lookahead, redis) if stage))

    def _prefill(self, index: int) -> ProcessSpec:
        port = self._options.base_port + index
        flags = [*self._model_flags(), *self._threads(self._options.num_prefill)]
        flags += ["--nice", str(_PREFILL_NICE)]
        return self._pod("prefill", f"prefill-{index}", {"grpc": port}, flags)

    def _decode(self, index: int, lookahead: Sequence[ProcessSpec]) -> ProcessSpec:
        base = self._options.base_port
        ports = {"grpc": base + 100 + index, "kv": base + 200 + index}
        flags = [
            *self._model_flags(),
            *self._threads(self._options.num_decode),
            *("--kv-host", self._options.host, "--kv-port", str(ports["kv"])),
            *("--speculation", self._options.speculation),
            *("--local-prefill-tokens", str(_LOCAL_PREFILL_TOKENS)),
        ]
        for service in lookahead:
            flags += ["--lookahead", service.health_target]
        return self._pod("decode", f"decode-{index}", ports, flags)

    def _lookahead(self, redis: Sequence[ProcessSpec]) -> ProcessSpec:
        flags = _redis_flags(redis[1:])
        return self._pod("lookahead", "lookahead", {"grpc": self._options.base_port + 300}, flags)

    def _gateway(
        self,
        index: int,
        prefill: Sequence[ProcessSpec],
        decode: Sequence[ProcessSpec],
        redis_flags: Sequence[str],
    ) -> ProcessSpec:
        options = self._options
        ports = {"grpc": options.grpc_port + index, "http": options.http_port + index}
        flags = ["--grpc-port", str(ports["grpc"]), "--http-port", str(ports["http"])]
        flags += redis_flags
        flags += ["--model", str(options.model_dir), "--decode", _targets(decode)]
        if prefill:
            flags += ["--prefill", _targets(prefill)]
        if options.max_model_len:
            flags += ["--max-model-len", str(options.max_model_len)]
        flags += ["--generation-config", options.generation_config]
        if options.chat_template is not None:
            flags += ["--chat-template", str(options.chat_template)]
        if options.api_keys_file is not None:
            flags += ["--api-keys-file", str(options.api_keys_file)]
        if options.no_api_keys:
            flags += ["--no-api-keys"]
        # Callers can saturate the public ports; the supervisor must not treat that as a hang.
        ports["metrics"] = options.base_port + 400 + index + _METRICS_OFFSET
        flags += ["--metrics-port", str(ports["metrics"]), "--nice", str(_GATEWAY_NICE)]
        spec = self._process("gateway", f"gateway-{index}", ports, flags)
        return replace(spec, health_target=f"http://{reachable(options.host)}:{ports['metrics']}")

    def _model_flags(self) -> list[str]:
        options = self._options
        flags = ["--model", str(options.model_dir), "--dtype", options.dtype]
        flags += ["--quantization", options.quantization, "--shares-cores"]
        if options.max_model_len:
            flags += ["--max-model-len", str(options.max_model_len)]
        if options.memory_bytes:
            share = options.memory_bytes // (options.num_prefill + options.num_decode)
            flags += ["--memory-bytes", str(share)]
        return flags

    def _threads(self, num_pods: int) -> list[str]:
        """Pods of a role divide the cores. Otherwise threads that synchronise at every layer of a decode step
        would wait for threads of other pods."""
        threads = self._options.threads
        if threads is None and num_pods > 1:
            threads = max(1, usable_cpus() // num_pods)
        return [] if threads is None else ["--threads", str(threads)]

    def _pod(self, role: str, name: str, ports: dict[str, int], flags: list[str]) -> ProcessSpec:
        ports = {**ports, "metrics": ports["grpc"] + _METRICS_OFFSET}
        own = ["--port", str(ports["grpc"]), "--metrics-port", str(ports["metrics"])]
        return self._process(role, name, ports, [*own, *flags])

    def _process(self, role: str, name: str, ports: dict[str, int], flags: list[str]) -> ProcessSpec:
        options = self._options
        extra = [part for flag in options.pod_flags if flag.role == role for part in flag.arguments()]
        common = ["--host", options.host, "--pod-id", name]
        common += ["--log-format", options.log_format, "--log-level", options.log_level]
        if options.tls_dir is not None:
            files = certificate_files(options.tls_dir, Role(role))
            common += ["--pod-tls-cert", str(files.cert), "--pod-tls-key", str(files.key)]
            common += ["--pod-tls-ca", str(files.ca)]
        if options.insecure:
            common += ["--insecure"]
        return ProcessSpec(
            role=role,
            name=name,
            command=(str(script(f"tandem-{role}")), *common, *flags, *extra),
            ports=ports,
            health_target=f"{reachable(options.host)}:{ports['grpc']}",
        )


def certificate_files(folder: Path, name: str) -> PemFiles:
    """Certificate files of a role, or of a server without a role."""
    role = name if isinstance(name, Role) else None
    return PemFiles(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem", role)


def check_settings(options: FleetOptions, plan: ProcessPlan) -> None:
    """Raises OptionError if a process would refuse its flags, variables or files."""
    from pydantic_settings import SettingsError
    from tandem_gateway.auth import ApiKeys, KeyFileError
    from tandem_gateway.settings import GatewaySettings
    from tandem_service.settings import parse
    from tandem_service.slo_file import SloFileError, load_slo_classes
    from tandem_service.tls import TlsFileError
    from tandem_service.validation import did_you_mean

    for role, spec in {spec.role: spec for spec in plan.processes if spec.role in ROLES}.items():
        given = [flag for flag in options.pod_flags if flag.role == role]
        cls = getattr(importlib.import_module(f"tandem_{role}.settings"), f"{role.title()}Settings")
        known = [name.replace("_", "-") for name in cls.model_fields]
        for flag in given:
            if flag.flag not in known:
                meant = did_you_mean(flag.flag, known).replace("mean ", f"mean {role}.")
                remedy = meant or f"; `tandem-{role} --help` lists its flags"
                raise OptionError(f"--set {flag.text}: {role}.{flag.flag} is unknown{remedy}")
        try:
            settings = parse(cls, spec.command[1:])
            if isinstance(settings, GatewaySettings):
                settings.public_tls()
                ApiKeys.load(settings.api_keys_file, load_slo_classes(settings.slo_classes_file))
        except (SettingsError, KeyFileError, SloFileError, TlsFileError) as error:
            culprits = [flag.text for flag in given if re.match(rf"--{flag.flag}\b", str(error))]
            raise OptionError("".join(f"--set {text}: " for text in culprits[-1:]) + str(error)) from error


def check_ports(plan: ProcessPlan, host: str) -> None:
    """Raises PortInUseError for the first port that cannot be used, OptionError for the host."""
    from tandem_cli.targets import running

    for spec in plan.processes:
        for purpose, port in spec.ports.items():
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # Like servers, allows a port whose old connections are in TIME_WAIT.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError as error:
                    if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                        raise OptionError(
                            f"--host {host}: {error.strerror}; give an address of this machine"
                        ) from None
                    is_own = spec.role == "gateway" and purpose != "metrics"
                    flag = f"--{purpose}-port" if is_own else "--base-port"
                    owners = [one.supervisor_pid for one in running().values() if one.has_port(str(port))]
                    owner = f"`tandem up` (process {owners[0]})" if owners else "process"
                    raise PortInUseError(
                        f"port {port} on {host}, wanted for {spec.name} ({purpose}), cannot be used: "
                        f"{error.strerror}. Stop the {owner} that uses it, or choose another with {flag}."
                    ) from None


def reachable(host: str) -> str:
    """The address under which this machine reaches a server bound to `host`, brackets around IPv6."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _targets(specs: Sequence[ProcessSpec]) -> str:
    return ",".join(spec.health_target for spec in specs)


def script(name: str) -> Path:
    """Console script of this installation, independent of PATH."""
    return Path(sys.executable).parent / name
