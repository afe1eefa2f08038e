"""The mirror: snapshots, deltas, and a corpus that drafters read without waiting."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.native import AcceptanceModel, SequenceIndex, SequenceInput, draft
from tandem_drafting.spans import AcceptedSpan

FREE = [1.0 + 1e-9 * q for q in range(64)]


def snapshot_of(*texts: list[int]) -> bytes:
    mirror = GlobalMirror()
    mirror.apply_delta([AcceptedSpan(f"s{n}", 0, tuple(text)) for n, text in enumerate(texts)], "")
    return mirror.snapshot()[0]


def guesses(mirror: GlobalMirror, text: list[int], own: str = "") -> set[int]:
    """Tokens that the corpus makes a drafter guess behind a text, at once or later."""
    sequence = SequenceIndex(len(text))
    sequence.extend(text)
    job = SequenceInput(sequence, AcceptanceModel(), mirror.corpus, own_run=mirror.run_of(own))
    (found,) = draft([job], 16, FREE)
    return set(found.tree.token_ids) if found is not None else set()


def test_a_snapshot_replaces_everything():
    mirror = GlobalMirror()
    mirror.apply_delta([AcceptedSpan("r", 0, (1, 2))], "5-0")
    mirror.apply_snapshot(snapshot_of([3, 4]), "9-0")
    assert (mirror.count((1, 2)), mirror.count((3, 4)), mirror.position) == (0, 1, "9-0")
    assert guesses(mirror, [1]) == set()
    assert guesses(mirror, [3]) == {4}


def test_a_damaged_snapshot_changes_nothing():
    mirror = GlobalMirror()
    mirror.apply_delta([AcceptedSpan("r", 0, (1, 2))], "5-0")
    payload = bytearray(snapshot_of([3, 4]))
    payload[-1] ^= 1
    with pytest.raises(ValueError, match="digest"):
        mirror.apply_snapshot(bytes(payload), "9-0")
    assert (mirror.count((1, 2)), mirror.position) == (1, "5-0")


def test_tokens_outside_the_vocabulary_never_enter():
    mirror = GlobalMirror(vocab_size=100)
    mirror.apply_delta([AcceptedSpan("a", 0, (1, 100)), AcceptedSpan("b", 0, (2, 99))], "1-0")
    assert (mirror.count((1,)), mirror.count((2, 99))) == (0, 1)
    with pytest.raises(ValueError, match="vocabulary"):
        mirror.apply_snapshot(snapshot_of([1, 100]), "2-0")
    mirror.apply_snapshot(snapshot_of([1, 99]), "3-0")
    assert mirror.count((1, 99)) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=12))
def test_deltas_equal_a_rebuilt_snapshot(texts):
    mirror = GlobalMirror()
    # All requests at once, piece by piece, and each piece twice.
    for offset in range(0, 12, 3):
        for number, text in enumerate(texts):
            span = AcceptedSpan(f"s{number}", offset, tuple(text[offset : offset + 3]))
            mirror.apply_delta([span, span], f"{number}-{offset}")
    again = GlobalMirror()
    again.apply_snapshot(mirror.snapshot()[0], mirror.position)
    whole = GlobalMirror()
    whole.apply_snapshot(snapshot_of(*texts), "")
    for ngram in [(a,) for a in range(4)] + [(a, b) for a in range(4) for b in range(4)]:
        assert mirror.count(ngram) == again.count(ngram) == whole.count(ngram)
    assert mirror.num_tokens == again.num_tokens == sum(map(len, texts))


def test_pieces_of_requests_that_take_turns_are_found_as_whole_texts():
    story, other = list(range(100, 140)), list(range(200, 240))
    mirror = GlobalMirror()
    for offset in range(0, 40, 4):
        for name, text in (("story", story), ("other", other)):
            mirror.apply_delta([AcceptedSpan(name, offset, tuple(text[offset : offset + 4]))], "1-0")
    for cut in range(1, 36):
        assert story[cut] in guesses(mirror, story[:cut])
        assert not guesses(mirror, story[:cut]) & set(other)


def test_a_request_s_own_run_is_known_by_a_name_that_tells_nothing():
    mirror = GlobalMirror()
    name = mirror.names.of("chat-17")
    assert "chat" not in name
    assert name == mirror.names.of("chat-17") != GlobalMirror().names.of("chat-17")
    mirror.apply_delta([AcceptedSpan("other", 0, (1, 2)), AcceptedSpan(name, 0, (3, 4))], "1-0")
    assert (mirror.run_of("chat-17"), mirror.run_of("other")) == (1, -1)


def test_what_came_before_a_snapshot_is_known_behind_it():
    mirror = GlobalMirror()
    mirror.apply_delta([AcceptedSpan("r", 0, (1, 2, 3))], "1-0")
    late = GlobalMirror()
    late.apply_snapshot(*mirror.snapshot())
    assert late.apply_delta([AcceptedSpan("r", 0, (1, 2, 3)), AcceptedSpan("r", 3, (4,))], "2-0") == 1
    assert late.count((3, 4)) == 1


def test_a_gap_begins_a_run_anew_and_keeps_the_old_one():
    mirror = GlobalMirror()
    mirror.apply_delta([AcceptedSpan("r", 0, (1, 2)), AcceptedSpan("r", 5, (6, 7))], "1-0")
    assert (mirror.count((1, 2)), mirror.count((2, 6)), mirror.count((6, 7))) == (1, 0, 1)
    assert guesses(mirror, [1, 2]) == set()


def test_memory_stays_bounded_and_the_latest_text_is_kept():
    mirror = GlobalMirror(max_tokens=1000)
    for number in range(300):
        noise = tuple(range(1000 + 20 * number, 1020 + 20 * number))
        mirror.apply_delta([AcceptedSpan(f"r{number}", 0, noise)], str(number))
        assert mirror.num_tokens <= 1000
    assert (mirror.count((1000, 1001)), mirror.count((6980, 6981))) == (0, 1)


def test_a_full_corpus_makes_room():
    mirror = GlobalMirror()
    for number in range(100):
        mirror.apply_delta([AcceptedSpan(f"r{number}", 0, tuple(range(number, number + 1500)))], "1-0")
    assert mirror.num_tokens == 150_000
    assert 77 in guesses(mirror, [75, 76])
    assert mirror.memory_bytes / mirror.num_tokens < 90


def test_readers_are_never_disturbed_by_swaps_and_deltas():
    """One thread drafts without pause while another replaces and extends the text."""
    mirror = GlobalMirror()
    payloads = [snapshot_of([1, 2, 3, 4] * n) for n in (1, 5)]
    stop = threading.Event()
    drafted = 0
    failures: list[BaseException] = []

    def read() -> None:
        nonlocal drafted
        try:
            while not stop.is_set():
                found = guesses(mirror, [1, 2])
                assert all(token < 1000 for token in found)
                drafted += len(found)
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(400):
        if number % 20 == 0:
            mirror.apply_snapshot(payloads[number // 20 % 2], str(number))
        span = AcceptedSpan(f"r{number}", 0, (1, 2, number, 1, 2, 2 * number, *range(number, number + 20)))
        mirror.apply_delta([span], str(number))
    stop.set()
    reader.join()
    assert not failures
    assert drafted > 0
