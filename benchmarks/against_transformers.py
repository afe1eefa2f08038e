"""TTFT and TPOT of the whole system beside transformers' `generate`, on one machine in one run.

    python benchmarks/against_transformers.py --dtype float32 --out benchmarks/results/NAME

Peers: transformers greedy `generate`, the same with prompt lookup (its training-free speculation), and Tandem
as users run it (`tandem up`: gateway, prefill pod, decode pod, lookahead), with and without drafts. All in
one dtype on the same weights and threads. Every cell is a median over several different customer-service
prompts; within a cell each peer sees the same prompts. transformers serves concurrent requests as one
padded batch; prompt lookup takes one request at a time, so there concurrent requests queue.

TTFT: request sent to first token. TPOT: (last token - first token) / (tokens - 1). For Tandem both are
taken at the client, through the gateway.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import torch
from tandem_cli.bench.dataset import load_dialogues, sample_dialogues, sample_policy
from tandem_cli.state_file import read_state
from tandem_engine import store
from tandem_engine.tokenizer import Tokenizer
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

OUTPUT_TOKENS = 64
CONTEXTS = {"short": 256, "4K": 3840}
CONCURRENCIES = (1, 4)
Prompt = list[int]
Serve = Callable[[Sequence[Prompt]], list["Timing"]]


@dataclass(frozen=True)
class Timing:
    """One request, seconds."""

    ttft: float
    tpot: float
    tokens: int
    steps: int = 0


@dataclass(frozen=True)
class Cell:
    peer: str
    context: str
    concurrency: int
    ttft_ms: float
    tpot_ms: float
    tokens_per_step: float
    num_requests: int


def main() -> None:
    options = _options()
    # A terminated benchmark ends its fleet too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    model_dir = store.pull(store.DEFAULT_MODEL)
    prompts = _prompts(Tokenizer(model_dir), options)
    generate, lookup = _transformers_peers(model_dir, options.dtype)
    with (
        _fleet(model_dir, options.dtype, "global", first_port=20600) as shared,
        _fleet(model_dir, options.dtype, "off", first_port=24600) as plain,
    ):
        peers: dict[str, Serve] = {
            "transformers": generate,
            "transformers, prompt lookup": lookup,
            "tandem, speculation off": lambda p: _tandem(plain, p),
            "tandem, speculation global": lambda p: _tandem(shared, p),
        }
        # A different text than any measured one, so that nothing but memory and threads is warm.
        for serve in peers.values():
            serve([[5] * 1300])
            serve([[6] * 200])
        cells: list[Cell] = []
        for (context, concurrency), rounds in prompts.items():
            cells += _measure(peers, context, concurrency, rounds)
            _report(cells, options)  # what there is so far: the whole takes a quarter of an hour


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of different prompts per cell")
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.json and OUT.md")
    return parser.parse_args()


def _prompts(tokenizer: Tokenizer, options: argparse.Namespace) -> dict[tuple[str, int], list[list[Prompt]]]:
    """Per (context, concurrency): rounds of `concurrency` prompts each; no prompt comes twice."""
    dialogues = load_dialogues(options.dataset) if options.dataset else sample_dialogues()
    texts = [dialogue.as_text() for dialogue in dialogues]
    policy = sample_policy()
    number = 0

    def make(length: int) -> Prompt:
        nonlocal number
        rotation = [texts[(number + i) % len(texts)] for i in range(len(texts))]
        # The number comes first, so that no two prompts share a cached prefix.
        head = f"Ticket {number}.\n"
        text = head + (policy if length > 1000 else "") + "\n\n".join(rotation)
        number += 1
        prompt = tokenizer.encode(text)[:length]
        if len(prompt) < length:
            raise SystemExit(f"--dataset holds too little text for {length} tokens; give a larger one")
        return prompt

    return {
        (context, concurrency): [[make(length) for _ in range(concurrency)] for _ in range(options.repeats)]
        for context, length in CONTEXTS.items()
        for concurrency in CONCURRENCIES
    }


def _measure(
    peers: dict[str, Serve], context: str, concurrency: int, rounds: list[list[Prompt]]
) -> list[Cell]:
    """One cell of each peer. They take turns round by round, so that the machine's bad minutes meet all."""
    timings: dict[str, list[Timing]] = {peer: [] for peer in peers}
    for together in rounds:
        for peer, serve in peers.items():
            timings[peer] += serve(together)
    cells = [_cell(peer, context, concurrency, seen) for peer, seen in timings.items()]
    for cell in cells:
        print(cell, flush=True)
    return cells


def _cell(peer: str, context: str, concurrency: int, timings: list[Timing]) -> Cell:
    steps = sum(t.steps for t in timings)
    return Cell(
        peer,
        context,
        concurrency,
        ttft_ms=1e3 * statistics.median(t.ttft for t in timings),
        tpot_ms=1e3 * statistics.median(t.tpot for t in timings),
        tokens_per_step=sum(t.tokens - 1 for t in timings) / steps if steps else 1.0,
        num_requests=len(timings),
    )


