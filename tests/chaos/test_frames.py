"""Frame faults: none of them reaches a token, and a missing guard is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from tandem_chaos.frame_faults import FrameFault
from tandem_chaos.frame_simulation import KINDS, FrameSimulation
from tandem_chaos.frames import FrameOptions, FrameReport, run_frames
from tandem_chaos.violations import Violations
from tandem_engine.transport import codec, incoming
from tandem_engine.transport.incoming import IncomingTransfer

#: Nothing here may depend on the speed of the machine.
PATIENT = {"settle_s": 30.0}


async def run(model: Path, num_faults: int, *kinds: FrameFault, **sizes: int) -> FrameReport:
    options = FrameOptions(
        model, seed=5, num_faults=num_faults, kinds=kinds or tuple(FrameFault), **PATIENT, **sizes
    )
    return await run_frames(options, Violations())


async def test_no_frame_fault_changes_a_token_or_leaves_anything_behind(tiny_model: Path) -> None:
    report = await run(tiny_model, 150, round_size=24, concurrency=24)
    assert report.violations == ()
    assert report.num_faults.total() >= 150
    assert len(report.num_faults) >= 6, "many kinds"
    assert report.num_complete > 0
    assert report.num_failed > 0
    assert sum(report.num_dropped.values()) > 0


def test_thousands_of_simulated_frame_faults_do_no_harm_and_a_seed_repeats_them() -> None:
    first, second = (FrameSimulation(3, Violations()).run(1000) for _ in range(2))
    assert first.violations == ()
    assert sum(first.num_faults.values()) >= 1000
    assert set(first.num_faults) == set(KINDS)
    assert 0 < first.num_complete < first.num_transfers
    assert (first.num_faults, first.num_dropped) == (second.num_faults, second.num_dropped)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(4))
def test_many_simulated_frame_faults(seed: int) -> None:
    report = FrameSimulation(seed, Violations(), credit_blocks=1 + 5 * seed).run(20_000)
    assert report.violations == ()


@pytest.mark.wide
@pytest.mark.parametrize("kind", FrameFault)
async def test_each_kind_alone(tiny_model: Path, kind: FrameFault) -> None:
    report = await run(tiny_model, 400, kind, round_size=64, concurrency=32)
    assert report.violations == ()
    assert set(report.num_faults) == {kind}


def test_a_damaged_frame_that_is_accepted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the digest's check."""
    monkeypatch.setattr(incoming.secrets, "compare_digest", lambda *_: True)
    report = FrameSimulation(5, Violations(), (FrameFault.CORRUPT,)).run(100)
    assert any("differs from what was sent" in sentence for sentence in report.violations)


def test_a_frame_of_an_old_epoch_that_is_accepted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = IncomingTransfer._check

    def check(self: IncomingTransfer, frame: codec.Frame, payload: memoryview) -> slice:
        place = (frame.transfer_id, self.ticket.epoch, frame.layer, frame.first_block, frame.num_blocks)
        current = codec.Frame(*place, codec.digest(*place, payload))
        return checked(self, current, payload)

    monkeypatch.setattr(IncomingTransfer, "_check", check)
    report = FrameSimulation(5, Violations(), (FrameFault.STALE,)).run(60)
    assert any("a frame of epoch 1 was written in epoch 2" in sentence for sentence in report.violations)
