"""Part A: what the machine is, and whether the GPU path computes the right thing."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import torch
from tandem_core.sampling import SamplingParams
from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.draft_tree import DraftTree
from tandem_engine.kv_pool import KVPool
from tandem_engine.models.decoder import Decoder
from tandem_engine.request import Request
from tandem_engine.runner import ModelRunner
from tandem_engine.workspace import StepLimits

from gpu.runner import Bench, Stage, query_gpu
from gpu.shapes import make_runner, model_shape, random_decoder, random_tree

ROOT = Path(__file__).resolve().parents[2]
#: Largest ratio of |graph - eager| to |eager|, as norms of all logits: a few roundings of bfloat16.
TOLERANCE = 0.03
#: A test takes seconds, of which the kernels' compiler takes most.
TEST_TIMEOUT_S = 60


def versions(bench: Bench) -> None:
    """What runs here."""
    bench.table("what", "value")
    bench.row("Python", sys.version.split()[0])
    bench.row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in ("triton", "grpcio", "pyzmq"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            bench.row(name, metadata.version(name))
    if bench.dry:
        bench.row("GPU", "none")
        return
    properties = torch.cuda.get_device_properties(0)
    bench.row("GPU", f"{properties.name}, sm_{properties.major}{properties.minor}")
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
    for name, value in zip(fields.split(","), query_gpu(fields).split(","), strict=False):
        bench.row(name, value.strip())


def build(bench: Bench) -> None:
    """Compiles the C++ parts (build_native.py)."""
    bench.table("what", "result")
    if bench.dry:
        bench.note("Not in a dry run: other processes use the libraries.")
        return
    began = time.perf_counter()
    result = subprocess.run([sys.executable, str(ROOT / "build_native.py")], capture_output=True, text=True)
    for path in result.stdout.split():
        bench.row(Path(path).name, "built")
    bench.row("seconds", time.perf_counter() - began)
    if result.returncode:
        raise RuntimeError(result.stderr.strip().splitlines()[-1])


def _synchronize(*tensors: torch.Tensor) -> None:
    if any(t.is_cuda for t in tensors):
        torch.cuda.synchronize()


# Graphs against eager steps


def runner_of_random_kv(decoder: Decoder, num_blocks: int, *, graphs: bool) -> ModelRunner:
    """The same KV for the same sizes."""
    limits = StepLimits(max_tokens=1024, max_seqs=128, max_decode_tokens=1024)
    runner = make_runner(decoder, limits, num_blocks, graphs=graphs)
    generator = torch.Generator(decoder.device).manual_seed(5)
    for cache in runner.pool.caches:
        cache.normal_(generator=generator)
    return runner


def decode_batch(batch: int, num_new: int, context: int, vocab_size: int, seed: int = 0) -> Batch:
    """Sequences of different lengths over blocks of their own, each with a tree if num_new > 1."""
    source = random.Random(seed)
    width = -(-(context + 64) // 64)
    sequences = []
    for b in range(batch):
        start = context - source.randrange(context // 2)
        tokens = tuple(source.randrange(vocab_size) for _ in range(num_new))
        draft = None
        if num_new > 1:
            draft = DraftTree(tokens[1:], tuple(random_tree(num_new)), ("output",) * (num_new - 1))
        blocks = tuple(range(b * width, b * width + -(-(start + num_new) // 64)))
        request = Request(f"r{b}", [1] * (start + 1), SamplingParams(temperature=0.0))
        sequences.append(ScheduledSequence(request, (blocks,), start, tokens, draft, True))
    return Batch(tuple(sequences))


def equality(bench: Bench) -> None:
    """Logits and KV of graphs (dry run: padded steps) against eager steps; drafts against decoding."""
    decoder = random_decoder(model_shape(bench.dry, num_layers=2), bench.device)
    vocab_size = decoder.spec.vocab_size
    context = 200 if bench.dry else 2000
    sizes = (
        [(1, 1), (3, 5)]
        if bench.dry
        else [(1, 1), (1, 8), (8, 1), (8, 8), (3, 5), (32, 16), (128, 1), (128, 8)]
    )
    num_blocks = max(batch for batch, _ in sizes) * -(-(context + 64) // 64)
    plain, graphs = (runner_of_random_kv(decoder, num_blocks, graphs=on) for on in (False, True))
    bench.table("step", "logits differ by", "same tokens", "KV differs in")
    worst = 0.0
    for batch, n in sizes:
        step = decode_batch(batch, n, context, vocab_size)
        expected = plain.execute(step).values
        for name in ("first run", "replay"):
            got = graphs.execute(step).values
            differs = ((got - expected).norm() / expected.norm()).item()
            worst = max(worst, differs)
            same = (got.argmax(1) == expected.argmax(1)).float().mean().item()
            blocks = sum(
                int((a[:-1] != b[:-1]).flatten(1).any(1).sum())
                for a, b in zip(plain.pool.caches, graphs.pool.caches, strict=True)
            )
            bench.row(f"{batch} x {n}, {name}", differs, f"{same:.1%}", f"{blocks} blocks")
    for n in (4,) if bench.dry else (2, 8, 16):
        # A chain of tokens as one draft, against the same tokens one after another.
        chain = decode_batch(1, n, context, vocab_size).sequences[0]
        draft = DraftTree(chain.token_ids[1:], tuple(range(n - 1)), ("output",) * (n - 1))
        together = ScheduledSequence(
            chain.request, chain.block_ids, chain.start, chain.token_ids, draft, True
        )
        got = graphs.execute(Batch((together,))).values.clone()
        one_by_one = []
        for i, token in enumerate(chain.token_ids):
            request = Request("r", [1] * (chain.start + i + 1), SamplingParams(temperature=0.0))
            alone = ScheduledSequence(request, chain.block_ids, chain.start + i, (token,), None, True)
            one_by_one.append(graphs.execute(Batch((alone,))).values.clone())
        expected = torch.cat(one_by_one)
        differs = ((got - expected).norm() / expected.norm()).item()
        worst = max(worst, differs)
        same = (got.argmax(1) == expected.argmax(1)).float().mean().item()
        bench.row(f"draft of {n - 1}, accepted, against {n} steps", differs, f"{same:.1%}", "-")
    if not worst <= TOLERANCE:
        raise ValueError(f"logits differ by {worst:.3g} of their norm, at most {TOLERANCE} is rounding")


# Tests


def gpu_tests(bench: Bench) -> None:
    """The tests marked `gpu` and each case of the kernels' tests, several at a time."""
    kernels = [f"tests/kernels/triton_{name}cases.py" for name in ("", "layer_", "draw_")]
    # Others may import packages that the machine lacks.
    marked = [
        str(path.relative_to(ROOT))
        for folder in ("engine", "kernels")
        for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]
    runs: list[list[str]] = (
        [["-m", "gpu", "tests/kernels/test_triton_layer_ops.py"]]
        if bench.dry
        # test_results_on_the_gpu would run the kernels' cases as one test.
        else [["-m", "gpu", "-k", "not results_on_the_gpu", *marked],
              ["-m", "not wide", *kernels]]
    )  # fmt: skip
    bench.table("test", "outcome")
    failed = [failure for run in runs if (failure := run_tests(bench, run))]
    if failed:
        raise RuntimeError("; ".join(failed))


