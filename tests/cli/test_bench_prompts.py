"""Prompts of each workload: content, length, and equality for equal seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tandem_cli.bench.dataset import Dialogue, Turn, sample_dialogues, sample_policy
from tandem_cli.bench.prompts import WORKLOADS, Material, Prompt, cut_to_tokens, estimate_tokens, question

MATERIAL = Material(sample_dialogues(), sample_policy(), None, estimate_tokens, seed=5)


def make(name: str, count: int, material: Material = MATERIAL) -> list[Prompt]:
    return [WORKLOADS[name](material, index) for index in range(count)]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_equal_seeds_give_equal_prompts_that_end_with_the_user(name: str) -> None:
    prompts = make(name, 6)
    assert prompts == make(name, 6)
    assert all(prompt.messages[-1].role == "user" and prompt.messages[-1].content for prompt in prompts)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_other_seeds_and_indices_give_other_prompts(name: str) -> None:
    prompts = make(name, 8)
    assert len({prompt.messages for prompt in prompts}) == 8
    assert prompts != make(name, 8, replace(MATERIAL, seed=6))


def test_random_answers_have_a_high_temperature_and_separate_seeds() -> None:
    prompts = make("random", 5)
    assert {prompt.temperature for prompt in prompts} == {2.0}
    assert len({prompt.seed_offset for prompt in prompts}) == 5
    words = [word for prompt in prompts for word in prompt.messages[0].content.split()]
    assert len(set(words)) > 0.98 * len(words)


@pytest.mark.parametrize("length", [40, 120])
def test_random_prompts_have_the_wanted_length(length: int) -> None:
    for prompt in make("random", 4, replace(MATERIAL, input_tokens=length)):
        assert 0.5 * length <= estimate_tokens(prompt.messages[-1].content) <= length + 20


def test_the_question_is_the_last_one_with_an_answer() -> None:
    turns = (Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d"))
    assert question(Dialogue("", "", turns)) == turns[:3]
    assert question(Dialogue("", "", (*turns, Turn("user", "bye")))) == turns[:3]
    assert question(Dialogue("", "", (Turn("user", "alone"),))) == (Turn("user", "alone"),)


def retail(input_tokens: int | None, index: int, seed: int = 0) -> Prompt:
    return WORKLOADS["retail"](replace(MATERIAL, input_tokens=input_tokens, seed=seed), index)


@pytest.mark.parametrize("wanted", [300, 1000, 4000, 12000])
def test_prompts_have_about_the_wanted_length(wanted: int) -> None:
    for index in range(5):
        prompt = retail(wanted, index)
        length = sum(estimate_tokens(turn.content) for turn in prompt.messages)
        assert wanted * 0.95 - 20 <= length <= wanted + 5
        assert prompt.messages[0].role == "system"
        assert prompt.messages[-1].role == "user"


def test_prompts_share_only_the_policy() -> None:
    first, second = retail(2000, 0), retail(2000, 12)
    policy = sample_policy().strip()
    assert first.dialogue_id == second.dialogue_id
    assert first.messages[0].content.startswith(policy)
    assert second.messages[0].content.startswith(policy)
    assert first.messages[0].content != second.messages[0].content


def test_equal_seeds_give_equal_lengthened_prompts() -> None:
    assert [retail(1500, i, 7) for i in range(3)] == [retail(1500, i, 7) for i in range(3)]
    assert [retail(1500, i, 7) for i in range(3)] != [retail(1500, i, 8) for i in range(3)]


def test_each_dialogue_is_used_before_one_repeats() -> None:
    assert len({retail(None, index).dialogue_id for index in range(12)}) == 12


def test_without_a_length_policy_and_dialogue_are_unchanged() -> None:
    prompt = retail(None, 0)
    assert prompt.messages[0].content == sample_policy().strip()


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (3, 12), (1000, 40)])
def test_text_is_cut_to_the_limit_within_a_few_characters(limit: int, expected: int) -> None:
    cut = cut_to_tokens("x" * 40, limit, lambda text: (len(text) + 3) // 4)
    assert expected - 8 <= len(cut) <= expected
