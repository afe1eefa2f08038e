"""Gaps by cause and context length, and the counts of a run, as markdown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_cli.bench.stats import percentile

from tandem_chaos.faults import Fault
from tandem_chaos.load import Stream

#: A drain moves streams a little later than the signal.
_EFFECT_S = 2.0
WITHOUT_FAULT = "no fault"


def is_touched(stream: Stream, fault: Fault) -> bool:
    """Whether the fault concerned this stream, as far as its receipt shows."""
    match fault.role:
        case "decode":
            return stream.receipt.decode_retries > 0
        case "prefill":
            return stream.receipt.prefill_retries > 0
        case _:
            return True


def longest_pause_s(stream: Stream, fault: Fault | None = None) -> float | None:
    """Longest time between two chunks, with a fault: around it; None: there are not two."""
    pauses = [
        end - begin
        for begin, end in zip(stream.chunks_at, stream.chunks_at[1:], strict=False)
        if fault is None or (end > fault.at and begin < fault.at + _EFFECT_S)
    ]
    return max(pauses, default=None)


@dataclass
class Gaps:
    """By cause and tokens of the prompt, in seconds: the longest pauses of streams; of those that another
    decode pod continued, the time in which it got their KV."""

    pauses: defaultdict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    rebuilds: defaultdict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, stream: Stream, fault: Fault | None) -> None:
        if fault is not None and not (stream.ended_at is not None and is_touched(stream, fault)):
            return
        pause = longest_pause_s(stream, fault)
        if pause is not None:
            cause = WITHOUT_FAULT if fault is None else fault.cause
            key = cause, stream.case.context
            self.pauses[key].append(pause)
            if stream.receipt.decode_retries:
                # Computed by a prefill pod and sent, fetched from the pod that drains, or computed there.
                self.rebuilds[key].append((stream.receipt.prefill_ns + stream.receipt.transfer_ns) / 1e9)

    def table(self) -> str:
        lines = [
            "| cause | context | streams | p50 ms | p99 ms | worst ms | KV p50 ms | KV p99 ms |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for (cause, context), pauses in sorted(
            self.pauses.items(), key=lambda entry: (entry[0][0] != WITHOUT_FAULT, entry[0])
        ):
            cells = [*_percentiles(pauses, 50, 99, 100), *_percentiles(self.rebuilds[cause, context], 50, 99)]
            lines.append(f"| {cause} | {context} | {len(pauses)} | {' | '.join(cells)} |")
        return "\n".join(lines)


def _percentiles(seconds: Sequence[float], *wanted: int) -> list[str]:
    """In milliseconds; empty without values."""
    ordered = sorted(seconds)
    return [f"{1000 * percentile(ordered, p):,.0f}" if ordered else "" for p in wanted]


@dataclass
class ChaosReport:
    gaps: Gaps = field(default_factory=Gaps)
    faults: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0
    num_tokens: int = 0
    #: Streams that other pods continued, and prompts that went to another prefill pod.
    num_continued: int = 0
    num_prefilled_again: int = 0
    #: Streams that were cut with their gateway; those that could not resume, as Redis had lost the answer.
    num_resumed: int = 0
    num_anew: int = 0
    #: Times that a full gateway said when to send a request again.
    num_refused: int = 0
    num_rounds: int = 0
    seconds: float = 0.0
    #: Largest growth of one process between its first idle moments and its last.
    most_memory_mib: float = 0.0
    most_descriptors: int = 0
    violations: Sequence[str] = ()

    @property
    def num_faults(self) -> int:
        return self.faults.total()

    def __str__(self) -> str:
        faults = ", ".join(f"{name} {count:,}" for name, count in sorted(self.faults.items()))
        return (
            f"{self.num_faults:,} faults in {self.seconds:,.0f} s in {self.num_rounds:,} rounds: {faults}\n\n"
            f"{self.num_answers:,} answers with {self.num_tokens:,} tokens compared; {self.num_continued:,} "
            f"continued by another decode pod, {self.num_prefilled_again:,} sent to another prefill pod, "
            f"{self.num_resumed:,} resumed after the loss of their gateway, {self.num_anew:,} begun anew as "
            f"events were lost, {self.num_refused:,} refused by a full gateway and sent again\n\n"
            f"largest growth of a process: {self.most_memory_mib:.0f} MiB, {self.most_descriptors} "
            "descriptors\n\n"
            f"{self.gaps.table()}\n"
        )