def run_tests(bench: Bench, arguments: Sequence[str]) -> str | None:
    """A row for each test as it ends, in the repository's root; returns what went wrong.

    A test that waits for the driver forever heeds no signal. With pytest-xdist, pytest-timeout ends its
    worker from another thread: the test counts as failed, and a new worker runs the others.
    """
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    has_workers, has_timeout = (importlib.util.find_spec(name) for name in ("xdist", "pytest_timeout"))
    if has_timeout:
        command += ["--timeout", str(TEST_TIMEOUT_S)]
    if has_workers and not bench.dry:
        # Each worker holds some 500 MB of the device.
        num_workers = min(len(os.sched_getaffinity(0)), 12)
        command += ["-n", str(num_workers), "--max-worker-restart", "8"]
        command += ["--timeout-method", "thread"] if has_timeout else []
    outcomes: Counter[str] = Counter()
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
            if outcome := outcome_of(line):
                bench.row(*outcome)
                outcomes[outcome[1]] += 1
    if process.returncode or not outcomes:
        return f"pytest ended with {process.returncode}: {last}"
    return None


def outcome_of(line: str) -> tuple[str, str] | None:
    """Name and outcome of the test that a line of `pytest -v` is about, also of a worker of pytest-xdist."""
    words = "(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
    if found := re.match(rf"\[gw\d+\] \[ *\d+%\] {words} (\S+::.*)", line):
        return found[2].rstrip(), found[1]
    if found := re.match(rf"(\S+::.*) {words}", line):
        return found[1], found[2]
    return None


