"""Logits processing means what it means in transformers (for what it lacks, in vLLM); so do the filters of
numpy_draw, whose tokens the compiled draw has (test_sampling_sampler.py)."""

import math
import time

import numpy as np
import numpy_draw
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_core.sampling import SamplingParams
from tandem_engine.request import Request
from tandem_engine.sampling import processors
from tandem_engine.sampling.custom import Row
from tandem_engine.sampling.processors import TokenHistory
from tandem_engine.sampling.sampler import TokenChooser
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB = 2000
DROPPED = -math.inf


def random_row(seed: int, scale: float = 3.0, size: int = VOCAB) -> Row:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def theirs(processor: LogitsProcessor, row: Row, token_ids: list[int] | None = None) -> Row:
    ids = torch.tensor([token_ids or [0]])
    return processor(ids, torch.from_numpy(row.copy())[None])[0].numpy()


def only(row: Row, token_ids: numpy_draw.TokenIds) -> Row:
    """The row with all but these dropped, as transformers has it."""
    kept = np.full_like(row, DROPPED)
    kept[token_ids] = row[token_ids]
    return kept


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    row = random_row(0)
    expected = theirs(TemperatureLogitsWarper(temperature), row)
    actual = numpy_draw.apply_temperature(row, temperature)
    np.testing.assert_allclose(actual, expected - expected.max(), atol=2e-5)


def test_a_temperature_next_to_zero_is_greedy_and_finite() -> None:
    row = numpy_draw.apply_temperature(random_row(0), 1e-300)
    assert not np.isnan(row).any()
    assert np.count_nonzero(np.exp(row)) == 1


@pytest.mark.parametrize("num_levels", [3, 100, 10**9])
@pytest.mark.parametrize("k", [1, 7, 30, 31, 50, VOCAB - 1])
def test_top_k(k: int, num_levels: int) -> None:
    """Few levels make ties, also of the k-th."""
    row = np.random.default_rng(1).integers(0, num_levels, VOCAB).astype(np.float32)
    token_ids = numpy_draw.top_k_ids(row, k)
    assert token_ids.tolist() == sorted(token_ids.tolist())
    np.testing.assert_array_equal(only(row, token_ids), theirs(TopKLogitsWarper(k), row))


def test_top_k_keeps_equals_of_the_last() -> None:
    row = np.array([1, 3, 2, 2, 0], dtype=np.float32)
    assert numpy_draw.top_k_ids(row, 2).tolist() == [1, 2, 3]


@pytest.mark.parametrize("k", [0, VOCAB, VOCAB + 5])
def test_filters_that_are_off_keep_all(k: int) -> None:
    row = random_row(1)
    left, token_ids = numpy_draw.warp(row, SamplingParams(top_k=k))
    assert token_ids.tolist() == list(range(VOCAB))
    np.testing.assert_array_equal(left, row - row.max())


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.99])
def test_top_p(p: float, scale: float) -> None:
    row = random_row(2, scale)
    # transformers sums in float32, from the unlikely end: its border can be a token off ours
    expected = np.flatnonzero(theirs(TopPLogitsWarper(p), row) > DROPPED)
    differing = np.setxor1d(numpy_draw.top_p_ids(row, p), expected)
    assert len(differing) <= (1 if scale >= 1.0 else 3)


@settings(max_examples=300)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.floats(0.01, 0.999))
def test_top_p_is_the_smallest_sufficient_set_with_lower_ids_first(logits: list[int], p: float) -> None:
    row = np.array(logits, dtype=np.float32)
    weights = np.exp(row.astype(np.float64))
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    kept = numpy_draw.top_p_ids(row, p).tolist()
    num_kept = len(kept)
    assert kept == sorted(order[:num_kept])
    mass = weights[order].cumsum() / weights.sum()
    assert mass[num_kept - 1] >= p - 1e-6
    assert num_kept == 1 or mass[num_kept - 2] < p + 1e-6


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p(min_p: float) -> None:
    row = random_row(3)
    token_ids = numpy_draw.min_p_ids(row, min_p)
    np.testing.assert_array_equal(only(row, token_ids), theirs(MinPLogitsWarper(min_p), row))


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_looks_at_prompt_and_output_once_each(penalty: float) -> None:
    row = random_row(4)
    prompt, output = [3, 5, 5, 7], [5, 9, 9]
    actual = processors.penalise_repetition(row, TokenHistory(prompt, output).seen(), penalty)
    expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), row, prompt + output)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert np.flatnonzero(actual != row).tolist() == [3, 5, 7, 9]


def test_presence_and_frequency_penalties_look_at_the_output() -> None:
    row = random_row(5)
    actual = processors.penalise_output(row, TokenHistory([1, 2], [5, 9, 9]).output_counts, 0.5, 0.25)
    expected = row.copy()
    expected[5] -= 0.5 + 0.25
    expected[9] -= 0.5 + 2 * 0.25
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_logit_bias() -> None:
    row = random_row(6)
    expected = theirs(SequenceBiasLogitsProcessor([[[3], -100.0], [[7], 2.5]]), row)
    np.testing.assert_allclose(processors.add_bias(row, {3: -100.0, 7: 2.5}), expected, rtol=1e-6)


