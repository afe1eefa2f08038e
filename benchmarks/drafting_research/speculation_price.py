"""Throughput with adaptive drafting relative to no drafts and to fixed numbers of guesses.

    export PYTHONPATH=benchmarks
    python -m drafting_research.speculation_price --batches 1,8,32 --out FILE.md
    python -m drafting_research.speculation_price --workloads random --batches 1,2,4 --settings off,adaptive

One engine in this process, with the default model and numerics. Workloads (see TASKS):

    random     temperature 2: not predictable, so drafting can only lose
    story      a story at temperature 0.8
    copy       a text to repeat
    dialogue   answers to customers, greedy; earlier answers are shared
    repeated   the same, each generated for the second time
    others     correct, email, german, program, questions, table: not used for choosing constants

`fixed N` drafts the N likeliest guesses of each sequence whatever they cost. The settings take turns with the
same requests, in rounds, because the speed of a shared machine changes. All generate the same tokens. The
next request takes the place of one that ends. Counted are steps without a prompt and with a sequence in every
place: those of a pod that always has requests waiting.

settled   tokens per second relative to `off`, by median step times: a step takes the median over all settings
          of the steps with as many sequences and guesses, after each turn's drift is removed, and drafting
          takes what it took except for outliers. An idle machine would show this.
wall      the same by the clock: median over the rounds, then the range
drafting  share of the settled time spent in the drafter
"""

from __future__ import annotations

import argparse
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from free_drafter import FreeDrafter
from reporting import markdown_table, write_page
from tandem_cli.bench.dataset import load_dialogues
from tandem_cli.bench.prompts import question
from tandem_core.model.conversation import Message
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_engine import model_loader
from tandem_engine.llm import LLM
from tandem_engine.request import Request

MAX_NODES = 16
#: Requests of a turn, by place in the batch.
_REQUESTS_PER_PLACE = 3
#: Steps of one shape whose median is reliable.
_ENOUGH = 12
#: Iterations of median polish; the drifts hardly change after three.
_POLISHED = 5
#: Beyond this and four times the median, drafting time of a step is an outlier.
_OUTLIER_S = 5e-4
WORKLOADS = "random,story,copy,dialogue,repeated"
#: The request about a customer's message, and the temperature.
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
SETTINGS = "off,adaptive,fixed 1,fixed 3,fixed 7,fixed 15"
HEAD = (
    "workload", "batch", "setting", "settled", "wall", "range", "tokens/s", "tokens/step", "guesses/step",
    "drafting",
)  # fmt: skip
NOTES = (
    "settled: tokens per second relative to speculation off, from step times without outliers. wall: by the "
    "clock, median over the rounds, and range. tokens/s: settled."
)


