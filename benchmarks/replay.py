"""Replays known answers through drafters: accepted tokens, hit rates, drafting time. No model runs.

    python benchmarks/replay.py --data FILE.jsonl --nodes 8,16,32 --sources local,forest

Every combination of sources, nodes and batch sizes is a replay of its own; replaying.py has the drafters and
defines the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from replaying import DRAFTERS, Figures, read_conversations, replay, replay_cold
from reporting import markdown_table
from tandem_cli import models
from tandem_cli.bench.dataset import DatasetError, load_dialogues, sample_policy
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest


@dataclass(frozen=True)
class ReplayConfig:
    """The options of the command, parsed."""

    data: Path | None
    nodes: tuple[int, ...]
    sources: tuple[str, ...]
    passes: int
    batches: tuple[int, ...]
    policy: Path | None
    model: str


def run(config: ReplayConfig) -> str:
    """The table, as Markdown. Raises DatasetError."""
    unknown = [name for name in config.sources if name not in DRAFTERS]
    if unknown:
        raise DatasetError(f"--sources names {unknown[0]!r}; there are {', '.join(DRAFTERS)}")
    try:
        folder = models.obtain(config.model)
    except ModelLoadError as error:
        raise DatasetError(str(error)) from error
    conversations = read_conversations(folder, load_dialogues(config.data), _policy(config))
    vocab_size = ModelManifest.read(folder).vocab_size
    answers = [answer for conversation in conversations for answer in conversation.answers]
    num_tokens = sum(len(answer.target) for answer in answers)
    room = (num_tokens + len(answers)) * config.passes + 1
    mean_prompt = sum(len(answer.prompt) for answer in answers) / len(answers)
    about = (
        f"{len(conversations)} dialogues, {len(answers)} answers of {num_tokens} tokens in all, prompts of "
        f"{mean_prompt:.0f} tokens on average; tokenised as {config.model} does."
    )
    rows: list[list[str]] = []
    for name in config.sources:
        for nodes in config.nodes:
            make = partial(DRAFTERS[name], nodes, vocab_size, room)
            rows.append([name, str(nodes), "1", "cold", *_cells(replay_cold(make, conversations))])
    for batch in config.batches:
        for name in config.sources:
            for nodes in config.nodes:
                drafter = DRAFTERS[name](nodes, vocab_size, room)
                for number in range(1, config.passes + 1):
                    figures = replay(drafter, conversations, batch)
                    rows.append([name, str(nodes), str(batch), f"pass {number}", *_cells(figures)])
    return f"{about}\n\n{markdown_table(_HEAD, rows)}"


def _policy(config: ReplayConfig) -> str | None:
    if config.policy is None:
        return sample_policy() if config.data is None else None
    try:
        return config.policy.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{config.policy} cannot be read: {error}") from error


_HEAD = (
    "source", "nodes", "batch", "seen", "MAT", "± error", "iteration hit rate", "accepted per hit",
    "token hit rate", "predicted", "drafted per step", "steps", "drafting µs per sequence and step",
)  # fmt: skip


def _cells(figures: Figures) -> list[str]:
    drafted = figures.drafted / figures.steps if figures.steps else 0.0
    return [
        f"{figures.mat:.3f}",
        f"{figures.mat_error:.3f}",
        f"{figures.iteration_hit_rate:.3f}",
        f"{figures.accepted_per_hit:.2f}",
        f"{figures.token_hit_rate:.3f}",
        f"{figures.predicted_hit_rate:.3f}",
        f"{drafted:.2f}",
        str(figures.steps),
        f"{figures.microseconds:.1f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="dialogues as JSON lines; default: the built-in sample")
    parser.add_argument("--nodes", action="extend", type=_numbers(63), metavar="N,...",
                        help="guesses per step, 1 to 63; default: 16")  # fmt: skip
    parser.add_argument("--sources", default="local,forest",
                        help=f"drafters, with commas: {', '.join(DRAFTERS)}")  # fmt: skip
    parser.add_argument("--passes", type=int, default=2, help="how often the file is replayed; default: 2")
    parser.add_argument("--batch", action="extend", type=_numbers(100_000), metavar="N,...",
                        help="dialogues at a time; default: 1")  # fmt: skip
    parser.add_argument("--policy", type=Path, help="text of the system prompt; default with --data: none")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="its tokenizer and chat template")
    parser.add_argument("--output", type=Path, help="write the table here as Markdown")
    options = parser.parse_args(arguments)
    config = ReplayConfig(
        data=options.data,
        nodes=tuple(options.nodes or (16,)),
        sources=tuple(name.strip() for name in options.sources.split(",") if name.strip()),
        passes=options.passes,
        batches=tuple(options.batch or (1,)),
        policy=options.policy,
        model=options.model,
    )
    try:
        report = run(config)
    except DatasetError as error:
        parser.error(str(error))
    print(report)
    if options.output is not None:
        options.output.write_text(report + "\n", encoding="utf-8")


def _numbers(at_most: int) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names or not all(name.isdecimal() and 1 <= int(name) <= at_most for name in names):
            raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 1 to {at_most}")
        return [int(name) for name in names]

    return parse


if __name__ == "__main__":
    main()
