"""Part D: a prefill pod and a decode pod as two processes on one GPU, over gRPC and ZeroMQ.

The model has the width of an 8B model, but 8 layers and 32K tokens of vocabulary, because 16 GB of weights
would take minutes to write and load. Per layer its KV is that of the 8B model. Weights are random.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from processes import free_port
from tandem_core.model.manifest import ModelManifest
from tandem_engine.model_loader.convert import write_weights
from tandem_engine.model_loader.stored import Dense, Stored
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.layout import TensorPart, WeightForm, stored_tensors
from tandem_kernels import runs_packed
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tokenizers import Tokenizer, decoders, models

from gpu.checks import build
from gpu.runner import Bench, Stage
from gpu.shapes import model_shape

#: Seconds at a stage's end in which rows of what was measured are written.
RESERVE_S = 5.0
MODEL_8_LAYERS = {"num_hidden_layers": 8, "vocab_size": 32768, "max_position_embeddings": 8192}


class RandomSource:
    """Random weights for the converter, made on the device."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        stored = stored_tensors(config.spec, config.names, WeightForm(torch.bfloat16))
        self._parts: dict[str, TensorPart] = {part.hf_name: part for s in stored for part in s.parts}
        self._device = device

    def names(self) -> set[str]:
        return set(self._parts)

    def formats(self) -> dict[str, int]:
        return {"BF16": 1}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name].shape

    def release(self) -> None:
        """Nothing is kept."""

    def get(self, name: str, rows: slice = slice(None)) -> torch.Tensor:
        first, *rest = self.shape(name)
        shape = (len(range(*rows.indices(first))), *rest)
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return (tensor.fill_(1.0) if name.endswith("norm.weight") else tensor.normal_(std=0.02)).cpu()

    def grid(self, name: str) -> None:
        """Nothing here is quantized."""

    def stored(self, name: str, rows: slice = slice(None)) -> Stored:
        return Dense(self.get(name, rows))


