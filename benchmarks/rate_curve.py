"""TTFT, TPOT and goodput over the request rate, of Tandem and of other systems.

    python benchmarks/rate_curve.py --out FILE.md --plot FILE.png
    python benchmarks/rate_curve.py --only llama.cpp --only Tandem --rates .25,.5,1 --out FILE.md

Each system (peers.py) gets equal chat requests at equal times of a Poisson process from the load generator of
`tandem bench serve`, and its answers are judged by equal objectives. Only Tandem gets the class, so only it
can refuse a request; a refused one counts as missed. The systems take turns at each rate; the others are
stopped meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from curves import draw_curves, rate_table
from peers import Roster, lineup, say, send
from reporting import describe_objectives, page
from tandem_cli.bench.options import BenchOptions, Point
from tandem_cli.bench.records_file import RecordsWriter
from tandem_cli.bench.stats import Run, summarise
from tandem_cli.bench.workload import RequestMaker
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_engine import model_loader


class Sweep:
    """The runs so far, and the files that are written from them."""

    def __init__(
        self,
        options: BenchOptions,
        rates: Sequence[float],
        rounds: int,
        roster: Roster,
        out: Path,
        plot: Path | None,
    ) -> None:
        self._options = options
        self._rates = rates
        self._rounds = rounds
        self._roster = roster
        self._out = out
        self._plot = plot
        self._writer = RecordsWriter(options.output, options.described()) if options.output else None
        self.runs: list[Run] = []

    def measure(self) -> None:
        """All rates in turn; a system that answers nothing at one of them is left out of the next ones."""
        options = self._options
        maker = RequestMaker(options)
        points = [Point(options.workload, rate=rate) for rate in self._rates]
        cases = [(point, number) for point in points for number in range(self._rounds)]
        for turn, (point, number) in enumerate(cases):
            requests = maker.make(point.workload, turn * maker.num_requests)
            for peer, server in self._roster.turns(turn):
                records = send(peer, server, requests, maker.schedule(point), timeout_s=options.timeout)
                run = Run(point, number, peer.name, summarise(records), tuple(records))
                self.runs.append(run)
                say(f"{point.load()}, {peer.name}: {run.summary.num_ok} of {run.summary.num_sent}")
                if self._writer is not None:
                    self._writer.add(run)
                if not run.summary.num_ok:
                    self._roster.drop(peer, f"nothing succeeded at {point.load()}: {records[0].error}")
            self.write()

    def write(self) -> None:
        options = self._options
        missing = "".join(f"\nMissing: {name}: {reason}  " for name, reason in self._roster.missing.items())
        slo = DEFAULT_SLO_CLASSES[options.slo_class]
        notes = (
            f"{options.model}, Poisson arrivals, {options.num_requests} requests in each of {self._rounds} "
            f"rounds, prompts of {options.input_tokens} tokens, {options.max_tokens} output tokens, greedy. "
            f"Objectives: {describe_objectives(slo)}. Counts are sums over rounds, "
            f"other figures medians.\n{missing}"
        )
        title = "TTFT, TPOT and goodput over the request rate"
        self._out.write_text(page(title, rate_table(self.runs), notes))
        if self._plot is not None:
            draw_curves(self._plot, self.runs, options.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the page, as Markdown")
    parser.add_argument("--plot", type=Path, help="the curves, as PNG")
    parser.add_argument("--records", type=Path, help="every request, as JSON lines")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name, folder or GGUF file")
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16",
                        help="of transformers, vLLM and Tandem; llama.cpp runs the GGUF file")  # fmt: skip
    parser.add_argument("--up", action="append", metavar="FLAGS",
                        help="flags of `tandem up` for two rows; repeatable; default: --dtype")  # fmt: skip
    parser.add_argument("--only", action="append", metavar="PART",
                        help="peers whose name has PART; repeatable")  # fmt: skip
    parser.add_argument("--rates", default=".25,.5,1,2", help="requests per second, with commas")
    parser.add_argument("--num-requests", type=int, default=32, help="of each run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--slo-class", default="interactive", choices=sorted(DEFAULT_SLO_CLASSES))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a run")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a terminated benchmark ends its peers too
    options = BenchOptions(
        num_requests=given.num_requests,
        dataset=given.dataset,
        input_tokens=given.input_tokens,
        max_tokens=given.max_tokens,
        model=given.model,
        slo_class=given.slo_class,
        timeout=given.timeout,
        output=given.records,
    )
    rates = [float(rate) for rate in given.rates.split(",")]
    model_dir = model_loader.pull(given.model)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    roster = Roster()
    with contextlib.ExitStack() as stack:
        for peer in lineup(model_dir, given.dtype, given.up or [f"--dtype {given.dtype}"]):
            if not given.only or any(part in peer.name for part in given.only):
                roster.start(peer, stack)
        sweep = Sweep(options, rates, given.rounds, roster, given.out, given.plot)
        sweep.measure()
    print(given.out.read_text())


if __name__ == "__main__":
    main()
