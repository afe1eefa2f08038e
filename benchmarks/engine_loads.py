"""The prompts of `engine.py`, and the figures of each load: measured ones and their floor.

    with a shared prefix        policy, 1,200 tokens | Ticket 17. other dialogues | one dialogue
    without                     Ticket 17. policy | other dialogues | one dialogue

Every prompt has its own ticket number and is sent once. A prefix cache therefore has the whole policy of the
first form, and nothing of the second.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from floors import Pass
from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.prompts import WORKLOADS, Prompt, cut_to_tokens
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.stats import duration_of
from tandem_cli.bench.workload import load_material

SHORT_TOKENS, LONG_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS = 256, 3840, 1200, 64


@dataclass(frozen=True)
class Load:
    """Each round sends `concurrency` prompts at once, with a common prefix of `shared_tokens` tokens."""

    prompt_tokens: int
    concurrency: int
    rounds: int
    shared_tokens: int = 0

    def __str__(self) -> str:
        shared = f" ({self.shared_tokens:,} shared)" if self.shared_tokens else ""
        return f"{self.prompt_tokens:,} tokens{shared}, concurrency {self.concurrency}"


LOADS = (
    Load(SHORT_TOKENS, 1, rounds=3),
    Load(SHORT_TOKENS, 4, rounds=2),
    Load(LONG_TOKENS, 1, rounds=2),
    # Four prompts in one round; the slowest system takes minutes for them.
    Load(LONG_TOKENS, 4, rounds=1),
    Load(LONG_TOKENS, 1, rounds=2, shared_tokens=SHARED_TOKENS),
    Load(LONG_TOKENS, 4, rounds=1, shared_tokens=SHARED_TOKENS),
)


def quick(load: Load) -> Load:
    """One round with prompts of a quarter of the length: shows that everything runs."""
    return Load(load.prompt_tokens // 4, load.concurrency, 1, load.shared_tokens // 4)


class Prompts:
    """Chat prompts of a wanted length, counted with the model's tokenizer; none is made twice."""

    def __init__(self, options: BenchOptions) -> None:
        self._material = load_material(options)
        self._number = 0

    def make(self, num_tokens: int, count: int, shared_tokens: int = 0) -> list[Prompt]:
        return [self._next(num_tokens, shared_tokens) for _ in range(count)]

    def for_load(self, load: Load) -> list[Prompt]:
        """The prompts of one round."""
        return self.make(load.prompt_tokens, load.concurrency, load.shared_tokens)

    def _next(self, num_tokens: int, shared_tokens: int) -> Prompt:
        material, ticket = self._material, f"Ticket {self._number}."
        if shared_tokens:
            # The same dialogues for all prompts make up for a policy that is shorter.
            texts = (material.policy.strip(), *(dialogue.as_text() for dialogue in material.dialogues))
            shared = cut_to_tokens("\n\n".join(texts), shared_tokens, material.count)
            policy = f"{shared}\n\n{ticket}"
        else:
            policy = f"{ticket}\n\n{material.policy}"
        material = replace(material, policy=policy, input_tokens=num_tokens)
        prompt = WORKLOADS["retail"](material, self._number)
        self._number += 1
        return prompt


@dataclass(frozen=True)
class Figures:
    ttft_s: float
    tpot_s: float
    #: Output tokens of all requests, per second of wall time.
    tokens_per_s: float

    def __str__(self) -> str:
        values = (1e3 * self.ttft_s, 1e3 * self.tpot_s, self.tokens_per_s)
        return " / ".join(number(value) for value in values)


def measured(rounds: Sequence[Sequence[RequestRecord]]) -> Figures:
    """TTFT and TPOT: medians over all requests."""
    records = [record for records in rounds for record in records]
    return Figures(
        _median_s(records, "ttft_s"),
        _median_s(records, "tpot_s"),
        sum(record.output_tokens for record in records) / sum(map(duration_of, rounds)),
    )


def floor(load: Load, floor_s: Callable[[Pass], float]) -> Figures:
    """Without drafts: prompts one after the other, then all sequences decode in one batch.

    floor_s: the least time of a pass (floors.py).
    """
    new_tokens, sizes = load.prompt_tokens - load.shared_tokens, range(1, load.concurrency + 1)
    # When the n-th first token can be there at the earliest.
    ready_s = [floor_s(Pass(new_tokens, load.shared_tokens, num_seqs=n)) for n in sizes]
    # A step of mean length; the first token comes with the prompt.
    tpot_s = floor_s(Pass(1, load.prompt_tokens + OUTPUT_TOKENS // 2, num_seqs=load.concurrency))
    total_s = ready_s[-1] + (OUTPUT_TOKENS - 1) * tpot_s
    return Figures(statistics.median(ready_s), tpot_s, load.concurrency * OUTPUT_TOKENS / total_s)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _median_s(records: Sequence[RequestRecord], figure: Literal["ttft_s", "tpot_s"]) -> float:
    return statistics.median(getattr(record, figure) or 0.0 for record in records)