def make_folder(folder: Path, shape: dict[str, object], device: torch.device) -> None:
    """A model folder with random weights, in the form that pods on this device load."""
    config = ModelConfig.from_hf(shape)
    (folder / "config.json").write_text(json.dumps(shape))
    # No text is encoded; each token is shown as its number.
    tokenizer = Tokenizer(models.BPE(vocab={f"<{i}>": i for i in range(config.spec.vocab_size)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    ModelManifest(
        name="random", revision="ab" * 32, source="benchmarks/gpu", license="unknown", architecture="llama",
        max_model_len=config.spec.max_len, vocab_size=config.spec.vocab_size, eos_token_ids=(2,),
        bos_token="", eos_token="", chat_template="", tokenizer_hash="cd" * 32, add_bos=False, weights="",
        weight_bits=0,
    ).write(folder)  # fmt: skip
    form = WeightForm(torch.bfloat16, runs_packed(torch.bfloat16, device))
    write_weights(folder / form.file_name, config, RandomSource(config, device), form, "ab" * 32)


@dataclass
class Fleet:
    """The pods' addresses, and the decode pod's stub."""

    decode: decode_pb2_grpc.DecodeServiceStub
    prefill_target: str
    vocab_size: int


def start_pods(bench: Bench, folder: Path, ports: dict[str, int]) -> list[subprocess.Popen[bytes]]:
    sizes = (64, 200, 1) if bench.dry else (2048, 2048, 0)
    common = [
        *("--model", folder, "--device", bench.device.type, "--dtype", "bfloat16", "--quantization", "none"),
        *("--chunk-size", sizes[0], "--num-blocks", sizes[1], "--threads", sizes[2], "--max-batch", 32),
        *("--log-level", "warning"),
    ]
    own = {
        "prefill": [],
        # Every prompt that names a prefill pod is computed there, also the second time.
        "decode": ["--local-prefill-tokens", 32, "--idle-prefill-tokens", 32, "--no-prefix-cache",
                   "--speculation", "off"],
    }  # fmt: skip
    pods = []
    for role, port in ports.items():
        flags = [*common, *own[role], "--port", port, "--metrics-port", free_port(), "--pod-id", role]
        script = f"from tandem_{role}.main import main; main()"
        pods.append(subprocess.Popen([sys.executable, "-P", "-c", script, *map(str, flags)]))
    return pods


@asynccontextmanager
async def running_pods(bench: Bench, folder: Path, shape: dict[str, object]) -> AsyncIterator[Fleet]:
    """Both pods, ready; killed at the end."""
    ports = {role: free_port() for role in ("prefill", "decode")}
    pods = start_pods(bench, folder, ports)
    options = [("grpc.enable_http_proxy", 0)]
    channels = {role: grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for role, port in ports.items()}
    try:
        began = time.monotonic()
        for pod, channel in zip(pods, channels.values(), strict=True):
            ready = asyncio.ensure_future(channel.channel_ready())
            while not ready.done():
                await asyncio.wait([ready], timeout=0.5)
                if pod.poll() is not None:
                    raise RuntimeError(f"a pod ended with {pod.returncode} before it was ready")
                if bench.left_s < RESERVE_S:
                    raise RuntimeError("the pods were not ready in the stage's time; their logs are above")
        bench.note(f"Both pods were ready after {time.monotonic() - began:.0f} s.")
        stub = decode_pb2_grpc.DecodeServiceStub(channels["decode"])
        yield Fleet(stub, f"127.0.0.1:{ports['prefill']}", int(str(shape["vocab_size"])))
    finally:
        for channel in channels.values():
            await channel.close()
        for pod in pods:
            pod.kill()
            pod.wait()


@dataclass
class Stream:
    """What a client saw of one request."""

    began: float
    #: When chunks with tokens arrived.
    times: list[float] = field(default_factory=list)
    receipt: common_pb2.Receipt = field(default_factory=common_pb2.Receipt)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.began


async def request(
    fleet: Fleet, prompt: Sequence[int], max_tokens: int, stream: Stream, *, apart: bool
) -> Stream:
    message = decode_pb2.DecodeRequest(
        request_id=f"r{random.getrandbits(60)}",
        prompt_token_ids=prompt,
        sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        prefill_targets=[fleet.prefill_target] if apart else [],
    )
    async for response in fleet.decode.Decode(message):
        if response.HasField("finished"):
            stream.receipt.CopyFrom(response.finished.receipt)
        elif response.chunk.token_ids:
            stream.times.append(time.perf_counter())
    return stream


def random_prompt(fleet: Fleet, length: int) -> list[int]:
    return [random.randrange(3, fleet.vocab_size) for _ in range(length)]


async def one_request(fleet: Fleet, prompt: Sequence[int], *, apart: bool = True) -> Stream:
    stream = await request(fleet, prompt, 4, Stream(time.perf_counter()), apart=apart)
    if bool(stream.receipt.prefill_pod) != apart:
        raise RuntimeError(f"the prompt was computed by {stream.receipt.prefill_pod or 'the decode pod'}")
    return stream


async def in_time(bench: Bench, *requests: Coroutine[Any, Any, Stream]) -> list[Stream]:
    """The streams of all requests, or none if the stage's time ends first."""
    try:
        return await asyncio.wait_for(asyncio.gather(*requests), max(0.0, bench.left_s - RESERVE_S))
    except TimeoutError:
        return []


async def measure_idle(bench: Bench, fleet: Fleet, length: int, repeats: int) -> None:
    """Rows of one prompt at a time."""
    bench.table("one prompt at a time", "TTFT ms", "prefill ms", "residue ms", "KV MB", "KV GB/s over TTFT")
    new: list[Stream] = []
    again: list[Stream] = []
    local: list[Stream] = []
    for _ in range(repeats + 1):
        prompt = random_prompt(fleet, length)
        new += await in_time(bench, one_request(fleet, prompt))
        again += await in_time(bench, one_request(fleet, prompt))
        local += await in_time(bench, one_request(fleet, random_prompt(fleet, length), apart=False))
    for name, streams in (
        ("prompt computed on the prefill pod", new),
        ("prompt cached there: all KV is sent at once", again),
        ("prompt computed on the decode pod", local),
    ):
        kept = streams[1:]  # the first warms up
        if not kept:
            bench.row(f"{name}, {length} tokens", "did not fit the time")
            continue
        ttft = statistics.median(s.ttft_s for s in kept)
        num_bytes = kept[0].receipt.transfer_bytes
        bench.row(
            f"{name}, {length} tokens",
            f"{ttft * 1e3:.1f}",
            f"{statistics.median(s.receipt.prefill_ns for s in kept) / 1e6:.1f}",
            f"{statistics.median(s.receipt.transfer_ns for s in kept) / 1e6:.2f}" if num_bytes else "-",
            f"{num_bytes / 1e6:.1f}",
            num_bytes / ttft / 1e9 if num_bytes else "-",
        )


async def measure_at_once(bench: Bench, fleet: Fleet, length: int, repeats: int) -> None:
    """Rows of several prompts that arrive at the same time, all computed on the prefill pod."""
    bench.table(
        "prompts at once", "TTFT median ms", "TTFT max ms", "residue max ms", "KV GB/s until the last"
    )
    for count in (1, 4):
        rounds = []
        for _ in range(repeats + 1):
            prompts = [random_prompt(fleet, length) for _ in range(count)]
            if streams := await in_time(bench, *(one_request(fleet, prompt) for prompt in prompts)):
                rounds.append(streams)
        kept = rounds[1:]  # the first warms up
        if not kept:
            bench.row(count, "did not fit the time")
            continue
        slowest = statistics.median(max(s.ttft_s for s in streams) for streams in kept)
        num_bytes = sum(s.receipt.transfer_bytes for s in kept[0])
        bench.row(
            count,
            f"{statistics.median(s.ttft_s for streams in kept for s in streams) * 1e3:.1f}",
            f"{slowest * 1e3:.1f}",
            f"{max(s.receipt.transfer_ns for streams in kept for s in streams) / 1e6:.2f}",
            num_bytes / slowest / 1e9,
        )


async def measure_disturbance(bench: Bench, fleet: Fleet, length: int, streams: int, window_s: float) -> None:
    """Rows of the time between tokens of running streams, alone and beside prompts."""
    bench.table(f"{streams} running streams", "ITL median ms", "p99 ms", "max ms", "prompts", "their TTFT ms")
    running = [Stream(time.perf_counter()) for _ in range(streams)]
    # Long enough for all windows, at 1.6 ms a token.
    num_tokens = 1500 if bench.dry else 7000
    tasks = [
        asyncio.ensure_future(request(fleet, random_prompt(fleet, 24), num_tokens, stream, apart=False))
        for stream in running
    ]
    while not all(len(stream.times) > 5 for stream in running) and bench.left_s > RESERVE_S:
        await asyncio.sleep(0.01)
        if any(task.done() for task in tasks):
            raise RuntimeError("a stream ended before the measurement")
    for name in ("alone", "beside prompts on the prefill pod", "beside prompts on the decode pod"):
        began = time.perf_counter()
        prompts: list[Stream] = []
        if name == "alone":
            await asyncio.sleep(max(0.0, min(window_s, bench.left_s - RESERVE_S)))
        else:
            while time.perf_counter() - began < window_s and bench.left_s > RESERVE_S:
                apart = name == "beside prompts on the prefill pod"
                prompt = random_prompt(fleet, length)
                prompts += await in_time(bench, one_request(fleet, prompt, apart=apart))
        ended = time.perf_counter()
        gaps = sorted(
            (after - before) * 1e3
            for stream in running
            for before, after in zip(stream.times, stream.times[1:], strict=False)
            if began <= before and after <= ended
        )
        ttft = f"{statistics.median(s.ttft_s for s in prompts) * 1e3:.1f}" if prompts else "-"
        if len(gaps) < 2:
            ended_early = any(task.done() for task in tasks)
            bench.row(name, "the streams had ended" if ended_early else "did not fit the time")
            continue
        cells = (statistics.median(gaps), gaps[int(0.99 * len(gaps))], gaps[-1])
        bench.row(name, *(f"{ms:.2f}" for ms in cells), len(prompts), ttft)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def pods(bench: Bench) -> None:
    """Prefill and decode as two processes; KV crosses over ZeroMQ on loopback."""
    shape = model_shape(bench.dry) | ({"num_hidden_layers": 2} if bench.dry else MODEL_8_LAYERS)

    async def measure(folder: Path) -> None:
        async with running_pods(bench, folder, shape) as fleet:
            length, repeats = (200, 1) if bench.dry else (4096, 5)
            await measure_idle(bench, fleet, length, repeats)
            await measure_at_once(bench, fleet, length, repeats)
            sizes = (200, 2, 0.2) if bench.dry else (4096, 8, 3.5)
            await measure_disturbance(bench, fleet, *sizes)

    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        make_folder(Path(name), shape, bench.device)
        size = sum(path.stat().st_size for path in Path(name).iterdir())
        bench.note(f"Made a model folder of {size / 1e9:.2f} GB in {time.perf_counter() - began:.0f} s.")
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        asyncio.run(measure(Path(name)))


# The decode pod needs the compiled drafter.
STAGES = [Stage("build", 45, build), Stage("pods", 300, pods)]
