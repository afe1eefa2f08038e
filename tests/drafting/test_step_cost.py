"""The cost of a step: what was measured is found again, whatever the machine's speed does meanwhile."""

from __future__ import annotations

import random

import pytest
from tandem_drafting.step_cost import StepCost


def linear(num_sequences: int, context: int, num_guesses: int) -> float:
    rows = num_sequences + num_guesses
    return 4e-3 + 0.5e-3 * rows + 1e-8 * context + 2e-7 * rows * context / num_sequences


def tiled(num_sequences: int, context: int, num_guesses: int) -> float:
    """Rows are computed by eights: the ninth costs as much as eight."""
    return 4e-3 + 3e-3 * -(-(num_sequences + num_guesses) // 8)


def measured(
    seconds, num_sequences: int, context: int, *, steps: int = 600, noise: float = 0.0, hiccups: float = 0.0
) -> StepCost:
    """Steps of all sizes, while the machine's speed changes by a third every hundred."""
    cost, source = StepCost(), random.Random(0)
    for step in range(steps):
        q = source.choice([0, source.randrange(12 * num_sequences + 1)])
        took = seconds(num_sequences, context, q) * (1.33 if step // 100 % 2 else 1.0)
        took *= source.lognormvariate(0.0, noise) * (5.0 if source.random() < hiccups else 1.0)
        cost.observe(num_sequences, context, q, took)
        cost.curve(num_sequences, context, 12 * num_sequences)
    return cost


def test_before_anything_is_measured_a_row_costs_what_was_said():
    curve = StepCost(row_cost=0.1).curve(1, 4000, 4)
    assert [t / curve[0] for t in curve] == pytest.approx(
        [1, 1 + 0.1 / 1.1, 1 + 0.2 / 1.1, 1 + 0.3 / 1.1, 1 + 0.4 / 1.1]
    )


@pytest.mark.parametrize(("num_sequences", "context"), [(1, 300), (1, 4000), (8, 16_000), (64, 100_000)])
@pytest.mark.parametrize(("noise", "hiccups", "tolerance"), [(0.0, 0.0, 0.03), (0.15, 0.02, 0.1)])
def test_a_linear_machine_is_found(num_sequences, context, noise, hiccups, tolerance):
    cost = measured(linear, num_sequences, context, noise=noise, hiccups=hiccups)
    curve = cost.curve(num_sequences, context, 12 * num_sequences)
    for q in (num_sequences, 4 * num_sequences, 12 * num_sequences):
        truth = linear(num_sequences, context, q) / linear(num_sequences, context, 0)
        assert curve[q] / curve[0] == pytest.approx(truth, rel=tolerance)


def test_what_one_context_has_shown_tells_of_another():
    """Rows cost more the longer the context they read; seen at 500 and 2,000 tokens, asked at 6,000."""
    cost, source = StepCost(), random.Random(0)
    for step in range(1000):
        context, q = (500, 2000)[step // 50 % 2], source.randrange(13)
        cost.observe(1, context, q, linear(1, context, q))
        cost.curve(1, context, 12)
    curve = cost.curve(1, 6000, 12)
    assert curve[12] / curve[0] == pytest.approx(linear(1, 6000, 12) / linear(1, 6000, 0), rel=0.1)


def test_leaps_are_found_where_steps_were_seen():
    cost = measured(tiled, 4, 2000, steps=2000)
    curve = cost.curve(4, 2000, 48)
    # The knot at 4 has its share of what was seen at 5, beyond the leap to 1.43.
    assert 1.0 <= curve[4] / curve[0] < 1.2 < curve[6] / curve[0]
    assert curve[12] / curve[0] == pytest.approx(tiled(4, 0, 12) / tiled(4, 0, 0), rel=0.15)
    assert curve[48] / curve[0] == pytest.approx(tiled(4, 0, 48) / tiled(4, 0, 0), rel=0.1)


def test_steps_that_were_held_up_change_little():
    """One step of three with guesses takes five times as long, by chance: it counts for a quarter more."""
    cost, source = StepCost(), random.Random(0)
    for step in range(600):
        q = (0, 4)[step % 2]
        is_held_up = q > 0 and source.random() < 1 / 3
        cost.observe(2, 1000, q, linear(2, 1000, q) * (5.0 if is_held_up else 1.0))
    curve = cost.curve(2, 1000, 4)
    truth = linear(2, 1000, 4) / linear(2, 1000, 0)
    # Its mean is 2.3 times the truth.
    assert truth < curve[4] / curve[0] < 1.25 * truth


def test_more_guesses_never_cost_less():
    cost = measured(linear, 2, 1000, noise=0.6, hiccups=0.1)
    curve = cost.curve(2, 1000, 24)
    assert all(curve[q] <= curve[q + 1] for q in range(24))


def test_a_price_that_was_too_high_is_asked_for_again():
    """After a while of costly rows nothing is drafted or measured: the estimate returns to the prior."""
    cost = StepCost(row_cost=0.03)
    for step in range(200):
        cost.observe(1, 500, step % 3, 0.01 * (1 + 2 * (step % 3)))
        cost.curve(1, 500, 12)
    costly = cost.curve(1, 500, 12)
    assert costly[1] / costly[0] > 2
    for _ in range(5000):
        cost.observe(1, 500, 0, 0.01)
        cost.curve(1, 500, 12)
    again = cost.curve(1, 500, 12)
    assert again[1] / again[0] < 1.2


def test_a_negative_price_is_refused():
    with pytest.raises(ValueError, match="row_cost is -1"):
        StepCost(row_cost=-1.0)
