"""In fp32 the engine generates the same text however it computes it: with and without speculation, prefix
cache hits and preemption, in any chunk size and batch. test_models_default.py compares
it with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from greedy import (
    ALL_CHARS,
    NUM_TOKENS,
    SHORT_CHARS,
    Prompts,
    assert_same,
    generate,
    make_llm,
    make_prompts,
)
from tandem_core.sampling import SamplingParams
from tandem_engine.llm import LLM


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return make_llm(model_dir)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SHORT_CHARS, id="12 prompts"),
        pytest.param(ALL_CHARS, id="20 prompts", marks=[pytest.mark.wide, pytest.mark.timeout(1800)]),
    ],
)
def prompts(llm: LLM, corpus, request: pytest.FixtureRequest) -> Prompts:
    return make_prompts(llm, corpus, request.param)


@pytest.fixture(scope="module")
def reference(llm: LLM, prompts: Prompts) -> list[list[int]]:
    """The texts in batches of 8, in chunks of 512, with drafts from each request's own text."""
    return [completion.token_ids for completion in generate(llm, prompts)]


@pytest.mark.parametrize(
    ("chunk_size", "speculation"),
    [
        (64, "off"),
        pytest.param(64, "local", marks=pytest.mark.wide),
        pytest.param(512, "off", marks=pytest.mark.wide),
    ],
)
def test_speculation_and_chunk_size_change_nothing(
    model_dir: Path, prompts: Prompts, reference: list[list[int]], chunk_size: int, speculation: str
) -> None:
    got = generate(make_llm(model_dir, chunk_size=chunk_size, speculation=speculation), prompts[7::2])
    assert_same(got, reference[7::2], f"chunk {chunk_size}, speculation {speculation}")


def test_hot_prefix_cache_and_being_alone_change_nothing(
    model_dir: Path, prompts: Prompts, reference: list[list[int]]
) -> None:
    llm = make_llm(model_dir)
    cold = generate(llm, prompts[6::2], batch_size=1)
    hot = generate(llm, prompts[6::2], batch_size=1)
    assert_same(cold, reference[6::2], "alone, cold")
    assert_same(hot, reference[6::2], "alone, hot")
    assert all(c.stats.cached_tokens >= 64 for c in hot if c.stats.prompt_tokens > 128)


def test_preemption_changes_nothing(model_dir: Path, prompts: Prompts, reference: list[list[int]]) -> None:
    """A pool too small for all: sequences are preempted and their KV computed again."""
    got = generate(make_llm(model_dir, num_blocks=30, block_size=16), prompts[:8])
    assert_same(got, reference[:8], "preempted")
    assert sum(c.stats.preemptions for c in got) > 0, "nothing was preempted"


@pytest.mark.parametrize("num_tokens", [32, pytest.param(NUM_TOKENS, marks=pytest.mark.wide)])
def test_seeded_sampling_is_the_same_with_and_without_drafts_in_any_batch(
    model_dir: Path, llm: LLM, prompts: Prompts, num_tokens: int
) -> None:
    subset = prompts[5:9]
    sampling = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=1000 + i, max_tokens=num_tokens, ignore_eos=True)
        for i in range(len(subset))
    ]
    plain = make_llm(model_dir, speculation="off")
    want = [plain.generate([p], s)[0].token_ids for p, s in zip(subset, sampling, strict=True)]
    drafted = llm.generate(subset, sampling)
    again = plain.generate(subset, sampling)
    assert [c.token_ids for c in drafted] == want, "speculation or batching changed sampled text"
    assert [c.token_ids for c in again] == want
    assert len({tuple(w) for w in want}) == len(want)
