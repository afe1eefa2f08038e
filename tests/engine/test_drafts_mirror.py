"""The mirror: snapshots, deltas, and readers that never wait."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_engine.drafts.builder import ForestBuilder
from tandem_engine.drafts.calibration import Calibration
from tandem_engine.drafts.local import SuffixIndex
from tandem_engine.drafts.mirror import GlobalMirror
from tandem_engine.drafts.spans import AcceptedSpan
from tandem_engine.drafts.voting import Voters

DEPTH = 4


def snapshot_of(*texts: list[int]) -> bytes:
    builder = ForestBuilder(DEPTH)
    for text in texts:
        builder.insert(text)
    return builder.to_snapshot().to_bytes()


def test_a_snapshot_replaces_everything():
    mirror = GlobalMirror(depth=DEPTH)
    mirror.apply_delta([AcceptedSpan("r", 0, (1, 2))], "5-0")
    mirror.apply_snapshot(snapshot_of([3, 4]), "9-0")
    assert (mirror.view.count((1, 2)), mirror.view.count((3, 4)), mirror.position) == (0, 1, "9-0")


def test_a_damaged_snapshot_changes_nothing():
    mirror = GlobalMirror(depth=DEPTH)
    mirror.apply_delta([AcceptedSpan("r", 0, (1, 2))], "5-0")
    payload = bytearray(snapshot_of([3, 4]))
    payload[-1] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        mirror.apply_snapshot(bytes(payload), "9-0")
    assert (mirror.view.count((1, 2)), mirror.position) == (1, "5-0")


def test_tokens_outside_the_vocabulary_never_enter():
    mirror = GlobalMirror(depth=DEPTH, vocab_size=100)
    mirror.apply_delta([AcceptedSpan("a", 0, (1, 100)), AcceptedSpan("b", 0, (2, 99))], "1-0")
    assert (mirror.view.count((1,)), mirror.view.count((2, 99))) == (0, 1)
    with pytest.raises(ValueError, match="vocabulary"):
        mirror.apply_snapshot(snapshot_of([1, 100]), "2-0")
    mirror.apply_snapshot(snapshot_of([1, 99]), "3-0")
    assert mirror.view.count((1, 99)) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=12), st.integers(1, 60))
def test_deltas_equal_a_rebuilt_snapshot(texts, overlay_nodes):
    mirror = GlobalMirror(depth=DEPTH, overlay_nodes=overlay_nodes)
    for number, text in enumerate(texts):
        for offset in range(0, len(text), 3):
            span = AcceptedSpan(f"r{number}", offset, tuple(text[offset : offset + 3]))
            mirror.apply_delta([span, span], f"{number}-{offset}")
    merged, position = mirror.snapshot()
    assert merged.to_bytes() == snapshot_of(*texts)
    assert position == mirror.position


def test_own_spans_are_learnt_before_the_stream_brings_them_back():
    mirror = GlobalMirror(depth=DEPTH)
    assert mirror.learn([AcceptedSpan("r", 0, (1, 2, 3))]) == 3
    assert (mirror.position, mirror.view.count((1, 2))) == ("", 1)
    assert mirror.apply_delta([AcceptedSpan("r", 0, (1, 2, 3))], "1-0") == 0
    assert (mirror.position, mirror.view.count((1, 2)), mirror.num_tokens) == ("1-0", 1, 3)


def test_memory_stays_bounded_and_keeps_what_is_frequent():
    mirror = GlobalMirror(depth=DEPTH, max_nodes=500, overlay_nodes=1000)
    for number in range(300):
        noise = tuple(range(1000 + 20 * number, 1020 + 20 * number))
        mirror.apply_delta([AcceptedSpan(f"r{number}", 0, (1, 2, 3, 4, *noise))], str(number))
    assert mirror.view.base.num_nodes <= 500
    assert mirror.num_nodes < 500 + 1000 + 200
    assert mirror.view.count((1, 2, 3, 4)) == 300


def test_readers_are_never_disturbed_by_swaps_and_deltas():
    """One thread votes without pause while another replaces and extends the forest."""
    mirror = GlobalMirror(depth=DEPTH, overlay_nodes=400)
    payloads = [snapshot_of([1, 2, 3, 4] * n) for n in (1, 5)]
    stop = threading.Event()
    votes = 0
    failures: list[BaseException] = []

    def read() -> None:
        nonlocal votes
        calibration = Calibration()
        try:
            while not stop.is_set():
                voters = Voters(SuffixIndex(), 0, mirror.view, calibration)
                root = voters.root([1, 2])
                votes += len(voters.vote(root))
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
    assert votes > 0
