"""k distinct requests generated every shared span, whatever they generate and in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_drafting.k_anonymity import KAnonymityFilter, SharedSpan

ROOT = Path(__file__).resolve().parents[2]


def holds(text: list[int], part: list[int]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


@dataclass
class Requests:
    """A filter, and all text ever appended to it, by run; run r belongs to request r // 2."""

    min_requests: int
    texts: dict[int, list[int]] = field(default_factory=dict)
    spans: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.filter = KAnonymityFilter(self.min_requests)

    def append(self, run: int, tokens: list[int]) -> list[SharedSpan]:
        text = self.texts.setdefault(run, [])
        text.extend(tokens)
        found = self.filter.append(run, run // 2, tokens)
        for span in found:
            assert self.spans.get((run, span.begin), 0) < span.end <= len(text)
            self.spans[run, span.begin] = span.end
        return found

    def shared(self) -> list[list[int]]:
        return [self.texts[run][begin:end] for (run, begin), end in self.spans.items()]

    def num_holders(self, part: list[int]) -> int:
        return len({run // 2 for run, text in self.texts.items() if holds(text, part)})


# Few tokens, so that texts meet often; a piece may repeat one that was there before.
pieces = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(0, 2), min_size=1, max_size=12)), max_size=40
)


@settings(max_examples=300, deadline=None)
@given(pieces, st.integers(1, 4), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 9)), max_size=5))
def test_every_span_as_a_whole_is_text_of_k_requests(given_pieces, min_requests, drops):
    requests = Requests(min_requests)
    dropped: set[int] = set()
    for number, (run, tokens) in enumerate(given_pieces):
        for when, what in drops:
            if when == number:
                requests.filter.drop(what)
                dropped.add(what)
        if run not in dropped:
            requests.append(run, tokens)
    for part in requests.shared():
        assert requests.num_holders(part) >= min_requests


@settings(max_examples=100, deadline=None)
@given(pieces)
def test_of_two_requests_all_that_is_four_tokens_long_is_shared(given_pieces):
    requests = Requests(2)
    for run, tokens in given_pieces:
        for token in tokens:  # what another held when the token came
            requests.texts.setdefault(run, [])
            end = [*requests.texts[run], token][-4:]
            is_held = len(end) == 4 and any(
                holds(text, end) for other, text in requests.texts.items() if other // 2 != run // 2
            )
            found = requests.append(run, [token])
            assert bool(found) == is_held
            if is_held:
                assert found[-1].end - found[-1].begin >= 4
                assert found[-1].end == len(requests.texts[run])


@settings(max_examples=100, deadline=None)
@given(pieces, st.integers(1, 3))
def test_pieces_do_not_matter(given_pieces, min_requests):
    whole, single = Requests(min_requests), Requests(min_requests)
    for run, tokens in given_pieces:
        whole.append(run, tokens)
        for token in tokens:
            single.append(run, [token])
    assert whole.spans == single.spans


def test_a_repetition_is_one_span_from_its_fourth_token_on():
    requests = Requests(2)
    assert requests.append(0, list(range(50))) == []
    assert requests.append(2, [99, *range(10, 13)]) == []
    assert requests.append(2, list(range(13, 20))) == [SharedSpan(1, 11, supporter=0)]
    assert requests.append(2, list(range(20, 30))) == [SharedSpan(1, 21)]
    assert requests.append(2, [7, 7, 7, 7]) == []


def test_where_the_text_goes_on_like_another_one_a_span_begins_that_overlaps():
    requests = Requests(2)
    requests.append(0, [*range(20), *range(100, 110)])
    requests.append(2, [*range(5, 20), *range(200, 210)])
    requests.append(4, [*range(20), *range(200, 210)])
    # 12 .. 19 once more: what follows them must not stand alone.
    assert [part for part in requests.shared() if 200 in part] == [[*range(12, 20), *range(200, 210)]]


def test_a_request_s_own_runs_do_not_support_each_other():
    requests = Requests(2)
    requests.append(0, list(range(20)))
    assert requests.append(1, list(range(20))) == []  # prompt and output of one request, say
    assert requests.append(2, list(range(20))) == [SharedSpan(0, 20, supporter=1)]


def test_three_requests_are_three():
    requests = Requests(3)
    requests.append(0, list(range(30)))
    assert requests.append(2, list(range(20))) == []
    assert requests.append(4, list(range(10, 30))) == [SharedSpan(0, 10, supporter=2)]


def test_of_one_request_everything_is_shared_at_once():
    requests = Requests(1)
    assert requests.append(0, [5]) == [SharedSpan(0, 1)]
    assert requests.append(0, [6, 7]) == [SharedSpan(0, 3)]


def test_a_dropped_run_supports_nobody():
    requests = Requests(2)
    requests.append(0, list(range(20)))
    requests.filter.drop(0)
    assert requests.append(2, list(range(20))) == []
    assert requests.append(4, list(range(20))) == [SharedSpan(0, 20, supporter=2)]


def test_memory_is_given_back():
    filter = KAnonymityFilter(2)
    most = 0
    for run in range(2000):
        filter.append(run, run, [run * 7919 % 10007 + at for at in range(100)])
        if run >= 100:
            filter.drop(run - 100)
        if run == 300:
            most = filter.memory_bytes
    assert filter.memory_bytes < 1.5 * most
    assert list(filter.read(1999, 0, 3)) == [1999 * 7919 % 10007 + at for at in range(3)]


def test_what_is_restored_goes_on_as_before():
    before, after = Requests(2), KAnonymityFilter(2)
    before.append(0, list(range(30)))
    before.append(2, list(range(10)))
    after.restore(0, 0, list(range(30)), None)
    after.restore(2, 1, list(range(10)), SharedSpan(0, 10))
    assert after.append(2, 1, [10, 11]) == [SharedSpan(0, 12, supporter=0)]
    assert before.append(2, [10, 11]) == [SharedSpan(0, 12)]


def test_no_request_is_too_few():
    with pytest.raises(ValueError, match="min_requests"):
        KAnonymityFilter(0)
