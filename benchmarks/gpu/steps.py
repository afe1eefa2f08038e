"""Part C: whole engine steps of an 8B model with random weights (dry run: of a tiny one).

A step is all of `Engine.step`: draft, schedule, forward pass, verify, compact, update. Guesses are random
tokens; the verifier computes what it always does, but then accepts as many guesses as the table says, so that
accepted KV is moved as in real use. Random weights take as long as trained ones.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from floors import layer_weights
from tandem_core.model.spec import ModelSpec
from tandem_core.sampling import SamplingParams
from tandem_engine.batch import Batch
from tandem_engine.block_manager import BlockGroup, BlockManager
from tandem_engine.draft_source import Emitted
from tandem_engine.draft_tree import DraftTree
from tandem_engine.engine import Engine
from tandem_engine.request import Request
from tandem_engine.runner import ModelRunner
from tandem_engine.sampling.verify import Verified, Verifier
from tandem_engine.scheduler import Scheduler, SchedulerConfig
from tandem_engine.workspace import StepLimits

from gpu.runner import Bench, Stage
from gpu.shapes import BLOCK_SIZE, make_runner, model_shape, random_decoder

#: Guesses accepted of a draft, by rows of the step.
ACCEPTED = {1: 0, 8: 2, 16: 3}
MAX_CONTEXT = {"max_position_embeddings": 8192}
#: Steps before those that are timed, and after them under the profiler.
WARM_UP, PROFILED = 3, 3
#: Seconds that filling sequences with context leaves to the rows of the table.
MEASURING_S = 60.0


class BinaryTrees:
    """A drafter that proposes `num_guesses` random tokens for each sequence."""

    def __init__(self, vocab_size: int) -> None:
        self.num_guesses = 0
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def propose(
        self, requests: Sequence[Request], max_nodes: int, share: float = 1.0
    ) -> list[DraftTree | None]:
        n = self.num_guesses
        if n == 0:
            return [None] * len(requests)
        parents, sources = tuple(i // 2 for i in range(n)), ("output",) * n
        return [
            DraftTree(tuple(self._random.randrange(self._vocab_size) for _ in range(n)), parents, sources)
            for _ in requests
        ]

    def observe_step(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        """Learns nothing."""

    def extend(self, emitted: Sequence[Emitted], logits: Any) -> None:
        """Learns nothing."""

    def forget(self, request_id: str) -> None:
        """Knows nothing."""


class ForcedVerifier(Verifier):
    """Verifies, and then accepts the guesses along the last branch, as many as ACCEPTED says."""

    def verify(self, batch: Batch, *logits: Any) -> list[Verified]:
        computed = super().verify(batch, *logits)
        sampling = [s for s in batch.sequences if s.samples]
        return [
            replace(verified, **_forced(sequence.draft, verified.token_ids[-1]))
            if sequence.draft
            else verified
            for sequence, verified in zip(sampling, computed, strict=True)
        ]


def _forced(draft: DraftTree, bonus: int) -> dict[str, tuple[object, ...]]:
    path = [len(draft)]
    while path[0]:
        path.insert(0, draft.parents[path[0] - 1])
    path = path[: ACCEPTED[len(draft) + 1] + 1]
    tokens = tuple(draft.token_ids[node - 1] for node in path[1:])
    return {
        "token_ids": (*tokens, bonus),
        "path": tuple(path),
        "accepted_sources": tuple(draft.sources[node - 1] for node in path[1:]),
    }


@dataclass
class Rig:
    """A model and its pool; engines of different settings around them."""

    runner: ModelRunner
    limits: StepLimits

    @property
    def spec(self) -> ModelSpec:
        return self.runner.decoder.spec

    def engine(self, drafts: BinaryTrees | None, chunk_size: int) -> Engine:
        manager = BlockManager(
            [BlockGroup(self.runner.pool.groups[0].num_blocks)], BLOCK_SIZE, enable_prefix_caching=False
        )
        limits = SchedulerConfig(
            max_model_len=self.spec.max_len,
            max_batch=self.limits.max_seqs,
            max_tokens_per_step=self.limits.max_tokens,
            chunk_size=chunk_size,
        )
        return Engine(
            self.runner, Scheduler(manager, limits), ForcedVerifier(), manager,
            vocab_size=self.spec.vocab_size, drafter=drafts, max_draft_nodes=max(ACCEPTED) - 1,
        )  # fmt: skip


def make_rig(bench: Bench, num_blocks: int, limits: StepLimits) -> Rig:
    # A longer context would only take memory.
    decoder = random_decoder(model_shape(bench.dry) | MAX_CONTEXT, bench.device)
    return Rig(make_runner(decoder, limits, num_blocks), limits)


def add_requests(
    engine: Engine, count: int, num_tokens: int, vocab_size: int, *, max_tokens: int, name: str = "r"
) -> None:
    source = random.Random(0)
    for i in range(count):
        prompt = [source.randrange(vocab_size) for _ in range(num_tokens)]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add(Request(f"{name}{i}", prompt, sampling))


def decode(bench: Bench) -> None:
    """Decode steps at 4K context (dry run: 120). Per step: host wall time, and what the profiler counts."""
    batches, context = ((3, 1), 120) if bench.dry else ((128, 64, 32, 8, 1), 4096)
    repeats = 3 if bench.dry else 12
    # A sequence grows by its accepted guesses and one in every step; the context is right in the middle.
    grown = (WARM_UP + repeats + PROFILED) * sum(n + 1 for n in ACCEPTED.values()) * len(batches)
    prompt = max(1, context - grown // 2)
    chunk_size = context if bench.dry else 8192
    # The first ones already decode while the others' prompts are computed.
    filling = -(-batches[0] * prompt // chunk_size) + batches[0]
    max_tokens = filling + grown + max(ACCEPTED)
    blocks_each = -(-(prompt + max_tokens) // BLOCK_SIZE) + 1
    rows = batches[0] * max(ACCEPTED)
    rig = make_rig(bench, batches[0] * blocks_each, StepLimits(max(chunk_size, rows), batches[0], rows))
    batches = tuple(batch for batch in batches if batch * blocks_each <= rig.runner.pool.groups[0].num_blocks)
    vocab_size = rig.spec.vocab_size
    drafts = BinaryTrees(vocab_size)
    engine = rig.engine(drafts, chunk_size)
    add_requests(engine, batches[0], prompt, vocab_size, max_tokens=max_tokens)
    filled = fill(bench, engine, batches[0], prompt)
    batches = tuple(batch for batch in batches if batch <= filled)
    bench.table(
        "batch", "n", "tokens/step", "ms", "tokens/s", "T_n/T_1", "kernels", "launches", "syncs", "GPU idle"
    )
    for batch in batches:
        for request in engine.scheduler.decoding()[batch:]:
            engine.abort(request.request_id)
        one_ms = 0.0
        for n in ACCEPTED:
            if bench.left_s < 10:
                bench.note("The other rows did not fit the time.")
                return
            drafts.num_guesses = n - 1
            for _ in range(WARM_UP):
                engine.step()
            times, tokens = [], 0
            for _ in range(repeats):
                began = time.perf_counter()
                outputs = engine.step()
                times.append((time.perf_counter() - began) * 1e3)
                if len(outputs) != batch or any(output.finished for output in outputs):
                    raise RuntimeError("a request ended, or waited, during the measurement")
                tokens = sum(len(output.token_ids) for output in outputs)
            ms = statistics.median(times)
            one_ms = one_ms or ms
            bench.row(
                batch, n, tokens, f"{ms:.2f}", f"{tokens / ms * 1e3:.0f}", f"{ms / one_ms:.2f}",
                *counts(trace(engine, bench.dry), PROFILED),
            )  # fmt: skip


def fill(bench: Bench, engine: Engine, count: int, prompt: int) -> int:
    """Computes the waiting prompts while the stage has time for them; returns how many sequences decode."""
    began = time.perf_counter()
    while len(engine.scheduler.decoding()) < count and bench.left_s > MEASURING_S:
        engine.step()
    decoding = engine.scheduler.decoding()
    speed = len(decoding) * prompt / (time.perf_counter() - began)
    bench.note(f"{len(decoding)} prompts of {prompt} tokens were computed at {speed:.0f} tokens/s.")
    if len(decoding) < count:
        bench.note(f"The other {count - len(decoding)} did not fit the time; nor do batches that need them.")
        kept = {request.request_id for request in decoding}
        for i in range(count):
            if f"r{i}" not in kept:
                engine.abort(f"r{i}")
    if not decoding:
        raise RuntimeError("not one prompt was computed in the stage's time")
    return len(decoding)


def trace(engine: Engine, dry: bool) -> list[dict[str, object]]:
    """The events of PROFILED steps, as in a Chrome trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not dry:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(PROFILED):
                engine.step()
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return list(json.loads(path.read_text())["traceEvents"])


