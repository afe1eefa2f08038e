"""Time of one engine step with n rows of one sequence, for each numerics option, beside transformers.

    python benchmarks/engine_step.py --config dtype=bfloat16 --out OUT

A step is all of `Engine.step`: draft, schedule, forward pass, verify, compact, update. With n = 1 it decodes
plainly; with n = 8 or 16 it verifies a tree of n - 1 guesses. The guesses are random tokens, of which hardly
any is accepted, and each step has others. transformers runs one forward pass of n tokens on a cache of the
same length, without sampling anything. Both take turns, n by n, in one process with the same threads.

--config holds fields of tandem_engine.assemble.EngineConfig, e.g. `dtype=float32`, and may be repeated; a new
option of the engine needs no change here.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from huggingface_model import load
from reporting import describe_command, describe_machine, markdown_table
from tandem_cli.bench.dataset import sample_dialogues
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.prefix_hash import cache_salt
from tandem_core.sampling import SamplingParams
from tandem_engine import model_loader
from tandem_engine.assemble import EngineConfig, assemble
from tandem_engine.draft_source import Emitted
from tandem_engine.draft_tree import DraftTree
from tandem_engine.engine import Engine
from tandem_engine.request import Request
from torch import Tensor

ROWS = (1, 8, 16)
CONTEXTS = (512, 4096)
#: Computes one step of that many rows at about the wanted context length.
Step = Callable[[int], None]


@dataclass(frozen=True)
class Result:
    system: str
    context: int
    #: Median step time by number of rows, milliseconds.
    step_ms: dict[int, float]


def main() -> None:
    options = _options()
    model_dir = model_loader.pull(model_loader.DEFAULT_MODEL)
    text = "\n\n".join(dialogue.as_text() for dialogue in sample_dialogues())
    tokens = Tokenizer(model_dir).encode(text) * 10
    configs = options.config or ["dtype=bfloat16"]
    results: list[Result] = []
    for context in CONTEXTS:
        # A step appends a token, so the context starts short by half of all steps.
        prompt = tokens[: context - len(ROWS) * options.steps // 2]
        systems: dict[str, Step] = {
            f"tandem, {text}": _tandem(parse_config(model_dir, text), prompt, len(ROWS) * (options.steps + 2))
            for text in configs
        }
        # After Tandem, whose assembly sets the number of threads.
        systems[f"transformers, {options.peer_dtype}"] = _transformers(model_dir, options.peer_dtype, prompt)
        results += _measure(systems, context, options.steps)
    _report(results, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", action="append", metavar="FIELD=VALUE[,FIELD=VALUE...]",
                        help="one engine to measure; repeatable; default: dtype=bfloat16")  # fmt: skip
    parser.add_argument("--peer-dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=30, help="steps per number of rows")
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.md")
    return parser.parse_args()


def parse_config(model_dir: Path, text: str) -> EngineConfig:
    """FIELD=VALUE,... as an EngineConfig that can verify as many rows as are measured."""
    types = {field.name: str(field.type) for field in fields(EngineConfig)}
    values: dict[str, object] = {}
    for assignment in text.split(","):
        name, _, value = assignment.partition("=")
        if name not in types:
            raise SystemExit(f"--config: the engine has no option {name!r}; it has {', '.join(types)}")
        values[name] = int(value) if types[name] == "int" else value
    return EngineConfig(model=model_dir, **{"max_draft_nodes": max(ROWS) - 1, **values})  # type: ignore[arg-type]


class _RandomDrafts:
    """A drafter that proposes `num_nodes` random tokens in a binary tree."""

    def __init__(self, vocab_size: int) -> None:
        self.num_nodes = 0
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def propose(self, requests: Sequence[Request], max_nodes: int) -> list[DraftTree | None]:
        if self.num_nodes == 0:
            return [None] * len(requests)
        return [self._tree() for _ in requests]

    def observe_step(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        """Learns nothing."""

    def extend(self, emitted: Sequence[Emitted], logits: Tensor) -> None:
        """Learns nothing."""

    def forget(self, request_id: str) -> None:
        """Knows nothing."""

    def _tree(self) -> DraftTree:
        tokens = tuple(self._random.randrange(self._vocab_size) for _ in range(self.num_nodes))
        return DraftTree(tokens, tuple(i // 2 for i in range(self.num_nodes)), ("output",) * self.num_nodes)


def _tandem(config: EngineConfig, prompt: list[int], max_steps: int) -> Step:
    """An engine whose one request has computed the prompt."""
    manifest = ModelManifest.read(config.model)
    drafts = _RandomDrafts(manifest.vocab_size)
    engine: Engine = assemble(config, drafts).engine
    engine.add(
        Request(
            request_id="benchmark",
            prompt_token_ids=prompt,
            # Every accepted guess is one token more; there are hardly any.
            sampling=SamplingParams(temperature=0.0, max_tokens=2 * max_steps + 64, ignore_eos=True),
            cache_salt=cache_salt("", manifest.revision),
            eos_token_ids=frozenset(manifest.eos_token_ids),
        )
    )
    while not engine.step():
        pass

    def step(num_rows: int) -> None:
        drafts.num_nodes = num_rows - 1
        if not engine.step():
            raise RuntimeError("the request ended before the measurement")

    return step


def _transformers(model_dir: Path, dtype: str, prompt: list[int]) -> Step:
    """A model with the prompt in its cache, to which nothing is added for long."""
    model = load(model_dir / ModelManifest.read(model_dir).weights, getattr(torch, dtype))
    source = random.Random(0)
    with torch.inference_mode():
        cache = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def step(num_rows: int) -> None:
        tokens = [source.randrange(model.config.vocab_size) for _ in range(num_rows)]
        model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        # As after a verification that accepts nothing.
        if num_rows > 1:
            cache.crop(1 - num_rows)

    return step


def _measure(systems: dict[str, Step], context: int, num_steps: int) -> list[Result]:
    seconds: dict[str, dict[int, list[float]]] = {name: {n: [] for n in ROWS} for name in systems}
    for turn in range(num_steps + 2):
        for name, step in systems.items():
            for num_rows in ROWS:
                began = time.perf_counter()
                step(num_rows)
                if turn >= 2:  # the first ones warm up
                    seconds[name][num_rows].append(time.perf_counter() - began)
    return [
        Result(name, context, {n: 1e3 * statistics.median(times) for n, times in by_rows.items()})
        for name, by_rows in seconds.items()
    ]


def _report(results: list[Result], options: argparse.Namespace) -> None:
    command = describe_command()
    hardware = f"{describe_machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    method = (
        f"{model_loader.DEFAULT_MODEL}; one sequence; medians of {options.steps} steps; "
        "the systems take turns."
    )
    text = f"Command: `{command}`  \nHardware: {hardware}  \n{method}\n\n{step_table(results)}\n"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_name(options.out.name + ".md").write_text(text)
    print(text)


def step_table(results: Iterable[Result]) -> str:
    """Milliseconds per step, what n rows cost over one, and the last system's times over each one's."""
    results = list(results)
    peers = {result.context: result for result in results}
    head = ["context", "system"]
    head += [f"n={n} ms" for n in ROWS]
    head += [f"T_{n}/T_1" for n in ROWS[1:]]
    head += [f"vs HF, n={n}" for n in ROWS]
    rows = []
    for result in results:
        times, peer = result.step_ms, peers[result.context].step_ms
        rows.append(
            [
                str(result.context),
                result.system,
                *(f"{times[n]:.2f}" for n in ROWS),
                *(f"{times[n] / times[1]:.2f}" for n in ROWS[1:]),
                *(f"{peer[n] / times[n]:.2f}x" for n in ROWS),
            ]
        )
    return markdown_table(head, rows)


if __name__ == "__main__":
    main()
