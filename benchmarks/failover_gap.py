"""How long a stream pauses when its decode pod is killed, beside the time to compute its prompt anew.

    python benchmarks/failover_gap.py --out FILE.md

Starts `tandem up` with two decode pods and one prefill pod. In each round a client streams a greedy answer to
a prompt that no pod has seen; in the middle the decode pod that computes it gets SIGKILL. The table gives the
time to the first token, which is that of computing the prompt, and the longest pause between two chunks
around the kill: with prefix caches, and with none, so that the whole prompt is computed again. Each prompt is
sent once more without a kill; exit status 1: an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from reporting import markdown_table, page
from tandem_cli.state_file import FleetRecord, read_state
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_channel

PORT = 29051
START_LIMIT_S, ANSWER_LIMIT_S = 180.0, 300.0
NUM_DECODE, NUM_PREFILL = 2, 1
#: Name -> flags of `tandem up`.
MODES = {
    "prefix caches": "",
    "none": "--set prefill.prefix-cache=false --set decode.prefix-cache=false",
}


@dataclass
class Round:
    ttft_s: float
    pause_s: float
    #: Until the next pod had the KV, by its receipt; 0 without a kill.
    kv_s: float
    num_retries: int
    tokens: tuple[int, ...]


async def ask(target: str, prompt: list[int], num_tokens: int, at_half: asyncio.Event) -> Round:
    sampling = common_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    message = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt), sampling=sampling, slo_class="batch"
    )
    began, times, tokens = time.monotonic(), [], []
    async with open_channel(target) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        async for response in stub.Generate(message, timeout=ANSWER_LIMIT_S):
            if response.HasField("end"):
                receipt = response.end.receipt
                break
            times.append(time.monotonic())
            tokens += response.chunk.token_ids
            if len(tokens) >= num_tokens // 2:
                at_half.set()
    pause_s = max(after - before for before, after in itertools.pairwise(times))
    kv_s = (receipt.prefill_ns + receipt.transfer_ns) / 1e9 if receipt.decode_retries else 0.0
    return Round(times[0] - began, pause_s, kv_s, receipt.decode_retries, tuple(tokens))


async def kill_the_busy_pod(state: FleetRecord) -> None:
    for pod in state.pods:
        if pod.role == "decode" and pod.pid is not None:
            async with open_channel(f"{state.host}:{pod.ports['grpc']}") as channel:
                stub = decode_pb2_grpc.DecodeServiceStub(channel)
                status = await stub.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest(), timeout=5)
            if status.status.usage.requests_running:
                os.kill(pod.pid, signal.SIGKILL)
                return
    raise RuntimeError("no decode pod computes the answer")


async def serves(state_file: Path) -> FleetRecord | None:
    """The fleet once both decode pods and the prefill pod are known to the gateway."""
    try:
        state = read_state(state_file)
        async with open_channel(f"127.0.0.1:{PORT}") as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            fleet = await stub.GetFleetStatus(gateway_pb2.GetFleetStatusRequest(), timeout=2)
    except (FileNotFoundError, grpc.aio.AioRpcError):
        return None
    return state if sum(pod.healthy for pod in fleet.pods) == NUM_DECODE + NUM_PREFILL else None


async def until_serving(state_file: Path, up: asyncio.subprocess.Process) -> FleetRecord:
    give_up_at = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up_at:
        if up.returncode is not None:
            log = state_file.with_name("up.log").read_text()
            raise SystemExit(f"`tandem up` ended with code {up.returncode}:\n{log[-2000:]}")
        if (state := await serves(state_file)) is not None:
            return state
        await asyncio.sleep(0.2)
    raise TimeoutError(f"the fleet does not serve after {START_LIMIT_S:g} s")


async def measure(flags: str, given: argparse.Namespace, folder: Path, context: int) -> list[Round]:
    state_file, target = folder / "state.json", f"127.0.0.1:{PORT}"
    command = [str(Path(sys.executable).with_name("tandem")), "up", "--model", given.model]
    command += ["--decode", str(NUM_DECODE), "--prefill", str(NUM_PREFILL)]
    command += ["--grpc-port", str(PORT), "--http-port", str(PORT + 29), "--base-port", str(PORT + 49)]
    command += ["--state-file", str(state_file), *shlex.split(flags)]
    with (folder / "up.log").open("a") as log:
        up = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    rng = random.Random(context)
    prompts = [[rng.randrange(1000, 30_000) for _ in range(context)] for _ in range(given.rounds)]
    rounds = []
    try:
        for prompt in prompts:
            state, at_half = await until_serving(state_file, up), asyncio.Event()
            asking = asyncio.create_task(ask(target, prompt, given.max_tokens, at_half))
            await at_half.wait()
            await kill_the_busy_pod(state)
            rounds.append(await asking)
            print(
                f"{flags!r}, {context}: {rounds[-1].ttft_s:.2f} s, pause {rounds[-1].pause_s:.2f} s",
                flush=True,
            )
        await until_serving(state_file, up)
        for prompt, with_kill in zip(prompts, rounds, strict=True):
            without = await ask(target, prompt, given.max_tokens, asyncio.Event())
            if with_kill.num_retries != 1:
                raise SystemExit(f"{with_kill.num_retries} pods were lost with an answer instead of one")
            if without.tokens != with_kill.tokens:
                raise SystemExit(f"an answer differs: {with_kill.tokens} instead of {without.tokens}")
    finally:
        if up.returncode is None:
            up.send_signal(signal.SIGTERM)
            await up.wait()
    return rounds


async def run(given: argparse.Namespace) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for context in [int(length) for length in given.contexts.split(",")]:
            for name, flags in MODES.items():
                rounds = await measure(flags, given, Path(folder), context)
                pauses = [one.pause_s for one in rounds]
                rows.append(
                    [
                        f"{context:,}",
                        name,
                        str(len(rounds)),
                        f"{statistics.median([one.ttft_s for one in rounds]):.2f}",
                        f"{statistics.median(pauses):.2f}",
                        f"{max(pauses):.2f}",
                        f"{statistics.median([one.kv_s for one in rounds]):.2f}",
                    ]
                )
    header = ("prompt", "KV", "kills", "TTFT s", "pause s p50", "worst", "of it KV s p50")
    given.out.write_text(page("Pauses when a decode pod is killed", markdown_table(header, rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the page, as Markdown")
    add("--model", default="smollm2-135m-instruct", help="a name or folder")
    add("--contexts", default="500,3840", help="tokens of the prompts")
    add("--rounds", type=int, default=6, help="kills of each kind")
    add("--max-tokens", type=int, default=160)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