class Setting:
    """A way to draft, with a mirror and a drafter that learn from its own turns only."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self.name = name
        self.mirror = GlobalMirror(vocab_size=vocab_size)
        if name == "adaptive":
            self.drafter = Drafter(self.mirror, DraftPolicy())
        else:
            max_guesses = 0 if name == "off" else int(name.removeprefix("fixed "))
            self.drafter = FreeDrafter(self.mirror, max_guesses=max_guesses)
        self.turns: list[Turn] = []

    def share(self, turn: Turn, number: int) -> None:
        """Lets later drafts copy the generated texts."""
        for row, text in enumerate(turn.texts):
            self.mirror.apply_delta([AcceptedSpan(f"{number}-{row}", 0, text)], "1")


class Step(NamedTuple):
    """One step of a turn; its time outside and inside the drafter."""

    num_sequences: int
    num_guesses: int
    num_tokens: int
    computing_s: float
    drafting_s: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_sequences, self.num_guesses


class Turn(NamedTuple):
    steps: list[Step]
    texts: list[list[int]]

    @property
    def wall_speed(self) -> float:
        """Tokens per second."""
        seconds = sum(step.computing_s + step.drafting_s for step in self.steps)
        return sum(step.num_tokens for step in self.steps) / seconds


class Settled:
    """Step times without outliers and drift, from the steps of all settings.

    A step's time is the time of its shape multiplied by the drift of its turn. Both are estimated as medians,
    in turn (Tukey's median polish), because a shape may occur in a few turns only.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        drifts = [1.0] * len(turns)
        for _ in range(_POLISHED):
            by_shape = defaultdict(list)
            for turn, drift in zip(turns, drifts, strict=True):
                for step in turn.steps:
                    by_shape[step.shape].append(step.computing_s / drift)
            medians = {shape: median(seconds) for shape, seconds in sorted(by_shape.items())}
            drifts = [median(step.computing_s / medians[step.shape] for step in turn.steps) for turn in turns]
        by_rows = defaultdict(list)
        for shape, seconds in by_shape.items():
            by_rows[sum(shape)] += seconds
        self._medians = {shape: s for shape, s in medians.items() if len(by_shape[shape]) >= _ENOUGH}
        self._rows = sorted(rows for rows, seconds in by_rows.items() if len(seconds) >= _ENOUGH)
        self._row_medians = [median(by_rows[rows]) for rows in self._rows]

    def computing_s(self, step: Step) -> float:
        """The median of its shape; of a rare shape: that of the nearest, scaled by the number of rows.

        A step with more or fewer rows than were often seen counts with its own time.
        """
        rows = sum(step.shape)
        if not self._rows or not self._rows[0] <= rows <= self._rows[-1]:
            return step.computing_s
        known = [shape for shape in self._medians if shape[0] == step.num_sequences]
        if not known:
            return self._of_rows(rows)
        nearest = min(known, key=lambda shape: abs(shape[1] - step.num_guesses))
        return self._medians[nearest] * self._of_rows(rows) / self._of_rows(sum(nearest))

    def _of_rows(self, rows: int) -> float:
        return float(np.interp(rows, self._rows, self._row_medians))

    def tokens_per_second(self, turns: Sequence[Turn]) -> tuple[float, float]:
        """Of one setting's turns; and the share of the time that was drafting."""
        steps = [step for turn in turns for step in turn.steps]
        computing, drafting = sum(map(self.computing_s, steps)), 0.0
        for has_draft in (False, True):
            seconds = [step.drafting_s for step in steps if (step.num_guesses > 0) == has_draft]
            if seconds:
                most = 4 * median(seconds) + _OUTLIER_S
                drafting += sum(min(second, most) for second in seconds)
        total = computing + drafting
        return sum(step.num_tokens for step in steps) / total, drafting / total


class Bench:
    def __init__(self, dataset: Path | None, max_tokens: int, max_batch: int) -> None:
        model_dir = model_loader.pull(model_loader.DEFAULT_MODEL)
        self._llm = LLM(model_dir, max_batch=max_batch, max_draft_nodes=MAX_NODES)
        engine = self._llm.engine
        engine._draft = self._timed(engine._draft)  # type: ignore[method-assign]
        engine._learn = self._timed(engine._learn)  # type: ignore[method-assign]
        #: In the drafter, since the last step.
        self._drafting_s = 0.0
        self._dialogues = load_dialogues(dataset)
        self._max_tokens = max_tokens
        self._ids = itertools.count()

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            begun = time.perf_counter()
            function(*args)
            self._drafting_s += time.perf_counter() - begun

        return timed

    def requests(self, workload: str, count: int, first: int) -> list[Request]:
        """Requests of about 200 tokens, from number `first` on."""
        task, temperature = TASKS[workload]
        requests = []
        for number in range(first, first + count):
            turns = question(self._dialogues[number % len(self._dialogues)])[-2:]
            said = " ".join(turn.content for turn in turns)[:700]
            prompt = self._llm.tokenizer.encode_chat([Message("user", task.format(said))])
            sampling = SamplingParams(
                max_tokens=self._max_tokens, temperature=temperature, ignore_eos=True, seed=number
            )
            requests.append(Request(f"r{next(self._ids)}", prompt, sampling))
        return requests

    def turn(self, setting: Setting, requests: Sequence[Request], batch: int) -> Turn:
        """Generates all texts; the next request takes the place of one that ends."""
        engine, steps = self._llm.engine, []
        engine._drafter = setting.drafter
        waiting = list(requests)
        running: list[Request] = []
        while waiting or running:
            is_decoding = True
            while waiting and len(running) < batch:
                is_decoding = False
                running.append(waiting.pop(0))
                engine.add(running[-1])
            self._drafting_s = 0.0
            begun = time.perf_counter()
            outputs = engine.step()
            seconds, drafting = time.perf_counter() - begun, self._drafting_s
            if is_decoding and len(outputs) == batch:
                guesses = sum(len(output.drafted_sources) for output in outputs)
                tokens = sum(len(output.token_ids) for output in outputs)
                steps.append(Step(batch, guesses, tokens, seconds - drafting, drafting))
            running = [request for request in running if request.finish_reason is None]
        return Turn(steps, [request.output_token_ids for request in requests])

    def compare(self, workload: str, batch: int, names: Sequence[str], rounds: int) -> Iterable[list[str]]:
        """One row of the table per setting."""
        settings = [Setting(name, self._llm.manifest.vocab_size) for name in names]
        # Two rounds more, not counted: a pod has measured its costs after a second.
        count = batch * _REQUESTS_PER_PLACE
        for number in range(rounds + 2):
            first = number % len(settings)
            texts = []
            for setting in settings[first:] + settings[:first]:
                if workload == "repeated":
                    taught = self.turn(setting, self.requests(workload, count, number * count), batch)
                    setting.share(taught, 2 * number)
                turn = self.turn(setting, self.requests(workload, count, number * count), batch)
                if workload == "dialogue":
                    setting.share(turn, 2 * number + 1)
                if number >= 2:
                    setting.turns.append(turn)
                texts.append(turn.texts)
            if any(text != texts[0] for text in texts):
                raise SystemExit(f"{workload}, batch {batch}: the texts differ between settings")
        settled = Settled([turn for setting in settings for turn in setting.turns])
        off = settings[0].turns
        off_speed, _ = settled.tokens_per_second(off)
        for setting in settings:
            ratios = [turn.wall_speed / o.wall_speed for turn, o in zip(setting.turns, off, strict=True)]
            speed, drafting = settled.tokens_per_second(setting.turns)
            steps = [step for turn in setting.turns for step in turn.steps]
            sequence_steps = sum(step.num_sequences for step in steps)
            tokens = sum(step.num_tokens for step in steps) / sequence_steps
            guesses = sum(step.num_guesses for step in steps) / sequence_steps
            wall = [f"{median(ratios):.3f}", f"{min(ratios):.2f} - {max(ratios):.2f}"]
            figures = [f"{speed:.0f}", f"{tokens:.2f}", f"{guesses:.1f}", f"{drafting:.2%}"]
            yield [workload, str(batch), setting.name, f"{speed / off_speed:.3f}", *wall, *figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--settings", default=SETTINGS, help=f"off first; default: {SETTINGS}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    names, workloads = options.settings.split(","), options.workloads.split(",")
    if names[0] != "off" or not all(re.fullmatch(r"off|adaptive|fixed \d+", name) for name in names):
        parser.error(f"--settings {options.settings}: wanted off first, then adaptive or fixed N")
    if not set(workloads) <= set(TASKS):
        parser.error(f"--workloads {options.workloads}: wanted some of {', '.join(TASKS)}")
    bench = Bench(options.dataset, options.max_tokens, max(batches))
    rows = []
    for workload, batch in itertools.product(workloads, batches):
        for row in bench.compare(workload, batch, names, options.rounds):
            print(*row, sep="  ", flush=True)
            rows.append(row)
    if options.out is not None:
        title = "Throughput with adaptive and fixed numbers of guesses"
        write_page(options.out, title, markdown_table(HEAD, rows), NOTES)


if __name__ == "__main__":
    main()