def counts(events: list[dict[str, object]], num_steps: int) -> list[str]:
    """Kernels, launches by the host, waits of the host, and the GPU's idle share; per step."""
    kernels = 0
    launches = 0
    syncs = 0
    spans: list[tuple[float, float]] = []
    for event in events:
        category, name = str(event.get("cat", "")), str(event.get("name", ""))
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels += category == "kernel"
            begin = float(str(event["ts"]))
            spans.append((begin, begin + float(str(event["dur"]))))
        elif category in ("cuda_runtime", "cuda_driver"):
            launches += "Launch" in name
            syncs += "Synchronize" in name
    busy, covered_to = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, covered_to))
        covered_to = max(covered_to, end)
    if not spans:
        return ["0", "0", "0", "-"]
    idle = 1 - busy / (covered_to - min(spans)[0])
    return [*(f"{n / num_steps:.1f}" for n in (kernels, launches, syncs)), f"{idle:.0%}"]


def prefill(bench: Bench) -> None:
    """A prompt of 4K tokens (dry run: 96), alone, in chunks."""
    length, chunks = (96, (32, 128)) if bench.dry else (4096, (512, 2048, 8192))
    repeats = 2 if bench.dry else 5
    rig = make_rig(bench, 2 * -(-length // BLOCK_SIZE) + 4, StepLimits(max(*chunks, 16), 1, 16))
    spec = rig.spec
    flops = 2 * length * sum(layer_weights(spec))
    flops += 2 * sum(a.heads * a.k_dim for a in spec.attentions) * length * length
    bench.table("chunk", "ms to the first token", "tokens/s", "TFLOP/s")
    for chunk_size in chunks:
        engine = rig.engine(None, chunk_size)
        times = []
        for i in range(repeats + 1):
            add_requests(engine, 1, length, spec.vocab_size, max_tokens=1, name=f"{i}-")
            began = time.perf_counter()
            while not engine.step():
                pass
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[1:])
        bench.row(chunk_size, f"{seconds * 1e3:.1f}", f"{length / seconds:.0f}", flops / seconds / 1e12)


STAGES = [Stage("decode", 225, decode), Stage("prefill", 70, prefill)]
