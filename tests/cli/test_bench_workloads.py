"""What each workload asks for, and that it is asked again with the same seed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tandem_cli.bench.dataset import sample_dialogues, sample_policy
from tandem_cli.bench.workload import Prompt, estimate_tokens
from tandem_cli.bench.workloads import WORKLOADS, Material

MATERIAL = Material(sample_dialogues(), sample_policy(), None, estimate_tokens, seed=5)


def make(name: str, count: int, material: Material = MATERIAL) -> list[Prompt]:
    return [WORKLOADS[name](material, index) for index in range(count)]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_equal_seeds_give_equal_prompts_that_end_with_the_user(name: str) -> None:
    prompts = make(name, 6)
    assert prompts == make(name, 6)
    assert all(prompt.messages[-1].role == "user" and prompt.messages[-1].content for prompt in prompts)


@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - {"faq"}))
def test_other_seeds_and_indices_give_other_prompts(name: str) -> None:
    prompts = make(name, 8)
    assert len({prompt.messages for prompt in prompts}) == 8
    assert prompts != make(name, 8, replace(MATERIAL, seed=6))


def test_questions_come_back() -> None:
    prompts = make("faq", 8)
    assert prompts[:4] == prompts[4:]
    assert len({prompt.messages for prompt in prompts}) == 4
    assert all(prompt.messages[0].content == sample_policy().strip() for prompt in prompts)


def test_random_answers_are_drawn_hot_and_each_with_its_own_seed() -> None:
    prompts = make("random", 5)
    assert {prompt.temperature for prompt in prompts} == {2.0}
    assert len({prompt.seed_offset for prompt in prompts}) == 5
    words = [word for prompt in prompts for word in prompt.messages[0].content.split()]
    assert len(set(words)) > 0.98 * len(words)


def test_what_is_to_be_copied_is_in_the_prompt_and_in_a_dialogue() -> None:
    for prompt in make("copy", 5):
        _, passage = prompt.messages[0].content.split("\n\n", 1)
        assert any(passage in dialogue.as_text() for dialogue in MATERIAL.dialogues)


@pytest.mark.parametrize("name", ["random", "copy"])
@pytest.mark.parametrize("length", [40, 120])
def test_a_wanted_length_is_met(name: str, length: int) -> None:
    for prompt in make(name, 4, replace(MATERIAL, input_tokens=length)):
        assert 0.5 * length <= estimate_tokens(prompt.messages[-1].content) <= length + 20


def test_the_example_of_json_is_json_with_the_keys_asked_for() -> None:
    (prompt,) = make("json", 1)
    (example,) = json.loads(prompt.messages[1].content)
    assert all(key in prompt.messages[2].content for key in example)
