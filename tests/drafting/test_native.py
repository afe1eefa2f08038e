"""The compiled drafter: guesses that occurred, trees within their bounds, chances that come true."""

from __future__ import annotations

import itertools
import random
import runpy
import shutil
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_drafting import native
from tandem_drafting.native import (
    AcceptanceModel,
    CorpusIndex,
    Guesses,
    Recycler,
    SequenceIndex,
    SequenceInput,
    TopTokens,
    draft,
    draft_batch,
    learn,
)

VOCABULARY = 1000
#: A step costs the same however many guesses it verifies.
FREE = [1.0 + 1e-9 * q for q in range(1024)]


def text_of(tokens: Sequence[int], num_prompt: int = 0) -> SequenceIndex:
    text = SequenceIndex(num_prompt)
    text.extend(tokens)
    return text


def guesses_for(
    text: SequenceIndex, *, corpus: CorpusIndex | None = None, max_guesses: int = 16, **job
) -> Guesses | None:
    (guesses,) = draft(
        [SequenceInput(text, job.pop("model", AcceptanceModel()), corpus, **job)], max_guesses, FREE
    )
    return guesses


def best_chain(guesses: Guesses | None) -> list[int]:
    """The first guess at each depth along the likeliest path."""
    chain: list[int] = []
    node = 0
    while guesses is not None and node in guesses.tree.parents:
        node = guesses.tree.parents.index(node) + 1
        chain.append(guesses.tree.token_ids[node - 1])
    return chain


