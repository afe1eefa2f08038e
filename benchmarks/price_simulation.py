"""What the adaptive price loses by having to learn: real texts and real step times, with the clock replaced.

    python benchmarks/price_simulation.py record --dataset FILE.jsonl --out build/price.json
    python benchmarks/price_simulation.py run build/price.json --seeds 12 --out FILE.md

record   takes down what the model writes for each task (speculation_price.py has them), and how long steps
         with so many guesses take
run      decodes those texts again with real drafters, one sequence joining as another ends. A step is said to
         have taken the median of its number of guesses, times noise: what recorded steps took beside these
         medians, in their order, from a place that the seed chooses. What counts is the time without noise.

Where a clock on a shared machine cannot tell 3 % apart, this tells .3 %, within seconds. It says nothing of
the drafter's own time.

fixed    tokens per second beside those without drafts, with the N likeliest guesses of each sequence
adaptive the same by the adaptive price: mean over the seeds, and the least
known    the same if the times without noise were known
best     adaptive beside the best of the others and of no drafts, for the same texts: mean, and least
points   by how many percentage points more of the adaptive guesses were predicted to be accepted than were
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from reporting import describe_command, describe_machine, markdown_table
from speculation_price import TASKS, Bench, Setting
from tandem_core.sampling import SamplingParams
from tandem_drafting.spans import AcceptedSpan
from tandem_drafting.step_cost import StepCost
from tandem_engine import model_loader
from tandem_engine.draft_tree import DraftTree
from tandem_engine.request import Request

FIXED = ("fixed 1", "fixed 3", "fixed 7")
#: Texts of a task, and their tokens.
_NUM_TEXTS, _MAX_TOKENS = 80, 128
#: Steps of one number of guesses whose median is a time to go by.
_ENOUGH = 6
#: Steps with guesses come from these, and from every setting.
_TIMED_TASKS = ("copy", "dialogue", "repeated")
_TIMED_ROUNDS = {1: 10, 8: 6}


@dataclass(frozen=True)
class Text:
    prompt: list[int]
    output: list[int]


class Machine:
    """Recorded steps of one batch size: [number of guesses, seconds] of each, in order."""

    def __init__(self, batch: int, steps: Sequence[tuple[int, float]]) -> None:
        self.batch = batch
        by_guesses: dict[int, list[float]] = {}
        for guesses, seconds in steps:
            by_guesses.setdefault(guesses, []).append(seconds)
        self._knots = sorted(guesses for guesses, seconds in by_guesses.items() if len(seconds) >= _ENOUGH)
        medians = [statistics.median(by_guesses[knot]) for knot in self._knots]
        self._seconds = np.maximum.accumulate(medians)
        self.noise = [seconds / self.seconds(guesses) for guesses, seconds in steps]

    def seconds(self, num_guesses: int) -> float:
        """Without noise; beyond what was seen, on along the last third of it."""
        last = self._knots[-1]
        if num_guesses <= last:
            return float(np.interp(num_guesses, self._knots, self._seconds))
        third = float(np.interp(last * 2 / 3, self._knots, self._seconds))
        return float(self._seconds[-1] + (num_guesses - last) * 3 * (self._seconds[-1] - third) / last)


class KnownCost(StepCost):
    """Has nothing to learn."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def curve(self, num_sequences: int, context: int, max_guesses: int) -> array[float]:
        return array("d", [self._machine.seconds(guesses) for guesses in range(max_guesses + 1)])


class Simulation:
    """One setting on one machine; goes on learning from run to run."""

    def __init__(self, machine: Machine, name: str, seed: int, vocab_size: int) -> None:
        self._machine = machine
        self.setting = Setting("adaptive" if name == "known" else name, vocab_size)
        if name == "known":
            self.setting.step_cost = self.setting._drafter.step_cost = KnownCost(machine)
        self._at = random.Random(seed).randrange(len(machine.noise))
        self._count = 0

    def tokens_per_second(self, texts: Sequence[Text], *, is_shared: bool) -> float:
        """As long as all places of the batch are taken; what is shared helps those who begin later."""
        machine, waiting = self._machine, list(reversed(texts))
        running: list[tuple[Request, Text]] = []
        seconds, num_tokens = 0.0, 0
        while True:
            while waiting and len(running) < machine.batch:
                running.append(self._begin(waiting.pop()))
            if len(running) < machine.batch:
                return num_tokens / seconds
            requests = [request for request, _ in running]
            trees = self.setting.propose(requests, 16)
            num_guesses = sum([len(tree) for tree in trees if tree is not None])
            emitted = [
                (request, _verified(request, text, tree), ())
                for (request, text), tree in zip(running, trees, strict=True)
            ]
            took = machine.seconds(num_guesses)
            self._at = (self._at + 1) % len(machine.noise)
            context = sum([request.num_computed_tokens for request in requests])
            self.setting.step_cost.observe(len(running), context, num_guesses, took * machine.noise[self._at])
            self.setting.extend(emitted)
            seconds += took
            for request, token_ids, _ in emitted:
                num_tokens += len(token_ids)
                request.output_token_ids += token_ids
                request.num_computed_tokens = request.num_tokens - 1
            for request, text in running:
                if len(request.output_token_ids) == len(text.output):
                    self.setting.forget(request.request_id)
                    if is_shared:
                        self.share(request.request_id, text)
            running = [
                (request, text)
                for request, text in running
                if len(request.output_token_ids) < len(text.output)
            ]

    def share(self, name: str, text: Text) -> None:
        self.setting.mirror.apply_delta([AcceptedSpan(name, 0, tuple(text.output))], "1")

    def sent(self) -> np.ndarray:
        """Guesses that were sent, how many were predicted to be accepted, and how many were."""
        tenths = self.setting._drafter.reliability()
        return np.sum([[tenth.num_guesses, tenth.predicted, tenth.accepted] for tenth in tenths], axis=0)

    def _begin(self, text: Text) -> tuple[Request, Text]:
        self._count += 1
        request = Request(f"r{self._count}", text.prompt, SamplingParams(max_tokens=len(text.output)))
        request.output_token_ids = text.output[:1]
        request.num_computed_tokens = len(text.prompt)
        return request, text


