"""Answers that can be resumed: their lifetime and their memory."""

from __future__ import annotations

import random
import time

import pytest
from resident_memory import in_own_process, resident_bytes
from tandem_gateway.answers.answer import Answer
from tandem_gateway.answers.kept_answers import KeptAnswers
from tandem_proto.v1 import answers_pb2, common_pb2, decode_pb2

MAX_BYTES = 100_000


def answer(number: int, tenant: str = "", *, has_key: bool = False) -> Answer:
    request = decode_pb2.DecodeRequest(tenant=tenant)
    record = answers_pb2.AnswerRecord(id=f"{number:016x}{0:08x}", request=request)
    return Answer(record, None, is_kept=True, has_key=has_key)


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
            grow(kept, rng.choice(there), rng.randrange(2000))
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
    assert kept.has_room("")
    kept.add(answer(1))
    grow(kept, answer(2), MAX_BYTES)  # not kept, and so not counted
    assert kept.has_room("")
    one = answer(3)
    kept.add(one)
    grow(kept, one, MAX_BYTES)
    assert not kept.has_room("")
    assert not KeptAnswers(ttl_s=0.0, max_bytes=MAX_BYTES).has_room("")


def filled(
    kept: KeptAnswers, tenant: str, num_bytes: int, *, start: int, has_key: bool = False
) -> list[Answer]:
    """The tenant's new answers, more than `num_bytes` together, as far as they were kept."""
    added: list[Answer] = []
    while sum(one.num_bytes for one in added) <= num_bytes and kept.has_room(tenant):
        added.append(answer(start + len(added), tenant, has_key=has_key))
        kept.add(added[-1])
        grow(kept, added[-1], 1000)
        kept.remove_excess()
    return added


@pytest.mark.parametrize("has_key", [False, True])
def test_a_tenant_cannot_displace_answers_of_others(has_key: bool):
    kept = KeptAnswers(ttl_s=60.0, max_bytes=MAX_BYTES, tenant_bytes=MAX_BYTES // 2)
    quiet = filled(kept, "quiet", MAX_BYTES // 5, start=0)
    busy = filled(kept, "busy", 4 * MAX_BYTES, start=1000, has_key=has_key)
    for one in quiet:
        assert kept.get(one.name) is one
    assert kept.num_bytes <= MAX_BYTES
    assert sum(one.num_bytes for one in busy if kept.get(one.name)) <= MAX_BYTES // 2 + busy[0].num_bytes
    assert kept.has_room("quiet")
    assert kept.has_room("busy") is not has_key, "answers without a key make room for the next one"


def test_answers_of_keys_stay_for_their_time():
    kept = KeptAnswers(ttl_s=60.0, max_bytes=MAX_BYTES)
    keyed = filled(kept, "", 2 * MAX_BYTES, start=0, has_key=True)
    assert not kept.has_room("")
    assert 50 < kept.room_in_s() <= 60
    assert all(kept.get(one.name) is one for one in keyed)
    for one in keyed:
        one.last_used = time.monotonic() - 61
    kept.remove_expired()
    assert kept.has_room("")


def test_a_copy_of_a_stored_answer_is_removable_although_it_has_a_key():
    kept, copy = KeptAnswers(ttl_s=60.0, max_bytes=1), answer(1, has_key=True)
    copy.is_copy = True
    kept.add(copy)
    assert kept.remove_excess() == [copy]


def chunk(num_logprobs: int, prompt: int) -> decode_pb2.DecodeChunk:
    one = common_pb2.TokenLogprob(token_id=7, logprob=-0.5, token_bytes=b" word")
    logprobs = [common_pb2.PositionLogprobs(chosen=one, top=[one] * num_logprobs)] if num_logprobs else []
    of_prompt = common_pb2.PromptLogprobs(
        logprobs=[-0.25] * prompt,
        ranks=[2] * prompt,
        top_token_ids=range(prompt),
        top_logprobs=[-0.5] * prompt,
    )
    return decode_pb2.DecodeChunk(
        text=" word", token_ids=[7], logprobs=logprobs, prompt_logprobs=of_prompt if prompt else None
    )


@pytest.mark.parametrize(
    ("num_answers", "num_events", "num_logprobs", "prompt"),
    [(4000, 1, 0, 0), (20, 8000, 0, 0), (20, 1000, 20, 0), (100, 1, 0, 8000)],
    ids=["short answers", "tokens", "log probabilities", "prompt log probabilities"],
)
def test_counted_bytes_are_the_memory_that_answers_take(num_answers, num_events, num_logprobs, prompt):
    counted, resident = in_own_process(grown, num_answers, num_events, num_logprobs, prompt)
    assert resident > 4 << 20, "too little to measure"
    assert 0.5 * resident < counted < 2.0 * resident


def grown(num_answers: int, num_events: int, num_logprobs: int, prompt: int) -> tuple[int, int]:
    """Bytes counted, and resident bytes added, by answers of such events."""
    kept, event = KeptAnswers(ttl_s=60.0, max_bytes=1 << 40), chunk(num_logprobs, prompt)
    before = resident_bytes()
    for number in range(num_answers):
        one = answer(number)
        kept.add(one)
        for _ in range(num_events):
            one.add(event)
        kept.count(one)
    return kept.num_bytes, resident_bytes() - before
