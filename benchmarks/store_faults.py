"""Whether decoding slows down while the lookahead service, or its store, hangs.

    tandem up --state-file fleet.json &
    python benchmarks/store_faults.py --state fleet.json --out benchmarks/results/store-faults.md

Requests one after another, in each round the same prompts for all conditions, which take turns. Every answer
is drawn by a seed of its own, so that none has another's text to copy. What hangs is stopped by SIGSTOP for
its turn and goes on afterwards. `well` comes twice: what lies between the two is what cannot be told here.

A gap is the time between two messages with tokens, divided by the tokens of the second.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from reporting import describe_command, describe_machine, markdown_table
from tandem_cli.bench.dataset import sample_dialogues
from tandem_cli.bench.prompts import question
from tandem_cli.state_file import read_state
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

CONDITIONS = ("well", "well again", "store hangs", "service hangs")
HEAD = ("condition", "requests", "failed", "tokens", "median gap ms", "beside well", "rounds: quartiles")


def processes(state: Path) -> dict[str, int]:
    """Pids of what is stopped, by condition."""
    fleet = read_state(state)
    (service,), (store,) = fleet.pids("lookahead"), fleet.pids("redis")
    return {"store hangs": store, "service hangs": service}


@contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    """Stops a process for a while."""
    if pid is None:
        yield
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Client:
    """Sends one request after another and times what comes."""

    def __init__(self, port: int, max_tokens: int) -> None:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)])
        self._stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        self._max_tokens = max_tokens

    def ask(self, said: str, seed: int) -> list[float] | None:
        """The gaps of an answer, once for each token, in seconds; None: it failed."""
        request = gateway_pb2.GenerateRequest(
            text=said,
            sampling=common_pb2.SamplingParams(
                temperature=1.0, seed=seed, max_tokens=self._max_tokens, ignore_eos=True
            ),
            slo_class="batch",
        )
        gaps: list[float] = []
        last = None
        try:
            for response in self._stub.Generate(request, timeout=120):
                now = time.perf_counter()
                count = len(response.chunk.token_ids)
                if count:
                    if last is not None:
                        gaps += [(now - last) / count] * count
                    last = now
        except grpc.RpcError as error:
            print(f"failed: {error}")
            return None
        return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--state", type=Path, required=True, help="of a running `tandem up`")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--requests", type=int, default=3, help="of a condition in a round")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pids = processes(options.state)
    (gateway,) = [pod for pod in read_state(options.state).pods if pod.role == "gateway"]
    client = Client(gateway.ports["grpc"], options.max_tokens)
    texts = [" ".join(turn.content for turn in question(d)[-1:])[:300] for d in sample_dialogues()]
    gaps: dict[str, list[list[float]]] = {name: [] for name in CONDITIONS}
    failed = dict.fromkeys(CONDITIONS, 0)
    seeds = itertools.count(1)
    for number in range(options.rounds):
        asked = [f"{texts[(number + i) % len(texts)]} ({number}, {i})" for i in range(options.requests)]
        first = number % len(CONDITIONS)
        for name in CONDITIONS[first:] + CONDITIONS[:first]:
            with stopped(pids.get(name)):
                time.sleep(0.2)
                answers = [client.ask(said, next(seeds)) for said in asked]
            # What hung takes in what it missed.
            time.sleep(0.3)
            failed[name] += sum(answer is None for answer in answers)
            gaps[name].append([gap for answer in answers if answer for gap in answer])
    rows = []
    for name in CONDITIONS:
        pooled = [gap for of_round in gaps[name] for gap in of_round]
        base = [gap for of_round in gaps["well"] for gap in of_round]
        ratios = [
            statistics.median(mine) / statistics.median(well)
            for mine, well in zip(gaps[name], gaps["well"], strict=True)
        ]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows.append(
            [
                name,
                str(options.rounds * options.requests),
                str(failed[name]),
                str(len(pooled)),
                f"{1e3 * statistics.median(pooled):.3f}",
                f"{statistics.median(pooled) / statistics.median(base):.3f}, "
                f"by rounds {statistics.median(ratios):.3f}",
                f"{low:.3f} to {high:.3f}",
            ]
        )
        print(*rows[-1], sep="  ", flush=True)
    if options.out is not None:
        options.out.write_text(
            f"# Decoding while the lookahead service or its store hangs\n\n`{describe_command()}`\n\n"
            f"{describe_machine()}\n\n{markdown_table(HEAD, rows)}\n"
        )


if __name__ == "__main__":
    main()
