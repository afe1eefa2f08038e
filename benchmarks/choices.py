"""The cost of n choices beside n separate requests for the same prompt, against a running system.

    tandem up
    python benchmarks/choices.py --n 4 --prompt-tokens 1024 --max-tokens 32

Each round has new prompts, so that nothing is cached before; the two ways take turns. The separate requests
are sent at once, as a client without `n` would do.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import statistics
import time
import urllib.request


def post(url: str, **body: object) -> dict:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    together, separate = [], []
    for round_number in range(options.rounds):
        for seconds, is_together in ((together, True), (separate, False)):
            generator = random.Random(2 * round_number + is_together)
            prompt = [generator.randrange(1000, 40_000) for _ in range(options.prompt_tokens)]
            body = {
                "prompt": prompt, "max_tokens": options.max_tokens, "ignore_eos": True, "slo_class": "batch",
                "speculation": "off",
            }  # fmt: skip
            started = time.perf_counter()
            if is_together:
                post(options.url, n=options.n, seed=1, **body)
            else:
                with concurrent.futures.ThreadPoolExecutor(options.n) as pool:
                    list(
                        pool.map(lambda i, body=body: post(options.url, seed=1 + i, **body), range(options.n))
                    )
            seconds.append(time.perf_counter() - started)
    ratios = [one / other for one, other in zip(together, separate, strict=True)]
    print(f"n = {options.n}: median {statistics.median(together):.2f} s")
    print(f"{options.n} separate requests: median {statistics.median(separate):.2f} s")
    print(
        f"ratio of each round: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