@contextmanager
def _fleet(model_dir: Path, dtype: str, speculation: str, *, first_port: int) -> Iterator[str]:
    """`tandem up` on ports of its own; yields the gateway's gRPC target."""
    with tempfile.TemporaryDirectory() as folder:
        state, log = Path(folder) / "fleet.json", Path(folder) / "fleet.log"
        command = [
            str(Path(sys.executable).with_name("tandem")), "up", "--model", str(model_dir),
            "--dtype", dtype, "--speculation", speculation, "--state-file", str(state),
            "--grpc-port", str(first_port), "--http-port", str(first_port + 1),
            "--base-port", str(first_port + 100),
        ]  # fmt: skip
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=sink, env=os.environ | {"TANDEM_HOME": folder}
            )
        try:
            while not (state.exists() and read_state(state).ready):
                if process.poll() is not None:
                    raise RuntimeError(f"tandem up ended:\n{log.read_text()}")
                time.sleep(0.2)
            yield f"127.0.0.1:{first_port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _tandem(target: str, prompts: Sequence[Prompt]) -> list[Timing]:
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    def one(prompt: Prompt) -> Timing:
        with grpc.insecure_channel(target) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            request = gateway_pb2.GenerateRequest(
                token_ids=gateway_pb2.TokenIds(ids=prompt), sampling=sampling, slo_class="batch"
            )
            sent, times, tokens, steps = time.perf_counter(), [], 0, 0
            for response in stub.Generate(request, timeout=600):
                if response.chunk.token_ids:
                    times.append(time.perf_counter())
                    tokens += len(response.chunk.token_ids)
                if response.HasField("end"):
                    steps = response.end.receipt.decode_steps
            return Timing(times[0] - sent, (times[-1] - times[0]) / (tokens - 1), tokens, steps)

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def _transformers_peers(model_dir: Path, dtype: str) -> tuple[Serve, Serve]:
    """Plain greedy `generate`, and the same with prompt lookup."""
    import transformers
    from transformers import AutoModelForCausalLM, GgufConfig

    weights = model_dir / store.ModelManifest.read(model_dir).weights
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=getattr(torch, dtype),
        # Plain weights, as Tandem computes with; unpacking at each step would be slower.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.generation_config.eos_token_id = None

    class Clock(transformers.generation.BaseStreamer):
        """Notes when tokens come; the first call brings the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []
            self.counts: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.perf_counter())
            self.counts.append(value.shape[-1] if value.ndim > 1 else 1)

        def end(self) -> None:
            pass

    @torch.inference_mode()
    def generate(prompts: Sequence[Prompt], **options: object) -> list[Timing]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        clock, sent = Clock(), time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
            **options,
        )
        tokens = out.shape[1] - width
        first, last = clock.times[1], clock.times[-1]
        steps = len(clock.times) - 2
        return [Timing(first - sent, (last - first) / (tokens - 1), tokens, steps) for _ in prompts]

    def lookup(prompts: Sequence[Prompt]) -> list[Timing]:
        timings, waited = [], 0.0
        for prompt in prompts:
            started = time.perf_counter()
            (timing,) = generate([prompt], prompt_lookup_num_tokens=10)
            timings.append(Timing(waited + timing.ttft, timing.tpot, timing.tokens, timing.steps))
            waited += time.perf_counter() - started
        return timings

    return generate, lookup


def _report(cells: list[Cell], options: argparse.Namespace) -> None:
    out: Path = options.out
    # Paths shortened: what was run, not where.
    command = " ".join(
        [
            "python benchmarks/against_transformers.py",
            *(Path(a).name if "/" in a else a for a in sys.argv[1:]),
        ]
    )
    machine = f"{_cpu_name()}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}"
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": machine,
        "dtype": options.dtype,
        "output_tokens": OUTPUT_TOKENS,
        "cells": [asdict(c) for c in cells],
    }
    out.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    base = {(c.context, c.concurrency): c for c in cells if c.peer == "transformers"}
    lines = [
        f"Command: `{command}`  ",
        f"Hardware: {machine}; {options.dtype}; {options.repeats} rounds; "
        f"{OUTPUT_TOKENS} output tokens; medians of all requests.",
        "",
        "| context | at once | system | TTFT ms | vs HF | TPOT ms | vs HF | tokens/step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for context, concurrency in base:
        for cell in cells:
            if (cell.context, cell.concurrency) == (context, concurrency):
                other = base[context, concurrency]
                lines.append(
                    f"| {context} | {concurrency} | {cell.peer} | {cell.ttft_ms:.0f} "
                    f"| {other.ttft_ms / cell.ttft_ms:.2f}x | {cell.tpot_ms:.1f} "
                    f"| {other.tpot_ms / cell.tpot_ms:.2f}x | {cell.tokens_per_step:.2f} |"
                )
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
