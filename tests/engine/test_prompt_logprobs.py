"""Log probabilities of prompts: transformers' values, and the same bits however the prompt is computed."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

import pytest
import torch
from free_drafts import FreeDrafts
from tandem_core.errors import InvalidRequestError, LogitsError
from tandem_core.model.manifest import ModelManifest
from tandem_core.sampling import PromptLogprobs, SamplingParams
from tandem_drafting.drafter import drafter_for
from tandem_engine.batch import Batch
from tandem_engine.engine import Engine
from tandem_engine.llm import LLM
from tandem_engine.prompt_scores import PromptScores
from tandem_engine.request import Request
from tandem_engine.runner import ModelRunner
from tandem_engine.sampling.prompt_logprobs import prompt_logprobs
from tandem_kernels import native
from toy_models import SIZES, prompt_of
from transformers import AutoModelForCausalLM

SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=3)
#: Nothing to score, one position; a token more than two blocks and than a chunk; three chunks and a part.
LENGTHS = (1, 2, 33, 65, 230)
compiled = pytest.mark.skipif(native.LIBRARY is None, reason="torch's products depend on the batch")


def scores(
    llm: LLM, prompts: list[list[int]], sampling: SamplingParams = SCORED
) -> list[PromptLogprobs | None]:
    return [completion.prompt_logprobs for completion in llm.generate(prompts, sampling)]


def expected_of(logits: torch.Tensor, token_ids: list[int], num_top: int) -> PromptLogprobs:
    """By sorting every row: descending, equals by ascending id."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    parts = []
    for row, token_id in zip(logprobs.tolist(), token_ids, strict=True):
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))
        parts.append(
            (row[token_id], order.index(token_id) + 1, order[:num_top], [row[i] for i in order[:num_top]])
        )
    return PromptLogprobs(
        tuple(p[0] for p in parts),
        tuple(p[1] for p in parts),
        tuple(i for p in parts for i in p[2]),
        tuple(v for p in parts for v in p[3]),
    )


def test_they_are_transformers_float32_log_softmax(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **SIZES)
    checkpoint = Path(ModelManifest.read(tiny_model).source)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompts = [prompt_of(length, start) for start, length in enumerate(LENGTHS)]
    for prompt, got in zip(prompts, scores(llm, prompts), strict=True):
        assert got is not None
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt])).logits[0]
        want = expected_of(logits[:-1], prompt[1:], 3)
        assert len(got.logprobs) == len(prompt) - 1
        assert got.logprobs == pytest.approx(want.logprobs, abs=2e-4)
        assert got.top_logprobs == pytest.approx(want.top_logprobs, abs=2e-4)
        # No two tokens of this model are as close as the two computations differ, but for a few.
        assert sum(a != b for a, b in zip(got.ranks, want.ranks, strict=True)) <= len(prompt) // 50


def test_equal_logits_are_ranked_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    got = prompt_logprobs(logits, [4, 2, 0], 2)
    assert got.ranks == (3, 3, 5)
    assert got.top_token_ids == (1, 2, 0, 1, 4, 3)
    assert got.top_logprobs[2] == pytest.approx(math.log(1 / 5))
    for num_top in (0, 1, 4, 5, 20):
        got, want = prompt_logprobs(logits, [4, 2, 0], num_top), expected_of(logits, [4, 2, 0], num_top)
        assert (got.ranks, got.top_token_ids) == (want.ranks, want.top_token_ids)


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_in_any_chunks_and_company(tiny_model: Path, dtype: str) -> None:
    prompts = [prompt_of(length, start) for start, length in enumerate(LENGTHS)]
    options = {**SIZES, "dtype": dtype}
    alone = [scores(LLM(tiny_model, **{**options, "chunk_size": 512}), [prompt])[0] for prompt in prompts]
    for chunk_size in (1, 7, 48):
        llm = LLM(tiny_model, **{**options, "chunk_size": chunk_size})
        assert scores(llm, prompts) == alone, chunk_size
        # Now the prefix cache holds all of them.
        assert scores(llm, prompts[::-1]) == alone[::-1], chunk_size


@compiled
@pytest.mark.parametrize("quantization", [pytest.param("none", marks=pytest.mark.wide), "w4a8"])
def test_a_text_has_the_same_values_as_a_prompt_and_as_an_answer(
    model_dir: Path, corpus, quantization: str
) -> None:
    """The default model; the answer is drafted, and no chunk of the prompt is a multiple of 64 tokens."""
    drafter = drafter_for("local")
    drafter.step_cost = FreeDrafts()
    llm = LLM(model_dir, quantization=quantization, num_blocks=60, chunk_size=150, drafter=drafter)
    prompt = llm.tokenizer.encode(corpus.prompt(0, 900))
    written = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=5)
    answer = llm.generate([prompt], written)[0]
    assert answer.stats.accepted_tokens > 5
    got = scores(llm, [prompt + answer.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=5))[0]
    assert got is not None
    assert list(got.logprobs[len(prompt) - 1 :]) == [position.logprob for position in answer.logprobs]
    top = list(zip(got.top_token_ids, got.top_logprobs, strict=True))[5 * (len(prompt) - 1) :]
    assert top == [entry for position in answer.logprobs for entry in position.top]
    assert set(got.ranks[len(prompt) - 1 :]) == {1}, "a greedy answer"


