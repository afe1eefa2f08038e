"""The tables of `benchmarks/engine.py`, as Markdown, and the same figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from reporting import markdown_table

from peers.statistics import Cell, Phase

#: Names of Tandem's lines start so; all others are its peers.
OURS = "tandem"
#: What ratios refer to.
BASE = "transformers"

_ABOUT_PHASES = (
    "gap: median time between two arrivals of the stream, each of which may bring several tokens. TPOT of "
    "systems with drafts also falls by itself as a long text comes to repeat itself; their gaps do not."
)


@dataclass
class Report:
    """Everything measured so far; written anew after each cell."""

    command: str
    hardware: str
    method: str
    #: What each peer said of itself when it started, by name.
    descriptions: dict[str, str] = field(default_factory=dict)
    #: Why a peer is missing, or left early, by name.
    missing: dict[str, str] = field(default_factory=dict)
    #: What each peer's processes took while others were measured, on average, as a share of one core.
    idle_cores: dict[str, float] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)

    def write(self, out: Path) -> None:
        """Writes OUT.json and OUT.md."""
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_name(out.name + ".json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        out.with_name(out.name + ".md").write_text(self.markdown())

    def markdown(self) -> str:
        parts = [
            f"Command: `{self.command}`  \nHardware: {self.hardware}  \n{self.method}",
            markdown_table(["system", "what it is"], list(self.descriptions.items())),
        ]
        parts += [f"**Missing: {name}.** {reason}" for name, reason in self.missing.items()]
        if self.cells:
            parts += ["## TTFT and TPOT", cells_table(self.cells)]
            parts += ["## Tandem beside the best of the others", leaders_table(self.cells)]
        if self.phases:
            parts += ["## A running stream while another prompt is computed", _ABOUT_PHASES]
            parts.append(phases_table(self.phases))
        if self.idle_cores:
            most, share = max(self.idle_cores.items(), key=lambda item: item[1])
            parts.append(
                "Systems that were not being measured took, all together and on average, "
                f"{sum(self.idle_cores.values()):.1%} of a core; the most: {most}, {share:.1%}."
            )
        return "\n\n".join(parts) + "\n"


def cells_table(cells: Sequence[Cell]) -> str:
    """One line per cell, those of one load together."""
    rows = []
    for load in _loads(cells):
        peers = [c for c in cells if (c.prompt_tokens, c.concurrency) == load]
        base = next((c for c in peers if c.peer == BASE), None)
        rows += [
            (
                str(c.prompt_tokens),
                str(c.concurrency),
                c.peer,
                _ms(c.ttft_ms),
                _ratio(base.ttft_ms if base else None, c.ttft_ms),
                _ms(c.tpot_ms),
                _ratio(base.tpot_ms if base else None, c.tpot_ms),
                "" if c.tokens_per_step is None else f"{c.tokens_per_step:.2f}",
                str(len(c.timings)),
            )
            for c in peers
        ]
    head = ["prompt", "at once", "system", "TTFT ms", "vs HF", "TPOT ms", "vs HF", "tokens/step", "requests"]
    return markdown_table(head, rows)


def leaders_table(cells: Sequence[Cell]) -> str:
    """Tandem's best beside the best of the others, for each load; above 1, Tandem is ahead."""
    questions: list[tuple[str, Callable[[Cell], bool], Callable[[Cell], float]]] = [
        ("TTFT", lambda c: True, lambda c: c.ttft_ms),
        ("TPOT without drafts", lambda c: not c.drafts, lambda c: c.tpot_ms),
        ("TPOT", lambda c: True, lambda c: c.tpot_ms),
    ]
    rows = []
    for load in _loads(cells):
        here = [c for c in cells if (c.prompt_tokens, c.concurrency) == load]
        for question, may_answer, figure in questions:
            ours = [c for c in here if c.peer.startswith(OURS) and may_answer(c)]
            others = [c for c in here if not c.peer.startswith(OURS) and may_answer(c)]
            if not ours or not others:
                continue
            mine, best = min(ours, key=figure), min(others, key=figure)
            rows.append(
                (
                    str(load[0]),
                    str(load[1]),
                    question,
                    f"{_ms(figure(mine))} ({mine.peer.removeprefix(OURS).lstrip(', ')})",
                    f"{_ms(figure(best))} ({best.peer})",
                    _ratio(figure(best), figure(mine)),
                )
            )
    return markdown_table(["prompt", "at once", "ms", "tandem", "best of the others", "ratio"], rows)


def phases_table(phases: Sequence[Phase]) -> str:
    before = {p.peer: p for p in phases if p.name == "before"}
    rows = [
        (
            p.peer,
            p.name,
            str(p.num_tokens),
            _ms(p.tpot_ms),
            _ratio(p.tpot_ms, before[p.peer].tpot_ms if p.peer in before else None),
            _ms(p.gap_median_ms),
            _ms(p.gap_p99_ms),
            _ms(p.arriving_ttft_ms),
        )
        for p in phases
    ]
    head = [
        "system",
        "phase",
        "tokens",
        "TPOT ms",
        "vs before",
        "gap ms",
        "gap p99 ms",
        "TTFT of the other, ms",
    ]
    return markdown_table(head, rows)


def _loads(cells: Sequence[Cell]) -> list[tuple[int, int]]:
    """In the order in which they were measured."""
    return list(dict.fromkeys((c.prompt_tokens, c.concurrency) for c in cells))


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or base is None else f"{value / base:.2f}x"
