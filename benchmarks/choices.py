"""The cost of n choices beside n separate requests for the same prompt, against a running system.

    tandem up
    python benchmarks/choices.py --n 2 4 8 --prompt-tokens 256 1024 --max-tokens 32 --out FILE.md

Each round has new prompts, so that nothing is cached before; the two ways take turns. The separate requests
are sent at once, as a client without `n` would do. Afterwards the prompts of both ways are asked again in the
other way, untimed: choice i must have the tokens of a separate request with the seed + i.

CPU time is that of all processes of the system: the children of --pid, for example of `tandem up`. Exit
status 1: a choice has other tokens.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import random
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from reporting import markdown_table, write_page

SEED = 1


class Cost(NamedTuple):
    seconds: float
    cpu_s: float


def post(url: str, **body: object) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def body_of(prompt: list[int], max_tokens: int) -> dict[str, object]:
    return {
        "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "slo_class": "batch",
        "speculation": "off", "return_token_ids": True,
    }  # fmt: skip


def together(url: str, n: int, body: dict[str, object]) -> list[list[int]]:
    return [choice["token_ids"] for choice in post(url, n=n, seed=SEED, **body)["choices"]]


def separate(url: str, n: int, body: dict[str, object]) -> list[list[int]]:
    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        answers = pool.map(lambda i: post(url, seed=SEED + i, **body), range(n))
        return [answer["choices"][0]["token_ids"] for answer in answers]


WAYS = (together, separate)


def cpu_seconds(pid: int) -> float:
    """Of all descendants."""
    times = [process.cpu_times() for process in psutil.Process(pid).children(recursive=True)]
    return sum(one.user + one.system for one in times)


def measure(options: argparse.Namespace, n: int, num_prompt: int) -> tuple[list[list[Cost]], int]:
    """Costs by way and round, and how many of the choices have other tokens than separate requests."""
    costs: list[list[Cost]] = [[], []]
    num_other = 0
    for round_number in range(options.rounds):
        for way, other, costs_of_way in zip(WAYS, reversed(WAYS), costs, strict=True):
            generator = random.Random(f"{n} {num_prompt} {round_number} {way.__name__}")
            prompt = [generator.randrange(1000, 40_000) for _ in range(num_prompt)]
            body = body_of(prompt, options.max_tokens)
            cpu_s, started = cpu_seconds(options.pid), time.perf_counter()
            texts = way(options.url, n, body)
            costs_of_way.append(Cost(time.perf_counter() - started, cpu_seconds(options.pid) - cpu_s))
            again = other(options.url, n, body)
            num_other += sum(one != two for one, two in zip(texts, again, strict=True))
    return costs, num_other


def median_ratio(costs: list[list[Cost]], field: str) -> str:
    ratios = [getattr(one, field) / getattr(two, field) for one, two in zip(*costs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True, help="of `tandem up`")
    parser.add_argument("--n", type=int, nargs="+", default=[4])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    num_wrong = num_compared = 0
    for num_prompt, n in itertools.product(options.prompt_tokens, options.n):
        costs, num_other = measure(options, n, num_prompt)
        num_wrong += num_other
        num_compared += 2 * n * options.rounds
        seconds = (f"{statistics.median(cost.seconds for cost in of_way):.2f}" for of_way in costs)
        rows.append(
            [str(num_prompt), str(n), *seconds, *(median_ratio(costs, field) for field in Cost._fields)]
        )
    head = ("prompt tokens", "n", "n choices, s", "n requests, s", "time, ratio of a round",
            "CPU time, ratio of a round")  # fmt: skip
    notes = (
        f"{options.max_tokens} output tokens, {options.rounds} rounds; medians (least to largest). "
        f"{num_compared} choices compared with separate requests with their seed: {num_wrong} have other "
        "tokens."
    )
    write_page(options.out, "n choices beside n requests", markdown_table(head, rows), notes)
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
