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

Settings take turns with the same requests, in rounds, so that the machine's moods fall on all alike. Tokens
do not depend on drafts, so that every setting does the same work; tokens per second count from the step after
the last prompt was computed. `fixed N` drafts the N likeliest guesses of each sequence, whatever they cost.
"drafting" is the share of that time that the drafter itself took.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reporting import describe_command, describe_machine, markdown_table
from tandem_cli.bench.dataset import load_dialogues, sample_dialogues
from tandem_cli.bench.workload import question
from tandem_engine import store
from tandem_engine.drafts.drafter import Drafter, DraftPolicy
from tandem_engine.drafts.mirror import GlobalMirror
from tandem_engine.drafts.native import Likeliest
from tandem_engine.drafts.spans import AcceptedSpan
from tandem_engine.drafts.tree import DraftTree
from tandem_engine.llm import LLM
from tandem_engine.request import Request, SamplingParams
from tandem_engine.salt import cache_salt
from tandem_engine.step_cost import StepCost

MAX_NODES = 16
WORKLOADS = ("random", "story", "copy", "dialogue", "repeated")
SETTINGS = ("off", "adaptive", "fixed 1", "fixed 3", "fixed 7", "fixed 15")


class Setting:
    """A way to draft, which learns from its own turns only."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self.name = name
        self.mirror = GlobalMirror(vocab_size=vocab_size)
        self.num_guesses = 0
        self._max_nodes = {"off": 0, "adaptive": MAX_NODES}.get(name, 0)
        if name.startswith("fixed "):
            self._max_nodes = int(name.removeprefix("fixed "))
        is_free = name != "adaptive"
        self._drafter = Drafter(self.mirror, DraftPolicy(row_cost=0.0) if is_free else DraftPolicy())
        #: Where the engine reports its steps: a fixed setting does not heed them.
        self.step_cost = StepCost() if is_free else self._drafter.step_cost

    def propose(self, requests: Sequence[Request], max_nodes: int) -> list[DraftTree | None]:
        trees = self._drafter.propose(requests, min(max_nodes, self._max_nodes))
        self.num_guesses += sum([len(tree) for tree in trees if tree is not None])
        return trees

    def learns_from(self, request: Request) -> bool:
        return self._drafter.learns_from(request)

    def extend(
        self, emitted: Sequence[tuple[Request, Sequence[int]]], likeliest: Likeliest | None = None
    ) -> None:
        self._drafter.extend(emitted, likeliest)

    def forget(self, request_id: str) -> None:
        self._drafter.forget(request_id)


class Turns:
    """The engine's drafter: whichever setting's turn it is. Takes its time."""

    def __init__(self, setting: Setting) -> None:
        self.now = setting
        self.seconds = 0.0

    @property
    def step_cost(self) -> StepCost:
        return self.now.step_cost

    def propose(self, requests: Sequence[Request], max_nodes: int) -> list[DraftTree | None]:
        begun = time.perf_counter()
        trees = self.now.propose(requests, max_nodes)
        self.seconds += time.perf_counter() - begun
        return trees

    def learns_from(self, request: Request) -> bool:
        return self.now.learns_from(request)

    def extend(
        self, emitted: Sequence[tuple[Request, Sequence[int]]], likeliest: Likeliest | None = None
    ) -> None:
        begun = time.perf_counter()
        self.now.extend(emitted, likeliest)
        self.seconds += time.perf_counter() - begun

    def forget(self, request_id: str) -> None:
        self.now.forget(request_id)


@dataclass(frozen=True)
class Turn:
    tokens_per_second: float
    tokens_per_step: float
    guesses_per_step: float
    drafting: float
    texts: tuple[tuple[int, ...], ...]


class Bench:
    def __init__(self, model_dir: Path, dataset: Path | None, max_tokens: int, max_batch: int) -> None:
        self._llm = LLM(model_dir, speculation="off", max_batch=max_batch, max_draft_nodes=MAX_NODES)
        self._engine = self._llm.engine
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
        prompts = []
        for i in range(batch):
            dialogue = self._dialogues[(round_number * batch + i) % len(self._dialogues)]
            said = " ".join(turn.content for turn in question(dialogue)[-2:])[:700]
            task = {
                "random": f"Write something about this:\n\n{said}",
                "story": f"Write a story about a customer who says:\n\n{said}",
                "copy": f"Repeat the following text word by word:\n\n{said}",
            }.get(workload, said)
            prompts.append(self._llm.render_chat([{"role": "user", "content": task}]))
        temperature = {"random": 2.0, "story": 0.8}.get(workload, 0.0)
        sampling = SamplingParams(max_tokens=self._max_tokens, temperature=temperature, ignore_eos=True)
        return [
            (prompt, replace(sampling, seed=round_number * batch + i)) for i, prompt in enumerate(prompts)
        ]

    def turn(self, setting: Setting, wanted: Sequence[tuple[list[int], SamplingParams]]) -> Turn:
        engine = self._engine
        engine._drafter = turns = Turns(setting)
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
        before = sum(len(request.output_token_ids) for request in requests)
        setting.num_guesses = sequence_steps = 0
        turns.seconds = 0.0
        begun = time.perf_counter()
        while engine.has_work():
            sequence_steps += len(engine.step())
        seconds = time.perf_counter() - begun
        tokens = sum(len(request.output_token_ids) for request in requests) - before
        texts = tuple(tuple(request.output_token_ids) for request in requests)
        return Turn(
            tokens / seconds,
            tokens / sequence_steps,
            setting.num_guesses / sequence_steps,
            turns.seconds / seconds,
            texts,
        )

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
                    self._share(setting, taught)
                turn = self.turn(setting, wanted)
                if workload == "dialogue":
                    self._share(setting, turn)
                if round_number >= 0:
                    turns[setting.name].append(turn)
        for number in range(rounds):
            if len({turns[name][number].texts for name in names}) != 1:
                raise SystemExit(f"{workload}, batch {batch}: the texts differ between settings")
        rows = []
        for name in names:
            ratios = [
                mine.tokens_per_second / off.tokens_per_second
                for mine, off in zip(turns[name], turns["off"], strict=True)
            ]
            rows.append(
                [
                    workload,
                    str(batch),
                    name,
                    f"{statistics.median(ratios):.3f}",
                    f"{min(ratios):.2f} - {max(ratios):.2f}",
                    f"{statistics.median([t.tokens_per_second for t in turns[name]]):.0f}",
                    f"{statistics.mean([t.tokens_per_step for t in turns[name]]):.2f}",
                    f"{statistics.mean([t.guesses_per_step for t in turns[name]]):.1f}",
                    f"{statistics.median([t.drafting for t in turns[name]]):.2%}",
                ]
            )
        return rows

    def _share(self, setting: Setting, turn: Turn) -> None:
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
    bench = Bench(store.pull(options.model), options.dataset, options.max_tokens, max(batches))
    head = [
        "workload",
        "batch",
        "setting",
        "beside off",
        "range",
        "tokens/s",
        "tokens/step",
        "guesses/step",
        "drafting",
    ]
    rows = []
    for workload in options.workloads.split(","):
        for batch in batches:
            found = bench.compare(workload, batch, names, options.rounds)
            print(*("  ".join(row) for row in found), sep="\n", flush=True)
            rows += found
    report = (
        f"# What drafting is worth\n\n`{describe_command()}`\n\n{describe_machine()}\n\n"
        "Tokens per second of the whole batch beside speculation off: median over rounds of the ratio.\n\n"
        f"{markdown_table(head, rows)}\n"
    )
    if options.out is not None:
        options.out.write_text(report)


if __name__ == "__main__":
    main()
