"""Measures the lookahead service with faults: two replicas and a real Redis, over gRPC on loopback.

    python benchmarks/lookahead_service.py --out FILE.md [--quick]

    delivery    from `push` in one pod until the text is in the mirrors of eight pods on two replicas
    faults      two pods, one on each replica, push 20 numbered spans per second each while a fault occurs:
                  pause       longest time without news in a mirror whose replica keeps running
                  catch-up    from the end of the fault until every mirror has every span pushed before
                  lost        spans that a mirror still lacks after 30 s

In `faults` one request is enough to share a span (min_requests 1), so that spans can be counted. In
`delivery` two requests must generate it. Pods are real clients and mirrors in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import redis.asyncio as redis
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from reporting import markdown_table, write_page
from tandem_cli.up.redis_server import find_server
from tandem_drafting.lookahead_client import LookaheadClient
from tandem_drafting.mirror import GlobalMirror
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_service import parent_death
from tandem_service.channels import open_channel

VOCABULARY = 49_152
NAMESPACE = pb.Namespace(tenant="bench", model_revision="r", tokenizer_hash="t")
#: What was measured, and its result.
Row = tuple[str, str]


async def until(condition: Callable[[], bool], what: str, limit_s: float = 120.0) -> float:
    """Seconds until the condition holds."""
    begun = time.perf_counter()
    while not condition():
        if time.perf_counter() - begun > limit_s:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        await asyncio.sleep(0.001)
    return time.perf_counter() - begun


class Child:
    """A process that can be killed and started again; it ends with this one."""

    def __init__(self, *command: str) -> None:
        self._command = (*parent_death.command_prefix(signal.SIGKILL), *command)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        quiet = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=quiet, stderr=quiet)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


class Fleet:
    """Redis, two replicas, and any number of pods."""

    def __init__(self, folder: Path, min_requests: int) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        self.redis_port, *self.ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        self.redis = Child(
            *(str(find_server()), "--port", str(self.redis_port), "--bind", "127.0.0.1"),
            *("--dir", str(folder), "--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
        )
        self.replicas = [
            Child(
                *(sys.executable, "-P", "-m", "tandem_lookahead.main", "--port", str(port)),
                *("--redis-url", f"redis://127.0.0.1:{self.redis_port}/0", "--snapshot-interval-s", "2"),
                *("--min-requests", str(min_requests), "--drain-s", "1", "--max-bytes", str(1 << 30)),
            )
            for port in self.ports
        ]
        self.pods: list[tuple[LookaheadClient, GlobalMirror]] = []

    async def serving(self, replica: int) -> None:
        async with open_channel(f"127.0.0.1:{self.ports[replica]}") as channel:
            request = health_pb2.HealthCheckRequest(service="tandem.v1.LookaheadService")
            await health_pb2_grpc.HealthStub(channel).Check(request, timeout=30, wait_for_ready=True)

    def pod(self, replica: int) -> tuple[LookaheadClient, GlobalMirror]:
        mirror = GlobalMirror(vocab_size=VOCABULARY, max_tokens=4_000_000)
        target = f"127.0.0.1:{self.ports[replica]}"
        client = LookaheadClient(target, NAMESPACE, f"pod{len(self.pods)}", mirror)
        client.start()
        self.pods.append((client, mirror))
        return client, mirror

    async def start_pods(self, count: int) -> list[tuple[LookaheadClient, GlobalMirror]]:
        """Pods on both replicas by turns, each with its first snapshot."""
        pods = [self.pod(number % 2) for number in range(count)]
        await until(lambda: all(mirror.position for _, mirror in pods), "the first snapshots")
        return pods


@asynccontextmanager
async def running_fleet(min_requests: int) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), min_requests)
        try:
            for child in (fleet.redis, *fleet.replicas):
                await child.start()
            for replica in range(2):
                await fleet.serving(replica)
            yield fleet
        finally:
            for client, _ in fleet.pods:
                await client.close()
            for child in (*fleet.replicas, fleet.redis):
                await child.kill()


async def delivery(count: int) -> Row:
    async with running_fleet(2) as fleet:
        pods = await fleet.start_pods(8)
        source = random.Random(1)
        times_ms = []
        for number in range(count):
            text = tuple(source.choices(range(VOCABULARY), k=12))
            pods[number % 8][0].push(f"first{number}", 0, text)
            await asyncio.sleep(0.15)
            wanted = [mirror.num_tokens + 12 for _, mirror in pods]
            # At a random time between two flushes.
            await asyncio.sleep(0.05 * source.random())
            pods[(number + 3) % 8][0].push(f"second{number}", 0, text)

            def delivered(wanted: list[int] = wanted) -> bool:
                return all(mirror.num_tokens >= want for (_, mirror), want in zip(pods, wanted, strict=True))

            times_ms.append(1e3 * await until(delivered, "a span in eight mirrors"))
        p50, p99 = statistics.median(times_ms), sorted(times_ms)[int(0.99 * (count - 1))]
        figure = f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {max(times_ms):.0f} ms"
        return f"a span in 8 mirrors, 4 on each of 2 replicas, {count} times", figure


Action = Callable[[Fleet], Awaitable[None]]


async def fault(name: str, inflict: Action, heal: Action, lasting_s: float) -> Row:
    async with running_fleet(1) as fleet:
        pods = await fleet.start_pods(4)
        pushed = [0, 0]
        gaps: list[float] = []

        async def push(pod: int) -> None:
            while True:
                pods[pod][0].push(f"{pod}-{pushed[pod]}", 0, (pod, pushed[pod], 3, 4, 5, 6, 7, 8))
                pushed[pod] += 1
                await asyncio.sleep(0.05)

        async def watch(mirror: GlobalMirror) -> None:
            """Records the times between two changes of a mirror."""
            held, since = mirror.num_tokens, time.perf_counter()
            while True:
                await asyncio.sleep(0.005)
                if mirror.num_tokens != held:
                    now = time.perf_counter()
                    gaps.append(now - since)
                    held, since = mirror.num_tokens, now

        pushes = [asyncio.create_task(push(pod)) for pod in range(2)]
        # The last pod only listens, and its replica is never killed.
        watching = asyncio.create_task(watch(pods[3][1]))
        await asyncio.sleep(2.0)
        gaps.clear()
        await inflict(fleet)
        await asyncio.sleep(lasting_s)
        await heal(fleet)
        for task in pushes:
            task.cancel()
        expected, mirrors = 8 * sum(pushed), [mirror for _, mirror in pods]
        catch_up = "over 30 s"
        with suppress(TimeoutError):
            seconds = await until(lambda: all(m.num_tokens >= expected for m in mirrors), "the spans", 30)
            catch_up = f"{seconds:.2f} s"
        watching.cancel()
        await asyncio.gather(*pushes, watching, return_exceptions=True)
        lost = sum(expected - mirror.num_tokens for mirror in mirrors) // 8
        dropped = sum(client.dropped for client, _ in pods)
        figure = f"pause {max(gaps, default=0):.2f} s; catch-up {catch_up}; lost {lost} of "
        return name, figure + f"{sum(pushed) * len(mirrors)} ({dropped} dropped by pods)"


async def nothing(_: Fleet) -> None:
    pass


async def start_replica(fleet: Fleet) -> None:
    await fleet.replicas[0].start()
    await fleet.serving(0)


async def signal_redis(fleet: Fleet, number: signal.Signals) -> None:
    fleet.redis.send(number)


async def flush_redis(fleet: Fleet) -> None:
    async with redis.Redis(port=fleet.redis_port) as client:
        await client.flushall()


#: Name, how the fault begins and ends, seconds between.
FAULTS: tuple[tuple[str, Action, Action, float], ...] = (
    ("no fault", nothing, nothing, 3.0),
    ("kill -9 of a replica, back after 3 s", lambda fleet: fleet.replicas[0].kill(), start_replica, 3.0),
    ("kill -9 of Redis, back after 3 s", lambda f: f.redis.kill(), lambda f: f.redis.start(), 3.0),
    (
        "Redis stopped for 5 s (SIGSTOP)",
        lambda fleet: signal_redis(fleet, signal.SIGSTOP),
        lambda fleet: signal_redis(fleet, signal.SIGCONT),
        5.0,
    ),
    ("FLUSHALL", flush_redis, nothing, 3.0),
)


async def measure(quick: bool) -> list[Row]:
    return [await delivery(20 if quick else 200), *[await fault(*each) for each in FAULTS]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that everything works")
    options = parser.parse_args()
    # A terminated benchmark removes its files and lets stopped processes continue.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    rows = asyncio.run(measure(options.quick))
    title = "The lookahead service under load and with faults"
    write_page(options.out, title, markdown_table(["what", "measured"], rows))


if __name__ == "__main__":
    main()
