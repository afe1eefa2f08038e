"""`slo.py` on a simulated machine (tests/helpers/simulated_system.py), where the step time is exactly that of
the cost model, or varies as on a shared machine.

    PYTHONPATH=tests/helpers python benchmarks/slo_simulated.py --out FILE.md
        [--noise .1 --drift .15 --right-guesses 1.5]

Parts, loads and tables are those of slo.py, with one decode pod, without drafts or with an acceptance that
varies between texts. Each case begins with a fresh start. An oracle replaces the probes of refusals: for up
to REPLAYED of them the case is repeated with the refused request admitted too. The refusal was wrong if the
request then meets its objectives and no fewer others meet theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import structlog
from fixed_gate import FixedGate
from simulated_system import MEASURED, SimulatedSystem
from slo import TENANTS, Benchmark, Case, Plan, System, add_arguments, fixed_order, plan_of, writer_of
from slo_report import PROBE, SHAPES, finish
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.records_file import RecordsWriter, read_runs
from tandem_cli.bench.requests import Request
from tandem_cli.bench.stats import Run, summarise
from tandem_core.model.tokenizer import Tokenizer
from tandem_engine import model_loader

#: Refusals of a case.
REPLAYED = 12
MADE_OTHERS_LATE = "MADE OTHERS LATE"

#: Starts a configuration, given its flags and what is decided beforehand.
Simulate: TypeAlias = Callable[[str, Mapping[Request, bool]], AbstractContextManager[System]]


class SimulatedBenchmark(Benchmark):
    def __init__(
        self, plan: Plan, simulate: Simulate, writer: RecordsWriter | None, *, num_replayed: int = REPLAYED
    ) -> None:
        # The simulated machine has no drafts.
        super().__init__(
            replace(plan, learning_requests=0), self._start_one, dict.fromkeys(TENANTS, "-"), writer
        )
        self._simulate = simulate
        self._num_replayed = num_replayed
        self._decided: Mapping[Request, bool] = {}

    def _start_one(self, name: str, flags: str) -> AbstractContextManager[System]:
        return self._simulate(flags, self._decided)

    def _measure_part(self, name: str, cases: Sequence[Case], *, is_first: bool) -> None:
        for case in cases:
            first_prompt = self._next_prompt
            with self._started(name) as system:
                self._run(system, name, case)
            if is_first and case.part in SHAPES:
                self._replay(name, case, self.runs[-1], first_prompt)

    def _replay(self, name: str, case: Case, run: Run, first_prompt: int) -> None:
        refused = [record for record in run.records if record.is_refused]
        if not refused or not self._num_replayed:
            return
        admitted = {case.requests[r.index]: not r.is_refused for r in run.records}
        records = []
        for one in _spread(refused, self._num_replayed):
            # The warm-up has the same prompts again.
            self._next_prompt = first_prompt
            self._decided = admitted | {case.requests[one.index]: True}
            with self._started(name) as system:
                again = self._send(system, case.requests, case.schedule)
            lost = sum(r.is_met() for r in run.records) - sum(r.is_met() for r in again)
            mine = again[one.index]
            records.append(replace(mine, status=MADE_OTHERS_LATE) if mine.is_met() and lost >= 0 else mine)
        self._decided = {}
        point = run.point._replace(workload=f"{PROBE}{case.part}")
        self._note(Run(point, 0, name, summarise(records), tuple(records)))


def _spread(records: Sequence[RequestRecord], count: int) -> list[RequestRecord]:
    """Picks at most `count` of them, at equal distances."""
    step = max(len(records) / count, 1.0)
    return [records[int(number * step)] for number in range(min(count, len(records)))]


def simulator(
    model_dir: Path, seed: int, noise: float = 0.0, drift: float = 0.0, right_guesses: float = 0.0
) -> Simulate:
    """Applies the flags `--set gateway.NAME=VALUE` and `--fixed-gate ORDER`; ignores others."""
    tokenizer, spec = Tokenizer(model_dir), replace(MEASURED, right_guesses=right_guesses)

    @contextlib.contextmanager
    def simulate(flags: str, decided: Mapping[Request, bool]) -> Iterator[SimulatedSystem]:
        order, flags = fixed_order(flags)
        found = re.findall(r"--set gateway\.([\w-]+)=(\S+)", flags)
        settings = {name.replace("-", "_"): value for name, value in found}
        system = SimulatedSystem(
            tokenizer, settings, spec, noise=noise, drift=drift, seed=seed, decided=decided
        )
        if order:
            system.admission.gate = FixedGate(system.admission, order)  # type: ignore[assignment]
        with system.started():
            yield system

    return simulate


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--noise", type=float, default=0.0, help="standard deviation of the logarithm of a step's time")
    add("--drift", type=float, default=0.0, help="as --noise, of the machine's speed over ten seconds")
    add(
        "--right-guesses",
        type=float,
        default=0.0,
        help="of drafts in a step, the mean over texts that differ",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    add_machine_arguments(parser)
    given = parser.parse_args()
    if given.up:
        parser.error("--up: nothing is started here; give settings of the gateway with --config")
    if given.source is not None:
        finish(read_runs(given.source), given.out, given.plot)
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    plan = plan_of(given)
    model_dir = model_loader.pull(given.model)
    simulate = simulator(model_dir, given.seed, given.noise, given.drift, given.right_guesses)
    benchmark = SimulatedBenchmark(plan, simulate, writer_of(given, plan))
    benchmark.measure()
    finish(benchmark.runs, given.out, given.plot)


if __name__ == "__main__":
    main()
