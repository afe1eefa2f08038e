"""Rolls every role of a fleet from one installation to another and back, under load.

    python benchmarks/rolling_update.py --old OLD_VENV --new NEW_VENV --model FOLDER --out FILE.md

OLD_VENV and NEW_VENV are virtual environments with two versions of Tandem, for example from two wheels. The
fleet has two gateways, two decode pods, two prefill pods, a lookahead service and Redis. For each role, one
pod of the other version starts beside them, is waited for, and one of the first version gets SIGTERM, until
all are replaced, as a Deployment with `maxSurge: 1` does; the one lookahead service stops
first. Prefill pods come first, gateways last; on the way
back gateways come first, so that versions meet in both orders.

Meanwhile clients stream answers over gRPC, through any gateway, and resume a stream that is cut. An answer
counts as failed if it does not get to its end, and as changed if a token differs from the same request before
the first replacement. Exit status 1: one of them happened.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reporting import markdown_table, write_page
from stream_load import Tally, ask, load
from tandem_cli import health, redis_server
from tandem_cli.supervisor import Health

FIRST_PORT = {"gateway": 27000, "decode": 27100, "prefill": 27200, "lookahead": 27300}
HTTP_PORT, KV_PORT = 27400, 27500
REPLICAS = {"prefill": 2, "decode": 2, "lookahead": 1, "gateway": 2}
#: One more than replicas, for the pod that starts before another stops; pods know one lookahead service.
SLOTS = {role: count + (role != "lookahead") for role, count in REPLICAS.items()}
#: Gateways look at their pods once a second.
SEEN_S = 2.0
START_LIMIT_S, STOP_LIMIT_S = 180.0, 40.0


@dataclass
class Pod:
    role: str
    slot: int
    venv: Path
    process: asyncio.subprocess.Process

    @property
    def target(self) -> str:
        return target(self.role, self.slot)


def target(role: str, slot: int) -> str:
    return f"127.0.0.1:{FIRST_PORT[role] + slot}"


def targets(role: str) -> str:
    return ",".join(target(role, slot) for slot in range(SLOTS[role]))


@dataclass
class Fleet:
    model: Path
    folder: Path
    pods: list[Pod] = field(default_factory=list)

    def command(self, role: str, slot: int, venv: Path) -> list[str]:
        port = str(FIRST_PORT[role] + slot)
        model = ["--model", str(self.model)]
        engine = [*model, "--port", port, "--threads", "1", "--num-blocks", "128"]
        peers = ["--decode", targets("decode"), "--prefill", targets("prefill")]
        flags = {
            "gateway": [*model, "--grpc-port", port, "--http-port", str(HTTP_PORT + slot), *peers],
            "decode": [*engine, "--kv-port", str(KV_PORT + slot), "--lookahead", targets("lookahead")],
            "prefill": engine,
            "lookahead": ["--port", port],
        }[role]
        return [str(venv / "bin" / f"tandem-{role}"), "--pod-id", f"{role}-{slot}", *flags]

    async def start(self, role: str, slot: int, venv: Path) -> Pod:
        log = (self.folder / f"{role}-{slot}-{time.monotonic_ns()}.log").open("wb")
        redis = f"unix://{redis_server.socket_path(self.folder)}"
        process = await asyncio.create_subprocess_exec(
            *self.command(role, slot, venv),
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"REDIS_URL": redis},
        )
        pod = Pod(role, slot, venv, process)
        self.pods.append(pod)
        return pod

    async def until_serving(self, pods: Sequence[Pod]) -> None:
        give_up_at = time.monotonic() + START_LIMIT_S
        for pod in pods:
            while await health.check(pod.target) is not Health.SERVING:
                if pod.process.returncode is not None or time.monotonic() > give_up_at:
                    name = f"{pod.role}-{pod.slot} of {pod.venv}"
                    raise RuntimeError(f"{name} does not serve; see {self.folder}")
                await asyncio.sleep(0.1)

    async def replace(self, role: str, old: Path, new: Path) -> list[float]:
        """One after another; returns the seconds from each SIGTERM to the process's end."""
        took = []
        for pod in [pod for pod in self.pods if pod.role == role and pod.venv == old]:
            free = set(range(SLOTS[role])) - {other.slot for other in self.pods if other.role == role}
            for slot in free:
                await self.until_serving([await self.start(role, slot, new)])
                await asyncio.sleep(SEEN_S)
            asked_at = time.monotonic()
            pod.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(pod.process.wait(), STOP_LIMIT_S)
            took.append(time.monotonic() - asked_at)
            self.pods.remove(pod)
            if not free:
                await self.until_serving([await self.start(role, pod.slot, new)])
        return took

    def gateways(self) -> list[str]:
        return [pod.target for pod in self.pods if pod.role == "gateway"]

    async def stop(self) -> None:
        for pod in self.pods:
            if pod.process.returncode is None:
                pod.process.kill()
                await pod.process.wait()


async def run(options: argparse.Namespace) -> bool:
    rng = random.Random(options.seed)
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with tempfile.TemporaryDirectory(prefix="tandem-rolling-") as folder:
        fleet = Fleet(options.model, Path(folder))
        redis = await asyncio.create_subprocess_exec(*redis_server.command(fleet.folder))
        rows = []
        all_well = True
        try:
            started = [
                await fleet.start(role, slot, options.old)
                for role, count in REPLICAS.items()
                for slot in range(count)
            ]
            await fleet.until_serving(started)
            await asyncio.sleep(SEEN_S)
            expected = [await ask(fleet.gateways, index, rng) for index in range(options.prompts)]
            assert all(answer.tokens and not answer.failure for answer in expected), expected
            roles = tuple(REPLICAS)
            ways = [(roles, options.old, options.new), (roles[::-1], options.new, options.old)]
            for roles, old, new in ways:
                way = "old to new" if old == options.old else "new to old"
                for role in roles:
                    tally = Tally()
                    clients = [
                        asyncio.create_task(load(fleet.gateways, expected, tally, rng))
                        for _ in range(options.clients)
                    ]
                    took = await fleet.replace(role, old, new)
                    tally.is_over = True
                    await asyncio.gather(*clients)
                    all_well = all_well and not tally.failures and not tally.counts["changed"]
                    rows.append([
                        f"{role}, {way}",
                        str(tally.counts["answers"]), str(tally.counts["resumed"]), str(len(tally.failures)),
                        str(tally.counts["changed"]), f"{max(took):.1f} s",
                        f"{statistics.median(tally.gaps_s) * 1e3:.0f} ms",
                        f"{max(tally.gaps_s) * 1e3:.0f} ms",
                    ])  # fmt: skip
                    print(rows[-1], *tally.failures, flush=True)
        finally:
            await fleet.stop()
            redis.terminate()
            await redis.wait()
    head = ["role, direction", "answers", "resumes", "failed", "changed", "longest stop",
            "longest pause in an answer, median", "worst"]  # fmt: skip
    if options.out is not None:
        write_page(options.out, "Rolling update under load", markdown_table(head, rows))
    return all_well


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--old", type=Path, required=True, help="virtual environment of the first version")
    parser.add_argument("--new", type=Path, required=True, help="virtual environment of the second version")
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="page to write")
    sys.exit(0 if asyncio.run(run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
