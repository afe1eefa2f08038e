"""The system under fault: the processes of `tandem up` under its supervisor, on ports that are free now."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from tandem_cli.up import health, redis_server
from tandem_cli.up.options import FleetOptions, PodFlag
from tandem_cli.up.supervisor import Child, Process, ProcessSpec, RestartPolicy, Supervisor, spawn
from tandem_cli.up.up_plan import ProcessPlan, plan_fleet
from tandem_core.speculation import SpeculationMode
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tandem_service.channels import open_channel

from tandem_chaos.child_faults import compile_wall_clock
from tandem_chaos.cuts import Proxy
from tandem_chaos.fork_server import ForkServer
from tandem_chaos.load import Client

#: Longest time for a process to come back; a hung one is killed after five seconds.
BACK_LIMIT_S = 120.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class ChaosSystemOptions:
    model: Path
    #: Data of Redis, and the processes' output.
    folder: Path
    num_prefill: int = 2
    num_decode: int = 3
    num_gateways: int = 2
    #: Start pods by fork.
    forks: bool = True
    #: Put proxies between the processes.
    cuts: bool = False
    #: Clocks can jump; by fork only.
    clocks: bool = False
    pod_flags: tuple[PodFlag, ...] = ()


class ChaosSystem:
    """Use `running_system`."""

    def __init__(
        self,
        supervisor: Supervisor,
        plan: ProcessPlan,
        proxies: Mapping[str, Proxy],
        fork_server: ForkServer | None,
    ) -> None:
        self._fork_server = fork_server
        self._supervisor = supervisor
        #: By the name of the process behind.
        self.proxies = proxies
        self.gateways = {spec.name: f"127.0.0.1:{spec.ports['grpc']}" for spec in plan.stages[0]}

    @property
    def children(self) -> list[Child]:
        return self._supervisor.children

    def slow_down_next_start(self, name: str) -> None:
        """The next process of this name reads its model slowly."""
        assert self._fork_server is not None
        self._fork_server.slow_next.add(name)

    def of_role(self, role: str) -> list[Child]:
        return [child for child in self.children if child.spec.role == role]

    def pids(self) -> dict[str, int]:
        return {child.spec.name: child.pid for child in self.children if child.pid is not None}

    async def until(self, what: str, is_true: Callable[[], Awaitable[bool]]) -> None:
        """Raises TimeoutError."""
        try:
            async with asyncio.timeout(BACK_LIMIT_S):
                while not await is_true():  # noqa: ASYNC110  # events of other processes
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise TimeoutError(f"{what}: not within {BACK_LIMIT_S:g} s") from None

    async def until_serving(self, clients: Sequence[Client], least: Mapping[str, int]) -> None:
        """Waits until each gateway has at least so many healthy pods of each role and every other process
        answers."""

        async def is_serving() -> bool:
            if not all(child.ready.is_set() for child in self.children if child.spec.role not in least):
                return False
            with contextlib.suppress(grpc.aio.AioRpcError):
                views = [(await client.fleet()).pods for client in clients]
                return all(
                    sum(pod.healthy and pod.role == role for pod in pods) >= number
                    # A gateway learns of a death up to a second later.
                    and sum(child.ready.is_set() for child in self.of_role(role)) >= number
                    for pods in views
                    for role, number in least.items()
                )
            return False

        await self.until(f"a fleet with {dict(least)}", is_serving)

    async def usages(self) -> dict[str, common_pb2.ResourceUsage]:
        """Of the pods that answer."""
        usages = {}
        for child in self.of_role("decode") + self.of_role("prefill"):
            if not child.ready.is_set():
                continue
            channel = open_channel(f"127.0.0.1:{child.spec.ports['grpc']}")
            with contextlib.suppress(grpc.aio.AioRpcError):
                usages[child.spec.name] = await _usage(channel, child.spec.role)
            await channel.close(None)
        return usages


async def _usage(channel: grpc.aio.Channel, role: str) -> common_pb2.ResourceUsage:
    if role == "decode":
        decode = decode_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[no-untyped-call]
        request = decode_pb2.GetDecodeStatusRequest()
        answer: decode_pb2.GetDecodeStatusResponse = await decode.GetDecodeStatus(request, timeout=5.0)
        return answer.status.usage
    prefill = prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]
    reply: prefill_pb2.GetPrefillStatusResponse = await prefill.GetPrefillStatus(
        prefill_pb2.GetPrefillStatusRequest(), timeout=5.0
    )
    return reply.status.usage


@asynccontextmanager
async def running_system(options: ChaosSystemOptions) -> AsyncIterator[ChaosSystem]:
    """Raises StartupError. The fleet has been ready once."""
    redis_server.make_folders(options.folder)
    grpc_port, http_port, base_port = _free_ports(options)
    plan = plan_fleet(
        FleetOptions(
            model_dir=options.model,
            dtype="float32",
            num_prefill=options.num_prefill,
            num_decode=options.num_decode,
            num_gateways=options.num_gateways,
            grpc_port=grpc_port,
            http_port=http_port,
            base_port=base_port,
            threads=1,
            speculation=SpeculationMode.GLOBAL,
            redis_dir=options.folder,
            pod_flags=options.pod_flags,
        )
    )
    async with AsyncExitStack() as stack:
        supervisors: list[Supervisor] = []
        proxies: dict[str, Proxy] = {}
        if options.cuts:
            pids = lambda: {c.spec.name: c.pid for s in supervisors for c in s.children if c.pid}  # noqa: E731
            plan, proxies = await _with_proxies(plan, options.folder, pids)
            for proxy in proxies.values():
                stack.push_async_callback(proxy.close)
        start: Callable[[ProcessSpec], Process] = spawn
        server: ForkServer | None = None
        if options.forks:
            wall_clock = compile_wall_clock(options.folder) if options.clocks else None
            server = await asyncio.to_thread(ForkServer, wall_clock)
            stack.push_async_callback(asyncio.to_thread, server.close)
            start = server.spawn
        log = stack.enter_context((options.folder / "fleet.log").open("a", buffering=1))

        def note(spec: ProcessSpec, line: str) -> None:
            log.write(f"{spec.name:<10} | {line}\n")

        supervisor = Supervisor(
            plan.stages,
            probe=health.probe,
            on_line=note,
            on_event=note,
            on_change=lambda: None,
            # A pod that is killed often is to come back as soon as the first time.
            policy=RestartPolicy(first_delay_s=0.1, longest_delay_s=0.1),
            spawn=start,
        )
        supervisors.append(supervisor)
        stack.push_async_callback(supervisor.stop)
        supervisor.start()
        await supervisor.wait_ready()
        yield ChaosSystem(supervisor, plan, proxies, server)


async def _with_proxies(
    plan: ProcessPlan, folder: Path, pids: Callable[[], Mapping[str, int]]
) -> tuple[ProcessPlan, dict[str, Proxy]]:
    """The plan in which each process reaches the others through proxies."""
    proxies: dict[str, Proxy] = {}
    other_name: dict[str, str] = {}
    for spec in plan.processes:
        if spec.role == "gateway":
            continue
        target = spec.health_target.removeprefix("unix://")
        proxy = proxies[spec.name] = Proxy(target, pids)
        cut = folder / f"cut{len(proxies)}"
        cut.mkdir(exist_ok=True)
        await proxy.listen(redis_server.socket_path(cut) if spec.health_target != target else None)
        other_name[target] = proxy.address

    def replaced(argument: str) -> str:
        scheme = "unix://" if argument.startswith("unix://") else ""
        parts = argument.removeprefix(scheme).split(",")
        return scheme + ",".join(other_name.get(part, part) for part in parts)

    stages = tuple(
        tuple(
            spec
            if spec.role == "redis"
            else dataclasses.replace(spec, command=tuple(map(replaced, spec.command)))
            for spec in stage
        )
        for stage in plan.stages
    )
    return ProcessPlan(stages), proxies


def _free_ports(options: ChaosSystemOptions) -> tuple[int, int, int]:
    """Ports of gRPC and HTTP, and the base of the pods' ports, in one free range."""
    pods = range(max(options.num_prefill, options.num_decode))
    offsets = {300, 1300, *(at + i for i in pods for at in (0, 100, 200, 1000, 1100))}
    offsets |= {at + i for i in range(options.num_gateways) for at in (400, 500)}
    # Not every harness that starts now looks at the same ports first.
    for base in range(21_000 + os.getpid() * 37 % 8_000, 30_000, 7):
        if all(_is_free(base + offset) for offset in offsets):
            return base + 400, base + 500, base
    raise RuntimeError("no free range of ports below 31400")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
