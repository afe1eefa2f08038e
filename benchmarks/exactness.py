"""Drafts change no token: texts with speculation beside the same texts without, counted token by token.

    python benchmarks/exactness.py --cut 3 --tokens 1000000 --log build/exactness.jsonl --out FILE.md

    piece    some requests: other prompts, lengths, seeds and sampling for each
    off      the piece without drafts                                        -> the tokens to be met
    local    again, with drafts from each sequence's own text
    global   again, with drafts also from a mirror that learns every step's tokens as they come

Everything is float32 in one process. A piece's requests run 1 to 64 at a time and join as others end, so
that a step mixes prompt chunks, plain decoding and drafts. Drafts are made without regard to their price, as
many as 256 rows a step allow: verification shall be shown exact here, not drafting worth its price.

`--cut N` keeps the model's first N layers and the first 8,192 tokens of its vocabulary, in a folder made for
the run: the weights are real, the text makes no sense, and a million tokens take one hour instead of ten.

A piece that is done is a line of the log; a further run with the same log goes on behind it, so that
`--seconds` may cut the work anywhere. The report sums up the whole log. Exit status 1: a token differed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from reporting import describe_command, describe_machine, markdown_table
from safetensors.torch import save_file
from tandem_cli.bench.dataset import load_dialogues, sample_dialogues
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.sampling import SamplingParams
from tandem_core.speculation import SpeculationMode
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_drafting.step_cost import StepCost
from tandem_engine import model_loader
from tandem_engine.assemble import EngineConfig, assemble
from tandem_engine.draft_tree import DraftTree
from tandem_engine.engine import StepOutput
from tandem_engine.model_loader.convert import open_source
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.layout import WeightForm, stored_tensors
from tandem_engine.request import Request

#: Requests under way at a time, piece by piece, and how many requests such a piece has.
BATCHES = ((1, 6), (4, 16), (16, 32), (64, 96))
MAX_ROWS = 256
CUT_VOCABULARY = 8192
MODES = (SpeculationMode.LOCAL, SpeculationMode.GLOBAL)
#: Every request takes one of them, with a seed of its own.
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.15, frequency_penalty=0.2),
    "temperature 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "the same, penalties": SamplingParams(
        temperature=0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.3
    ),
}


@dataclass(frozen=True)
class Piece:
    batch: int
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]


@dataclass(frozen=True)
class Run:
    """What came of one piece: a text for every request, and how it was drafted."""

    texts: list[list[int]]
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Outcome:
    """A line of the log. `tokens` generated without drafts; the rest by mode."""

    model: str
    piece: int
    batch: int
    tokens: int
    #: By sampling mode.
    modes: dict[str, int]
    drafted: dict[str, int]
    accepted: dict[str, int]
    differing: dict[str, int]


class Free(StepCost):
    """Guesses cost nothing, or so little that the likelier still come first; drafting takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_seconds = 1e9

    def observe(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        """Learns nothing."""

    def curve(self, num_sequences: int, context: int, max_guesses: int) -> array[float]:
        return array("d", [1.0 + 1e-9 * guesses for guesses in range(max_guesses + 1)])


class Eager(Drafter):
    """Sends as many guesses as MAX_ROWS allow."""

    def __init__(self, mirror: GlobalMirror) -> None:
        super().__init__(mirror, DraftPolicy())
        self.step_cost = Free()

    def propose(self, requests: Sequence[Request], max_nodes: int) -> list[DraftTree | None]:
        return super().propose(requests, min(max_nodes, MAX_ROWS // len(requests) - 1))


class Generator:
    """One engine; each call of `run` generates a piece anew."""

    def __init__(self, model_dir: Path, *, max_batch: int = 64, **sizes: object) -> None:
        manifest = ModelManifest.read(model_dir)
        self._mirror = GlobalMirror(vocab_size=manifest.vocab_size)
        wanted: dict[str, object] = {"dtype": "float32", "num_blocks": 1024, "max_draft_nodes": 12, **sizes}
        config = EngineConfig(model=model_dir, max_batch=max_batch, **wanted)  # type: ignore[arg-type]
        self._engine = assemble(config, Eager(self._mirror)).engine
        self._num_requests = 0

    def run(self, piece: Piece, mode: SpeculationMode) -> Run:
        requests = [
            Request(self._name(), list(prompt), sampling, speculation=mode)
            for prompt, sampling in zip(piece.prompts, piece.sampling, strict=True)
        ]
        waiting, live, drafted, accepted = list(reversed(requests)), 0, 0, 0
        while waiting or live:
            while waiting and live < piece.batch:
                self._engine.add(waiting.pop())
                live += 1
            for output in self._engine.step():
                drafted += len(output.drafted_sources)
                accepted += len(output.accepted_sources)
                live -= output.finished
                if mode is SpeculationMode.GLOBAL:
                    self._share(output)
        return Run([request.output_token_ids for request in requests], drafted, accepted)

    def _share(self, output: StepOutput) -> None:
        """As a lookahead service would that shares everything at once."""
        request = output.request
        offset = len(request.output_token_ids) - len(output.token_ids)
        span = AcceptedSpan(self._mirror.names.of(request.request_id), offset, output.token_ids)
        self._mirror.apply_delta([span], str(self._num_requests))

    def _name(self) -> str:
        self._num_requests += 1
        return f"exactness-{self._num_requests}"


def make_piece(number: int, corpus: Sequence[Sequence[int]], max_tokens: int = 192) -> Piece:
    """The number-th piece of requests on texts of a corpus, cut to other lengths; the same every time."""
    generator = random.Random(number)
    batch, num_requests = BATCHES[number % len(BATCHES)]
    prompts, sampling = [], []
    for index in range(num_requests):
        text = corpus[generator.randrange(len(corpus))]
        start = generator.randrange(max(len(text) - 64, 1))
        prompts.append(tuple(text[start : start + generator.randint(16, 320)]))
        mode = SAMPLING[list(SAMPLING)[index % len(SAMPLING)]]
        sampling.append(
            dataclasses.replace(
                mode,
                max_tokens=generator.randint(max_tokens // 8, max_tokens),
                seed=generator.getrandbits(63),
                ignore_eos=True,
            )
        )
    return Piece(batch, tuple(prompts), tuple(sampling))


def count_differing(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """Places at which two lists of texts have not the same token; a missing one differs."""
    return sum(
        a != b for texts in zip(one, other, strict=True) for a, b in zip_longest(*texts, fillvalue=None)
    )


def compare(generator: Generator, piece: Piece, number: int, model: str) -> Outcome:
    plain = generator.run(piece, SpeculationMode.OFF)
    runs = {mode.value: generator.run(piece, mode) for mode in MODES}
    lengths = [len(text) for text in plain.texts]
    names = list(SAMPLING)
    return Outcome(
        model=model,
        piece=number,
        batch=piece.batch,
        tokens=sum(lengths),
        modes={name: sum(lengths[index :: len(names)]) for index, name in enumerate(names)},
        drafted={name: run.drafted for name, run in runs.items()},
        accepted={name: run.accepted for name, run in runs.items()},
        differing={name: count_differing(plain.texts, run.texts) for name, run in runs.items()},
    )


def cut_model(model_dir: Path, num_layers: int, folder: Path) -> Path:
    """A model folder with the first layers and tokens of another; float32. Returns `folder`."""
    manifest = ModelManifest.read(model_dir)
    raw = json.loads((model_dir / "config.json").read_text())
    vocab_size = min(raw["vocab_size"], CUT_VOCABULARY)
    raw |= {"num_hidden_layers": num_layers, "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    source = open_source((model_dir / manifest.weights).resolve())
    tensors = {}
    for stored in stored_tensors(ModelConfig.from_folder(folder), WeightForm(torch.float32)):
        for part in stored.parts:
            tensors[part.hf_name] = source.get(part.hf_name)[: part.shape[0]].float().contiguous()
    save_file(tensors, folder / "cut.safetensors")
    dataclasses.replace(
        manifest,
        name=f"{manifest.name}, first {num_layers} layers, {vocab_size} tokens",
        revision=f"{manifest.revision}/{num_layers}",
        vocab_size=vocab_size,
        weights="cut.safetensors",
        weight_bits=0,
    ).write(folder)
    return folder


def report(outcomes: Sequence[Outcome]) -> str:
    """The table over everything logged."""
    rows = []
    for model in dict.fromkeys(outcome.model for outcome in outcomes):
        of_model = [outcome for outcome in outcomes if outcome.model == model]
        for batch in [*dict.fromkeys(outcome.batch for outcome in of_model), None]:
            part = [outcome for outcome in of_model if batch in (None, outcome.batch)]
            rows += [_row(model, batch, mode.value, part) for mode in MODES]
    modes = {name: sum(outcome.modes[name] for outcome in outcomes) for name in SAMPLING}
    total = sum(outcome.tokens for outcome in outcomes)
    differing = sum(sum(outcome.differing.values()) for outcome in outcomes)
    head = (
        "model",
        "batch",
        "drafts",
        "tokens compared",
        "guesses verified",
        "accepted",
        "tokens that differ",
    )
    return "\n".join(
        [
            f"**{total:,} tokens** without drafts, each compared with {len(MODES)} drafted runs: "
            f"**{differing} differ**.",
            "",
            "By sampling: " + "; ".join(f"{name} {count:,}" for name, count in modes.items()) + ".",
            "",
            markdown_table(head, rows),
        ]
    )


def _row(model: str, batch: int | None, mode: str, outcomes: Sequence[Outcome]) -> list[str]:
    figures = (
        sum(outcome.tokens for outcome in outcomes),
        sum(outcome.drafted[mode] for outcome in outcomes),
        sum(outcome.accepted[mode] for outcome in outcomes),
        sum(outcome.differing[mode] for outcome in outcomes),
    )
    return [model, "all" if batch is None else str(batch), mode, *(f"{figure:,}" for figure in figures)]


def read_log(path: Path) -> list[Outcome]:
    """What is logged so far; a last line that was cut short is dropped."""
    outcomes = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            outcomes.append(Outcome(**json.loads(line)))
        except ValueError:
            break
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=model_loader.DEFAULT_MODEL)
    parser.add_argument("--cut", type=int, default=0, metavar="LAYERS", help="keep so many layers; 0: all")
    parser.add_argument(
        "--tokens", type=int, default=10_000, help="to generate without drafts, by this model"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no further piece after this")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    logged = read_log(options.log)
    options.log.write_text("".join(json.dumps(dataclasses.asdict(outcome)) + "\n" for outcome in logged))
    with ExitStack() as stack:
        folder = model_loader.pull(options.model)
        if options.cut:
            folder = cut_model(folder, options.cut, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        logged += _generate(folder, options, logged)
    text = "\n".join(
        [
            "Drafts change no token: `benchmarks/exactness.py`, which says how.",
            "",
            f"Command: `{describe_command()}`; the table sums up its log.  ",
            f"Hardware: {describe_machine()}; torch {torch.__version__}.",
            "",
            report(logged),
        ]
    )
    options.out.write_text(text + "\n")
    print(text)
    sys.exit(any(sum(outcome.differing.values()) for outcome in logged))


def _generate(folder: Path, options: argparse.Namespace, logged: Sequence[Outcome]) -> list[Outcome]:
    """Pieces behind those that are logged, until there are tokens enough or the time is up."""
    manifest = ModelManifest.read(folder)
    mine = [outcome for outcome in logged if outcome.model == manifest.name]
    num_tokens = sum(outcome.tokens for outcome in mine)
    if num_tokens >= options.tokens:
        return []
    tokenizer = Tokenizer(folder)
    dialogues = load_dialogues(options.dataset) if options.dataset else sample_dialogues()
    corpus = [
        [token for token in tokenizer.encode(dialogue.as_text()) if token < manifest.vocab_size]
        for dialogue in dialogues
    ]
    generator = Generator(folder, threads=options.threads)
    stop_at = time.monotonic() + options.seconds
    number = 1 + max((outcome.piece for outcome in mine), default=-1)
    made: list[Outcome] = []
    with options.log.open("a") as log:
        while num_tokens < options.tokens and time.monotonic() < stop_at:
            outcome = compare(generator, make_piece(number, corpus), number, manifest.name)
            log.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            log.flush()
            made.append(outcome)
            num_tokens += outcome.tokens
            number += 1
    return made


if __name__ == "__main__":
    main()
