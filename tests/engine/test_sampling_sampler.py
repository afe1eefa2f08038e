"""A token is drawn from the row's softmax; near-equal logits give the same token."""

import math

import numpy as np
import numpy_draw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_libraries import NATIVE, native_library
from tandem_core.errors import LogitsError
from tandem_core.sampling import SamplingParams
from tandem_engine.request import Request
from tandem_engine.sampling.custom import Row
from tandem_engine.sampling.rng import position_key
from tandem_engine.sampling.sampler import TokenChooser, draw_parameters, most_likely
from tandem_kernels import draw_token, native


def random_row(seed: int, size: int = 1000) -> Row:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert most_likely(np.array([0, 2, 1, 2], dtype=np.float32)) == 1


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1e-9),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.9999),
    SamplingParams(top_p=math.nextafter(1.0, 0.0)),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1.5, top_k=100, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=2.0, top_k=300, top_p=0.5),
]


def rows(size: int) -> list[Row]:
    """Wide, flat, peaked, with ties, and with dropped tokens."""
    noise = np.random.default_rng(size).standard_normal((5, size)).astype(np.float32)
    noise[4][noise[4] < 0.3] = -math.inf
    noise[4][0] = 0.0
    return [noise[0] * 3, noise[1] * np.float32(0.01), noise[2] * 30, np.round(noise[3] * 2), noise[4] * 4]


def drawn(row: Row, params: SamplingParams, key: int) -> int:
    return draw_token(row, key, *draw_parameters(params))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 1000, 1024, 49152])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_draw_is_numpys(size: int, params: SamplingParams) -> None:
    for n, row in enumerate(rows(size)):
        left = numpy_draw.warp(row, params)
        keys = [position_key(seed, n) for seed in range(100 if size < 10_000 else 10)]
        assert [drawn(row, params, key) for key in keys] == [numpy_draw.draw(left, key) for key in keys]


@pytest.mark.parametrize("library", NATIVE)
def test_each_instruction_set_draws_numpys_tokens(library: str) -> None:
    with native_library(library):
        for params in PARAMS:
            for row in rows(5000):
                left = numpy_draw.warp(row, params)
                assert [drawn(row, params, key) for key in range(20)] == [
                    numpy_draw.draw(left, key) for key in range(20)
                ]


def test_without_compiled_kernels_draws_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", None)
    for params in PARAMS:
        for row in rows(1000):
            left = numpy_draw.warp(row, params)
            assert [drawn(row, params, key) for key in range(5)] == [
                numpy_draw.draw(left, key) for key in range(5)
            ]


@settings(max_examples=300)
@given(
    st.lists(st.one_of(st.integers(-4, 4), st.just(-math.inf)), min_size=1, max_size=200),
    st.integers(0, 250),
    st.sampled_from([1.0, 0.999999, 0.9, 0.5, 0.1]),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_ties_are_numpys(logits: list[float], top_k: int, top_p: float, min_p: float, key: int) -> None:
    row = np.array([*logits, 0.0], dtype=np.float32)
    params = SamplingParams(temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p)
    assert drawn(row, params, key) == numpy_draw.draw(numpy_draw.warp(row, params), key)


@settings(max_examples=300)
@given(
    st.lists(st.one_of(st.floats(-200, 30, width=32), st.just(-math.inf)), min_size=1, max_size=600),
    st.integers(0, 2**64 - 1),
)
def test_dropped_tokens_are_never_drawn(logits: list[float], key: int) -> None:
    row = np.array([*logits, 0.0], dtype=np.float32)
    assert row[drawn(row, SamplingParams(), key)] > -math.inf


def test_noise_as_of_another_batch_size_changes_no_token_in_a_thousand() -> None:
    generator = np.random.default_rng(1)
    row = random_row(2, 20_000)
    noisy = row + generator.standard_normal(len(row)).astype(np.float32) * np.float32(1e-5)
    keys = [position_key(seed, 9) for seed in range(1000)]
    params = SamplingParams()
    assert [drawn(row, params, key) for key in keys] == [drawn(noisy, params, key) for key in keys]


@pytest.mark.parametrize("worst", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, frequency_penalty=0.5),
    ],
)
def test_logits_that_are_no_numbers_are_refused(params: SamplingParams, worst: float) -> None:
    row = random_row(3)
    row[7] = worst
    with pytest.raises(LogitsError, match="NaN"):
        TokenChooser(Request("r", [1], params)).choose(row)


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