def noise(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


def test_goes_on_as_the_text_did_before() -> None:
    story = noise(40)
    assert best_chain(guesses_for(text_of(story + story[:10]), max_guesses=5)) == story[10:15]


def test_goes_on_as_another_request_did() -> None:
    story = noise(40)
    corpus = CorpusIndex(1000, VOCABULARY)
    assert corpus.add(0, story)
    ours = text_of(noise(30, seed=1) + story[:10])
    assert best_chain(guesses_for(ours, corpus=corpus, max_guesses=5)) == story[10:15]
    assert guesses_for(ours, corpus=CorpusIndex(1000, VOCABULARY)) is None


def test_nothing_goes_on_from_one_run_into_the_next() -> None:
    corpus = CorpusIndex(1000, VOCABULARY)
    corpus.add(0, [1, 2, 3, 4])
    corpus.add(1, [5, 6, 7, 8])
    assert guesses_for(text_of([3, 4]), corpus=corpus) is None


def test_a_run_goes_on_over_several_calls() -> None:
    corpus = CorpusIndex(1000, VOCABULARY)
    story = noise(40)
    for start in range(0, 40, 5):
        corpus.add(0, story[start : start + 5])
    assert best_chain(guesses_for(text_of(story[2:8]), corpus=corpus, max_guesses=5)) == story[8:13]


def test_what_does_not_fit_a_corpus_is_left_out_whole() -> None:
    corpus = CorpusIndex(12, VOCABULARY)
    assert corpus.add(0, [1] * 10)
    assert not corpus.add(1, [2, 3])
    assert not corpus.add(0, [1, VOCABULARY])
    assert not corpus.add(0, [-1])
    assert corpus.num_tokens == 11
    assert corpus.add(0, [2])


def test_the_models_own_successors_are_guesses() -> None:
    """The model read 1 2 3, emitted 10 and then 20, and thought of others as well."""
    recycler, text = Recycler(), text_of([1, 2, 3])
    likeliest = TopTokens.of_tokens(
        [[10, 11, 12, 13], [20, 21, 22, 23]], [[9.0, 5.0, 4.0, 3.0], [8.0, 7.5, 2.0, 1.0]]
    )
    learn([SequenceInput(text, AcceptanceModel(), recycler=recycler)], [[10, 20]], likeliest)
    text.extend([7, 1, 2, 3])
    guesses = guesses_for(text, recycler=recycler)
    assert guesses.tree.token_ids[0] == 10
    assert {20, 11, 21} <= set(guesses.tree.token_ids)
    assert "recycled" in guesses.tree.sources
    with pytest.raises(ValueError, match="top tokens of 1 places, wanted 2"):
        learn([SequenceInput(text, AcceptanceModel(), recycler=recycler)], [[10, 20]], likeliest.part(0, 1))


def test_other_requests_see_the_successors_that_two_requests_had() -> None:
    recycler = Recycler()

    def seen_by_another() -> set[int]:
        guesses = guesses_for(text_of([1, 2, 3]), recycler=recycler)
        return set(guesses.tree.token_ids) if guesses is not None else set()

    def has(text: SequenceIndex, *tokens: int) -> None:
        """After 1, 2, 3 the model finds these likely."""
        likeliest = TopTokens.of_tokens([tokens], [[9.0, 5.0, 4.0, 3.0]])
        learn([SequenceInput(text, AcceptanceModel(), recycler=recycler)], [tokens[:1]], likeliest)
        text.extend([1, 2, 3])

    one, two = text_of([1, 2, 3]), text_of([1, 2, 3])
    for _ in range(3):
        has(one, 10, 11, 12, 13)
    assert seen_by_another() == set(), "however often one request has had them"
    has(two, 11, 10, 14, 15)
    assert seen_by_another() == {10, 11}
    has(two, 11, 14, 15, 16)
    assert seen_by_another() == {11}, "14 and 15 are its own, and 10 is no longer likely"


@settings(max_examples=100, deadline=None)
@given(st.integers(4, 300), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_likeliest_are_those_that_sorting_finds(vocab_size: int, num_rows: int, seed: int) -> None:
    # Few distinct values, so that there are ties: the lower token goes first.
    logits = np.random.default_rng(seed).integers(-9, 9, (num_rows, vocab_size)).astype(np.float32)
    rows = [num_rows - 1, 0]
    found = TopTokens.of_logits(logits.ctypes.data, vocab_size, rows)
    assert found.tokens == [np.argsort(-logits[row], kind="stable")[:4].tolist() for row in rows]
    assert found.part(1, 2).tokens == found.tokens[1:]


def test_a_vocabulary_without_four_tokens_has_no_likeliest_four() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 3 tokens; wanted 4 or more"):
        TopTokens.of_logits(0, 3, [0])


tokens = st.integers(0, 4)
texts = st.lists(tokens, min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(texts, min_size=1, max_size=4),
    st.lists(texts, max_size=3),
    st.integers(1, 63),
    st.integers(0, 9),
    st.integers(0, 80),
)
def test_trees_hold_to_their_bounds(
    batch: list[list[int]], runs: list[list[int]], max_guesses: int, room: int, most: int
) -> None:
    corpus = CorpusIndex(2000, 5)
    for number, run in enumerate(runs):
        assert corpus.add(number, run)
    model = AcceptanceModel()
    jobs = [SequenceInput(text_of(text, len(text) // 2), model, corpus, room=room) for text in batch]
    drafts = draft(jobs, max_guesses, FREE[: most + 1])
    assert drafts == draft(jobs, max_guesses, FREE[: most + 1]), "the same again"
    assert sum(len(d.tree) for d in drafts if d is not None) <= most
    followers = {pair for text in (*batch, *runs) for pair in itertools.pairwise(text)}
    for text, guesses in zip(batch, drafts, strict=True):
        if guesses is None:
            continue
        tree = guesses.tree
        assert len(tree) <= max_guesses
        assert max(tree.depths()) <= room
        path = (text[-1], *tree.token_ids)
        for node, (parent, reach) in enumerate(zip(tree.parents, guesses.reach, strict=True), start=1):
            assert (path[parent], path[node]) in followers, "a guess followed its parent somewhere"
            assert 0 < reach <= (guesses.reach[parent - 1] if parent else 1)
        siblings = list(zip(tree.parents, tree.token_ids, strict=True))
        assert len(siblings) == len(set(siblings))
        for parent in set(tree.parents):
            children = [r for p, r in zip(tree.parents, guesses.reach, strict=True) if p == parent]
            assert children == sorted(children, reverse=True)


def test_guesses_must_be_worth_their_price() -> None:
    story = noise(40)
    job = SequenceInput(text_of(story + story[:10]), AcceptanceModel())
    # A row as costly as a step pays for no guess, and at a tenth only the likely ones do.
    assert draft([job], 16, [1.0 + q for q in range(17)]) == [None]
    (costly,), (cheap,) = (draft([job], 16, [1.0 + price * q for q in range(17)]) for price in (0.2, 0.01))
    assert 0 < len(costly.tree) < len(cheap.tree)
    expected = 1.0
    for q, reach in enumerate(costly.reach):
        assert (expected + reach) / (1 + 0.2 * (q + 1)) >= expected / (1 + 0.2 * q)
        expected += reach


def test_a_leap_in_the_price_is_shared_by_those_who_take_it() -> None:
    """One guess alone costs half a step, seven together no more: all or none."""
    story = noise(40)
    job = SequenceInput(text_of(story + story[:10]), AcceptanceModel())
    (taken,) = draft([job], 16, [1.0] + [1.5] * 7 + [9.0] * 9)
    assert taken is not None
    assert len(taken.tree) == 7
    assert sum(taken.reach) > 0.5 > taken.reach[0] * 0.5
    assert draft([job], 16, [1.0] + [9.0] * 16) == [None]


def test_it_tells_which_sequences_are_hopeless() -> None:
    """Random tokens have no probable guess. The guess after a repeated sequence is probable at any cost."""
    story, random_tokens = noise(40), text_of([token % 50 for token in noise(500, seed=2)])
    unsure, sure = (
        SequenceInput(random_tokens, AcceptanceModel()),
        SequenceInput(text_of(story + story[:10]), AcceptanceModel()),
    )
    for cost, is_hopeless in ((1.1, True), (1e-6, False)):
        curve = array("d", [1.0 + cost * q for q in range(17)])
        seen = [draft_batch([one], 16, 1, curve).is_hopeless for one in (unsure, sure)]
        assert seen == [array("i", [is_hopeless]), array("i", [False])]


def test_the_whole_batch_has_one_price() -> None:
    """The likelier sequence gets the rows."""
    story = noise(40)
    sure, unsure = text_of(story + story[:10]), text_of([1, 2, 1, 3, 1, 4, 1, 5, 1])
    model = AcceptanceModel()
    first, second = draft([SequenceInput(unsure, model), SequenceInput(sure, model)], 16, FREE[:2])
    assert first is None
    assert second.tree.token_ids == (story[10],)


def test_chances_come_true_once_learnt() -> None:
    """On a text in which each token has three followers of known frequency."""
    source = random.Random(5)
    model, text = AcceptanceModel(), text_of([0])
    token, predicted, accepted, late = 0, 0.0, 0, 4000
    for step in range(6000):
        (guesses,) = draft([SequenceInput(text, model)], 3, FREE)
        token = (token * 7 + source.choices([1, 2, 3], [0.7, 0.2, 0.1])[0]) % 97
        if guesses is not None and step >= late:
            for parent, guess, reach in zip(
                guesses.tree.parents, guesses.tree.token_ids, guesses.reach, strict=True
            ):
                if parent == 0:
                    predicted += reach
                    accepted += guess == token
        learn([SequenceInput(text, model)], [[token]])
    assert accepted > 0.65 * (6000 - late)
    assert predicted == pytest.approx(accepted, rel=0.05)


def test_predictions_are_counted_beside_what_came_of_them() -> None:
    story, model = noise(40), AcceptanceModel()
    text = text_of(story + story[:10])
    (guesses,) = draft([SequenceInput(text, model)], 4, FREE)
    learn([SequenceInput(text, model)], [[*story[10:13], VOCABULARY]])
    tenths = model.reliability()
    assert [t.num_guesses for t in tenths] == [
        sum(int(reach * 10) == n for reach in guesses.reach) for n in range(10)
    ]
    assert sum(t.predicted for t in tenths) == pytest.approx(sum(guesses.reach), rel=1e-5)
    assert sum(t.accepted for t in tenths) == 3
    model.reset()
    assert model.reliability() == tenths, "the counts are those of this process"


def test_a_reset_model_predicts_as_a_new_one() -> None:
    story, model = noise(30), AcceptanceModel()
    text = text_of(story)
    for token in story * 5:
        draft([SequenceInput(text, model)], 8, FREE)
        learn([SequenceInput(text, model)], [[token]])
    assert guesses_for(text, model=AcceptanceModel()) != guesses_for(text, model=model)
    model.reset()
    assert guesses_for(text, model=AcceptanceModel()) == guesses_for(text, model=model)


def test_a_corpus_may_be_added_to_while_others_draft_from_it() -> None:
    story = noise(5000, seed=3)
    corpus = CorpusIndex(200_000, VOCABULARY)
    ends = threading.Event()

    def add() -> None:
        for run in range(30):
            for start in range(0, len(story), 50):
                corpus.add(run, story[start : start + 50])
        ends.set()

    writer = threading.Thread(target=add)
    writer.start()
    model, steps = AcceptanceModel(), 0
    followers = set(itertools.pairwise(story)) | {(story[-1], story[0])}
    while not ends.is_set() or steps < 200:
        start = (steps * 37) % 4900
        text = text_of(story[start : start + 20])
        guesses = guesses_for(text, corpus=corpus, model=model)
        if guesses is not None:
            path = (story[start + 19], *guesses.tree.token_ids)
            for node, parent in enumerate(guesses.tree.parents, start=1):
                assert (path[parent], path[node]) in followers
        learn([SequenceInput(text, model)], [story[start + 20 : start + 22]])
        steps += 1
    writer.join()


def test_memory_per_token_is_bounded() -> None:
    corpus = CorpusIndex(1_000_000, 49_152)
    assert corpus.memory_bytes / corpus.capacity <= 64


def test_a_library_of_other_sources_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """As after `git pull` without `make`: the library lacks a function that the Python code calls."""
    shutil.copy(xxhash._xxhash.__file__, tmp_path / "tandem_drafting.so")
    with pytest.raises(ImportError, match=rf"{tmp_path}/tandem_drafting.so: .*run `python build_native.py`"):
        runpy.run_path(shutil.copy(native.__file__, tmp_path))
