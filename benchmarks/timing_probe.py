"""Whether a tenant can tell by the time to the first token that another tenant has sent a prompt.

    python benchmarks/timing_probe.py --out FILE.md [--trials 800] [--up FLAGS]

Starts `tandem up` with keys of two tenants. In each trial the victim sends a prompt. The observer then sends
that prompt and another one of the same length that nobody has sent, in random order, and compares the times
to the first token. The figure is the AUC: the share of all pairs (sent, new) in which the prompt that was
sent is faster; .5 means that the times tell nothing. As a control the victim repeats its own prompt, which
its prefix cache makes faster: an AUC near 1 shows that the probe sees such a difference. All traffic is on
loopback.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

import httpx
from peers import Server, say, tandem_peer
from reporting import markdown_table, write_page
from tandem_core.model import registry
from tandem_engine import model_loader

KEYS = {"victim": "key-of-the-victim", "observer": "key-of-the-observer"}
#: Of a prompt; each is about a token of the default model.
NUM_WORDS = 320
WORDS = ("order", "refund", "parcel", "address", "invoice", "account", "return", "delivery", "item", "store")


def prompt(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=NUM_WORDS))


class Sender:
    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._clients = {
            tenant: httpx.Client(timeout=60.0, trust_env=False, headers={"authorization": f"Bearer {key}"})
            for tenant, key in KEYS.items()
        }

    def ttft_s(self, tenant: str, text: str) -> float:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "stream": True}
        asked = time.perf_counter()
        with self._clients[tenant].stream("POST", self._url, json=body | {"slo_class": "batch"}) as answer:
            answer.raise_for_status()
            first_s = None
            # To the end, so that nothing of this request runs beside the next one.
            for line in answer.iter_lines():
                if first_s is None and '"content":"' in line.replace(": ", ":").replace('"content":""', ""):
                    first_s = time.perf_counter() - asked
        if first_s is not None:
            return first_s
        raise RuntimeError("the answer has no token")

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def auc(sent: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """Share of pairs in which the sent prompt is faster, equals count half; and its standard error without a
    difference (Mann and Whitney)."""
    ordered = sorted(new)
    slower = [len(ordered) - (bisect_left(ordered, s) + bisect_right(ordered, s)) / 2 for s in sent]
    n, m = len(sent), len(new)
    return sum(slower) / (n * m), math.sqrt((n + m + 1) / (12 * n * m))


def probe(sender: Sender, rng: random.Random, observer: str, trials: int) -> tuple[list[float], list[float]]:
    """Times to the first token of prompts that the victim has sent, and of new ones."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(trials):
        known, unknown = prompt(rng), prompt(rng)
        sender.ttft_s("victim", known)
        for is_known in rng.sample((True, False), 2):
            times[is_known].append(sender.ttft_s(observer, known if is_known else unknown))
    return times[True], times[False]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=registry.DEFAULT_MODEL)
    parser.add_argument("--trials", type=int, default=800)
    parser.add_argument("--control-trials", type=int, default=50)
    parser.add_argument("--up", default="", metavar="FLAGS", help="flags of `tandem up`")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.jsonl"
        keys.write_text(
            "\n".join(
                json.dumps({"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant})
                for tenant, key in KEYS.items()
            )
        )
        up = f"--set gateway.api-keys-file={keys} {options.up}"
        server = Server(tandem_peer("timing probe", model_loader.pull(options.model), up))
        try:
            wait_until_ready(server.url)
            sender, rng = Sender(server.url), random.Random(options.seed)
            for name, observer, trials in (
                ("another tenant", "observer", options.trials),
                ("the same tenant (control)", "victim", options.control_trials),
            ):
                sent, new = probe(sender, rng, observer, trials)
                area, error = auc(sent, new)
                medians = [f"{sorted(times)[trials // 2] * 1e3:.0f}" for times in (sent, new)]
                rows.append([name, str(trials), f"{' / '.join(medians)} ms", f"{area:.3f}", f"{error:.3f}"])
                say(" ".join(rows[-1]))
            sender.close()
        finally:
            server.close()
    head = ["observer", "trials", "median TTFT, prompt sent before / new", "AUC", "standard error at .5"]
    write_page(options.out, "A timing probe between tenants", markdown_table(head, rows))


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError("the system is not ready after two minutes")


if __name__ == "__main__":
    main()
