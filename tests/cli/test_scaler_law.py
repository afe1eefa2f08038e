"""The scaling law: decisions and invariants."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_cli.scaler.law import (
    Bounds,
    DecodeLoad,
    Kept,
    Memory,
    Pods,
    Policy,
    PrefillLoad,
    RoleDecision,
    Snapshot,
    Traffic,
    decide,
    queue_servers,
)
from tandem_core.step_cost import StepCost

POLICY = Policy(Bounds(0, 50), Bounds(0, 50))
#: 24 ms a step and .3 ms a sequence, so that about 120 sequences keep 60 ms.
COST = StepCost(0.024, 0.0003)
TICK_S = 15.0


def snapshot(
    rate: float = 10.0,
    *,
    now: float = 0.0,
    before: float | None = None,
    prefill: tuple[int, int] = (2, 2),
    decode: tuple[int, int] = (2, 2),
    work_s: float = 0.1,
    queue_s: float = 0.0,
    sequences: int = 0,
    held: int = 1,
    ttft: Kept = Kept(),  # noqa: B008
    tpot: Kept = Kept(),  # noqa: B008
) -> Snapshot:
    """A fleet of (wanted, ready) pods that gets `rate` requests a second."""
    traffic = Traffic(rate, rate if before is None else before, 45.0, held, 1000, 300, 1.0, 0.06, ttft, tpot)
    return Snapshot(
        now,
        traffic,
        PrefillLoad(Pods(*prefill), work_s, queue_s),
        DecodeLoad(Pods(*decode), COST, 1.0, 128, 200_000, 0.1, sequences),
    )


def once(given_snapshot: Snapshot, memory: Memory | None = None) -> tuple[RoleDecision, RoleDecision]:
    decision, _ = decide(given_snapshot, memory or Memory(), POLICY)
    return decision.prefill, decision.decode


def repeated(first: Snapshot, seconds: float, memory: Memory | None = None) -> tuple[tuple[int, int], Memory]:
    """Decides every 15 s for this time; pods are ready as soon as they are wanted."""
    memory, current = memory or Memory(), first
    pods = (first.prefill.pods.wanted, first.decode.pods.wanted)
    for tick in range(int(seconds / TICK_S) + 1):
        current = replace(
            current,
            now=first.now + tick * TICK_S,
            prefill=replace(current.prefill, pods=Pods(pods[0], pods[0])),
            decode=replace(current.decode, pods=Pods(pods[1], pods[1])),
        )
        decision, memory = decide(current, memory, POLICY)
        pods = (decision.prefill.wanted, decision.decode.wanted)
    return pods, memory


RATES = st.floats(0.0, 200.0)
PODS = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (max(pair), min(pair)))
KEPT = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda pair: Kept(max(pair), min(pair)))


@given(rate=RATES, before=RATES, prefill=PODS, decode=PODS, queue_s=st.floats(0, 500), ttft=KEPT, tpot=KEPT)
def test_every_decision_is_within_bounds_and_has_a_reason(
    rate: float,
    before: float,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    queue_s: float,
    ttft: Kept,
    tpot: Kept,
) -> None:
    seen = snapshot(
        rate, before=before, prefill=prefill, decode=decode, queue_s=queue_s, ttft=ttft, tpot=tpot
    )
    for decision in once(seen):
        assert 0 <= decision.wanted <= 50
        assert decision.reason
        assert "\n" not in decision.reason


@given(rate=RATES, more=st.floats(1.0, 3.0), queue_s=st.floats(0, 100), sequences=st.integers(0, 2000))
def test_more_work_never_wants_fewer_pods(rate: float, more: float, queue_s: float, sequences: int) -> None:
    less = once(snapshot(rate, queue_s=queue_s, sequences=sequences))
    for greater in (
        snapshot(rate * more, queue_s=queue_s, sequences=sequences),
        snapshot(rate, queue_s=queue_s * more, sequences=sequences),
        snapshot(rate, queue_s=queue_s, sequences=int(sequences * more)),
    ):
        for small, large in zip(less, once(greater), strict=True):
            assert small.wanted <= large.wanted


@given(rate=st.floats(0.1, 100.0), prefill=PODS, decode=PODS)
def test_one_decision_removes_no_pod(rate: float, prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    decisions = once(snapshot(rate, prefill=prefill, decode=decode))
    for decision, (wanted, _) in zip(decisions, (prefill, decode), strict=True):
        assert decision.wanted >= min(wanted, 50)


@given(rate=st.floats(0.5, 100.0))
def test_removed_pods_are_not_needed_again_at_a_load_a_tenth_higher(rate: float) -> None:
    settled, memory = repeated(snapshot(rate, prefill=(50, 50), decode=(50, 50)), 400)
    assert max(settled) < 50 or rate > 80
    after = snapshot(rate * 1.1, now=401.0, prefill=(settled[0],) * 2, decode=(settled[1],) * 2)
    assert tuple(decision.wanted for decision in once(after, memory)) == settled


def test_a_pod_is_removed_only_if_fewer_were_enough_all_the_time() -> None:
    many = {"prefill": (9, 9), "decode": (9, 9)}
    assert repeated(snapshot(10, **many), 240)[0] == (9, 9)
    assert max(repeated(snapshot(10, **many), 300)[0]) < 9
    _, memory = repeated(snapshot(10, **many), 200)
    decision, memory = decide(snapshot(80, now=215, **many), memory, POLICY)
    peak = decision.prefill.wanted
    assert peak >= 9
    pods, _ = repeated(snapshot(10, now=230, prefill=(peak, peak), decode=(9, 9)), 240, memory)
    assert pods[0] == peak, "the short peak counts until it is settle_s old"


def test_no_pod_is_removed_while_objectives_are_missed() -> None:
    _, memory = repeated(snapshot(5, prefill=(9, 9), decode=(9, 9)), 250)
    missed = snapshot(5, now=300, prefill=(9, 9), decode=(9, 9), ttft=Kept(100, 50), tpot=Kept(100, 50))
    assert [decision.wanted for decision in once(missed, memory)] == [9, 9]
    kept = replace(
        missed, traffic=replace(missed.traffic, ttft_kept=Kept(100, 100), tpot_kept=Kept(100, 100))
    )
    assert max(decision.wanted for decision in once(kept, memory)) < 9


def test_pods_that_never_start_are_removed_when_not_needed() -> None:
    _, memory = repeated(snapshot(5, prefill=(9, 9), decode=(9, 9)), 250)
    pending = snapshot(5, now=300, prefill=(9, 4), decode=(9, 4))
    assert max(decision.wanted for decision in once(pending, memory)) < 9


def test_starting_pods_count_against_the_queue() -> None:
    first, _ = once(snapshot(30, prefill=(2, 2), queue_s=3.0, ttft=Kept(100, 20)))
    assert first.wanted > 2
    again, _ = once(snapshot(30, prefill=(first.wanted, 2), queue_s=3.0, ttft=Kept(100, 20)))
    assert again.wanted == first.wanted
    assert "starting" in again.reason


def test_a_queue_that_ends_before_a_pod_is_ready_adds_none() -> None:
    short, _ = once(snapshot(10, prefill=(3, 3), queue_s=30.0))
    long, _ = once(snapshot(10, prefill=(3, 3), queue_s=200.0))
    assert short.wanted == 3
    assert long.wanted > 3


def test_growth_is_extrapolated_over_a_pods_start_and_decline_is_not() -> None:
    level, growing, falling = (once(snapshot(20, before=before)) for before in (20.0, 10.0, 30.0))
    assert growing[0].wanted > level[0].wanted
    assert growing[1].wanted > level[1].wanted
    assert falling == level


def test_missed_objectives_add_a_pod_and_raise_the_bias() -> None:
    _, memory = repeated(snapshot(10, prefill=(3, 3)), 0)
    missed = snapshot(10, now=200, prefill=(3, 3), decode=(2, 2), ttft=Kept(200, 150))
    decision, memory = decide(missed, memory, POLICY)
    assert decision.prefill.wanted == 4
    assert "TTFT was kept by 150 of 200" in decision.prefill.reason
    assert decision.decode.wanted == 2, "TPOT was kept"
    assert memory.prefill.bias > 1.0
    settled = replace(memory, prefill=replace(memory.prefill, enough=((-80.0, 2), *memory.prefill.enough)))
    kept = snapshot(10, now=215, prefill=(4, 4), ttft=Kept(200, 200))
    assert decide(kept, settled, POLICY)[0].prefill.wanted == 4, "three were too few within settle_s"
    soon, _ = decide(
        replace(missed, now=215.0, prefill=replace(missed.prefill, pods=Pods(4, 4))), memory, POLICY
    )
    assert soon.prefill.wanted == 4, "what ends now began before"


def test_misses_within_chance_do_not_count() -> None:
    assert not Kept(20, 19).is_missed(0.99)
    assert Kept(20, 17).is_missed(0.99)
    assert not Kept(0, 0).is_missed(0.99)
    assert Kept(10_000, 9_800).is_missed(0.99)


def test_requests_that_alone_miss_add_no_pod() -> None:
    slow = snapshot(1.5, now=500, work_s=1.4, prefill=(5, 5), ttft=Kept(100, 0))
    decision, _ = once(slow)
    assert decision.wanted == 5
    assert "alone misses TTFT" in decision.reason


def test_a_fleet_without_requests_scales_to_zero_and_a_held_request_starts_both_roles() -> None:
    idle = snapshot(0.0, held=0, prefill=(2, 2), decode=(2, 2))
    assert repeated(idle, 240)[0] == (2, 2)
    assert repeated(idle, 400)[0] == (0, 0)
    held = snapshot(0.0, held=1, prefill=(0, 0), decode=(0, 0), work_s=0.0)
    held = replace(held, decode=DecodeLoad(Pods(0, 0)))
    assert [decision.wanted for decision in once(held)] == [1, 1]
    known = snapshot(0.02, held=1, prefill=(0, 0), decode=(0, 0))
    assert [decision.wanted for decision in once(known)] == [1, 1]


def test_decode_pods_follow_used_kv_if_lengths_underestimate_it() -> None:
    full = snapshot(1, decode=(4, 4))
    full = replace(full, decode=replace(full.decode, kv_use=0.99))
    assert once(full)[1].wanted == 5
    assert "KV 99% used" in once(full)[1].reason


def test_an_mm1_queue_has_the_waits_of_the_textbook() -> None:
    """P(wait > t) = rho exp(-(1 - rho) t / service): one server keeps just this slack."""
    rho, service_s, miss = 0.5, 0.2, 0.01
    slack_s = math.log(rho / miss) * service_s / (1 - rho)
    assert queue_servers(rho, service_s, slack_s * 1.001, miss) == 1
    assert queue_servers(rho, service_s, slack_s * 0.999, miss) == 2


@given(load=st.floats(0.01, 500), slack=st.floats(0, 10), miss=st.floats(0.0001, 0.5))
def test_a_queue_has_more_servers_than_load_and_fewer_with_more_slack(
    load: float, slack: float, miss: float
) -> None:
    servers = queue_servers(load, 1.0, slack, miss)
    assert servers > load
    assert queue_servers(load, 1.0, slack + 1, miss) <= servers


def test_contradictory_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="3 to 2"):
        Bounds(3, 2)
