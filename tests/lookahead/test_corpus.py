"""What of a namespace's text is shared, and what is given up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpc_fuzz import mutate
from tandem_drafting.lookahead_protocol import snapshot_from_bytes, snapshot_to_bytes
from tandem_drafting.shared_corpus import SharedCorpus
from tandem_drafting.spans import AcceptedSpan
from tandem_lookahead.corpus import BYTES_PER_SEQUENCE, BYTES_PER_TOKEN, CorpusPolicy, NamespaceCorpus
from tandem_proto.v1 import lookahead_pb2 as pb

ANSWER = tuple(range(100, 120))


def shared_of(corpus: NamespaceCorpus) -> list[tuple[int, ...]]:
    return sorted(tuple(run.tokens) for run in corpus.shared().sequences())


def ngrams(tokens: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {tokens[a:b] for a in range(len(tokens)) for b in range(a + 1, len(tokens) + 1)}


def requests_with(ngram: tuple[int, ...], said: dict[tuple[str, bool], dict[int, int]]) -> set[str]:
    """Requests in whose output or prompt the n-gram is; `said`: (request, is_prompt) -> offset -> token."""
    return {
        request
        for (request, _), tokens in said.items()
        if any(all(tokens.get(at + i) == t for i, t in enumerate(ngram)) for at in tokens)
    }


# Requests take turns; pieces are resent, overlap, leave gaps. A request says the same at an offset each time.
turns = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.booleans(), st.integers(0, 20), st.integers(1, 14)), max_size=30
)
scripts = st.lists(st.lists(st.integers(0, 2), min_size=34, max_size=34), min_size=12, max_size=12)


@settings(max_examples=80, deadline=None)
@given(turns, scripts, st.integers(1, 3), st.integers(2_000, 20_000))
def test_every_ngram_that_is_shared_was_generated_by_k_requests(given_turns, given_scripts, k, max_bytes):
    corpus = NamespaceCorpus(CorpusPolicy(min_requests=k, max_bytes=max_bytes))
    pod = SharedCorpus(10_000)
    said: dict[tuple[str, bool], dict[int, int]] = {}
    for time_s, (request, is_prompt, offset, length) in enumerate(given_turns):
        script = given_scripts["abcdef".index(request) + 6 * is_prompt]
        tokens = tuple(script[offset : offset + length])
        said.setdefault((request, is_prompt), {}).update(enumerate(tokens, offset))
        _, shared = corpus.add([AcceptedSpan(request, offset, tokens, is_prompt)], time_s)
        for span in shared:
            pod.add(span)
    for store in (pod, corpus.shared()):
        for run in store.sequences():
            for ngram in ngrams(tuple(run.tokens)):
                assert len(requests_with(ngram, said)) >= k


@settings(max_examples=50, deadline=None)
@given(turns, scripts, st.integers(1, 3), st.integers(0, 29))
def test_two_replicas_share_the_same_and_one_that_begins_with_a_snapshot_no_less(
    given_turns, given_scripts, k, cut
):
    policy = CorpusPolicy(min_requests=k)
    one, two, late = NamespaceCorpus(policy), NamespaceCorpus(policy), None
    for time_s, (request, is_prompt, offset, length) in enumerate(given_turns):
        if time_s == cut:
            late = NamespaceCorpus.from_bytes(one.to_bytes(), policy)
        script = given_scripts["abcdef".index(request) + 6 * is_prompt]
        span = AcceptedSpan(request, offset, tuple(script[offset : offset + length]), is_prompt)
        assert one.add([span], time_s) == two.add([span], time_s)
        if late is not None:
            late.add([span], time_s)
    assert one.shared().to_bytes() == two.shared().to_bytes()
    if late is not None:
        assert {g for run in shared_of(late) for g in ngrams(run)} == {
            g for run in shared_of(one) for g in ngrams(run)
        }
        assert late.num_tokens == one.num_tokens


def test_what_one_request_said_is_nobody_else_s():
    corpus = NamespaceCorpus(CorpusPolicy())
    assert corpus.add([AcceptedSpan("a", 0, ANSWER)], 0) == (20, [])
    assert corpus.add([AcceptedSpan("a", 0, ANSWER)], 0) == (0, [])  # resent
    num_new, (shared,) = corpus.add([AcceptedSpan("b", 0, (1, 2, *ANSWER[:8]))], 1)
    assert (num_new, shared.offset, shared.token_ids) == (10, 0, ANSWER[:8])
    _, (more,) = corpus.add([AcceptedSpan("b", 10, (*ANSWER[8:10], 3))], 2)
    assert (more.run, more.offset, more.token_ids) == (shared.run, 8, ANSWER[8:10])
    assert shared_of(corpus) == [ANSWER[:10]]
    assert (corpus.num_tokens, corpus.num_shared_tokens, corpus.num_sequences) == (33, 10, 2)


def test_a_prompt_and_its_answer_are_one_request():
    corpus = NamespaceCorpus(CorpusPolicy())
    corpus.add([AcceptedSpan("a", 0, ANSWER, is_prompt=True), AcceptedSpan("a", 0, ANSWER)], 0)
    assert shared_of(corpus) == []
    corpus.add([AcceptedSpan("b", 0, ANSWER, is_prompt=True)], 0)
    assert shared_of(corpus) == [ANSWER]


def test_shared_runs_are_named_after_nobody():
    corpus = NamespaceCorpus(CorpusPolicy())
    corpus.add([AcceptedSpan("a", 0, ANSWER), AcceptedSpan("b", 0, ANSWER)], 0)
    assert not {run.name for run in corpus.shared().sequences()} & {"a", "b"}


def test_what_is_shared_at_once_is_known_to_the_request_s_own_pod():
    corpus = NamespaceCorpus(CorpusPolicy(min_requests=1))
    corpus.add([AcceptedSpan("a", 0, ANSWER), AcceptedSpan("a", 0, (5, 6), is_prompt=True)], 0)
    names = {run.name: tuple(run.tokens) for run in corpus.shared().sequences()}
    assert names["a"] == ANSWER
    assert set(names.values()) == {ANSWER, (5, 6)}


def test_another_threshold_judges_old_text_anew():
    corpus = NamespaceCorpus(CorpusPolicy(min_requests=1))
    corpus.add([AcceptedSpan(name, 0, (*ANSWER, n)) for n, name in enumerate("ab")], 0)
    stricter = NamespaceCorpus.from_bytes(corpus.to_bytes(), CorpusPolicy(min_requests=2))
    assert shared_of(stricter) == [ANSWER]
    assert stricter.num_shared_tokens == 20


def noise(number: int) -> tuple[int, ...]:
    return tuple(range(1000 + 20 * number, 1020 + 20 * number))


#: Room for about 32 requests of 20 tokens.
SMALL = CorpusPolicy(max_bytes=32 * (20 * BYTES_PER_TOKEN + BYTES_PER_SEQUENCE), half_life_s=100.0)


def test_what_is_repeated_outlives_what_is_not():
    corpus = NamespaceCorpus(SMALL)
    corpus.add([AcceptedSpan("a", 0, ANSWER), AcceptedSpan("b", 0, ANSWER)], 0)
    for number in range(200):
        corpus.add([AcceptedSpan(f"r{number}", 0, noise(number))], number)
        assert corpus.num_bytes <= SMALL.max_bytes
    assert shared_of(corpus) == [ANSWER]
    # The newest of the rest can still be repeated.
    _, shared = corpus.add([AcceptedSpan("again", 0, noise(199))], 200)
    assert [span.token_ids for span in shared] == [noise(199)]
    assert corpus.add([AcceptedSpan("too late", 0, noise(0))], 200)[1] == []


def test_uses_fade():
    corpus = NamespaceCorpus(SMALL)
    for number in range(8):  # much used long ago
        corpus.add([AcceptedSpan(f"old{number}", 0, ANSWER)], 0)
    for number in range(100):
        for who in "ab":
            corpus.add([AcceptedSpan(f"{who}{number}", 0, noise(number))], 1000 + number)
    kept = shared_of(corpus)
    assert ANSWER not in kept
    assert noise(99) in kept


def test_new_text_finds_room_however_much_is_repeated():
    corpus = NamespaceCorpus(SMALL)
    for number in range(100):
        for who in "ab":
            corpus.add([AcceptedSpan(f"{who}{number}", 0, noise(number))], 0)
    for number in range(200, 208):
        corpus.add([AcceptedSpan(f"x{number}", 0, noise(number))], 1)
    for number in range(200, 208):
        _, shared = corpus.add([AcceptedSpan(f"y{number}", 0, noise(number))], 2)
        assert [span.token_ids for span in shared] == [noise(number)]


def test_a_damaged_snapshot_is_refused_with_a_reason():
    corpus = NamespaceCorpus(CorpusPolicy())
    corpus.add([AcceptedSpan("a", 0, ANSWER)], 0)
    good = corpus.to_bytes()
    for payload, words in (
        (b"", "digest"),
        (b"TLKR" + bytes(28), "not a Snapshot"),
        (good[:-1], "not a Snapshot"),
        (good[:-1] + b"\xff", "digest"),
    ):
        with pytest.raises(ValueError, match=words):
            NamespaceCorpus.from_bytes(payload, CorpusPolicy())


def fuzz(number: int, seed: int) -> None:
    """Snapshots with a right digest and changed content."""
    rng = random.Random(seed)
    corpus = NamespaceCorpus(CorpusPolicy())
    for request in "abcd":
        own = tuple(rng.randrange(100, 200) for _ in range(20))
        corpus.add([AcceptedSpan(request, 0, (*ANSWER, *own))], 0)
    good = snapshot_from_bytes(corpus.to_bytes(), pb.NamespaceCorpus)
    refused = 0
    for _ in range(number):
        message = pb.NamespaceCorpus()
        message.CopyFrom(good)
        for _ in range(rng.choice((1, 2, 4))):
            mutate(message, rng)
        policy = CorpusPolicy(min_requests=rng.choice((1, 2, 3)), max_bytes=1 << 20)
        try:
            read = NamespaceCorpus.from_bytes(snapshot_to_bytes(message), policy)
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        read.add([AcceptedSpan(rng.choice("abcdx"), 0, ANSWER)], 5.0)
        read.shared()
        for index in range(100):  # until it must drop something
            read.add([AcceptedSpan(f"n{index}", 0, tuple(rng.randrange(1000) for _ in range(400)))], 6.0)
        NamespaceCorpus.from_bytes(read.to_bytes(), policy)
        assert read.num_bytes <= policy.max_bytes
    assert 0 < refused < number


def test_a_snapshot_that_somebody_made_up_is_refused_or_harmless():
    fuzz(100, seed=0)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(1, 9))
def test_each_of_many_such_snapshots_is_refused_or_harmless(seed: int):
    fuzz(500, seed)
