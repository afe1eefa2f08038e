"""The lookahead service under load and under fire: two replicas, a real Redis, real gRPC, all on loopback.

    python benchmarks/lookahead_service.py --out benchmarks/results/lookahead-service.md [--quick]

    ingest      spans into one namespace's text, and through gRPC, Redis and back: tokens per second
    visible     from `push` in one pod until the text is in the mirrors of eight, on two replicas
    warm        a new pod, and a restarted service, at a million shared tokens
    faults      a steady stream of numbered spans from two pods, one on each replica, and a fault:
                  pause       the longest time without anything new in a mirror that followed a living replica
                  catch-up    from the fault's end until every mirror has every span pushed before it
                  lost        spans that some mirror does not have even then

Spans are shared at once in `faults` and `warm` (min_requests 1), so that each can be counted; else two
requests must generate a text. Pods are real clients and mirrors, all in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio as redis
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from reporting import describe_command, describe_machine, markdown_table
from slow_door import SlowDoor
from tandem_cli.redis_server import find_server
from tandem_drafting.lookahead_client import LookaheadClient
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_lookahead.corpus import CorpusPolicy, NamespaceCorpus
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_service.channels import open_channel

VOCABULARY = 49_152
NAMESPACE = pb.Namespace(tenant="bench", model_revision="r", tokenizer_hash="t")
LIMIT_S = 60.0


@dataclass(frozen=True)
class Row:
    what: str
    figure: str
    aim: str = ""

    def __post_init__(self) -> None:
        print(f"{self.what}: {self.figure}", file=sys.stderr)


async def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> float:
    """Seconds until the condition holds."""
    begun = time.perf_counter()
    while not condition():
        if time.perf_counter() - begun > limit_s:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        await asyncio.sleep(0.001)
    return time.perf_counter() - begun


class Child:
    """A process that can be killed, stopped and started again."""

    def __init__(self, *command: str) -> None:
        self._command = command
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
    """Redis, two replicas, and as many pods as are asked for."""

    def __init__(self, folder: Path, min_requests: int) -> None:
        self.redis_port, *self.ports = _free_ports(3)
        self.redis = Child(
            *(str(find_server()), "--port", str(self.redis_port), "--bind", "127.0.0.1"),
            *("--dir", str(folder), "--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
        )
        self.door = SlowDoor(self.redis_port)
        self._min_requests = min_requests
        self.replicas: list[Child] = []
        self.pods: list[tuple[LookaheadClient, GlobalMirror]] = []

    async def start(self) -> None:
        await self.redis.start()
        await self.door.start()
        for port in self.ports:
            self.replicas.append(
                Child(
                    *(sys.executable, "-P", "-m", "tandem_lookahead.main", "--port", str(port)),
                    *("--redis-url", f"redis://127.0.0.1:{self.door.port}/0", "--snapshot-interval-s", "2"),
                    *("--min-requests", str(self._min_requests), "--drain-s", "1"),
                    *("--max-bytes", str(1 << 30)),
                )
            )
            await self.replicas[-1].start()
        for port in self.ports:
            await self.serving(port)

    async def serving(self, port: int) -> None:
        channel = open_channel(f"127.0.0.1:{port}")
        request = health_pb2.HealthCheckRequest(service="tandem.v1.LookaheadService")
        await health_pb2_grpc.HealthStub(channel).Check(request, timeout=30, wait_for_ready=True)
        await channel.close()

    async def pod(self, replica: int) -> tuple[LookaheadClient, GlobalMirror]:
        mirror = GlobalMirror(vocab_size=VOCABULARY, max_tokens=4_000_000)
        target = f"127.0.0.1:{self.ports[replica]}"
        client = LookaheadClient(target, NAMESPACE, f"pod{len(self.pods)}", mirror)
        client.start()
        self.pods.append((client, mirror))
        return client, mirror

    async def stop(self) -> None:
        for client, _ in self.pods:
            await client.close()
        for child in self.replicas:
            await child.kill()
        await self.door.stop()
        await self.redis.kill()


@asynccontextmanager
async def fleet(min_requests: int) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory() as folder:
        running = Fleet(Path(folder), min_requests)
        try:
            await running.start()
            yield running
        finally:
            await running.stop()


def answers(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Texts of 300 tokens, 70% of them phrases that others use too."""
    source = random.Random(seed)
    phrases = [[source.randrange(VOCABULARY) for _ in range(source.randrange(5, 40))] for _ in range(5000)]
    texts = []
    for _ in range(count):
        text: list[int] = []
        while len(text) < 300:
            if source.random() < 0.7:
                text += phrases[int(5000 * source.random() ** 3)]
            else:
                text += [source.randrange(VOCABULARY) for _ in range(20)]
        texts.append(tuple(text[:300]))
    return texts


