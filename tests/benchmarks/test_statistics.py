"""From what clients saw to the figures of the engine benchmark's tables."""

from __future__ import annotations

import pytest
from peers.protocol import Answer, Stream
from peers.statistics import cell, percentile, phases, timing


def test_ttft_counts_from_when_the_request_was_sent() -> None:
    seen = timing(Stream(sent_s=1.0, times_s=[1.25, 1.5], counts=[1, 1]))
    assert seen.ttft_ms == pytest.approx(250)


def test_tpot_divides_by_the_tokens_that_came_after_the_first_arrival() -> None:
    seen = timing(Stream(0.0, [0.1, 0.2, 0.5], [2, 3, 1], decode_steps=4))
    assert seen.tpot_ms == pytest.approx(400 / 4)
    assert (seen.num_tokens, seen.decode_steps) == (6, 4)


def test_a_stream_that_arrives_at_once_has_no_tpot() -> None:
    with pytest.raises(ValueError, match="no TPOT"):
        timing(Stream(0.0, [0.1], [5]))


def test_a_cell_holds_medians_and_counts_tokens_over_all_steps() -> None:
    streams = [
        Stream(0.0, [ttft, ttft + 6 * tpot], [1, 6], decode_steps=steps)
        for ttft, tpot, steps in ((0.1, 0.01, 6), (0.2, 0.02, 3), (0.9, 0.09, 3))
    ]
    done = cell("a", True, 256, 3, streams)
    assert (done.ttft_ms, done.tpot_ms) == pytest.approx((200, 20))
    assert done.tokens_per_step == pytest.approx(18 / 12)


def test_a_peer_that_tells_no_steps_has_no_tokens_per_step() -> None:
    assert cell("a", False, 256, 1, [Stream(0.0, [0.1, 0.2], [1, 1])]).tokens_per_step is None


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.99, 3.0), ([1.0, 3.0], 0.5, 2.0), ([4.0, 1.0, 2.0, 3.0, 5.0], 1.0, 5.0)],
)
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_gaps_are_sorted_by_whether_they_touch_the_other_prompts_computation() -> None:
    #            before     over both edges     after
    running = Stream(0.0, [1.0, 1.1, 1.2, 3.0, 3.1, 3.3], [1, 1, 1, 2, 1, 1])
    arriving = Stream(sent_s=1.3, times_s=[2.9], counts=[1])
    by_name = {phase.name: phase for phase in phases("a", [Answer([running, arriving])])}
    assert by_name["before"].num_tokens == 2
    assert by_name["before"].tpot_ms == pytest.approx(100)
    # One gap of 1.8 s that brought two tokens.
    assert by_name["during"].num_tokens == 2
    assert by_name["during"].tpot_ms == pytest.approx(900)
    assert by_name["during"].gap_median_ms == pytest.approx(1800)
    assert by_name["after"].gap_median_ms == pytest.approx(150)
    assert [phase.arriving_ttft_ms for phase in by_name.values()] == pytest.approx([1600] * 3)


def test_phases_pool_the_gaps_of_all_rounds() -> None:
    answers = [
        Answer([Stream(0.0, [0.0, gap, 2 * gap], [1, 1, 1]), Stream(9.0, [9.5], [1])]) for gap in (0.1, 0.3)
    ]
    (before,) = phases("a", answers)
    assert before.num_tokens == 4
    assert before.tpot_ms == pytest.approx(200)
    assert before.gap_p99_ms == pytest.approx(300)
