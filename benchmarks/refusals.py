"""Measures the time of a refusal, at the client and inside the gateway.

    python benchmarks/refusals.py --out FILE.md

On an idle system and during running answers, by the length of the prompt's new part.

Each request has a strict objective of a millisecond for its first token, so it is refused by prediction. For
comparison, a call with an unknown model is refused without a prediction: the time of gRPC and both processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from peers import BATCH, cache_home, tandem_peer
from reporting import markdown_table, write_page
from slo import serving
from tandem_cli.bench.dataset import Turn
from tandem_cli.bench.options import BenchError, BenchOptions
from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import Recorder
from tandem_cli.bench.requests import Request, plain_requests
from tandem_cli.bench.stats import Percentiles
from tandem_cli.bench.transports import GrpcTransport, SendError
from tandem_cli.bench.workload import RequestMaker
from tandem_core.slo import SloTarget
from tandem_engine import model_loader

NAME = "refusals"
IMPOSSIBLE = SloTarget("interactive", ttft_s=0.001, is_strict=True)
#: Answers that run during the refusals, and their tokens; each one that ends is followed by another.
RUNNING, RUNNING_TOKENS = 8, 400
PAUSE_S = 0.03
#: Characters of longer last turns, which no cache has: tokenizing them takes most of the time.
LONG_CHARS = 4_000, 16_000


def prompts(num_chars: int = 0) -> Iterator[Prompt]:
    """Prompts with different last turns, which no cache has. `num_chars`: length of the last turns; 0: as in
    the built-in sample."""
    (first, *_) = RequestMaker(BenchOptions(rate=1.0, model="", num_requests=1)).make("retail", 0)
    turns = first.prompt.messages
    text = " ".join(turn.content for turn in turns)
    text = (text * (num_chars // len(text) + 1))[:num_chars] if num_chars else turns[-1].content
    for number in itertools.count():
        yield Prompt(f"{number}", (*turns[:-1], Turn("user", f"{number} {text}")))


def one(prompt: Prompt, slo: SloTarget, max_tokens: int) -> Request:
    (request,) = plain_requests([prompt], slo, max_tokens)
    return replace(request, sends_objectives=slo is IMPOSSIBLE)


async def errors_s(
    transport: GrpcTransport, source: Iterator[Prompt], status: str, seconds: float
) -> list[float]:
    """How long requests took that ended with this status. Raises BenchError for one that was served."""
    taken, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        request = one(next(source), IMPOSSIBLE, 48)
        began = time.perf_counter()
        try:
            await transport.send(request, Recorder(request, began))
        except SendError as error:
            if error.status != status:
                raise
            taken.append(time.perf_counter() - began)
        else:
            raise BenchError(f"a request was served that should have ended with {status}")
        await asyncio.sleep(PAUSE_S)
    return taken


async def keep_running(transport: GrpcTransport, source: Iterator[Prompt]) -> None:
    while True:
        request = one(next(source), BATCH, RUNNING_TOKENS)
        await transport.send(request, Recorder(request, time.perf_counter()))


async def measure(target: str, log: Path, seconds: float) -> list[list[str]]:
    source, rows = prompts(), []
    served, unknown = (GrpcTransport(target, BenchOptions(model=model)) for model in ("", "unknown"))
    beside: list[asyncio.Task[None]] = []
    for name, num_running in (("idle", 0), (f"beside {RUNNING} answers", RUNNING)):
        beside += [asyncio.create_task(keep_running(served, source)) for _ in range(num_running)]
        await asyncio.sleep(4.0)
        for num_chars in (0, *LONG_CHARS):
            num_before = len(refused_in(log))
            refused = prompts(num_chars)
            refused_s = await errors_s(served, refused, "RESOURCE_EXHAUSTED", seconds)
            await asyncio.sleep(0.5)
            inside_s = refused_in(log)[num_before:]
            unknown_s = await errors_s(unknown, refused, "NOT_FOUND", seconds)
            shown = f"{name}, {num_chars:,} characters" if num_chars else name
            rows.append([shown, str(len(refused_s)), *map(_ms, (refused_s, inside_s, unknown_s))])
    for task in beside:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await served.close()
    await unknown.close()
    return rows


def refused_in(log: Path) -> list[float]:
    """Seconds from arrival to refusal, from the gateway's log."""
    lines = [
        line[line.find("{") :] for line in log.read_text(errors="replace").splitlines() if '"refused"' in line
    ]
    return [entry["e2e_s"] for entry in map(json.loads, lines) if "e2e_s" in entry]


def _ms(seconds: Sequence[float]) -> str:
    values = Percentiles.of(seconds)
    return "-" if values is None else f"{1e3 * values.p50:.1f} / {1e3 * values.p99:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, folder or GGUF file")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--out", type=Path, required=True, help="page to write")
    options = parser.parse_args()
    peer = tandem_peer(NAME, model_loader.pull(options.model), "--log-format json")
    hello = one(next(prompts()), BATCH, 8)
    with serving(peer, hello) as target:
        rows = asyncio.run(measure(target, cache_home() / "logs" / f"{NAME}.log", options.seconds))
    head = [
        "gateway",
        "refusals",
        "refused, ms p50 / p99",
        "inside of the gateway",
        "unknown model, at the client",
    ]
    write_page(options.out, "How long a refusal takes", markdown_table(head, rows))


if __name__ == "__main__":
    main()
