"""Prompts with and without a common beginning, and the figures of a load."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, takewhile

import pytest
from engine_loads import LOADS, Figures, Load, Prompts, floor, measured, quick
from floors import Pass
from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.prompts import Prompt, estimate_tokens
from tandem_cli.bench.record import OK, RequestRecord

#: Without a model's tokenizer, a token is four characters.
OPTIONS = BenchOptions(model="")
RECORD = RequestRecord(
    index=0,
    dialogue_id="",
    status=OK,
    error="",
    sent_s=0.0,
    ttft_s=1.0,
    e2e_s=3.0,
    gaps_s=(),
    prompt_tokens=100,
    output_tokens=11,
    text="",
    speculation=None,
)


def contents(prompt: Prompt) -> str:
    return "".join(turn.content for turn in prompt.messages)


@pytest.mark.parametrize("shared_tokens", [0, 1200])
def test_prompts_have_the_wanted_length_and_share_no_more_than_the_wanted_beginning(
    shared_tokens: int,
) -> None:
    prompts = Prompts(OPTIONS)
    load = Load(3840, 3, rounds=1, shared_tokens=shared_tokens)
    texts = [contents(prompt) for prompt in (*prompts.for_load(load), *prompts.for_load(load))]
    assert all(abs(estimate_tokens(text) - 3840) < 20 for text in texts)
    for pair in combinations(texts, 2):
        common = sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], zip(*pair, strict=False)))
        # And the word before the ticket's number.
        assert shared_tokens - 5 <= common / 4 < shared_tokens + 10


def test_loads_show_long_prompts_with_and_without_a_policy_alone_and_together() -> None:
    kinds = {(load.prompt_tokens, load.concurrency, load.shared_tokens) for load in LOADS}
    assert kinds == {(256, 1, 0), (256, 4, 0), *((3840, n, shared) for n in (1, 4) for shared in (0, 1200))}
    assert str(LOADS[-1]) == "3,840 tokens (1,200 shared), concurrency 4"
    assert quick(LOADS[-1]) == Load(960, 4, rounds=1, shared_tokens=300)


def test_tokens_per_second_are_those_of_the_wall_time_of_all_rounds() -> None:
    # Two requests in four seconds, then one in three.
    rounds = [[RECORD, replace(RECORD, sent_s=1.0, ttft_s=2.0)], [replace(RECORD, sent_s=100.0, ttft_s=1.5)]]
    assert measured(rounds) == Figures(1.5, pytest.approx(0.15), pytest.approx(33 / 7))
    assert str(Figures(1.5, 0.0152, 33 / 7)) == "1500 / 15.2 / 4.7"


def test_the_floor_computes_uncached_tokens_of_all_prompts_and_then_decodes_in_one_batch() -> None:
    passes: list[Pass] = []

    def floor_s(one: Pass) -> float:
        passes.append(one)
        return float(one.new_tokens * one.num_seqs)

    figures = floor(Load(100, 4, rounds=1, shared_tokens=30), floor_s)
    assert passes == [*(Pass(70, 30, num_seqs=n) for n in (1, 2, 3, 4)), Pass(1, 132, num_seqs=4)]
    # First tokens after 70, 140, 210 and 280 s.
    assert figures == Figures(175.0, 4.0, 4 * 64 / (280 + 63 * 4))