def ingest_alone(num_requests: int) -> list[Row]:
    rows = []
    texts = answers(num_requests)
    for piece in (8, 64):
        text = NamespaceCorpus(CorpusPolicy(max_bytes=1 << 40))
        before = _resident()
        begun = time.perf_counter()
        for number, tokens in enumerate(texts):
            for at in range(0, len(tokens), piece):
                text.add([AcceptedSpan(f"{number:016x}", at, tokens[at : at + piece])], number)
        seconds = time.perf_counter() - begun
        rows.append(
            Row(
                f"text alone, pieces of {piece} tokens",
                f"{text.num_tokens / seconds / 1e3:,.0f} k tokens/s; "
                f"{100 * text.num_shared_tokens / text.num_tokens:.0f}% shared; "
                f"{(_resident() - before) / text.num_tokens:.0f} bytes a token resident",
            )
        )
    return rows


async def ingest_through(num_requests: int) -> list[Row]:
    async with fleet(2) as running:
        client, mirror = await running.pod(0)
        await until(lambda: mirror.position != "", "the first snapshot")
        texts = answers(num_requests)
        reference = NamespaceCorpus(CorpusPolicy(max_bytes=1 << 40))
        for number, tokens in enumerate(texts):
            reference.add([AcceptedSpan(str(number), 0, tokens)], 0)
        begun = time.perf_counter()
        for number, tokens in enumerate(texts):
            client.push(f"r{number}", 0, tokens)
            if number % 200 == 0:
                await asyncio.sleep(0)
        await until(lambda: mirror.num_tokens == reference.num_shared_tokens, "all that is shared")
        seconds = time.perf_counter() - begun
        total = sum(map(len, texts))
        figure = f"{total / seconds / 1e3:,.0f} k tokens/s pushed; {mirror.num_tokens:,} shared"
        return [Row("pod, gRPC, Redis, and back into a mirror, one replica", figure)]


async def visible(count: int) -> list[Row]:
    async with fleet(2) as running:
        pods = [await running.pod(number % 2) for number in range(8)]
        await until(lambda: all(mirror.position for _, mirror in pods), "the first snapshots")
        source = random.Random(1)
        seconds = []
        for number in range(count):
            text = tuple(source.choices(range(VOCABULARY), k=12))
            pods[number % 8][0].push(f"first{number}", 0, text)
            await asyncio.sleep(0.15)
            wanted = [mirror.num_tokens + 12 for _, mirror in pods]
            # Anywhere between two flushes.
            await asyncio.sleep(0.05 * source.random())
            pods[(number + 3) % 8][0].push(f"second{number}", 0, text)
            seconds.append(
                await until(
                    lambda wanted=wanted: all(
                        mirror.num_tokens >= want for (_, mirror), want in zip(pods, wanted, strict=True)
                    ),
                    "a span in eight mirrors",
                )
            )
        seconds.sort()
        p50, p99 = statistics.median(seconds), seconds[int(0.99 * (count - 1))]
        return [
            Row(
                f"a span in 8 mirrors, 4 on each of 2 replicas, {count} times",
                f"p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms, most {1e3 * seconds[-1]:.0f} ms",
                "p99 <= 100 ms",
            )
        ]


