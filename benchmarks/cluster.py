"""Rollouts, deletions, a drained node and scaling under load, on the process kubelet.

    PYTHONPATH=tests/helpers python benchmarks/cluster.py --model NAME --out FILE.md

The manifests are those of deploy/k8s/overlays/dev with two pods of each role. tests/helpers/kubelet runs each
pod as a process with an address of its own and follows probes, preStop, grace periods, rolling update rules
and PodDisruptionBudgets; gateways watch EndpointSlices at its API server. Clients stream answers of at least
--tokens tokens through the gateway's Service. An answer counts as failed if it does not get to its end, and
as changed if a token differs from the same request before. Exit status 1: one of them happened, or a pod was
killed at the end of its grace period.

With --other VENV the steps are rollouts between this version and that installation instead: to it, all
roles at once; to this version, role by role; to it again, role by role in the opposite order; and back, all
at once. So each role meets each other one in both versions. The manifests are those of this version, which
the other one must understand; gateways before ec2191b find no pods on the process kubelet.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kubelet import overlay
from kubelet.cluster import Cluster
from reporting import markdown_table, write_page
from stream_load import Tally, ask, load
from tandem_engine import model_loader

ROLES = ("gateway", "decode", "prefill", "lookahead")
#: Clients go on for this time after a step, so that what it broke shows.
SETTLE_S = 3.0


class Run:
    def __init__(self, options: argparse.Namespace, cluster: Cluster) -> None:
        self.options = options
        self.cluster = cluster

    def steps(self) -> dict[str, Callable[[], Awaitable[None]]]:
        names = self.options.steps.split(",") if self.options.steps else []
        every = self._between_versions(self.options.other) if self.options.other else self._of_one_version()
        return {name: step for name, step in every.items() if not names or any(n in name for n in names)}

    def _between_versions(self, other: Path) -> dict[str, Callable[[], Awaitable[None]]]:
        this = Path(sys.prefix)
        return {
            "all at once to the other version": lambda: self.roll_to(other, ROLES),
            **{f"{role} to this version": lambda role=role: self.roll_to(this, [role]) for role in ROLES},
            **{
                f"{role} to the other version": lambda role=role: self.roll_to(other, [role])
                for role in reversed(ROLES)
            },
            "all at once to this version": lambda: self.roll_to(this, ROLES),
        }

    def _of_one_version(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            **{f"rollout of {role}": lambda role=role: self.roll([role]) for role in ROLES},
            "rollout of all at once": lambda: self.roll(ROLES),
            "delete each decode pod": lambda: self.delete_each("decode"),
            "delete each prefill pod": lambda: self.delete_each("prefill"),
            "delete each gateway": lambda: self.delete_each("gateway"),
            "drain of a node": self.drain,
            "decode 2 -> 3 -> 1 -> 2": lambda: self.scale("decode", 3, 1, 2),
            "prefill 2 -> 0 -> 2": lambda: self.scale("prefill", 0, 2),
            "decode 2 -> 0 -> 2": lambda: self.scale("decode", 0, 2),
        }

    async def roll(self, roles: Sequence[str]) -> None:
        for role in roles:
            self.cluster.restart(f"tandem-{role}", reason=str(random.random()))
        await self.cluster.until_rolled_out()

    async def roll_to(self, installation: Path, roles: Sequence[str]) -> None:
        for role in roles:
            self.cluster.set_programs(f"tandem-{role}", installation / "bin")
        await self.cluster.until_rolled_out()

    async def delete_each(self, role: str) -> None:
        for pod in self.cluster.of(f"tandem-{role}"):
            self.cluster.delete_pod(pod)
            await asyncio.sleep(0.1)
            await self.cluster.until_rolled_out()

    async def drain(self) -> None:
        await self.cluster.drain("node-b")
        await self.cluster.until_rolled_out()
        self.cluster.uncordon("node-b")

    async def scale(self, role: str, *counts: int) -> None:
        for count in counts:
            self.cluster.scale(f"tandem-{role}", count)
            await asyncio.sleep(0.1)
            await self.cluster.until_rolled_out()
            await asyncio.sleep(SETTLE_S)


async def run(options: argparse.Namespace) -> bool:
    rng = random.Random(options.seed)
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    rows, all_well = [], True
    with tempfile.TemporaryDirectory(prefix="tandem-cluster-") as name:
        folder = Path(name)
        (folder / "overlay").mkdir()
        cluster = Cluster(folder, Path(sys.prefix) / "bin", network=77, paths={})
        await cluster.start()
        try:
            settings = overlay.small(model_loader.pull(options.model))
            await cluster.apply(overlay.manifests(folder / "overlay", settings))
            await cluster.until_rolled_out()
            target = f"{cluster.service_address('tandem-gateway')}:50051"

            def gateways() -> list[str]:
                return [target]

            expected = [await ask(gateways, index, rng, options.tokens) for index in range(options.prompts)]
            assert all(answer.tokens and not answer.failure for answer in expected), expected
            for title, step in Run(options, cluster).steps().items():
                tally, num_ended = Tally(), len(cluster.ended)
                clients = [
                    asyncio.create_task(load(gateways, expected, tally, rng, options.tokens))
                    for _ in range(options.clients)
                ]
                await asyncio.sleep(SETTLE_S)
                await step()
                await asyncio.sleep(SETTLE_S)
                tally.is_over = True
                await asyncio.gather(*clients)
                ended = cluster.ended[num_ended:]
                killed = [pod.name for pod in ended if pod.was_killed]
                all_well = all_well and not tally.failures and not tally.counts["changed"] and not killed
                rows.append([
                    title,
                    str(tally.counts["answers"]), str(tally.counts["resumed"]), str(len(tally.failures)),
                    str(tally.counts["changed"]),
                    f"{statistics.median(tally.gaps_s) * 1e3:.0f} / {max(tally.gaps_s) * 1e3:.0f} ms",
                    f"{max((pod.gone_at - pod.deleted_at for pod in ended), default=0.0):.1f} s",
                ])  # fmt: skip
                print(rows[-1], *killed, *tally.failures, flush=True)
        except BaseException:
            for pod in cluster.pods:
                print(f"--- {pod.name}\n{pod.log()[-1500:]}", file=sys.stderr)
            raise
        finally:
            await cluster.close()
    head = ["step", "answers", "resumes", "failed", "changed",
            "longest pause in an answer, median / worst", "delete to gone, longest"]  # fmt: skip
    if options.out is not None:
        write_page(options.out, "A cluster under load", markdown_table(head, rows))
    return all_well


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a name, folder or GGUF file")
    parser.add_argument("--other", type=Path, help="virtual environment of another version, to roll to")
    parser.add_argument("--steps", help="parts of names of steps, with commas; all without it")
    parser.add_argument("--tokens", type=int, default=512, help="least tokens of an answer")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="page to write")
    sys.exit(0 if asyncio.run(run(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