# Threads


def threads(bench: Bench) -> None:
    """Decode steps, gather and scatter, and captures at the same time, in three threads on one pool."""
    decoder = random_decoder(model_shape(bench.dry, num_layers=2), bench.device)
    rounds = 3 if bench.dry else 40
    context, own_blocks = 200, 8
    first_moved = 4 * -(-(context + 64) // 64)
    runner = runner_of_random_kv(decoder, first_moved + own_blocks, graphs=True)
    steps = [decode_batch(1 + i % 4, 1 + i % 3, context, decoder.spec.vocab_size, i) for i in range(rounds)]
    moved = range(first_moved, first_moved + own_blocks)
    layers = range(len(decoder.spec.cached))
    before = [cache.clone() for cache in runner.pool.caches]
    _synchronize(*before)
    contents = {layer: _read(runner.pool, layer, moved) for layer in layers}

    def decode() -> str:
        """The hash of all logits."""
        digest = hashlib.sha256()
        for step in steps:
            logits = runner.execute(step).values
            digest.update(logits.cpu().numpy().tobytes())
        return digest.hexdigest()

    def move() -> None:
        for _, layer in itertools.product(range(rounds), layers):
            if _read(runner.pool, layer, moved) != contents[layer]:
                raise ValueError("gathered blocks differ from what was scattered")
            if wait := runner.pool.scatter(layer, moved, memoryview(contents[layer])):
                wait()

    def capture() -> None:
        x = torch.randn(512, 512, dtype=torch.bfloat16, device=bench.device)
        for _ in range(rounds):
            expected = x * 3 + 1
            if bench.dry:
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                result = x * 3 + 1
            graph.replay()
            torch.cuda.current_stream().synchronize()
            if not torch.equal(result, expected):
                raise ValueError("a replayed graph computed something else")

    def all_kv() -> str:
        """The hash of all blocks but the scratch one."""
        digest = hashlib.sha256()
        for cache in runner.pool.caches:
            digest.update(cache[:-1].cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    decode()  # compiles and captures
    _restore(runner.pool, before)
    alone = (decode(), all_kv())
    _restore(runner.pool, before)
    results: dict[str, object] = {}
    errors: list[str] = []

    def catch(work: Callable[[], object]) -> None:
        try:
            results[work.__name__] = work()
        except Exception as error:
            errors.append(f"{work.__name__}: {error}")

    workers = [threading.Thread(target=catch, args=(work,)) for work in (decode, move, capture)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    same_logits, same_kv = results.get("decode") == alone[0], all_kv() == alone[1]
    bench.table("what", "result")
    bench.row(f"logits of {rounds} steps, SHA-256", "as alone" if same_logits else "DIFFER")
    bench.row("KV of all blocks, SHA-256", "as alone" if same_kv else "DIFFERS")
    bench.row("errors", "; ".join(errors) or "none")
    if errors or not same_logits or not same_kv:
        raise ValueError("; ".join(errors) or "results differ when three threads use the device")


def _restore(pool: KVPool, contents: list[torch.Tensor]) -> None:
    for cache, content in zip(pool.caches, contents, strict=True):
        cache.copy_(content)
    # Blocks are read on a stream of their own.
    _synchronize(*contents)


def _read(pool: KVPool, layer: int, block_ids: Sequence[int]) -> bytes:
    """Blocks as a transfer would send them; a GPU's are still being copied when `gather` returns."""
    gathered = pool.gather(layer, block_ids)
    return bytes(gathered.wait() if hasattr(gathered, "wait") else gathered)


STAGES = [
    Stage("versions", 20, versions),
    Stage("build", 45, build),
    Stage("equality", 75, equality),
    Stage("tests", 190, gpu_tests),
    Stage("threads", 45, threads),
]
