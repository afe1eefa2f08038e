"""Whether drafting is worth its price: the adaptive price beside none and beside fixed numbers of guesses.

    python benchmarks/speculation_price.py --batches 1,8,32 --out FILE.md
    python benchmarks/speculation_price.py --workloads random --batches 1,2,4,8,16,32,64,128 \\
        --settings off,adaptive

Five workloads, one engine in this process with the default model and numerics:

    random     temperature 2: nobody can guess it; drafting can only lose
    story      a story at temperature 0.8
    copy       a text is to be repeated
    dialogue   answers to customers, greedily; what was generated before is shared
    repeated   the same, each for the second time

Six more, by name, on which nothing was tuned: correct, email, german, program,
questions, table (see TASKS).

Settings take turns with the same requests, in rounds, so that the machine's drifts fall on all alike. Tokens
do not depend on drafts, so that every setting does the same work; tokens per second count from the step after
the last prompt was computed. `fixed N` drafts the N likeliest guesses of each sequence, whatever they cost.

wall      tokens per second beside those without drafts, as the clock said: median over the rounds, and range
settled   the same of settled times: what a step computes takes as long as the median step, of any setting,
          with as many sequences and guesses, once each turn's drift is taken out; the drafter takes what it
          took, but for steps that held it up. This is what remains when nothing keeps the machine from work.
drafting  the share of that time that the drafter itself took, its learning and the likeliest tokens included
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from reporting import describe_command, describe_machine, markdown_table
from tandem_cli.bench.dataset import load_dialogues, sample_dialogues
from tandem_cli.bench.prompts import question
from tandem_core.model.chat_template import Message
from tandem_core.prefix_hash import cache_salt
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_drafting.step_cost import StepCost
from tandem_engine import model_loader
from tandem_engine.draft_source import Emitted
from tandem_engine.draft_tree import DraftTree
from tandem_engine.engine import Engine
from tandem_engine.llm import LLM
from tandem_engine.request import Request
from torch import Tensor

MAX_NODES = 16
#: Steps of one shape whose median is a time to go by.
_ENOUGH = 12
#: Rounds of taking out the turns' drifts; they hardly change after three.
_POLISHED = 5
#: Drafting for a sequence that rests takes next to nothing, and now and then a look.
_LOOKING_S = 5e-4
WORKLOADS = ("random", "story", "copy", "dialogue", "repeated")
#: What is asked of what a customer has said, and at which temperature.
TASKS = {
    "random": ("Write something about this:\n\n{}", 2.0),
    "story": ("Write a story about a customer who says:\n\n{}", 0.8),
    "copy": ("Repeat the following text word by word:\n\n{}", 0.0),
    "dialogue": ("{}", 0.0),
    "repeated": ("{}", 0.0),
    "correct": ("Correct the spelling and grammar of this text:\n\n{}", 0.0),
    "email": ("Answer this message with an e-mail that has a subject:\n\n{}", 0.6),
    "german": ("Translate into German:\n\n{}", 0.0),
    "program": ("Write a Python program that handles requests like this:\n\n{}", 0.2),
    "questions": ("Which questions should an agent ask before helping with this?\n\n{}", 0.4),
    "table": ("Put the facts of this message into a table:\n\n{}", 0.0),
}
SETTINGS = ("off", "adaptive", "fixed 1", "fixed 3", "fixed 7", "fixed 15")


class Setting:
    """A way to draft, which learns from its own turns only."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self.name = name
        self.mirror = GlobalMirror(vocab_size=vocab_size)
        self._max_nodes = {"off": 0, "adaptive": MAX_NODES}.get(name, 0)
        if name.startswith("fixed "):
            self._max_nodes = int(name.removeprefix("fixed "))
        is_free = name != "adaptive"
        self._drafter = Drafter(self.mirror, DraftPolicy(row_cost=0.0) if is_free else DraftPolicy())
        #: Where the engine reports its steps: a fixed setting does not heed them.
        self.step_cost = StepCost() if is_free else self._drafter.step_cost

    def propose(self, requests: Sequence[Request], max_nodes: int) -> list[DraftTree | None]:
        return self._drafter.propose(requests, min(max_nodes, self._max_nodes))

    def observe_step(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        self.step_cost.observe(num_sequences, context, num_guesses, seconds)

    def extend(self, emitted: Sequence[Emitted], logits: Tensor) -> None:
        self._drafter.extend(emitted, logits)

    def forget(self, request_id: str) -> None:
        self._drafter.forget(request_id)


@dataclass(frozen=True)
class Step:
    """One step of a turn, and its time without and within the drafter."""

    num_sequences: int
    num_guesses: int
    num_tokens: int
    computing_s: float
    drafting_s: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_sequences, self.num_guesses


class Clock:
    """Takes the time that an engine's drafter takes: before a step is computed and after it."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        engine._draft = self._timed(engine._draft)  # type: ignore[method-assign]
        engine._learn = self._timed(engine._learn)  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            begun = time.perf_counter()
            function(*args)
            self.seconds += time.perf_counter() - begun

        return timed


@dataclass(frozen=True)
class Turn:
    steps: tuple[Step, ...]
    seconds: float
    texts: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class Settled:
    """Times of steps that nothing held up, from many steps of all settings.

    A step takes what its shape takes times the drift of its turn. Both are medians, each beside the other
    (median polish, after Tukey), since a shape may have been seen in a few turns only.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        drifts = [1.0] * len(turns)
        for _ in range(_POLISHED):
            by_shape: dict[tuple[int, int], list[float]] = {}
            by_rows: dict[int, list[float]] = {}
            for turn, drift in zip(turns, drifts, strict=True):
                for step in turn.steps:
                    seconds = step.computing_s / drift
                    by_shape.setdefault(step.shape, []).append(seconds)
                    by_rows.setdefault(sum(step.shape), []).append(seconds)
            medians = {shape: statistics.median(seconds) for shape, seconds in by_shape.items()}
            drifts = [
                statistics.median([step.computing_s / medians[step.shape] for step in turn.steps])
                for turn in turns
            ]
        #: By number of sequences: numbers of guesses that many steps had.
        self._known: dict[int, list[int]] = {}
        self._medians: dict[tuple[int, int], float] = {}
        for shape, seconds in sorted(by_shape.items()):
            if len(seconds) >= _ENOUGH:
                self._known.setdefault(shape[0], []).append(shape[1])
                self._medians[shape] = medians[shape]
        self._rows = sorted(rows for rows, seconds in by_rows.items() if len(seconds) >= _ENOUGH)
        self._row_medians = [statistics.median(by_rows[rows]) for rows in self._rows]

    def computing_s(self, step: Step) -> float:
        """That of its shape; a rare one's is told from the nearest shape and what rows take.

        One with more rows than were often seen counts as it was.
        """
        rows = step.num_sequences + step.num_guesses
        known = self._known.get(step.num_sequences)
        if not self._rows or not self._rows[0] <= rows <= self._rows[-1]:
            return step.computing_s
        if known is None:
            return self._of_rows(rows)
        nearest = min(known, key=lambda guesses: abs(guesses - step.num_guesses))
        seconds = self._medians[step.num_sequences, nearest]
        return seconds * self._of_rows(rows) / self._of_rows(step.num_sequences + nearest)

    def _of_rows(self, rows: int) -> float:
        return float(np.interp(rows, self._rows, self._row_medians))

    def tokens_per_second(self, turns: Sequence[Turn]) -> tuple[float, float]:
        """Of one setting's turns, and the share of the time that was drafting."""
        steps = [step for turn in turns for step in turn.steps]
        computing = sum(self.computing_s(step) for step in steps)
        drafting = 0.0
        for is_drafted in (False, True):
            seconds = [step.drafting_s for step in steps if (step.num_guesses > 0) == is_drafted]
            if seconds:
                cap = 4 * statistics.median(seconds) + _LOOKING_S
                drafting += sum(min(second, cap) for second in seconds)
        total = computing + drafting
        return sum(step.num_tokens for step in steps) / total, drafting / total


class Bench:
    def __init__(self, model_dir: Path, dataset: Path | None, max_tokens: int, max_batch: int) -> None:
        self._llm = LLM(model_dir, max_batch=max_batch, max_draft_nodes=MAX_NODES)
        self._engine = self._llm.engine
        self._clock = Clock(self._engine)
        self._dialogues = load_dialogues(dataset) if dataset is not None else sample_dialogues()
        self._max_tokens = max_tokens
        self._count = 0

    @property
    def vocab_size(self) -> int:
        return self._llm.manifest.vocab_size

    def requests(
        self, workload: str, batch: int, round_number: int
    ) -> list[tuple[list[int], SamplingParams]]:
        """Prompts of about 200 tokens; other ones in every round."""
        task, temperature = TASKS[workload]
        prompts = []
        for i in range(batch):
            dialogue = self._dialogues[(round_number * batch + i) % len(self._dialogues)]
            said = " ".join(turn.content for turn in question(dialogue)[-2:])[:700]
            prompts.append(self._llm.tokenizer.encode_chat([Message("user", task.format(said))]))
        sampling = SamplingParams(max_tokens=self._max_tokens, temperature=temperature, ignore_eos=True)
        return [
            (prompt, replace(sampling, seed=round_number * batch + i)) for i, prompt in enumerate(prompts)
        ]

    def turn(self, setting: Setting, wanted: Sequence[tuple[list[int], SamplingParams]]) -> Turn:
        engine = self._engine
        engine._drafter = setting
        engine.step_cost = setting.step_cost
        requests = []
        for prompt, sampling in wanted:
            self._count += 1
            requests.append(
                Request(f"r{self._count}", prompt, sampling, cache_salt("", self._llm.manifest.revision))
            )
            engine.add(requests[-1])
        while any(not request.output_token_ids for request in requests):
            engine.step()
        steps: list[Step] = []
        begun = last = time.perf_counter()
        while engine.has_work():
            self._clock.seconds = 0.0
            outputs = engine.step()
            now = time.perf_counter()
            guesses = sum([len(output.drafted_sources) for output in outputs])
            tokens = sum([len(output.token_ids) for output in outputs])
            drafting = self._clock.seconds
            steps.append(Step(len(outputs), guesses, tokens, now - last - drafting, drafting))
            last = now
        texts = tuple(tuple(request.output_token_ids) for request in requests)
        return Turn(tuple(steps), last - begun, texts)

    def compare(self, workload: str, batch: int, names: Sequence[str], rounds: int) -> list[list[str]]:
        settings = [Setting(name, self.vocab_size) for name in names]
        turns: dict[str, list[Turn]] = {name: [] for name in names}
        # Two rounds more, not counted: a pod knows its prices after a second.
        for round_number in range(-2, rounds):
            wanted = self.requests(workload, batch, round_number + 2)
            first = round_number % len(settings)
            for setting in settings[first:] + settings[:first]:
                if workload == "repeated":
                    taught = self.turn(setting, wanted)
                    self.share(setting, taught)
                turn = self.turn(setting, wanted)
                if workload == "dialogue":
                    self.share(setting, turn)
                if round_number >= 0:
                    turns[setting.name].append(turn)
        for number in range(rounds):
            if len({turns[name][number].texts for name in names}) != 1:
                raise SystemExit(f"{workload}, batch {batch}: the texts differ between settings")
        settled = Settled(list(itertools.chain(*turns.values())))
        base, _ = settled.tokens_per_second(turns["off"])
        rows = []
        for name in names:
            mine = turns[name]
            ratios = [
                turn.tokens_per_second / off.tokens_per_second
                for turn, off in zip(mine, turns["off"], strict=True)
            ]
            speed, drafting = settled.tokens_per_second(mine)
            steps = [step for turn in mine for step in turn.steps]
            sequence_steps = sum(step.num_sequences for step in steps)
            rows.append(
                [
                    workload,
                    str(batch),
                    name,
                    f"{speed / base:.3f}",
                    f"{statistics.median(ratios):.3f}",
                    f"{min(ratios):.2f} - {max(ratios):.2f}",
                    f"{speed:.0f}",
                    f"{sum(step.num_tokens for step in steps) / sequence_steps:.2f}",
                    f"{sum(step.num_guesses for step in steps) / sequence_steps:.1f}",
                    f"{drafting:.2%}",
                ]
            )
        return rows

    def share(self, setting: Setting, turn: Turn) -> None:
        """What was generated is there to be copied, for this setting."""
        for number, text in enumerate(turn.texts):
            setting.mirror.apply_delta([AcceptedSpan(f"{self._count}-{number}", 0, text)], "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--dataset", type=Path, help="dialogues as JSON lines; default: a few that come along"
    )
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--settings", default=",".join(SETTINGS), help="must begin with off")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    names = options.settings.split(",")
    unknown = [name for name in names if name not in ("off", "adaptive") and not name.startswith("fixed ")]
    if names[0] != "off" or unknown:
        parser.error(
            f"--settings {options.settings}: wanted off first, then any of {', '.join(SETTINGS[1:])}"
        )
    workloads = options.workloads.split(",")
    if not set(workloads) <= set(TASKS):
        parser.error(f"--workloads {options.workloads}: wanted some of {', '.join(TASKS)}")
    bench = Bench(model_loader.pull(options.model), options.dataset, options.max_tokens, max(batches))
    head = [
        "workload",
        "batch",
        "setting",
        "settled",
        "wall",
        "range",
        "tokens/s",
        "tokens/step",
        "guesses/step",
        "drafting",
    ]
    rows = []
    for workload in workloads:
        for batch in batches:
            found = bench.compare(workload, batch, names, options.rounds)
            print(*("  ".join(row) for row in found), sep="\n", flush=True)
            rows += found
    report = (
        f"# What drafting is worth\n\n`{describe_command()}`\n\n{describe_machine()}\n\n"
        "Tokens per second of the whole batch beside speculation off. settled: of what steps take that "
        "nothing held up, pooled over all settings. wall: by the clock, median over the rounds, "
        "and range. tokens/s: settled.\n\n"
        f"{markdown_table(head, rows)}\n"
    )
    if options.out is not None:
        options.out.write_text(report)


if __name__ == "__main__":
    main()
