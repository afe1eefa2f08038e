"""Valid and right tool calls, and their time, of Tandem and llama.cpp with the same model file and requests.

    python benchmarks/tools.py --out benchmarks/results/tools.md

An answer is valid if its calls name known tools and have arguments that follow their schemas, or if it calls
none where none helps. It is right if the call is the expected one, with the expected arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from peers import MAX_MODEL_LEN, Peer, Roster, lineup, say, tandem_peer
from reporting import markdown_table, write_page
from tandem_engine import model_loader
from tool_cases import CASES, TOOLS, Case

MAX_TOKENS = 96
TIMEOUT_S = 600.0


@dataclass
class Score:
    """Of one row of the table."""

    num_valid: int = 0
    num_right: int = 0
    seconds: list[float] = field(default_factory=list)

    def row(self, name: str) -> list[str]:
        count = len(self.seconds)
        median = statistics.median(self.seconds)
        return [name, f"{self.num_valid} of {count}", f"{self.num_right} of {count}", f"{median:.1f} s"]


def judge(case: Case, message: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the answer is valid, and right."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    calls = []
    for call in message.get("tool_calls") or ():
        name = call["function"]["name"]
        try:
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, schemas[name])
        except (ValueError, KeyError, jsonschema.ValidationError):
            return False, False
        calls.append((name, arguments))
    if case.name is None or not calls:
        return case.name is None and not calls, case.name is None and not calls
    name, arguments = calls[0]
    is_right = name == case.name and all(
        str(arguments.get(key)).lower() == str(value).lower()
        or (isinstance(value, float | int) and arguments.get(key) == value)
        for key, value in case.arguments.items()
    )
    return True, is_right and len(calls) == 1


def ask(url: str, peer: Peer, case: Case, **extra: object) -> tuple[dict[str, object], float]:
    body = {
        "model": peer.model, "messages": [{"role": "user", "content": case.text}], "tools": TOOLS,
        "temperature": 0, "max_tokens": MAX_TOKENS, "parallel_tool_calls": False, **extra,
    }  # fmt: skip
    began = time.perf_counter()
    with httpx.Client(trust_env=False, timeout=TIMEOUT_S) as client:
        response = client.post(f"{url}/v1/chat/completions", json=body)
    seconds = time.perf_counter() - began
    response.raise_for_status()
    return response.json()["choices"][0]["message"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--rows", default="", help="measure only rows whose names contain this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model_dir = model_loader.pull(options.model)
    strict = copy.deepcopy(TOOLS)
    for tool in strict:
        tool["function"]["strict"] = True
    tandem = tandem_peer("Tandem", model_dir, f"--prefill 0 --decode 1 --max-model-len {MAX_MODEL_LEN}")
    llama_cpp = next(peer for peer in lineup(model_dir, "bfloat16", []) if peer.name == "llama.cpp")
    batch = {"slo_class": "batch"}
    variants: dict[Peer, dict[str, dict[str, Any]]] = {
        tandem: {"auto": batch, "auto, strict": {**batch, "tools": strict}},
        llama_cpp: {"auto": {}},
    }
    rows, notes = [], []
    for peer, every in variants.items():
        kinds = {kind: extra for kind, extra in every.items() if options.rows in f"{peer.name}, {kind}"}
        if not kinds:
            continue
        with contextlib.ExitStack() as stack:
            roster = Roster()
            roster.start(peer, stack)
            for _, server in roster.turns(0):
                for kind, extra in kinds.items():
                    score = Score()
                    for case in CASES:
                        message, seconds = ask(server.url, peer, case, **extra)
                        is_valid, is_right = judge(case, message)
                        score.num_valid += is_valid
                        score.num_right += is_right
                        score.seconds.append(seconds)
                        say(f"{peer.name} {kind}: {is_valid} {is_right} {seconds:.1f} s {message}")
                    rows.append(score.row(f"{peer.name}, {kind}"))
            notes += [f"Missing: {name}: {reason}" for name, reason in roster.missing.items()]
    table = markdown_table(["system", "valid", "right", "time of an answer, median"], rows)
    notes.append(
        f"{len(CASES)} cases of `benchmarks/tool_cases.py`, {len(TOOLS)} tools, greedy, one after the "
        "other. Both systems use the same model file and chat template. `strict`: each tool says "
        "`strict: true`."
    )
    title = f"Tool calls of {options.model}"
    if options.out is not None:
        write_page(options.out, title, table, "\n\n".join(notes))
    else:
        print(table)


if __name__ == "__main__":
    main()
