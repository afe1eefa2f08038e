"""The search finds what transformers' beam search finds, over a model that is a table; and what it keeps."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from tandem_core.beams import MAX_BEAM_WIDTH, BeamParams, EarlyStopping
from tandem_core.errors import InvalidRequestError, LogitsError
from tandem_engine.beam_search import BeamSearch, largest

VOCAB = 40


def log_probs(table: np.ndarray, texts: list[list[int]]) -> np.ndarray:
    """The next token depends on the last two."""
    rows = [table[(text or [0])[-1], (text or [0])[-2 if len(text) > 1 else -1]] for text in texts]
    return torch.log_softmax(torch.from_numpy(np.array(rows)), dim=-1).numpy()


def search(table: np.ndarray, params: BeamParams, ends: set[int], max_tokens: int) -> BeamSearch:
    state = BeamSearch(params, end_token_ids=ends, max_tokens=max_tokens, num_top=3)
    texts: list[list[int]] = [[]]
    while not state.is_done:
        assert state.num_running == len(texts)
        before = texts
        state.advance(log_probs(table, texts))
        texts = [state.running_token_ids(i) for i in range(state.num_running)]
        assert texts == [
            [*before[parent], token]
            for parent, token in zip(state.parents, state.last_token_ids, strict=True)
        ]
    return state


def by_definition(table: np.ndarray, params: BeamParams, ends: set[int], max_tokens: int):
    """Texts with their scores, from the definition in transformers' documentation, with tensors of torch."""
    width, penalty = params.width, params.length_penalty
    running: list[tuple[list[int], torch.Tensor]] = [([], torch.tensor(0.0))]
    finished: list[tuple[list[int], float]] = []
    for length in range(1, max_tokens + 1):
        rows = torch.from_numpy(log_probs(table, [text for text, _ in running]))
        totals = rows + torch.stack([total for _, total in running])[:, None]
        values, indices = torch.sort(totals.flatten(), descending=True, stable=True)
        kept = max(2, 1 + len(ends)) * width
        going_on = []
        for rank, (value, index) in enumerate(zip(values[:kept], indices[:kept].tolist(), strict=True)):
            text = [*running[index // VOCAB][0], index % VOCAB]
            if text[-1] in ends or length == max_tokens:
                if rank < width:
                    finished.append((text, float(value / length**penalty)))
            elif len(going_on) < width:
                going_on.append((text, value))
        finished = sorted(finished, key=lambda one: -one[1])[:width]
        running = going_on
        if not running:
            break
        if len(finished) == width:
            if params.early_stopping is EarlyStopping.WHEN_FULL or width == 1:
                break
            is_longest_best = params.early_stopping is EarlyStopping.NEVER and penalty > 0
            best = float(running[0][1] / (max_tokens if is_longest_best else length) ** penalty)
            if best <= finished[-1][1]:
                break
    return finished


@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_the_texts_are_those_of_the_definition(early_stopping: EarlyStopping) -> None:
    rng = random.Random(3)
    for seed in range(30):
        table = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB, VOCAB)).astype(np.float32) * 3
        ends = set(rng.sample(range(VOCAB), rng.choice([0, 1, 1, 2, 5])))
        for end in ends:
            table[..., end] += rng.choice([0.0, 2.0, 4.0])
        params = BeamParams(rng.choice([1, 2, 3, 5]), rng.choice([-1.0, 0.0, 0.6, 1.0, 2.5]), early_stopping)
        max_tokens = rng.choice([1, 2, 7, 20])
        state = search(table, params, ends, max_tokens)
        found = [(list(one.token_ids), one.score) for one in state.hypotheses()]
        assert found == by_definition(table, params, ends, max_tokens)
        assert len(found) == params.width


def test_log_probabilities_are_of_each_token_of_each_text() -> None:
    table = np.random.default_rng(1).normal(size=(VOCAB, VOCAB, VOCAB)).astype(np.float32)
    state = search(table, BeamParams(4, length_penalty=0.0), {7}, 12)
    for text in state.hypotheses():
        assert [one.token_id for one in text.logprobs] == list(text.token_ids)
        assert sum(one.logprob for one in text.logprobs) == pytest.approx(text.score, abs=1e-4)
        for n, one in enumerate(text.logprobs):
            row = log_probs(table, [list(text.token_ids[:n])])[0]
            assert one.logprob == row[one.token_id]
            assert [token for token, _ in one.top] == np.argsort(-row, kind="stable")[:3].tolist()


def test_equal_scores_go_to_the_lower_beam_and_token() -> None:
    state = BeamSearch(BeamParams(3), end_token_ids=(), max_tokens=9)
    for _ in range(3):
        state.advance(np.full((state.num_running, VOCAB), -1.0, dtype=np.float32))
        assert (state.parents, state.last_token_ids) == ((0, 0, 0), (0, 1, 2))


def test_the_largest_are_those_of_a_stable_sort() -> None:
    rng = np.random.default_rng(0)
    for size, count in itertools.product((1, 50, 5000, 20_001), (1, 7, 64)):
        values = rng.integers(-40, 0, size).astype(np.float32)
        assert largest(values, count).tolist() == np.argsort(-values, kind="stable")[:count].tolist()


def test_nan_is_no_probability() -> None:
    state = BeamSearch(BeamParams(2), end_token_ids=(), max_tokens=9)
    with pytest.raises(LogitsError, match="NaN"):
        state.advance(np.full((1, VOCAB), np.nan, dtype=np.float32))


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("beam_width", {"width": 0}),
        ("beam_width", {"width": MAX_BEAM_WIDTH + 1}),
        ("length_penalty", {"width": 2, "length_penalty": float("nan")}),
        ("length_penalty", {"width": 2, "length_penalty": 5.1}),
    ],
)
def test_parameters_have_limits(field: str, arguments: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        BeamParams(**arguments)
    assert error.value.field == field
