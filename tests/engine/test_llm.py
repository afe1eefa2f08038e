"""The engine in one process: texts may be streamed side by side, and nothing stays behind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_core.errors import InvalidRequestError
from tandem_core.sampling import FinishReason, SamplingParams
from tandem_engine.draft_tree import DraftTree
from tandem_engine.llm import LLM
from tandem_engine.request import Request
from tandem_engine.step_times import StepTimes, TokensPerStep
from toy_models import SIZES, prompt_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [prompt_of(length, start) for start, length in enumerate((20, 90, 33))]


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LLM:
    return LLM(tiny_model, **SIZES)


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    yield loaded
    assert not loaded.engine.has_work()
    assert loaded.engine.blocks.num_free_blocks == SIZES["num_blocks"]
    assert loaded.engine.scheduler.check() == []


@pytest.fixture(scope="module")
def texts(loaded: LLM) -> list[str]:
    return [loaded.generate([prompt], GREEDY)[0].text for prompt in PROMPTS]


def test_streams_read_in_turn_give_the_texts_they_give_alone(llm: LLM, texts: list[str]) -> None:
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    rounds = list(itertools.zip_longest(*streams, fillvalue=""))
    assert ["".join(pieces) for pieces in zip(*rounds, strict=True)] == texts
    assert len(rounds) > 5, "text comes piece by piece"


def test_a_stream_left_alone_while_another_is_read_loses_nothing(llm: LLM, texts: list[str]) -> None:
    paused = llm.stream(PROMPTS[0], GREEDY)
    begun = next(paused)
    assert "".join(llm.stream(PROMPTS[1], GREEDY)) == texts[1]
    assert begun + "".join(paused) == texts[0]


def test_generating_beside_a_stream_disturbs_neither(llm: LLM, texts: list[str]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    begun = next(stream)
    assert [completion.text for completion in llm.generate(PROMPTS[1:], GREEDY)] == texts[1:]
    assert begun + "".join(stream) == texts[0]


def test_closing_one_stream_frees_its_request_and_no_other(llm: LLM, texts: list[str]) -> None:
    closed, kept = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    begun = next(closed), next(kept)
    closed.close()
    assert begun[1] + "".join(kept) == texts[1]


def test_a_stop_string_ends_one_of_two_streams(llm: LLM, texts: list[str]) -> None:
    stop = texts[0][8:10]
    stopped = llm.stream(PROMPTS[0], SamplingParams(temperature=0.0, ignore_eos=True, stop=(stop,)))
    other = llm.stream(PROMPTS[1], GREEDY)
    begun = next(other)
    assert "".join(stopped) == texts[0][: texts[0].index(stop)]
    assert begun + "".join(other) == texts[1]


def test_a_bad_request_among_many_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.generate([PROMPTS[0], [10_000]], GREEDY)


def test_completions_account_for_themselves(llm: LLM) -> None:
    completion = llm.generate([PROMPTS[1]], GREEDY)[0]
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 24
    assert completion.stats.prompt_tokens == 90
    assert 0 < completion.stats.ttft_s <= completion.stats.e2e_s


@pytest.mark.parametrize(("num_guesses", "expected"), [(0, 48), (20, 32), (60, 32)])
def test_prompts_beside_text_with_an_objective_per_token_come_in_chunks(
    llm: LLM, num_guesses: int, expected: int
) -> None:
    engine, sampling = llm.engine, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.prefill_times, engine.tokens_per_step = StepTimes(), TokensPerStep()
    for num_tokens in (10, 20, 40):
        engine.prefill_times.observe(num_tokens, num_tokens * num_tokens // 2, 0.001 * num_tokens)
    # Refitted by no step of this test.
    cost = engine.prefill_times.cost()
    engine.prefill_times.cost = lambda: cost
    text = Request("text", prompt_of(10, 7), sampling, token_s=0.064)
    engine.add(text)
    engine.step()
    if num_guesses:
        text.draft = DraftTree((5,) * num_guesses, tuple(range(num_guesses)), ("output",) * num_guesses)
    prompt = Request("prompt", prompt_of(100, 8 + num_guesses), sampling)
    engine.add(prompt)
    engine.step()
    assert prompt.num_computed_tokens == expected, "whole blocks that take 64 ms with all other rows, or 32"
    while engine.has_work():
        engine.step()


def test_drafts_leave_half_of_the_time_to_prompts_beside_an_objective_per_token(
    llm: LLM, monkeypatch: Any
) -> None:
    engine, shares = llm.engine, []
    drafter = SimpleNamespace(
        propose=lambda requests, max_nodes, share: shares.append(share) or [None] * len(requests),
        observe_step=lambda *step: None,
        extend=lambda emitted, logits: None,
        forget=lambda request_id: None,
    )
    monkeypatch.setattr(engine, "_drafter", drafter)
    for token_s, expected in ((0.0, [1.0, 1.0, 1.0]), (0.03, [1.0, 0.5, 1.0])):
        sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        engine.add(Request("text", prompt_of(10, 7), sampling, token_s=token_s))
        engine.step()
        engine.step()
        engine.add(Request("prompt", prompt_of(10, 9), replace(sampling, max_tokens=1)))
        while engine.has_work():
            engine.step()
        assert shares == expected
        shares.clear()


def test_costs_of_steps_count_what_lies_between_them_but_no_rest(llm: LLM, monkeypatch: Any) -> None:
    engine, seen = llm.engine, []
    engine.decode_times = StepTimes()
    monkeypatch.setattr(engine.decode_times, "observe", lambda *step: seen.append(step[2]))
    engine.add(
        Request("text", prompt_of(10, 7), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    )
    engine.step()
    engine.step()
    time.sleep(0.05)
    engine.step()
    engine.rest()
    time.sleep(0.05)
    engine.step()
    assert [seconds >= 0.05 for seconds in seen] == [False, True, False]
