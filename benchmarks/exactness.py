"""Counts the tokens that drafts change, by generating texts with and without speculation.

    python benchmarks/exactness.py --cut 3 --tokens 1000000 --log build/exactness.jsonl --out FILE.md

A piece is a number of requests with different prompts, lengths, seeds and sampling, generated three times:
without drafts, with drafts from each sequence's own text (local), and with drafts also from a mirror that
receives the tokens of every step (global).

All in one process, in float32 unless --dtype says otherwise. 1 to 64 requests run at a time, and one joins
when another ends, so a step mixes prompt chunks, plain decoding and drafts. The drafter ignores costs and
fills up to 256 rows per step, because the subject is verification, not speed.

`--cut N` keeps the model's first N layers and the first 8,192 tokens of its vocabulary: the text makes no
sense, but a million tokens take one hour instead of ten.

Each finished piece is a line of the log. A further run with the same log continues behind it, and the report
covers the whole log. Exit status 1: a token differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from free_drafter import FreeDrafter
from reporting import markdown_table, write_page
from safetensors.torch import save_file
from tandem_cli.bench.dataset import load_dialogues
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.sampling import SamplingParams
from tandem_core.speculation import SpeculationMode
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_engine import model_loader
from tandem_engine.assemble import EngineConfig, assemble
from tandem_engine.model_loader.convert import open_source
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.layout import WeightForm, stored_tensors
from tandem_engine.request import Request

#: Requests under way at a time, piece by piece, and how many requests such a piece has.
BATCHES = ((1, 6), (4, 16), (16, 32), (64, 96))
MAX_ROWS = 256
CUT_VOCABULARY = 8192
MODES = (SpeculationMode.LOCAL, SpeculationMode.GLOBAL)
#: The requests of a piece take them in turn, each with its own seed.
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.15, frequency_penalty=0.2),
    "temperature 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "the same, penalties": SamplingParams(
        temperature=0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.3
    ),
}
HEAD = ("model", "batch", "drafts", "tokens compared", "guesses verified", "accepted", "tokens that differ")


class Piece(NamedTuple):
    batch: int
    prompts: Sequence[Sequence[int]]
    sampling: Sequence[SamplingParams]


class Run(NamedTuple):
    texts: list[list[int]]
    #: Guesses, by the source that drafted them.
    drafted: Counter[str]
    accepted: Counter[str]


@dataclass(frozen=True)
class Outcome:
    """A line of the log."""

    model: str
    piece: int
    batch: int
    #: Generated without drafts; in all and by sampling.
    tokens: int
    modes: dict[str, int]
    #: By speculation mode.
    drafted: dict[str, int]
    accepted: dict[str, int]
    differing: dict[str, int]


L = TypeVar("L", bound=Outcome)


class Generator:
    """One engine; each call of `run` generates a piece anew."""

    def __init__(self, model_dir: Path, **sizes: object) -> None:
        self._mirror = GlobalMirror(vocab_size=ModelManifest.read(model_dir).vocab_size)
        sizes = {"dtype": "float32", "num_blocks": 1024, "max_batch": 64, "max_draft_nodes": 12, **sizes}
        config = EngineConfig(model=model_dir, **sizes)  # type: ignore[arg-type]
        self._parts = assemble(config, FreeDrafter(self._mirror, max_rows=MAX_ROWS))
        self._engine = self._parts.engine
        self._num_requests = 0

    def run(self, piece: Piece, mode: SpeculationMode) -> Run:
        requests = [
            Request(
                f"{self._num_requests + n}",
                list(prompt),
                sampling,
                speculation=mode,
                eos_token_ids=self._parts.eos_token_ids,
                guide=self._parts.guide_state(sampling.guide),
            )
            for n, (prompt, sampling) in enumerate(zip(piece.prompts, piece.sampling, strict=True), start=1)
        ]
        self._num_requests += len(requests)
        waiting, live = list(reversed(requests)), 0
        drafted: Counter[str] = Counter()
        accepted: Counter[str] = Counter()
        while waiting or live:
            while waiting and live < piece.batch:
                self._engine.add(waiting.pop())
                live += 1
            for output in self._engine.step():
                drafted.update(output.drafted_sources)
                accepted.update(output.accepted_sources)
                live -= output.finished
                if mode is SpeculationMode.GLOBAL:
                    self._share(output.request, output.token_ids)
        return Run([request.output_token_ids for request in requests], drafted, accepted)

    def _share(self, request: Request, tokens: Sequence[int]) -> None:
        """Does what a lookahead service without delay and without a threshold would do."""
        offset = len(request.output_token_ids) - len(tokens)
        span = AcceptedSpan(self._mirror.names.of(request.request_id), offset, tuple(tokens))
        self._mirror.apply_delta([span], str(self._num_requests))


def make_piece(number: int, corpus: Sequence[Sequence[int]], max_tokens: int = 192) -> Piece:
    """The number-th piece, whose prompts are parts of the corpus; equal for equal numbers."""
    generator = random.Random(number)
    batch, num_requests = BATCHES[number % len(BATCHES)]
    kinds = list(SAMPLING.values())
    prompts, sampling = [], []
    for index in range(num_requests):
        text = corpus[generator.randrange(len(corpus))]
        start = generator.randrange(max(len(text) - 64, 1))
        prompts.append(tuple(text[start : start + generator.randint(16, 320)]))
        length = generator.randint(max_tokens // 8, max_tokens)
        kind, seed = kinds[index % len(kinds)], generator.getrandbits(63)
        sampling.append(dataclasses.replace(kind, max_tokens=length, seed=seed, ignore_eos=True))
    return Piece(batch, prompts, sampling)


def count_differing(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """Positions at which the tokens of two lists of texts differ; a missing token differs."""
    return sum(
        a != b for texts in zip(one, other, strict=True) for a, b in zip_longest(*texts, fillvalue=None)
    )


def compare(generator: Generator, piece: Piece, number: int, model: str) -> Outcome:
    plain = generator.run(piece, SpeculationMode.OFF)
    return outcome_of(piece, number, model, plain, [generator.run(piece, mode) for mode in MODES])


def outcome_of(piece: Piece, number: int, model: str, plain: Run, drafting: Sequence[Run]) -> Outcome:
    """`drafting`: the same piece in each of MODES."""
    runs = {mode.value: run for mode, run in zip(MODES, drafting, strict=True)}
    lengths = [len(text) for text in plain.texts]
    return Outcome(
        model=model,
        piece=number,
        batch=piece.batch,
        tokens=sum(lengths),
        modes={name: sum(lengths[index :: len(SAMPLING)]) for index, name in enumerate(SAMPLING)},
        drafted={name: run.drafted.total() for name, run in runs.items()},
        accepted={name: run.accepted.total() for name, run in runs.items()},
        differing={name: count_differing(plain.texts, run.texts) for name, run in runs.items()},
    )


def cut_model(model_dir: Path, num_layers: int, folder: Path, max_vocab_size: int = CUT_VOCABULARY) -> Path:
    """Writes the first layers and tokens of a model to `folder`, in float32. Returns `folder`."""
    manifest = ModelManifest.read(model_dir)
    raw = json.loads((model_dir / "config.json").read_text())
    vocab_size = min(raw["vocab_size"], max_vocab_size)
    raw |= {"num_hidden_layers": num_layers, "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(raw))
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(cut_tokenizer(tokenizer, vocab_size)), encoding="utf-8")
    source = open_source((model_dir / manifest.weights).resolve())
    tensors = {}
    config = ModelConfig.from_folder(folder)
    for stored in stored_tensors(config.spec, config.names, WeightForm(torch.float32)):
        for part in stored.parts:
            tensors[part.hf_name] = source.get(part.hf_name)[: part.in_source[0]].float().contiguous()
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


def cut_tokenizer(tokenizer: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """A BPE tokenizer of the first ids, with the merges that lead to them."""
    vocab = {token: n for token, n in tokenizer["model"]["vocab"].items() if n < vocab_size}
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in tokenizer["model"]["merges"]]
    merges = [pair for pair in pairs if {*pair, "".join(pair)} <= vocab.keys()]
    added = [token for token in tokenizer["added_tokens"] if token["id"] < vocab_size]
    model = tokenizer["model"] | {"vocab": vocab, "merges": merges}
    return tokenizer | {"model": model, "added_tokens": added}


def report(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """The table over everything logged, and the totals in words."""
    rows = []
    for model in dict.fromkeys(outcome.model for outcome in outcomes):
        of_model = [outcome for outcome in outcomes if outcome.model == model]
        for batch in [*dict.fromkeys(outcome.batch for outcome in of_model), "all"]:
            part = [outcome for outcome in of_model if batch in ("all", outcome.batch)]
            for mode in MODES:
                counts = [(o.tokens, o.drafted[mode], o.accepted[mode], o.differing[mode]) for o in part]
                rows.append(
                    [model, str(batch), mode.value, *(f"{sum(c):,}" for c in zip(*counts, strict=True))]
                )
    total = sum(outcome.tokens for outcome in outcomes)
    modes = (f"{name} {sum(outcome.modes[name] for outcome in outcomes):,}" for name in SAMPLING)
    return (
        markdown_table(HEAD, rows),
        f"{total:,} tokens without drafts are compared with {len(MODES)} runs with drafts: "
        f"{num_differing(outcomes)} differ. Sampling: {'; '.join(modes)}.",
    )


def num_differing(outcomes: Sequence[Outcome]) -> int:
    return sum(sum(outcome.differing.values()) for outcome in outcomes)


def read_log(path: Path, line_type: type[L]) -> list[L]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [line_type(**json.loads(line)) for line in lines]


def generate(
    model_dir: Path, dataset: Path | None, num_tokens: int, logged: Sequence[Outcome], dtype: str
) -> Iterator[Outcome]:
    """Pieces behind the logged ones, until they have `num_tokens` tokens together."""
    manifest, tokenizer = ModelManifest.read(model_dir), Tokenizer(model_dir)
    name = manifest.name if dtype == "float32" else f"{manifest.name}, {dtype}"
    logged = [outcome for outcome in logged if outcome.model == name]
    missing = num_tokens - sum(outcome.tokens for outcome in logged)
    number = 1 + max((outcome.piece for outcome in logged), default=-1)
    texts = (tokenizer.encode(dialogue.as_text()) for dialogue in load_dialogues(dataset))
    corpus = [[token for token in text if token < manifest.vocab_size] for text in texts]
    generator = Generator(model_dir, dtype=dtype)
    while missing > 0:
        outcome = compare(generator, make_piece(number, corpus), number, name)
        yield outcome
        missing -= outcome.tokens
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cut", type=int, default=0, metavar="LAYERS", help="layers to keep; 0: all")
    parser.add_argument("--dtype", default="float32", help="as of EngineConfig")
    parser.add_argument("--tokens", type=int, default=10_000, help="without drafts, by this model")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no further piece after this")
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    stop_at = time.monotonic() + options.seconds
    options.log.parent.mkdir(parents=True, exist_ok=True)
    outcomes = read_log(options.log, Outcome)
    with tempfile.TemporaryDirectory() as folder, options.log.open("a", buffering=1) as log:
        model_dir = model_loader.pull(model_loader.DEFAULT_MODEL)
        if options.cut:
            model_dir = cut_model(model_dir, options.cut, Path(folder))
        pieces = generate(model_dir, options.dataset, options.tokens, tuple(outcomes), options.dtype)
        for outcome in pieces:
            outcomes.append(outcome)
            log.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            if time.monotonic() > stop_at:
                break
    write_page(options.out, "Drafts change no token", *report(outcomes))
    sys.exit(num_differing(outcomes) > 0)


if __name__ == "__main__":
    main()
