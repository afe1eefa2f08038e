"""Replays known answers through drafters: accepted tokens, hit rates, drafting time. No model runs.

    python benchmarks/replay.py --data FILE.jsonl --nodes 8,16,32 --sources local,suffix,forest --calibration
    python benchmarks/replay.py --data FILE.jsonl --taco --batch 1,8,16,32,64,128

Every combination of sources, nodes and batch sizes is a replay of its own; definitions of the figures are in
`drafting_research/replaying.py`, the drafters in `drafting_research/drafters.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drafting_research.drafters import DRAFTERS
from drafting_research.replaying import (
    Conversation,
    Figures,
    PassFigures,
    read_conversations,
    replay,
    replay_cold,
)
from drafting_research.taco import taco_table
from reporting import markdown_table
from tandem_cli import models
from tandem_cli.bench.dataset import DatasetError, load_dialogues, sample_policy
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest

#: The compiled drafters, which predict how likely a guess is to be accepted.
_CALIBRATED = frozenset({"local", "forest", "line"})


@dataclass(frozen=True)
class ReplayConfig:
    """The options of the command, parsed."""

    data: Path | None
    nodes: tuple[int, ...]
    sources: tuple[str, ...]
    passes: int
    batches: tuple[int, ...]
    #: Print TACO-LLM's table at `batches` instead; it has sources and nodes of its own.
    as_taco: bool
    policy: Path | None
    model: str


def run(config: ReplayConfig, *, calibration: bool = False) -> str:
    """The tables, as Markdown. Raises DatasetError."""
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
    if config.as_taco:
        return f"{about}\n\n{taco_table(conversations, config.batches, vocab_size, config.passes)}"
    rows: list[list[str]] = []
    calibrations: list[str] = []
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
                    for trials, part in _parts(figures, number, conversations):
                        rows.append([name, str(nodes), str(batch), trials, *_cells(part)])
                    if calibration and name in _CALIBRATED:
                        title = f"{name}, {nodes} nodes, batch {batch}, pass {number}"
                        calibrations.append(_calibration(title, figures.everything))
    return "\n".join([about, "", markdown_table(_HEAD, rows), *calibrations])


def _policy(config: ReplayConfig) -> str | None:
    if config.policy is None:
        return sample_policy() if config.data is None else None
    try:
        return config.policy.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{config.policy} cannot be read: {error}") from error


def _parts(
    figures: PassFigures, number: int, conversations: Sequence[Conversation]
) -> list[tuple[str, Figures]]:
    """What of a pass is told: the first also by trials, where there are several."""
    if number > 1:
        return [(f"pass {number}", figures.everything)]
    if all(conversation.is_first_trial for conversation in conversations):
        return [("pass 1", figures.everything)]
    return [
        ("pass 1", figures.everything),
        ("first trials", figures.first_trials),
        ("further trials", figures.further_trials),
    ]


_HEAD = (
    "source", "nodes", "batch", "seen", "MAT", "± error", "iteration hit rate", "accepted per hit",
    "token hit rate", "drafted per step", "steps", "drafting µs per sequence and step",
)  # fmt: skip


def _cells(figures: Figures) -> list[str]:
    drafted = figures.drafted / figures.steps if figures.steps else 0.0
    return [
        f"{figures.mat:.3f}",
        f"{figures.mat_error:.3f}",
        f"{figures.iteration_hit_rate:.3f}",
        f"{figures.accepted_per_hit:.2f}",
        f"{figures.token_hit_rate:.3f}",
        f"{drafted:.2f}",
        str(figures.steps),
        f"{figures.microseconds:.1f}",
    ]


def _calibration(title: str, figures: Figures) -> str:
    deciles = figures.calibration()
    total = sum(d.num_guesses for d in deciles)
    predicted = sum(d.predicted * d.num_guesses for d in deciles) / max(total, 1)
    accepted = sum(d.accepted * d.num_guesses for d in deciles) / max(total, 1)
    rows = [
        [f"{d.predicted:.3f}", f"{d.accepted:.3f}", f"{d.error:.3f}", str(d.num_guesses)] for d in deciles
    ]
    rows.append([f"**{predicted:.4f}**", f"**{accepted:.4f}**", "", f"**{total}**"])
    head = ("predicted", "accepted", "± error", "guesses")
    return f"\nCalibration: {title}\n\n" + markdown_table(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="dialogues as JSON lines; default: the built-in sample")
    parser.add_argument("--nodes", action="extend", type=_numbers(63), metavar="N,...",
                        help="guesses per step, 1 to 63; default: 16")  # fmt: skip
    parser.add_argument("--sources", default="chain,global-chain,suffix,local,forest",
                        help=f"drafters, with commas: {', '.join(DRAFTERS)}")  # fmt: skip
    parser.add_argument("--passes", type=int, default=2, help="how often the file is replayed; default: 2")
    parser.add_argument("--batch", action="extend", type=_numbers(100_000), metavar="N,...",
                        help="dialogues at a time; default: 1")  # fmt: skip
    parser.add_argument("--taco", action="store_true", help="TACO-LLM's published table beside ours, instead")
    parser.add_argument("--policy", type=Path, help="text of the system prompt; default with --data: none")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="its tokenizer and chat template")
    parser.add_argument("--calibration", action="store_true", help="also predicted beside actual acceptance")
    parser.add_argument("--output", type=Path, help="write the tables here as Markdown")
    options = parser.parse_args(arguments)
    config = ReplayConfig(
        data=options.data,
        nodes=tuple(options.nodes or (16,)),
        sources=tuple(name.strip() for name in options.sources.split(",") if name.strip()),
        passes=options.passes,
        batches=tuple(options.batch or (1,)),
        as_taco=options.taco,
        policy=options.policy,
        model=options.model,
    )
    try:
        report = run(config, calibration=options.calibration)
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
