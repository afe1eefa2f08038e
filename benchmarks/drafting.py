"""How long drafting takes, apart from any model: the calls of tandem_drafting.native, timed.

    python benchmarks/drafting.py --dataset retail_dialogues.jsonl --policy retail_policy.md --out FILE.md

Answers of dialogues are decoded as if by the model, many at a time and in their order; what is generated is
shared at once. `row` is the time of a row as a share of the batch's step, which says how many guesses pay.
draft is one call for the whole batch, learn the call after the step; both with Python's part, caches warm.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from drafting_research.replaying import Answer, read_conversations
from reporting import describe_command, describe_machine, markdown_table
from tandem_cli.bench.dataset import load_dialogues, sample_dialogues
from tandem_core.model.manifest import ModelManifest
from tandem_drafting.native import (
    AcceptanceModel,
    CorpusIndex,
    SequenceIndex,
    SequenceInput,
    draft_batch,
    learn,
)
from tandem_engine import model_loader
from tandem_engine.draft_tree import DraftTree

MAX_GUESSES = 16
#: Sequences, and time of a row as a share of the step without guesses.
CASES = ((1, 0.1), (1, 0.03), (1, 0.0), (16, 0.01), (128, 0.01), (128, 0.002))
HEAD = (
    "sequences",
    "row",
    "tokens/step",
    "guesses",
    "µs a sequence",
    "draft µs, median",
    "p99",
    "learn µs, median",
    "p99",
)


class Lane:
    """One sequence after another."""

    def __init__(self, answers: Iterator[Answer], model: AcceptanceModel, corpus: CorpusIndex) -> None:
        self._answers, self._model, self._corpus = answers, model, corpus
        self.job: SequenceInput | None = None

    def begin(self, run: int) -> bool:
        """Takes the next answer; False when there is none."""
        answer = next(self._answers, None)
        if answer is None:
            self.job = None
            return False
        self._run = run
        self._target, self._position = answer.target, 1
        text = SequenceIndex(len(answer.prompt))
        text.extend(answer.prompt)
        text.extend(answer.target[:1])
        self.job = SequenceInput(text, self._model, self._corpus)
        return True

    @property
    def room(self) -> int:
        return len(self._target) - self._position - 1

    def verify(self, tree: DraftTree | None) -> tuple[int, ...]:
        """What the step emits."""
        children = tree.children() if tree is not None else [{}]
        begin, node = self._position, 0
        while self._position < len(self._target):
            token = self._target[self._position]
            self._position += 1
            if token not in children[node]:
                break
            node = children[node][token]
        return self._target[begin : self._position]

    def end(self) -> bool:
        """Whether the answer is complete; it is shared then."""
        if self._position < len(self._target):
            return False
        self._corpus.add(self._run, self._target)
        return True


def measure(answers: Sequence[Answer], vocab_size: int, num_lanes: int, row: float) -> list[str]:
    """One row of the table."""
    corpus = CorpusIndex(sum(len(answer.target) + 1 for answer in answers), vocab_size)
    model = AcceptanceModel()
    waiting = iter(answers)
    lanes = [Lane(waiting, model, corpus) for _ in range(num_lanes)]
    runs = 0
    for lane in lanes:
        runs += lane.begin(runs)
    seconds = array("d", [1.0 + (row + 1e-9) * q for q in range(MAX_GUESSES * num_lanes + 1)])
    drafting: list[float] = []
    learning: list[float] = []
    steps = tokens = guesses = 0
    while all(lane.job is not None for lane in lanes):
        jobs = []
        for lane in lanes:
            assert lane.job is not None
            lane.job.room = max(lane.room, 0)
            jobs.append(lane.job)
        begun = time.perf_counter()
        trees = draft_batch(jobs, MAX_GUESSES, len(jobs), seconds).trees()
        drafted = time.perf_counter()
        emitted = [lane.verify(tree) for lane, tree in zip(lanes, trees, strict=True)]
        verified = time.perf_counter()
        learn(jobs, emitted)
        learning.append(time.perf_counter() - verified)
        drafting.append(drafted - begun)
        steps += len(lanes)
        tokens += sum(len(ids) for ids in emitted)
        guesses += sum(len(tree) for tree in trees if tree is not None)
        for lane in lanes:
            if lane.end():
                runs += lane.begin(runs)
    return [
        str(num_lanes),
        f"{row:.3f}",
        f"{tokens / steps:.2f}",
        f"{guesses / steps:.1f}",
        f"{1e6 * statistics.mean(drafting) / num_lanes:.1f}",
        *(f"{1e6 * figure:.0f}" for times in (drafting, learning) for figure in spread(times)),
    ]


def spread(times: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: some that come along")
    parser.add_argument("--policy", type=Path, help="a system prompt for all of them")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = model_loader.pull(options.model)
    dialogues = load_dialogues(options.dataset) if options.dataset is not None else sample_dialogues()
    policy = options.policy.read_text() if options.policy is not None else None
    conversations = read_conversations(folder, dialogues, policy)
    answers = [answer for conversation in conversations for answer in conversation.answers]
    vocab_size = ModelManifest.read(folder).vocab_size
    rows = []
    for num_lanes, row in CASES:
        if num_lanes > len(answers):
            continue
        rows.append(measure(answers, vocab_size, num_lanes, row))
        print(*rows[-1], sep="  ", flush=True)
    if options.out is not None:
        options.out.write_text(
            f"# How long drafting takes\n\n`{describe_command()}`\n\n{describe_machine()}\n\n"
            f"{markdown_table(HEAD, rows)}\n"
        )


if __name__ == "__main__":
    main()