def test_requests_beside_them_are_not_changed(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **SIZES)
    sampling = SamplingParams(seed=5, max_tokens=20, ignore_eos=True, logprobs=2)
    prompts = [prompt_of(length, start) for start, length in enumerate((120, 70, 90))]
    alone = llm.generate(prompts, sampling)
    mixed = llm.generate([*prompts, prompt_of(200, 9)], [sampling] * 3 + [SCORED])
    assert [c.token_ids for c in mixed[:3]] == [c.token_ids for c in alone]
    assert [c.prompt_logprobs for c in mixed[:3]] == [None] * 3
    assert mixed[0].stats.cached_tokens > 0, "the cache serves those who ask for none"
    assert mixed[3].stats.cached_tokens == 0


def run_to_end(engine: Engine) -> dict[str, list[PromptLogprobs]]:
    """What each request got, in order."""
    got: dict[str, list[PromptLogprobs]] = {}
    while engine.has_work():
        for output in engine.step():
            if output.prompt_logprobs is not None:
                got.setdefault(output.request.request_id, []).append(output.prompt_logprobs)
    return got


@pytest.mark.parametrize("num_steps", [1, 2, 4, 7, 12])
def test_a_preempted_request_loses_none_and_gets_none_twice(tiny_model: Path, num_steps: int) -> None:
    """Before, in, and after its prompt."""
    llm = LLM(tiny_model, **{**SIZES, "num_blocks": 20, "chunk_size": 32})
    prompt, sampling = prompt_of(200), SamplingParams(max_tokens=30, ignore_eos=True, prompt_logprobs=2)
    want = scores(llm, [prompt], sampling)[0]
    engine = llm.engine
    late = Request("late", prompt, sampling, due=1000.0, prompt_scores=PromptScores.wanted(prompt, sampling))
    engine.add(late)
    outputs = [output for _ in range(num_steps) for output in engine.step()]
    engine.add(Request("early", prompt_of(250, 7), SamplingParams(max_tokens=3), due=1.0))
    got = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None] + run_to_end(engine).get(
        "late", []
    )
    assert late.num_preemptions == 1
    assert len(late.output_token_ids) == 30
    assert got == [want]
    assert engine.scheduler.check() == []


def test_a_request_that_is_dropped_leaves_nothing(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **SIZES)
    prompt = prompt_of(200)
    llm.engine.add(Request("a", prompt, SCORED, prompt_scores=PromptScores.wanted(prompt, SCORED)))
    llm.engine.step()
    llm.engine.abort("a")
    assert run_to_end(llm.engine) == {}
    assert llm.engine.blocks.num_free_blocks == SIZES["num_blocks"]


def test_logits_of_no_numbers_are_refused() -> None:
    logits = torch.randn(3, 9)
    logits[1, 4] = torch.nan
    for num_top in (0, 5):
        with pytest.raises(LogitsError):
            prompt_logprobs(logits, [1, 2, 3], num_top)


def test_a_prompt_that_cannot_be_scored_ends_its_request_alone(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_on_9(logits: torch.Tensor, token_ids: list[int], num_top: int) -> PromptLogprobs:
        if 9 in token_ids:
            raise LogitsError
        return prompt_logprobs(logits, token_ids, num_top)

    llm, good = LLM(tiny_model, **SIZES), [5] * 150
    (expected,) = llm.generate([good], SCORED)
    monkeypatch.setattr("tandem_engine.engine.prompt_logprobs", fails_on_9)
    prompts = {"bad": [9] * 140, "good": good}
    errors, token_ids = {}, []
    for name, prompt in prompts.items():
        wanted = PromptScores.wanted(prompt, SCORED)
        llm.engine.add(Request(name, prompt, SCORED, prompt_scores=wanted))
    while llm.engine.has_work():
        for output in llm.engine.step():
            errors[output.request.request_id] = output.error
            token_ids += output.token_ids
    assert isinstance(errors["bad"], LogitsError)
    assert errors["good"] is None
    assert token_ids == expected.token_ids


def test_chunks_of_scored_prompts_take_no_longer_than_others(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[int] = []
    execute = ModelRunner.execute

    def spy(runner: ModelRunner, batch: Batch, *listeners: object) -> object:
        chunks.append(batch.num_tokens)
        return execute(runner, batch, *listeners)

    def slow(logits: torch.Tensor, token_ids: list[int], num_top: int) -> PromptLogprobs:
        time.sleep(0.004 * len(token_ids))
        return prompt_logprobs(logits, token_ids, num_top)

    llm = LLM(tiny_model, **SIZES)
    monkeypatch.setattr("tandem_engine.engine.prompt_logprobs", slow)
    llm.engine.measure_costs(decodes=True)
    monkeypatch.setattr(ModelRunner, "execute", spy)
    llm.generate([prompt_of(180)], dataclasses.replace(SCORED, max_tokens=1))
    assert max(chunks) <= SIZES["chunk_size"] / 4
    chunks.clear()
    llm.generate([prompt_of(180, 3)], SamplingParams(max_tokens=1))
    assert max(chunks) == SIZES["chunk_size"]


def test_at_most_20_most_likely_tokens() -> None:
    for value in (-1, 21):
        with pytest.raises(InvalidRequestError, match=r"prompt_logprobs: is -?\d+; it must be in \[0, 20\]"):
            SamplingParams(prompt_logprobs=value)
