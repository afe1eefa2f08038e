"""Random numbers are a pure, well mixed function of (seed, position, token)."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy_draw import uniforms
from tandem_engine.sampling.rng import position_key, splitmix64

SEEDS = st.integers(0, 2**64 - 1)

#: P(chi-square with 99 degrees of freedom > 148.2) = 0.001; the inputs are fixed, so nothing is flaky.
CHI_SQUARE_99 = 148.2


def chi_square(values: np.ndarray) -> float:
    """Of 100 equal bins of [0, 1)."""
    counts = np.histogram(values, bins=100, range=(0.0, 1.0))[0]
    expected = len(values) / 100
    return float(((counts - expected) ** 2 / expected).sum())


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def test_the_generator_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, n) for n in range(1, 5)] == published


def test_keys_do_not_change_between_releases() -> None:
    assert [position_key(0, 0), position_key(0, 1), position_key(2**64 - 1, 4095)] == [
        12035550249420947055,
        12935080325729570654,
        4775990606404247777,
    ]


@given(SEEDS, st.lists(st.integers(0, 300_000), min_size=1, max_size=20))
def test_numbers_are_the_generators_outputs_in_the_open_unit_interval(key: int, token_ids: list[int]) -> None:
    values = uniforms(key, np.array(token_ids))
    assert ((values > 0.0) & (values < 1.0)).all()
    expected = [(splitmix64(key, t + 1) >> 12) / 2**52 for t in token_ids]
    np.testing.assert_allclose(values, expected, rtol=0, atol=2**-52)


def numbers(seeds: Iterable[int], positions: Iterable[int], token_id: int) -> np.ndarray:
    ids = np.array([token_id])
    return np.array([uniforms(position_key(s, p), ids)[0] for s, p in zip(seeds, positions, strict=False)])


def assert_random(values: np.ndarray) -> None:
    assert chi_square(values) < CHI_SQUARE_99
    for lag in (1, 2, 64):
        assert abs(correlation(values[:-lag], values[lag:])) < 4 / np.sqrt(len(values))


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_positions_of_one_seed_are_independent(seed: int) -> None:
    assert_random(numbers(itertools.repeat(seed), range(10_000), 7))


@pytest.mark.parametrize("position", [0, 1, 4096])
def test_small_consecutive_seeds_are_independent(position: int) -> None:
    values = numbers(range(10_000), itertools.repeat(position), 7)
    assert_random(values)
    # seed s at position p + 1 must not be seed s + 1 at position p
    following = numbers(range(10_000), itertools.repeat(position + 1), 7)
    assert abs(correlation(values[1:], following[:-1])) < 4 / np.sqrt(len(values))


def test_tokens_of_one_position_are_independent_of_each_other_and_of_the_next_position() -> None:
    here = uniforms(position_key(3, 100), np.arange(50_000))
    there = uniforms(position_key(3, 101), np.arange(50_000))
    assert_random(here)
    assert abs(correlation(here, there)) < 4 / np.sqrt(len(here))
    assert abs(correlation(here[1:], there[:-1])) < 4 / np.sqrt(len(here))


def test_seeds_one_increment_apart_are_not_the_same_stream_shifted() -> None:
    increment = 0x9E3779B97F4A7C15
    first = {position_key(7, position) for position in range(100)}
    assert not first & {position_key(7 + increment, position) for position in range(100)}
