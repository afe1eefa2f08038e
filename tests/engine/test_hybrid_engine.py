"""An engine with recurrent layers generates the same text in any chunks, with drafts, preemption and hits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hybrid_models import VARIANTS, prompts, randomize
from known_drafts import KnownDrafts
from tandem_core.beams import BeamParams
from tandem_core.errors import InvalidRequestError
from tandem_core.sampling import SamplingParams
from tandem_engine.llm import LLM, Completion
from tandem_engine.model_loader import pull
from toy_models import SIZES, save_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
PROMPTS = prompts(70, 5, 33, 90)
Texts = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module", params=["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.wide)])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.nn.Module, Path]:
    """transformers' model and our folder of it"""
    home = tmp_path_factory.mktemp("hybrid")
    model = randomize(VARIANTS[request.param]())
    save_checkpoint(model, home / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(home / "home"))
        return model, pull(str(home / "checkpoint"))


@pytest.fixture(scope="module")
def texts(folder: tuple[torch.nn.Module, Path]) -> Texts:
    """What transformers generates."""
    model = folder[0]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out: Texts = {}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)  # else it leaves out tokens that equal the padding
        generated = model.generate(ids, attention_mask=mask, max_new_tokens=64, **options)
        out[tuple(prompt)] = generated[0, len(prompt) :].tolist()
    return out


def make(folder: tuple[torch.nn.Module, Path], **options: object) -> LLM:
    return LLM(folder[1], **{**SIZES, **options})


def generate(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Completion]:
    completions = llm.generate(prompts, GREEDY)
    assert llm.engine.scheduler.check() == []
    return completions


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("chunk_size", [64, 7])
def test_texts_equal_transformers_alone_and_together(folder, texts: Texts, chunk_size: int) -> None:
    llm = make(folder, chunk_size=chunk_size, prefix_cache=False)
    assert ids(generate(llm)) == list(texts.values())
    assert ids(generate(llm, PROMPTS[:1])) == [texts[tuple(PROMPTS[0])]]


def test_drafts_change_nothing(folder, texts: Texts) -> None:
    for seed in range(3):
        llm = make(folder, drafter=KnownDrafts(texts, seed))
        completions = generate(llm)
        assert ids(completions) == list(texts.values())
        assert sum(c.stats.accepted_tokens for c in completions) > 40
        assert sum(c.stats.drafted_tokens - c.stats.accepted_tokens for c in completions) > 40


def test_preemption_changes_nothing(folder, texts: Texts) -> None:
    llm = make(folder, num_blocks=26, drafter=KnownDrafts(texts))
    completions = generate(llm)
    assert ids(completions) == list(texts.values())
    assert sum(c.stats.preemptions for c in completions) > 0


def test_hits_of_prompts_turns_and_divergences_change_nothing(folder, texts: Texts) -> None:
    cold, llm = make(folder, prefix_cache=False), make(folder)
    generate(llm)
    first = PROMPTS[0]
    turn = [*first, *texts[tuple(first)], 5, 6, 7]
    other = [*first[:50], *PROMPTS[3][:40]]
    third = [*first[:50], *PROMPTS[2]]
    for prompt, cached in ((first, 64), (turn, 128), (other, 0), (third, 48)):
        (completion,) = generate(llm, [prompt])
        assert completion.stats.cached_tokens == cached
        assert ids([completion]) == ids(generate(cold, [prompt]))


def test_beams_are_refused(folder) -> None:
    llm = make(folder)
    with pytest.raises(InvalidRequestError, match="recurrent"):
        llm.beam_search(PROMPTS[1], SamplingParams(max_tokens=4, beam_search=BeamParams(2)))
