"""Answers that can be resumed: their lifetime and their memory."""

from __future__ import annotations

import random
import time

import pytest
from tandem_gateway.answers.answer import Answer
from tandem_gateway.answers.kept_answers import KeptAnswers
from tandem_proto.v1 import answers_pb2, decode_pb2

MAX_BYTES = 4_000


def answer(number: int) -> Answer:
    return Answer(answers_pb2.AnswerRecord(id=f"{number:016x}{0:08x}"), None, is_kept=True)


def grow(kept: KeptAnswers, one: Answer, num_tokens: int = 1) -> None:
    one.add(decode_pb2.DecodeChunk(text="x" * num_tokens, token_ids=[1] * num_tokens))
    kept.count(one)


def test_bytes_are_the_sum_over_kept_answers():
    kept, rng = KeptAnswers(ttl_s=60.0, max_bytes=MAX_BYTES), random.Random(1)
    there: list[Answer] = []
    for number in range(300):
        there.append(answer(number))
        kept.add(there[-1])
        for _ in range(rng.randrange(4)):
            grow(kept, rng.choice(there), rng.randrange(50))
        if rng.random() < 0.2:
            kept.remove(there.pop(rng.randrange(len(there))))
        removed = kept.remove_excess()
        assert removed == there[: len(removed)]  # the oldest ones, and no more than needed
        there = there[len(removed) :]
        assert kept.num_bytes == sum(one.num_bytes for one in there) <= MAX_BYTES
        if removed:
            assert kept.num_bytes + removed[-1].num_bytes > MAX_BYTES
        assert all(kept.get(one.name) is one for one in there)
        assert all(kept.get(one.name) is None and one.is_forgotten for one in removed)


def test_a_removed_answer_does_not_count_when_it_grows():
    kept, one = KeptAnswers(ttl_s=60.0, max_bytes=MAX_BYTES), answer(1)
    kept.add(one)
    kept.remove(one)
    grow(kept, one)
    kept.remove(one)
    assert kept.num_bytes == 0


@pytest.mark.parametrize("use", [{"is_running": True}, {"num_readers": 1}])
def test_answers_in_use_are_not_removed(use: dict[str, int]):
    kept, used, other = KeptAnswers(ttl_s=0.01, max_bytes=1), answer(1), answer(2)
    for one in (used, other):
        kept.add(one)
        one.last_used = time.monotonic() - 1
    for name, value in use.items():
        setattr(used, name, value)
    assert kept.remove_excess() == [other]
    kept.remove_expired()
    assert kept.get(used.name) is used


def test_answers_expire_by_their_last_use():
    kept, old, used = KeptAnswers(ttl_s=10.0, max_bytes=MAX_BYTES), answer(1), answer(2)
    for one in (old, used):
        kept.add(one)
    old.last_used = time.monotonic() - 11
    kept.remove_expired()
    assert kept.get(old.name) is None and kept.get(used.name) is used
    assert kept.num_bytes == used.num_bytes


def test_there_is_room_below_the_byte_limit_and_with_a_time_to_live():
    kept = KeptAnswers(ttl_s=10.0, max_bytes=MAX_BYTES)
    assert kept.has_room()
    kept.add(answer(1))
    grow(kept, answer(2), MAX_BYTES)  # not kept, and so not counted
    assert kept.has_room()
    one = answer(3)
    kept.add(one)
    grow(kept, one, MAX_BYTES)
    assert not kept.has_room()
    assert not KeptAnswers(ttl_s=0.0, max_bytes=MAX_BYTES).has_room()
