"""Times one engine step with n rows of one sequence, compared with transformers and the machine's floor.

    python benchmarks/engine_step.py --out FILE.md
    python benchmarks/engine_step.py --config dtype=bfloat16,quantization=w8a8 --out FILE.md

A step is all of `Engine.step`: draft, schedule, forward pass, verify, compact, update. n = 1 is plain
decoding; n = 8 and 16 verify a tree of n - 1 random guesses, of which hardly any is accepted. transformers
runs one forward pass of n tokens on a cache of the same length, without sampling. The systems take turns in
one process with the same threads. --config sets fields of tandem_engine.assemble.EngineConfig.

The floor (floors.py) is the least time of the forward pass with the system's own weights and KV.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from floors import Pass, Weights, floor_s
from huggingface_model import load
from machine import AMX, AMX_NOTE, Peaks, amx_cell, amx_tile_ns, measure_peaks
from reporting import markdown_table, write_page
from tandem_cli.bench.dataset import sample_dialogues
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.spec import ModelSpec
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_engine import model_loader
from tandem_engine.assemble import EngineConfig, assemble
from tandem_engine.draft_tree import DraftTree
from tandem_engine.models.config import ModelConfig
from tandem_engine.request import Request

ROWS = (1, 8, 16)
CONTEXTS = (512, 4096)
WARM_UP_STEPS = 2
#: Computes one step of that many rows at about the wanted context length.
Step = Callable[[int], None]
TRANSFORMERS = "transformers, bfloat16"


@dataclass(frozen=True)
class Line:
    """One line of the table; milliseconds by number of rows."""

    context: int
    system: str
    step_ms: dict[int, float]
    floor_ms: dict[int, float]
    #: State of the AMX units; "" without AMX.
    amx: str = ""


class RandomDrafter(Drafter):
    """Proposes `num_guesses` random tokens in a binary tree."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(None, DraftPolicy())
        self.num_guesses = 0
        self._vocabulary = range(vocab_size)
        self._random = random.Random(0)

    def propose(
        self, requests: Sequence[Request], max_nodes: int, share: float = 1.0
    ) -> list[DraftTree | None]:
        if self.num_guesses == 0:
            return [None] * len(requests)
        parents = tuple(i // 2 for i in range(self.num_guesses))
        tokens = tuple(self._random.choices(self._vocabulary, k=self.num_guesses))
        return [DraftTree(tokens, parents, ("output",) * self.num_guesses)] * len(requests)


def parse_config(model_dir: Path, text: str) -> EngineConfig:
    """FIELD=VALUE,... as an EngineConfig that can verify as many rows as are measured."""
    types = {field.name: str(field.type) for field in fields(EngineConfig)}
    values: dict[str, object] = {"max_draft_nodes": max(ROWS) - 1}
    for assignment in text.split(","):
        name, _, value = assignment.partition("=")
        if name not in types:
            raise SystemExit(f"--config: the engine has no option {name!r}; it has {', '.join(types)}")
        values[name] = int(value) if types[name] == "int" else value
    return EngineConfig(model=model_dir, **values)  # type: ignore[arg-type]


def tandem(config: EngineConfig, prompt: list[int], max_tokens: int) -> Step:
    """An engine whose one request has computed the prompt."""
    drafter = RandomDrafter(ModelManifest.read(config.model).vocab_size)
    engine = assemble(config, drafter).engine
    engine.add(
        Request("benchmark", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    )
    while not engine.step():
        pass

    def step(num_rows: int) -> None:
        drafter.num_guesses = num_rows - 1
        if not engine.step():
            raise RuntimeError("the request ended before the measurement")

    return step


def transformers(model_dir: Path, prompt: list[int]) -> Step:
    """A model with the prompt in its cache."""
    model = load(model_dir / ModelManifest.read(model_dir).weights, torch.bfloat16)
    with torch.inference_mode():
        cache = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def step(num_rows: int) -> None:
        model(torch.randint(model.config.vocab_size, (1, num_rows)), past_key_values=cache, use_cache=True)
        # As after a verification that accepts nothing.
        if num_rows > 1:
            cache.crop(1 - num_rows)

    return step


def measure(systems: dict[str, Step], num_steps: int) -> dict[str, dict[int, float]]:
    """System -> median milliseconds of a step by number of rows."""
    seconds: dict[str, dict[int, list[float]]] = {name: {n: [] for n in ROWS} for name in systems}
    for _ in range(WARM_UP_STEPS + num_steps):
        for name, step in systems.items():
            for num_rows in ROWS:
                began = time.perf_counter()
                step(num_rows)
                seconds[name][num_rows].append(time.perf_counter() - began)
    return {
        name: {n: 1e3 * statistics.median(by_rows[n][WARM_UP_STEPS:]) for n in ROWS}
        for name, by_rows in seconds.items()
    }


def floors_ms(spec: ModelSpec, weights: Weights, peaks: Peaks, context: int) -> dict[int, float]:
    """By number of rows, which are the last ones of the context."""
    return {
        n: 1e3 * floor_s(spec, weights, peaks, Pass(n, cached_tokens=context - n, logit_rows=n)) for n in ROWS
    }


def step_table(lines: Sequence[Line]) -> str:
    """Milliseconds per step, relative to one row, and their floors."""
    has_amx = any(line.amx for line in lines)
    head = ["context", "system", *(f"n={n} ms" for n in ROWS), *(f"T_{n}/T_1" for n in ROWS[1:])]
    head += [*(f"floor n={n}" for n in ROWS), *([AMX] if has_amx else [])]
    rows = []
    for line in lines:
        cells = [f"{line.step_ms[n]:.2f}" for n in ROWS]
        cells += [f"{line.step_ms[n] / line.step_ms[1]:.2f}" for n in ROWS[1:]]
        cells += [f"{line.floor_ms[n]:.2f}" for n in ROWS]
        rows.append([str(line.context), line.system, *cells, *([line.amx] if has_amx else [])])
    return markdown_table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=model_loader.DEFAULT_MODEL, help="a name, folder or GGUF file")
    parser.add_argument("--config", action="append", metavar="FIELD=VALUE[,FIELD=VALUE...]",
                        help="repeatable; default: dtype=auto and dtype=bfloat16")  # fmt: skip
    parser.add_argument("--steps", type=int, default=30, help="steps per number of rows")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model_dir = model_loader.pull(options.model)
    texts = options.config or ["dtype=auto", "dtype=bfloat16"]
    configs = {f"tandem, {text}": parse_config(model_dir, text) for text in texts}
    weights = {
        name: Weights.of(model_dir, config.dtype, config.quantization) for name, config in configs.items()
    }
    weights[TRANSFORMERS] = Weights.of(model_dir, "bfloat16")
    text = "\n\n".join(dialogue.as_text() for dialogue in sample_dialogues())
    tokens = Tokenizer(model_dir).encode(text) * 10
    num_steps = len(ROWS) * (options.steps + WARM_UP_STEPS)
    peaks, spec = measure_peaks(), ModelConfig.from_folder(model_dir).spec
    measured: list[tuple[int, dict[str, dict[int, float]], str]] = []
    for context in CONTEXTS:
        # A step appends a token, so the context starts short by half of all steps.
        prompt = tokens[: context - num_steps // 2]
        # Every accepted guess is one token more; there are hardly any.
        systems = {name: tandem(config, prompt, 2 * num_steps + 64) for name, config in configs.items()}
        # After Tandem, whose assembly sets the number of threads.
        systems[TRANSFORMERS] = transformers(model_dir, prompt)
        before = amx_tile_ns()
        times = measure(systems, options.steps)
        measured.append((context, times, amx_cell(before, amx_tile_ns())))
        peaks = peaks.best(measure_peaks())
    lines = [
        Line(context, name, step_ms, floors_ms(spec, weights[name], peaks, context), amx)
        for context, times, amx in measured
        for name, step_ms in times.items()
    ]
    notes = (
        f"{options.model}, one sequence; n is the number of rows, 1 for plain decoding. Figures are medians "
        f"of {options.steps} steps in milliseconds. transformers runs the forward pass alone. Floors are "
        "lower bounds of a forward pass: the time to read weights and KV once, or to compute the "
        f"multiply-adds if longer. This machine {peaks}."
    )
    if any(line.amx for line in lines):
        notes += f"\n\n{AMX_NOTE}"
    write_page(options.out, "Time of one engine step", step_table(lines), notes)


if __name__ == "__main__":
    main()