async def warm(num_tokens: int) -> list[Row]:
    def is_warm(mirror: GlobalMirror) -> bool:
        """Held and indexed."""
        return mirror.corpus is not None and mirror.corpus.num_tokens >= num_tokens

    async with fleet(1) as running:
        client, mirror = await running.pod(0)
        source = random.Random(2)
        for number in range(num_tokens // 500):
            client.push(f"r{number}", 0, source.choices(range(VOCABULARY), k=500))
            if number % 100 == 0:
                await asyncio.sleep(0.01)
        await until(lambda: mirror.num_tokens == num_tokens, "all tokens", 120)
        rows = []
        for replica in (0, 1):
            _, late = await running.pod(replica)
            seconds = await until(lambda late=late: is_warm(late), "a warm pod")
            what = f"a new pod at {num_tokens:,} shared tokens, replica {replica}"
            rows.append(Row(what, f"{seconds:.1f} s", "10 s"))
        await asyncio.sleep(5.0)  # a snapshot is published
        for replica in running.replicas:
            await replica.kill()
        begun = time.perf_counter()
        await running.replicas[0].start()
        await running.serving(running.ports[0])
        _, late = await running.pod(0)
        await until(lambda: is_warm(late), "a warm pod")
        seconds = time.perf_counter() - begun
        rows.append(
            Row("the same after kill -9 of both replicas, the service's start included", f"{seconds:.1f} s")
        )
        return rows


@dataclass
class Stream:
    """Numbered spans of eight tokens from one pod, 20 a second."""

    pod: int
    client: LookaheadClient
    pushed: int = 0

    async def run(self) -> None:
        while True:
            self.client.push(f"{self.pod}-{self.pushed}", 0, (self.pod, self.pushed, 3, 4, 5, 6, 7, 8))
            self.pushed += 1
            await asyncio.sleep(0.05)


async def watch(mirror: GlobalMirror, gaps: list[float]) -> None:
    """Notes the times between two changes of a mirror."""
    held, since = mirror.num_tokens, time.perf_counter()
    while True:
        await asyncio.sleep(0.005)
        if mirror.num_tokens != held:
            now = time.perf_counter()
            gaps.append(now - since)
            held, since = mirror.num_tokens, now


Fault = Callable[[Fleet], Awaitable[None]]


async def fault(name: str, inflict: Fault, heal: Fault, lasting_s: float) -> Row:
    async with fleet(1) as running:
        pods = [await running.pod(number % 2) for number in range(4)]
        await until(lambda: all(mirror.position for _, mirror in pods), "the first snapshots")
        streams = [Stream(number, pods[number][0]) for number in range(2)]
        gaps: list[float] = []
        tasks = [asyncio.create_task(stream.run()) for stream in streams]
        # The third and fourth pods only listen; the fourth's replica is never the one that is killed.
        tasks.append(asyncio.create_task(watch(pods[3][1], gaps)))
        await asyncio.sleep(2.0)
        gaps.clear()
        await inflict(running)
        await asyncio.sleep(lasting_s)
        await heal(running)
        for task in tasks[:-1]:  # nobody pushes any more
            task.cancel()
        expected = 8 * sum(stream.pushed for stream in streams)
        mirrors = [mirror for _, mirror in pods]
        seconds = LIMIT_S
        with suppress(TimeoutError):
            seconds = await until(
                lambda: all(mirror.num_tokens >= expected for mirror in mirrors), "the last spans", 30
            )
        tasks[-1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lost = sum(expected - mirror.num_tokens for mirror in mirrors) // 8
        dropped = sum(client.dropped for client, _ in pods)
        return Row(
            name,
            f"pause {max(gaps, default=0):.2f} s; catch-up {seconds:.2f} s; lost {lost} of "
            f"{expected // 8 * len(mirrors)} ({dropped} given up by pods)",
            "lost 0",
        )


async def faults() -> list[Row]:
    async def nothing(_: Fleet) -> None:
        pass

    async def kill_replica(running: Fleet) -> None:
        await running.replicas[0].kill()

    async def start_replica(running: Fleet) -> None:
        await running.replicas[0].start()
        await running.serving(running.ports[0])

    async def kill_redis(running: Fleet) -> None:
        await running.redis.kill()

    async def start_redis(running: Fleet) -> None:
        await running.redis.start()

    async def pause_redis(running: Fleet) -> None:
        running.redis.send(signal.SIGSTOP)

    async def resume_redis(running: Fleet) -> None:
        running.redis.send(signal.SIGCONT)

    async def to_redis(running: Fleet, *command: str) -> None:
        async with redis.Redis(port=running.redis_port) as client:
            await client.execute_command(*command)

    async def flush(running: Fleet) -> None:
        await to_redis(running, "FLUSHALL")

    async def fill(running: Fleet) -> None:
        await to_redis(running, "CONFIG", "SET", "maxmemory", "1mb")

    async def make_room(running: Fleet) -> None:
        await to_redis(running, "CONFIG", "SET", "maxmemory", "0")

    async def slow_down(running: Fleet) -> None:
        running.door.delay_s = 0.1

    async def speed_up(running: Fleet) -> None:
        running.door.delay_s = 0.0

    return [
        await fault("nothing, for comparison", nothing, nothing, 3.0),
        await fault("kill -9 of a replica, back after 3 s", kill_replica, start_replica, 3.0),
        await fault("kill -9 of Redis, back after 3 s", kill_redis, start_redis, 3.0),
        await fault("Redis stopped for 5 s (SIGSTOP)", pause_redis, resume_redis, 5.0),
        await fault("FLUSHALL", flush, nothing, 3.0),
        await fault("Redis out of memory for 3 s (maxmemory)", fill, make_room, 3.0),
        await fault("Redis 200 ms away for 5 s", slow_down, speed_up, 5.0),
    ]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _free_ports(count: int) -> list[int]:
    import socket

    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


async def measure(quick: bool) -> list[Row]:
    rows = ingest_alone(300 if quick else 3000)
    rows += await ingest_through(300 if quick else 3000)
    rows += await visible(20 if quick else 200)
    rows += await warm(50_000 if quick else 1_000_000)
    return rows + await faults()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything works")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    rows = asyncio.run(measure(options.quick))
    table = markdown_table(["what", "measured", "aim"], [(row.what, row.figure, row.aim) for row in rows])
    report = (
        "# The lookahead service under load and under fire\n\n"
        f"`{describe_command()}` on {describe_machine()}, shared with others; the script says what each "
        f"line means. Redis: {find_server().name}.\n\n{table}\n"
    )
    print(report)
    if options.out is not None:
        options.out.write_text(report)


if __name__ == "__main__":
    main()
