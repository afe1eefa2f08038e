"""What each part of admission brings: the loads of `slo_simulated.py`, each time without one of them.

    PYTHONPATH=tests/helpers python benchmarks/slo_ablations.py --out FILE.md --seconds 30 --loads 1,2,4
        [--num-seeds 2] [--noise .1 --drift .15] [--right-guesses 1.5] [--only PART]

The sums are over all parts, loads and seeds. Since equal seeds give equal requests, at equal times on an
equally slow machine, a row differs from the first one by what is left out, and by what follows from it.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeAlias
from unittest.mock import patch

import structlog
from curves import pooled_records
from reporting import markdown_table, write_page
from slo import add_arguments, plan_of
from slo_report import SHAPES, kept_promises, neighbours
from slo_simulated import SimulatedBenchmark, add_machine_arguments, simulator
from tandem_cli.bench.stats import Run, calibration, fairness, refusals
from tandem_engine import model_loader
from tandem_gateway.admission import forecast, places, shares
from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.admission.batch_plan import BatchPlan, Turn
from tandem_gateway.admission.forecast import Forecast, Forecaster
from tandem_gateway.admission.judge import Judge
from tandem_gateway.admission.neighbours import Neighbours
from tandem_gateway.admission.shares import Bookings, FairShares
from tandem_gateway.fleet.pod_load import Backlog
from tandem_gateway.fleet.pods import Pod
from tandem_gateway.fleet.routing import Route, Router
from tandem_gateway.request import TokenizedRequest

Ablation: TypeAlias = Callable[[], AbstractContextManager[object]]


class _FixedLimit:
    """In place of one that adapts."""

    def __init__(self, highest: int, *, recovery: float = 1.0) -> None:
        self.value = float(highest)

    def lower_to(self, most: float) -> None:
        pass

    def ended(self, *, met: bool) -> None:
        pass


_work = Router._work
_started = Forecaster.started
_redeem = Bookings.redeem


def _work_without_sequences(self: Router, *given: object) -> object:
    return replace(_work(self, *given), join_s=0.0)  # type: ignore[arg-type]


def _started_on_time(
    self: Forecaster, request: TokenizedRequest, said: Forecast, ttft_s: float, *, is_overtaken: bool
) -> None:
    _started(self, request, said, ttft_s, is_overtaken=False)


def _redeemed_as_new(self: Bookings, key: int) -> bool:
    _redeem(self, key)
    return False


def _compared_whole(self: Admission, admitted: Admitted, ended_at: float) -> None:
    if admitted.route is not None:
        took_s = ended_at - (admitted.admitted_at or admitted.judged_at)
        self._forecaster.took(admitted.request, admitted.route, admitted.model_s, took_s)


def _compared_last(self: Admission, admitted: Admitted, ended_at: float) -> None:
    if admitted.route is not None:
        left_s = ended_at - admitted.changed_at
        self._forecaster.took(admitted.request, admitted.route, admitted.left_then_s, left_s)


def _overtaking_on_average(self: FairShares, name: str, seconds: float, work_s: float) -> float:
    _, rate, mean_work_s = self._asking_much_less(name)
    return rate * seconds * mean_work_s / work_s


class _SharedByAll(BatchPlan):
    """As if all sequences of a pod had places."""

    def __init__(self, pod: Pod, turns: Iterable[Turn], context: int) -> None:
        super().__init__(pod, (), context)


def _no_room(self: FairShares, *_: object) -> int:
    return 0


def _never_late(self: Neighbours, request: TokenizedRequest, route: Route, *_: object, **__: object) -> bool:
    return False


#: What is left out -> how.
ABLATIONS: Mapping[str, Ablation] = {
    "nothing": nullcontext,
    "whether it makes others late": lambda: patch.object(Neighbours, "would_be_late", _never_late),
    "of these, later prompts whose first token would be late": lambda: patch.object(
        Backlog, "slack", lambda *_: float("inf")
    ),
    "requests without objectives wait while they would make others late": lambda: patch.object(
        Judge, "may_begin", lambda *_: True
    ),
    "the limit of these that follows refusals": lambda: patch.object(places, "AdaptiveLimit", _FixedLimit),
    "the prior": lambda: patch.object(forecast, "_PRIOR", (0.0,)),
    "ten tokens on both sides of what is left": lambda: patch.object(forecast, "_NUM_STEPS_OFF", 0),
    "of what is compared, what was left when the last one came": lambda: patch.object(
        Admission, "_compare", _compared_whole
    ),
    "of what is compared, the whole answer": lambda: patch.object(Admission, "_compare", _compared_last),
    "that predictions of about the same length tell how wrong one may be": lambda: patch.object(
        forecast, "_NUM_NEAR", forecast._WINDOW
    ),
    "the moving level of quantiles": lambda: patch.object(forecast, "_LEVEL_RATE", 0.0),
    "first tokens that others overtook do not count": lambda: patch.object(
        Forecaster, "started", _started_on_time
    ),
    "sequences that decode in the steps of prompts": lambda: patch.object(
        Router, "_work", _work_without_sequences
    ),
    "who has a place in a full batch": lambda: patch(
        "tandem_gateway.admission.neighbours.BatchPlan", _SharedByAll
    ),
    "room for clients that are due back": lambda: patch.object(Judge, "_due_back_on", lambda *_: []),
    "clients that come back are judged by the median": lambda: patch.object(
        Bookings, "redeem", _redeemed_as_new
    ),
    "room for other tenants": lambda: patch.object(FairShares, "room_for_others", _no_room),
    "the standard deviations in it": lambda: patch.object(shares, "_DEVIATIONS", 0.0),
    "the standard deviation in how many overtake": lambda: patch.object(
        FairShares, "num_overtaking", _overtaking_on_average
    ),
    "of clients that are due back, those of a noisy tenant do not count": lambda: patch.object(
        FairShares, "asks_much_less", lambda *_: False
    ),
}


def row(name: str, by_seed: Sequence[Sequence[Run]]) -> list[str]:
    """Of the runs without that part."""
    runs = [run for of_seed in by_seed for run in of_seed]
    records = pooled_records([run for run in runs if run.point.workload in SHAPES])
    told, kept = calibration(records), kept_promises(records)
    retries = [refusals(run.records) for run in runs if run.point.workload == "retry"]
    num_again = sum(one.num_honoured for one in retries)
    noisy = [(of_seed, run) for of_seed in by_seed for run in of_seed if run.point.workload == "noisy"]
    beside = [neighbours(of_seed, run)[-1].attainment for of_seed, run in noisy]
    fair = [fairness(run.records) for _, run in noisy]
    cells = [
        str(sum(not record.is_refused for record in records)) if records else "",
        str(sum(record.is_met() for record in records)) if records else "",
        "" if kept is None else f"{kept:.4f}",
        "" if told is None else f"{told.ttft_p90:.3f} / {told.e2e_p90:.3f}",
        f"{sum(one.num_then_admitted for one in retries) / num_again:.3f}" if num_again else "",
        f"{statistics.mean(beside):.3f}" if beside else "",
        f"{statistics.mean(one.jain_of_fair_share for one in fair if one is not None):.3f}" if fair else "",
    ]
    return [name, *(cell or "-" for cell in cells)]


HEAD = (
    "left out", "admitted", "in time", "of admitted", "p90 that held, TTFT / E2E", "retries admitted",
    "neighbours of a noisy tenant in time", "Jain's index",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    add_machine_arguments(parser)
    parser.add_argument("--num-seeds", type=int, default=2, help="--seed and the next ones")
    parser.add_argument(
        "--only", action="append", metavar="PART", help="what has this in its name; repeatable"
    )
    given = parser.parse_args()
    if given.up or given.config or given.source:
        parser.error("--up, --config and --from are for slo.py")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    model_dir = model_loader.pull(given.model)
    rows: list[list[str]] = []
    for name, without in ABLATIONS.items():
        if given.only and not any(part in name for part in given.only):
            continue
        by_seed: list[list[Run]] = []
        for seed in range(given.seed, given.seed + given.num_seeds):
            plan = plan_of(argparse.Namespace(**vars(given) | {"seed": seed, "config": ["ours="]}))
            simulate = simulator(model_dir, seed, given.noise, given.drift, given.right_guesses)
            with without():
                by_seed.append(SimulatedBenchmark(plan, simulate, None, num_replayed=0).measure())
        rows.append(row(name, by_seed))
        write_page(given.out, "Admission without one of its parts, simulated", markdown_table(HEAD, rows))


if __name__ == "__main__":
    main()