def test_a_history_follows_an_output_that_grows_or_loses_its_end() -> None:
    history = TokenHistory([1, 2], [])
    for output in ([5, 9, 9], [5, 9], [5, 9, 7, 5], [5], [5, 9, 9, 9]):
        history.follow(output)
        fresh = TokenHistory([1, 2], output)
        assert (history.output, history.output_counts) == (fresh.output, fresh.output_counts)
        assert history.seen().tolist() == fresh.seen().tolist()


def test_a_choice_in_a_long_text_costs_no_more_than_in_a_short_one() -> None:
    seconds = []
    for num_output in (1_000, 100_000):
        sampling = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=200_000)
        request = Request("r", [1] * 10, sampling, eos_token_ids=frozenset({2}))
        request.output_token_ids += [3] * num_output
        row = np.zeros(64, np.float32)
        for _ in range(50):
            request.output_token_ids.append(TokenChooser(request).choose(row))
        began = time.thread_time()
        for _ in range(50):
            request.output_token_ids.append(TokenChooser(request).choose(row))
        seconds.append(time.thread_time() - began)
    assert seconds[1] < 5 * seconds[0]


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_min_tokens_forbids_the_ends(num_output: int) -> None:
    row = random_row(7)
    params = SamplingParams(min_tokens=2)
    history = TokenHistory([1, 2], [4] * num_output)
    actual = processors.process(row, params, history, num_output, frozenset({11, 13}))
    hugging_face = MinNewTokensLengthLogitsProcessor(2, 2, [11, 13], device="cpu")
    np.testing.assert_array_equal(actual, theirs(hugging_face, row, [1, 2] + [4] * num_output))


def test_forbidding_everything_forbids_nothing() -> None:
    row = random_row(8, size=4)
    np.testing.assert_array_equal(processors.forbid(row, range(4)), row)


@pytest.mark.parametrize("output", [[], [5], [5, 6], [6, 5], [9, 5, 6], [5, 6, 7]])
def test_bad_words_are_not_completed(output: list[int]) -> None:
    """transformers looks at the prompt too: it gets the output alone."""
    row = random_row(10)
    bad_words = ((4,), (5, 6), (5, 6, 7), (6, 8))
    actual = processors.process(
        row, SamplingParams(bad_words=bad_words), TokenHistory([9, 5], output), len(output), frozenset()
    )
    hugging_face = NoBadWordsLogitsProcessor([list(word) for word in bad_words])
    np.testing.assert_array_equal(actual, theirs(hugging_face, row, output or [1]))


def test_min_tokens_yields_to_bad_words_when_nothing_else_is_left() -> None:
    row = random_row(11, size=3)
    params = SamplingParams(min_tokens=2, bad_words=((0,), (1,)))
    actual = processors.process(row, params, TokenHistory([1], []), 0, frozenset({2}))
    np.testing.assert_array_equal(actual, [DROPPED, DROPPED, row[2]])


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    row = random_row(9, size=4)
    for actual in (
        processors.add_bias(row, {4: 1.0, 10**9: 1.0}),
        processors.penalise_output(row, {4: 1}, 1.0, 1.0),
        processors.penalise_repetition(row, TokenHistory([4], []).seen(), 2.0),
        processors.forbid(row, [4, 10**9]),
    ):
        np.testing.assert_array_equal(actual, row)


@pytest.mark.parametrize("seed", range(20))
def test_all_together_equal_transformers_in_its_order(seed: int) -> None:
    row = random_row(seed)
    prompt, output = [3, 5, 5, 7], [5, 9]
    params = SamplingParams(
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        logit_bias={3: 4.0, 8: -3.0},
        min_tokens=5,
    )
    expected = row
    for processor in (
        SequenceBiasLogitsProcessor([[[3], 4.0], [[8], -3.0]]),
        RepetitionPenaltyLogitsProcessor(1.2),
        MinNewTokensLengthLogitsProcessor(4, 5, [11], device="cpu"),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(40),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.02),
    ):
        expected = theirs(processor, expected, prompt + output)
    before = row.copy()
    processed = processors.process(row, params, TokenHistory(prompt, output), 2, frozenset({11}))
    logits, token_ids = numpy_draw.warp(processed, params)
    actual = np.full_like(row, DROPPED)
    actual[token_ids] = logits
    np.testing.assert_allclose(
        torch.from_numpy(actual).softmax(-1), torch.from_numpy(expected).softmax(-1), atol=1e-6
    )
    np.testing.assert_array_equal(row, before, "the raw logits are still needed for log probabilities")


def test_allowed_tokens_are_read_once_for_all_tokens_of_a_request():
    """Reading 50,000 ids takes 3 ms, which all requests in the batch would wait for at each token."""

    class Ids(tuple):
        num_reads = 0

        def __iter__(self):
            Ids.num_reads += 1
            return super().__iter__()

    params = SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=(1, 3, 99))
    object.__setattr__(params, "allowed_token_ids", Ids(params.allowed_token_ids))
    request = Request("r", [5], params)
    row = np.arange(8, dtype=np.float32)
    for _ in range(3):
        assert TokenChooser(request).choose(row) == 3
        request.output_token_ids.append(3)
    assert Ids.num_reads == 1
