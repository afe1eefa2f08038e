"""What a decode step loses to another process that takes a core now and then, as a gateway beside it does.

    python benchmarks/lost_core.py --out FILE.md

An engine decodes with as many threads as there are cores. Beside it a process is busy for a time and rests
for another, both drawn from exponential distributions, at nice -5 where that is allowed. It either interrupts
the threads of the step or waits for their offers (`tandem_service.priority`). Steps per second with it are
compared with those just before and after it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reporting import markdown_table, write_page
from tandem_core.sampling import SamplingParams
from tandem_engine import model_loader
from tandem_engine.assemble import EngineConfig, assemble
from tandem_engine.engine import Engine
from tandem_engine.request import Request

NUM_SEQUENCES, PROMPT_TOKENS, MAX_TOKENS = 8, 200, 4_000
NICE = -5
#: Milliseconds for which the other process is busy, and for which it rests; means.
OTHERS = ((0.7, 1.3), (0.7, 5.0), (0.2, 0.6))
SECONDS = 1.2
OTHER = """
import random, sys, time
from tandem_service.priority import change_nice, wait_for_offers
busy_s, rest_s = float(sys.argv[2]), float(sys.argv[3])
change_nice(int(sys.argv[4]))
if sys.argv[1] == "waits":
    wait_for_offers()
while True:
    until = time.perf_counter() + random.expovariate(1 / busy_s)
    while time.perf_counter() < until:
        pass
    time.sleep(random.expovariate(1 / rest_s))
"""


def decoding(model: str) -> Engine:
    """An engine whose requests have computed their prompts."""
    engine = assemble(EngineConfig(model=model_loader.pull(model), num_blocks=1_400)).engine
    rng = random.Random(0)
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for number in range(NUM_SEQUENCES):
        prompt = [rng.randrange(1_000, 20_000) for _ in range(PROMPT_TOKENS)]
        engine.add(Request(f"{number}", prompt, sampling))
    while len(engine.scheduler.decoding()) < NUM_SEQUENCES:
        engine.step()
    return engine


def steps_per_s(engine: Engine, seconds: float) -> float:
    began, number = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        engine.step()
        number += 1
    return number / (time.perf_counter() - began)


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """That the process has used."""
    fields = Path(f"/proc/{process.pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def beside(engine: Engine, way: str, busy_ms: float, rest_ms: float) -> tuple[float, float]:
    """Steps per second beside the other process, and the share of a core that it had."""
    given = [way, str(busy_ms / 1e3), str(rest_ms / 1e3), str(NICE)]
    with subprocess.Popen([sys.executable, "-c", OTHER, *given], stdout=subprocess.DEVNULL) as other:
        try:
            while cpu_s(other) < 0.3:  # until it has started
                engine.step()
            before, began = cpu_s(other), time.perf_counter()
            speed = steps_per_s(engine, SECONDS)
            return speed, (cpu_s(other) - before) / (time.perf_counter() - began)
        finally:
            other.kill()


def measure(engine: Engine, rounds: int) -> list[list[str]]:
    found: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for way, (busy_ms, rest_ms) in itertools.product(("interrupts", "waits"), OTHERS):
            alone = steps_per_s(engine, SECONDS)
            speed, share = beside(engine, way, busy_ms, rest_ms)
            # The contexts grow meanwhile.
            alone = (alone + steps_per_s(engine, SECONDS)) / 2
            found.setdefault((way, busy_ms, rest_ms), []).append((speed / alone, share))
    return [row(*case, results) for case, results in found.items()]


def row(way: str, busy_ms: float, rest_ms: float, results: Sequence[tuple[float, float]]) -> list[str]:
    speed, share = (statistics.median(values) for values in zip(*results, strict=True))
    lost = (1 - speed) / share
    return [way, f"{busy_ms:g}", f"{rest_ms:g}", f"{share:.2f}", f"{speed:.2f}", f"{lost:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=model_loader.DEFAULT_MODEL, help="a name, folder or GGUF file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="page to write")
    options = parser.parse_args()
    head = [
        "the other process",
        "busy ms",
        "rests ms",
        "of a core",
        "steps/s, of alone",
        "lost per core taken",
    ]
    rows = measure(decoding(options.model), options.rounds)
    notes = (
        f"{NUM_SEQUENCES} sequences without drafts. Medians of {options.rounds} rounds of {SECONDS} s each."
    )
    write_page(options.out, "What a step loses to another process", markdown_table(head, rows), notes)


if __name__ == "__main__":
    main()
