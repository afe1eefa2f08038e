"""A token is drawn from the row's softmax; near-equal logits give the same token."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_core.errors import InvariantError
from tandem_core.sampling import SamplingParams
from tandem_engine.request import Request
from tandem_engine.sampling.custom import Row
from tandem_engine.sampling.rng import RANGE, position_key, uniforms
from tandem_engine.sampling.sampler import TokenChooser, draw, most_likely


def random_row(seed: int, size: int = 1000) -> Row:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert most_likely(np.array([0, 2, 1, 2], dtype=np.float32)) == 1


@pytest.mark.parametrize("size", [1, 5, 1000, RANGE, RANGE + 1, 3 * RANGE - 1])
def test_draw_is_the_first_of_an_exponential_race(size: int) -> None:
    row = random_row(size, size)
    for key in range(200 if size < RANGE else 30):
        times = -np.log1p(-uniforms(key, np.arange(size))) / np.exp(row.astype(np.float64))
        assert draw(row, key) == int(times.argmin())


def test_tokens_keep_their_random_numbers_when_others_are_left_out() -> None:
    row = random_row(4, 3 * RANGE)
    token_ids = np.flatnonzero(row > 1.0)
    dropped = np.where(row > 1.0, row, np.float32(-math.inf))
    assert len(token_ids) > RANGE
    for key in range(50):
        assert draw(row[token_ids], key, token_ids) == draw(dropped, key)


@settings(max_examples=300)
@given(
    st.lists(st.one_of(st.floats(-200, 30, width=32), st.just(-math.inf)), min_size=1, max_size=600),
    st.integers(0, 2**64 - 1),
)
def test_dropped_tokens_are_never_drawn(logits: list[float], key: int) -> None:
    row = np.array([*logits, 0.0], dtype=np.float32)
    assert row[draw(row, key)] > -math.inf


def test_noise_as_of_another_batch_size_changes_no_token_in_a_thousand() -> None:
    generator = np.random.default_rng(1)
    row = random_row(2, 20_000)
    noisy = row + generator.standard_normal(len(row)).astype(np.float32) * np.float32(1e-5)
    changed = sum(draw(row, position_key(s, 9)) != draw(noisy, position_key(s, 9)) for s in range(1000))
    assert changed == 0


def test_logits_that_are_no_numbers_are_refused() -> None:
    row = random_row(3)
    row[7] = math.nan
    with pytest.raises(InvariantError, match="NaN"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw(row, 1)


def test_the_draws_of_many_seeds_follow_the_softmax() -> None:
    row = np.array([0.0, 1.0, 2.0, -1.0, -math.inf], dtype=np.float32)
    probabilities = np.exp(row) / np.exp(row).sum()
    counts = np.zeros(5)
    for seed in range(20_000):
        request = Request("r", [1, 2, 3], SamplingParams(seed=seed))
        counts[TokenChooser(request).choose(row)] += 1
    expected = probabilities[:4] * 20_000
    assert counts[4] == 0
    # P(chi-square with 3 degrees of freedom > 16.27) = 0.001, with fixed seeds
    assert float(((counts[:4] - expected) ** 2 / expected).sum()) < 16.27


def test_a_chooser_that_goes_on_equals_one_that_starts_there() -> None:
    rows = [random_row(seed, 20) for seed in range(30)]
    params = SamplingParams(
        temperature=1.3, repetition_penalty=1.5, frequency_penalty=0.7, min_tokens=8, seed=5
    )
    request = Request("r", [1, 2, 3], params, eos_token_ids=frozenset({0}))
    chooser = TokenChooser(request)
    together = [chooser.choose(row) for row in rows]
    for row in rows:
        request.output_token_ids.append(TokenChooser(request).choose(row))
    assert request.output_token_ids == together


def test_end_tokens() -> None:
    stops = SamplingParams(stop_token_ids=(4,))
    ignoring = SamplingParams(stop_token_ids=(4,), ignore_eos=True)
    assert Request("r", [1], stops, eos_token_ids=frozenset({2})).end_token_ids == {2, 4}
    assert Request("r", [1], ignoring, eos_token_ids=frozenset({2})).end_token_ids == {4}