def _verified(request: Request, text: Text, tree: DraftTree | None) -> list[int]:
    """What a step emits: the accepted guesses and the token after them."""
    children = tree.children() if tree is not None else [{}]
    node, emitted = 0, []
    for token_id in text.output[len(request.output_token_ids) :]:
        emitted.append(token_id)
        if token_id not in children[node]:
            break
        node = children[node][token_id]
    return emitted


def record(bench: Bench, batches: Sequence[int], out: Path) -> None:
    texts: dict[str, list[list[list[int]]]] = {}
    off = Setting("off", bench.vocab_size)
    for task in TASKS:
        if task == "repeated":  # has those of dialogue
            continue
        texts[task] = []
        for number in range(_NUM_TEXTS // 16):
            wanted = bench.requests(task, 16, number)
            turn = bench.turn(off, wanted)
            texts[task] += [
                [prompt, list(text)] for (prompt, _), text in zip(wanted, turn.texts, strict=True)
            ]
        print(task, flush=True)
    steps: dict[int, list[tuple[int, float]]] = {}
    for batch in batches:
        steps[batch] = []
        for task in _TIMED_TASKS:
            settings = [Setting(name, bench.vocab_size) for name in ("off", "adaptive", *FIXED)]
            for number in range(_TIMED_ROUNDS.get(batch, 4)):
                for setting in settings:
                    wanted = bench.requests(task, batch, number)
                    if task == "repeated":
                        bench.share(setting, bench.turn(setting, wanted))
                    turn = bench.turn(setting, wanted)
                    if task == "dialogue":
                        bench.share(setting, turn)
                    steps[batch] += [
                        (step.num_guesses, step.computing_s)
                        for step in turn.steps
                        if step.num_sequences == batch
                    ]
        print("batch", batch, len(steps[batch]), "steps", flush=True)
    recorded = {"machine": describe_machine(), "vocab_size": bench.vocab_size, "texts": texts, "steps": steps}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(recorded))


def simulate(recorded: dict, num_seeds: int) -> list[list[str]]:
    rows = []
    for batch, steps in recorded["steps"].items():
        machine = Machine(int(batch), [(int(guesses), seconds) for guesses, seconds in steps])
        plain = machine.batch / machine.seconds(0)
        for task in TASKS:
            written = recorded["texts"]["dialogue" if task == "repeated" else task]
            texts = [Text(prompt, output) for prompt, output in written]
            speeds: dict[str, list[float]] = {}
            sent = np.zeros(3)
            for seed in range(num_seeds):
                some = random.Random(seed).sample(texts, 10 * machine.batch if machine.batch < 8 else 80)
                for name in ("adaptive", "known", *FIXED):
                    simulation = Simulation(machine, name, seed, recorded["vocab_size"])
                    if task == "repeated":
                        for number, text in enumerate(some):
                            simulation.share(f"before {number}", text)
                    speed = simulation.tokens_per_second(some, is_shared=task == "dialogue")
                    speeds.setdefault(name, []).append(speed / plain)
                    if name == "adaptive":
                        sent += simulation.sent()
            best = [
                speeds["adaptive"][seed] / max([1.0, *[speeds[name][seed] for name in FIXED]])
                for seed in range(num_seeds)
            ]
            points = f"{100 * (sent[1] - sent[2]) / sent[0]:+.1f}" if sent[0] >= 100 else ""
            means = [f"{statistics.mean(speeds[name]):.3f}" for name in (*FIXED, "known", "adaptive")]
            least = f"{min(speeds['adaptive']):.3f}"
            rows.append(
                [task, batch, *means, least, f"{statistics.mean(best):.3f}", f"{min(best):.3f}", points]
            )
            print(*rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("record", help="texts and step times of this machine")
    taking.add_argument("--model", default="smollm2-135m-instruct")
    taking.add_argument(
        "--dataset", type=Path, help="dialogues as JSON lines; default: a few that come along"
    )
    taking.add_argument("--batches", default="1,8")
    taking.add_argument("--out", type=Path, required=True)
    running = commands.add_parser("run", help="what drafting is worth by them")
    running.add_argument("recorded", type=Path)
    running.add_argument("--seeds", type=int, default=12)
    running.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        batches = [int(batch) for batch in options.batches.split(",")]
        bench = Bench(model_loader.pull(options.model), options.dataset, _MAX_TOKENS, max(16, *batches))
        record(bench, batches, options.out)
        return
    recorded = json.loads(options.recorded.read_text())
    rows = simulate(recorded, options.seeds)
    head = ["task", "batch", *FIXED, "known", "adaptive", "least", "best", "least", "points"]
    report = (
        f"# What the adaptive price loses by having to learn\n\n`{describe_command()}`\n\n"
        f"Recorded on: {recorded['machine']}\n\n{markdown_table(head, rows)}\n"
    )
    if options.out is not None:
        options.out.write_text(report)


if __name__ == "__main__":
    main()
