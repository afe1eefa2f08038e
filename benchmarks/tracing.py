"""What tracing costs: beside the same system with tracing off, and in one process by the request.

    python benchmarks/tracing.py [--rounds 12] [--requests 6] [--out FILE.md]

Two fleets (`tandem up`, default model) run side by side on the same cores, one without tracing and one that
traces a tenth of its requests. They get the same requests in turns; each round gives one ratio of token
rates and one of CPU seconds per token, over all processes of a fleet. The fleets are changed in order from
round to round, so that drift of the machine falls on both alike.

The second part repeats the calls that one request makes in its three processes, and counts the CPU time of
the whole process, with that of the thread that encodes and sends the spans. The collector is a process of its
own. All traffic is on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry
from reporting import markdown_table, write_page
from tandem_cli.bench.records_file import read_runs
from tandem_core.sampling import SamplingParams
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_engine import model_loader
from tandem_gateway import trace_attributes
from tandem_gateway.choices import Running
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import TokenizedRequest
from tandem_proto.v1 import common_pb2, decode_pb2
from tandem_service.tracing import RequestTrace, Tracing, start_tracing

SHARE = 0.1
INPUT_TOKENS, OUTPUT_TOKENS = 400, 32
FIRST_PORT = 28100
NOTES = """The first four rows are CPU time of one process that makes the tracing calls of gateway, decode pod
and prefill pod, with encoding and sending; the spread is from the least to the most of five. In the last two
rows it is the middle half of the pairs, and shows what this machine can resolve."""
START_LIMIT_S = 300.0


class _Sink(BaseHTTPRequestHandler):
    """Takes everything."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def _serve_collector(pipe: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    pipe.send(server.server_port)
    server.serve_forever()


