"""From what clients saw to the figures of the tables.

TTFT   request sent to first token
TPOT   (last arrival - first arrival) / tokens that came after the first arrival
gap    time between two arrivals of one stream; an arrival may bring several tokens
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from peers.protocol import Answer, Stream

PHASES = ("before", "during", "after")


@dataclass(frozen=True)
class Timing:
    """One request, milliseconds."""

    ttft_ms: float
    tpot_ms: float
    num_tokens: int
    #: 0 where the peer does not tell.
    decode_steps: int


@dataclass(frozen=True)
class Cell:
    """One peer under one load; medians over all its requests."""

    peer: str
    drafts: bool
    prompt_tokens: int
    concurrency: int
    ttft_ms: float
    tpot_ms: float
    #: None where the peer does not tell.
    tokens_per_step: float | None
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Phase:
    """A peer's running streams before, while, or after another prompt is computed."""

    peer: str
    name: str
    num_tokens: int
    tpot_ms: float
    gap_median_ms: float
    gap_p99_ms: float
    #: Of the prompt that arrived, median; the same in all three phases.
    arriving_ttft_ms: float


def timing(stream: Stream) -> Timing:
    num_later = sum(stream.counts[1:])
    if num_later == 0:
        raise ValueError("a stream that arrives all at once has no TPOT")
    return Timing(
        ttft_ms=1e3 * (stream.times_s[0] - stream.sent_s),
        tpot_ms=1e3 * (stream.times_s[-1] - stream.times_s[0]) / num_later,
        num_tokens=sum(stream.counts),
        decode_steps=stream.decode_steps,
    )


def cell(peer: str, drafts: bool, prompt_tokens: int, concurrency: int, streams: Sequence[Stream]) -> Cell:
    timings = tuple(map(timing, streams))
    steps = sum(t.decode_steps for t in timings)
    return Cell(
        peer,
        drafts,
        prompt_tokens,
        concurrency,
        ttft_ms=statistics.median(t.ttft_ms for t in timings),
        tpot_ms=statistics.median(t.tpot_ms for t in timings),
        tokens_per_step=sum(t.num_tokens - 1 for t in timings) / steps if steps else None,
        timings=timings,
    )


def phases(peer: str, answers: Sequence[Answer]) -> list[Phase]:
    """Sorts each gap of the running streams into a phase.

        sent                 first token of the arriving prompt
         |<------ during ----->|
    --x--|-x-----x-----------x-|--x--x--      x: arrival in the running stream

    A gap that touches the prompt's computation belongs to `during`, also when it began before.
    """
    gaps: dict[str, list[tuple[float, int]]] = {name: [] for name in PHASES}
    ttfts = []
    for answer in answers:
        running, arriving = answer.streams
        begin, end = arriving.sent_s, arriving.times_s[0]
        ttfts.append(1e3 * (end - begin))
        for (left, right), count in zip(pairwise(running.times_s), running.counts[1:], strict=True):
            name = "before" if right <= begin else "after" if left >= end else "during"
            gaps[name].append((right - left, count))
    return [
        Phase(
            peer,
            name,
            num_tokens=sum(count for _, count in seen),
            tpot_ms=1e3 * sum(gap for gap, _ in seen) / sum(count for _, count in seen),
            gap_median_ms=1e3 * statistics.median(gap for gap, _ in seen),
            gap_p99_ms=1e3 * percentile([gap for gap, _ in seen], 0.99),
            arriving_ttft_ms=statistics.median(ttfts),
        )
        for name, seen in gaps.items()
        if seen
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks; share in [0, 1]."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
