"""The cost of a step, learned from steps."""

import random

import pytest
from tandem_core.step_cost import StepCost
from tandem_engine import step_times
from tandem_engine.step_times import DECODE_TERMS, StepTimes, TokensPerStep

TRUE = StepCost(per_step=0.004, per_token=0.0005, per_pair=2e-7)


def observe(times: StepTimes, cost: StepCost, start: int, num_tokens: int, noise: float = 1.0) -> None:
    num_pairs = num_tokens * (2 * start + num_tokens) // 2
    times.observe(num_tokens, num_pairs, cost.seconds(1, num_tokens, num_pairs) * noise)


def test_nothing_is_known_before_the_first_step():
    assert not StepTimes().cost().is_known


def test_a_long_prompt_is_predicted_from_chunks_of_many_sizes():
    times, rng = StepTimes(), random.Random(1)
    for _ in range(200):
        start = rng.choice([0, 0, 512, 2048, 6000])
        observe(times, TRUE, start, rng.choice([20, 100, 300, 512]), rng.uniform(0.9, 1.1))
    for start, stop in ((0, 64), (0, 4096), (3000, 4096), (0, 16384)):
        true = TRUE.prompt_seconds(start, stop, 512)
        assert times.cost().prompt_seconds(start, stop, 512) == pytest.approx(true, rel=0.1)


def test_prompts_of_one_size_are_predicted_and_longer_ones_not_as_free():
    times = StepTimes()
    for _ in range(50):
        observe(times, TRUE, 0, 512)
    one = TRUE.prompt_seconds(0, 512, 512)
    assert times.cost().prompt_seconds(0, 512, 512) == pytest.approx(one, rel=0.01)
    assert times.cost().prompt_seconds(0, 4096, 512) > 7 * one


def test_steps_of_one_number_of_sequences_say_that_more_of_them_cost_little():
    """A decode step waits for the weights; eight sequences are not eight times as slow as one."""
    one, times = StepTimes(DECODE_TERMS), StepTimes(DECODE_TERMS)
    for _ in range(5):
        one.observe(1, 100, 0.01)
        times.observe(1, 100, 0.01)
        times.observe(8, 800, 0.02)
    assert one.cost().seconds(1, 8, 800) == pytest.approx(0.01, rel=0.01)
    assert times.cost().seconds(1, 8, 800) == pytest.approx(0.02, rel=0.1)
    assert times.cost().seconds(1, 1, 100) == pytest.approx(0.01, rel=0.1)


def test_many_small_steps_do_not_push_out_a_large_one():
    times = StepTimes()
    observe(times, TRUE, 3584, 512)
    for _ in range(1000):
        observe(times, TRUE, 0, 10)
    expected = TRUE.prompt_seconds(0, 4096, 512)
    assert times.cost().prompt_seconds(0, 4096, 512) == pytest.approx(expected, rel=0.3)


def test_the_present_speed_of_the_machine_counts(monkeypatch):
    times, now = StepTimes(), 1000.0
    monkeypatch.setattr(step_times.time, "monotonic", lambda: now)
    for start in (0, 512, 1024, 2048):
        for _ in range(5):
            observe(times, TRUE, start, 512)
    now += 100
    for start in (0, 512, 1024):
        observe(times, TRUE, start, 512, noise=3.0)
    ratio = times.cost().prompt_seconds(0, 2048, 512) / TRUE.prompt_seconds(0, 2048, 512)
    assert 2 < ratio < 3.2


def test_no_term_is_negative():
    times, rng = StepTimes(), random.Random(2)
    for _ in range(100):
        times.observe(rng.randint(1, 512), rng.randint(1, 100_000), rng.uniform(0.001, 0.1))
        cost = times.cost()
        assert min(cost.per_step, cost.per_token, cost.per_pair) >= 0
        assert cost.is_known


def test_the_unloaded_share_is_that_of_the_fastest_steps():
    times, rng = StepTimes(), random.Random(4)
    for i in range(200):
        observe(times, TRUE, rng.choice([0, 512, 1024]), rng.choice([64, 256, 512]), 2.0 if i % 3 else 1.0)
    cost = times.cost()
    alone = cost.unloaded * cost.prompt_seconds(0, 1024, 512)
    assert alone == pytest.approx(TRUE.prompt_seconds(0, 1024, 512), rel=0.15)


def test_load_is_expected_until_it_is_seen(monkeypatch):
    times, now = StepTimes(), 1000.0
    monkeypatch.setattr(step_times.time, "monotonic", lambda: now)
    true_s = TRUE.prompt_seconds(0, 1024, 512)
    for start in (0, 512, 1024):
        observe(times, TRUE, start, 512)
    assert times.cost().prompt_seconds(0, 1024, 512) == pytest.approx(true_s)
    times.expect_load(2.0)
    cost = times.cost()
    assert cost.prompt_seconds(0, 1024, 512) == pytest.approx(2 * true_s)
    assert cost.unloaded * cost.prompt_seconds(0, 1024, 512) == pytest.approx(true_s)
    now += 60
    for start in (0, 512, 1024):
        observe(times, TRUE, start, 512, noise=1.3)
    assert times.cost().prompt_seconds(0, 1024, 512) == pytest.approx(1.3 * true_s, rel=0.02)


def test_tokens_of_a_step_are_counted_by_the_size_of_the_batch():
    gained = TokensPerStep()
    assert (gained.mean, gained.by_batch()) == (1.0, [])
    for _ in range(400):
        gained.observe(1, 3.0)
        gained.observe(9, 1.5)
    assert 1.5 < gained.mean < 3.0
    assert gained.by_batch() == pytest.approx([3.0, 3.0, 1.5, 1.5], rel=0.1)
    for _ in range(200):
        gained.observe(13, 1.0)
    assert gained.by_batch()[3] == pytest.approx(1.0, abs=0.02)


def test_a_quiet_time_does_not_hide_that_each_sequence_of_a_large_batch_gains_less():
    gained = TokensPerStep()
    for _ in range(100):
        gained.observe(1, 4.0)
        gained.observe(16, 2.0)
    for _ in range(1000):
        gained.observe(1, 8.0)
    one, *_, sixteen = gained.by_batch()
    assert one == pytest.approx(8.0, rel=0.02)
    assert sixteen == pytest.approx(4.0, rel=0.25), "these texts gain twice as much as those before"


def test_texts_that_change_change_batches_that_were_not_seen_with_them():
    gained = TokensPerStep()
    for size in (1, 2, 16):
        gained.observe(size, 1.0)
    for _ in range(100):
        gained.observe(4, 7.0)
    assert gained.by_batch() == pytest.approx([7.0] * 5, rel=0.25)