@contextmanager
def collector() -> Iterator[str]:
    """The URL of one in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve_collector, args=(theirs,), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


@dataclass
class Fleet:
    name: str
    process: subprocess.Popen[bytes]
    grpc_port: int

    def cpu_s(self) -> float:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return sum(sum(process.cpu_times()[:2]) for process in family)


@dataclass(frozen=True)
class Load:
    """One run of `tandem bench serve`."""

    tokens_per_s: float
    cpu_s_per_token: float


@contextmanager
def fleet(name: str, slot: int, folder: Path, environment: dict[str, str], memory: str) -> Iterator[Fleet]:
    port = FIRST_PORT + 10 * slot
    state, script = folder / f"{name}.json", Path(sys.executable).with_name("tandem")
    model = str(model_loader.pull(model_loader.DEFAULT_MODEL))
    command = [str(script), "up", "--model", model, "--grpc-port", str(port), "--http-port", str(port + 1),
               "--base-port", str(20000 + 2000 * slot), "--state-file", str(state),
               "--set", f"decode.memory-bytes={memory}", "--set", f"prefill.memory-bytes={memory}",
               ]  # fmt: skip
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    # Each fleet keeps its own shared text, so that both draft from the same.
    home = {"TANDEM_HOME": str(folder / name)}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=clean | home | environment)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not (state.exists() and json.loads(state.read_text())["ready"]):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / f"{name}.log").read_text()[-2000:])
            time.sleep(0.2)
        yield Fleet(name, process, port)
    finally:
        process.terminate()
        process.wait()


def load(fleet: Fleet, folder: Path, options: argparse.Namespace, seed: int) -> Load:
    script, out = Path(sys.executable).with_name("tandem"), folder / "bench.json"
    command = [str(script), "bench", "serve", "--target", f"127.0.0.1:{fleet.grpc_port}",
               "--slo-class", "batch", "--concurrency", "2", "--num-requests", str(options.requests),
               "--input-tokens", str(INPUT_TOKENS), "--max-tokens", str(OUTPUT_TOKENS), "--ignore-eos",
               "--seed", str(seed), "--output", str(out)]  # fmt: skip
    before = fleet.cpu_s()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    used = fleet.cpu_s() - before
    (run,) = read_runs(out)
    if run.summary.num_ok != options.requests:
        raise RuntimeError(f"{fleet.name}: {run.summary.failures}")
    rate = run.summary.output_tokens_per_s
    return Load(rate, used / (rate * run.summary.duration_s))


def beside_off(options: argparse.Namespace) -> tuple[list[list[str]], float]:
    """Rows, and the median of the CPU seconds of a request without tracing."""
    rates: list[float] = []
    costs: list[float] = []
    requests_s: list[float] = []
    # Each of the two places is traced in one half of the rounds.
    for is_traced in ((False, True), (True, False)):
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            traced = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": stack.enter_context(collector()),
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": str(SHARE),
            }
            fleets = []
            for slot, is_on in enumerate(is_traced):
                which, environment = ("on", traced) if is_on else ("off", {})
                one = stack.enter_context(fleet(which, slot, folder, environment, options.memory))
                fleets.append(one)
            for index in range(-1, options.rounds // 2):
                order = fleets if index % 2 else fleets[::-1]
                found = {one.name: load(one, folder, options, index + 1) for one in order}
                if index < 0:  # warms up
                    continue
                on, off = found["on"], found["off"]
                rates.append(on.tokens_per_s / off.tokens_per_s)
                costs.append(on.cpu_s_per_token / off.cpu_s_per_token)
                requests_s.append(off.cpu_s_per_token * OUTPUT_TOKENS)
                print(index, f"rate {rates[-1]:.3f}, CPU {costs[-1]:.3f}", flush=True)
    rows = [
        [f"tokens/s, 10 % traced / off, {len(rates)} pairs", *_spread(rates)],
        [f"CPU s per token, 10 % traced / off, {len(costs)} pairs", *_spread(costs)],
    ]
    return rows, statistics.median(requests_s)


def _spread(ratios: list[float]) -> list[str]:
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    middle = f"{ordered[quarter]:.3f} to {ordered[-1 - quarter]:.3f}"
    return [f"{statistics.median(ordered):.4f}", middle]


REQUEST = TokenizedRequest(
    request_id="0123456789abcdef", tenant="default", prompt_token_ids=(1,) * 200, sampling=SamplingParams(),
    slo=DEFAULT_SLO_CLASSES["interactive"], arrived=0.0, deadline=1.0,
)  # fmt: skip
ENDED = Running(
    REQUEST,
    GatewayMetrics(CollectorRegistry(), model_name="model").of(REQUEST),
    end=decode_pb2.DecodeFinished(
        reason=common_pb2.FINISH_REASON_STOP, receipt=common_pb2.Receipt(request_id="0123456789abcdef")
    ),
)


def one_request(tracings: list[Tracing]) -> None:
    """What a request of 200 prompt tokens with a prefill pod asks of the three processes."""
    gateway, decode, prefill = tracings

    def below(tracing: Tracing, trace: RequestTrace, name: str) -> RequestTrace:
        return tracing.begin(trace.metadata, name, "queue", started_ns=time.monotonic_ns())

    root = gateway.begin((), "chat model", "receive", started_ns=time.monotonic_ns(), is_entry=True)
    if root.is_recording:
        root.set(trace_attributes.of_call("chat", "model"))
        root.set(trace_attributes.of_request(REQUEST))
    root.stage("tokenize")
    root.begin_work("admission queue")
    root.call_stage("call decode pod", "127.0.0.1:1", {"tandem.decode.retries": 0})
    pod = below(decode, root, "decode pod")
    pod.stage("reserve blocks")
    pod.call_stage("call prefill pod", "127.0.0.1:2")
    source = below(prefill, pod, "prefill pod")
    for name in ("prefill", "send KV", "release"):
        source.stage(name)
    source.set({"tandem.outcome": "ok", "tandem.prompt.tokens": 200, "tandem.kv.sent_bytes": 1})
    source.end()
    for name in ("KV transfer", "adopt blocks", "decode"):
        pod.stage(name)
    if pod.is_recording:
        pod.set_stage({"tandem.decode.tokens": 64, "tandem.decode.steps": 20, "tandem.preemptions": 0})
    pod.stage("release")
    pod.end()
    if root.is_recording:
        root.set(trace_attributes.of_choices(1, len(REQUEST.prompt_token_ids)))
        root.set(trace_attributes.of_answer([ENDED], "model"))
    root.set({"tandem.outcome": "ok"})
    root.end_work("respond")
    root.end()


async def cost_us(environment: dict[str, str], num_requests: int) -> float:
    """CPU microseconds of a request, over all of this process's threads."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    os.environ.update(environment)
    tracings = [start_tracing(role, "x") for role in ("gateway", "decode", "prefill")]

    def run(number: int) -> None:
        for _ in range(number):
            contextvars.copy_context().run(one_request, tracings)

    run(50)
    started = time.process_time()
    for _ in range(num_requests // 20):
        run(20)
        await asyncio.sleep(0.02)  # the queue of spans must not overflow: dropped spans cost less
    for tracing in tracings:
        await tracing.close()
    return (time.process_time() - started) / num_requests * 1e6


def in_process(options: argparse.Namespace) -> tuple[list[list[str]], float]:
    """Rows, and what tracing a tenth of the requests costs each, in seconds."""
    with collector() as url:
        on = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_TRACES_SAMPLER": "traceidratio"}
        cases: dict[str, dict[str, str]] = {
            "off": {},
            "on, request not traced": on | {"OTEL_TRACES_SAMPLER_ARG": "0"},
            "on, request traced, spans sent": on | {"OTEL_TRACES_SAMPLER_ARG": "1"},
            "on, 10 % of requests traced": on | {"OTEL_TRACES_SAMPLER_ARG": str(SHARE)},
        }
        figures: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(5):
            for name, environment in cases.items():
                figures[name].append(asyncio.run(cost_us(environment, options.calls)))
    medians = {name: statistics.median(found) for name, found in figures.items()}
    rows = []
    for name, found in figures.items():
        spread = f"{min(found):.0f} to {max(found):.0f}"
        rows.append([f"tracing calls of one request, {name}", f"{medians[name]:.0f} µs", spread])
    return rows, (medians["on, 10 % of requests traced"] - medians["off"]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=12, help="pairs of runs; 0: only the cost in one process"
    )
    parser.add_argument("--requests", type=int, default=6, help="of one run")
    parser.add_argument("--calls", type=int, default=2000, help="of each case in one process")
    parser.add_argument("--memory", default="1000000000", help="bytes of each pod")
    parser.add_argument("--out", type=Path, help="write the page here")
    options = parser.parse_args()
    rows, added_s = in_process(options)
    if options.rounds:
        paired, request_s = beside_off(options)
        tokens = f"{INPUT_TOKENS} + {OUTPUT_TOKENS} tokens"
        rows += [
            [f"a request of {tokens}, CPU of all processes, off", f"{request_s:.2f} s", ""],
            ["what tracing 10 % adds to that", f"{added_s / request_s:.3%}", ""],
            *paired,
        ]
    head = ["", "median", "spread"]
    table = markdown_table(head, rows)
    print(table)
    if options.out is not None:
        write_page(options.out, "What tracing costs", table, NOTES)


if __name__ == "__main__":
    main()
