"""The whole harness: a few faults of every kind against real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tandem_chaos.faults import FaultKind
from tandem_chaos.run import ChaosOptions, run_chaos
from tandem_chaos.violations import Violations

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def options(model: Path, folder: Path, **fields: object) -> ChaosOptions:
    small = {"contexts": (60, 300), "num_cases": 6, "concurrency": 3, "settle_s": 30.0, "seed": 1}
    return ChaosOptions(model=model, folder=folder, **{**small, **fields})


async def test_no_client_sees_a_few_faults(tiny_model: Path, tmp_path: Path) -> None:
    kinds = (FaultKind.KILL, FaultKind.TERM, FaultKind.PAUSE)
    chosen = options(
        tiny_model,
        tmp_path,
        num_faults=3,
        concurrency=2,
        kinds=kinds,
        roles=("decode", "prefill", "redis"),
        num_decode=2,
        num_gateways=1,
    )
    report = await run_chaos(chosen, Violations(), lambda _: None)
    assert report.violations == ()
    assert report.num_faults == 3
    assert report.num_answers >= 6
    assert "no fault" in str(report)


@pytest.mark.wide
async def test_every_kind_against_every_role(tiny_model: Path, tmp_path: Path) -> None:
    chosen = options(tiny_model, tmp_path, num_faults=60, kinds=tuple(FaultKind), faults_per_round=10)
    report = await run_chaos(chosen, Violations(), lambda _: None)
    assert report.violations == ()
    assert report.num_continued > 0
    assert len(report.faults) > 15
