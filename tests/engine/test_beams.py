"""Beam search in the engine: transformers' beams, token for token, whatever runs beside them and however
often they are preempted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tandem_core.beams import BeamParams, EarlyStopping
from tandem_core.errors import CapacityError, InvalidRequestError
from tandem_core.sampling import FinishReason, SamplingParams
from tandem_engine.llm import LLM, Completion
from toy_models import SIZES, prompt_of, save_llama
from transformers import AutoModelForCausalLM, PreTrainedModel

EARLY = {EarlyStopping.HEURISTIC: False, EarlyStopping.WHEN_FULL: True, EarlyStopping.NEVER: "never"}
#: Texts end at one of these in a few tokens, or never.
END_TOKENS = (2, 11, 29, 40, 57)
#: Of prompts and outputs that end before, at and after the end of a block of 16.
LENGTHS = ((31, 33), (16, 17), (47, 24), (1, 20), (16, 1))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """The weights of `tiny_model`."""
    checkpoint = save_llama(tmp_path_factory.mktemp("beams"), seed=3)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def sampling(
    params: BeamParams, max_tokens: int, ends: tuple[int, ...] = (), **more: object
) -> SamplingParams:
    return SamplingParams(
        beam_search=params, max_tokens=max_tokens, stop_token_ids=ends, ignore_eos=not ends, **more
    )


def texts(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def expected(
    model: PreTrainedModel, prompt: list[int], params: BeamParams, max_tokens: int, ends: tuple[int, ...]
) -> list[list[int]]:
    """What transformers returns, without the padding."""
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            num_beams=params.width,
            num_return_sequences=params.width,
            do_sample=False,
            length_penalty=params.length_penalty,
            early_stopping=EARLY[params.early_stopping],
            max_new_tokens=max_tokens,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        )
    return [_unpadded(row, ends) for row in output[:, len(prompt) :].tolist()]


def _unpadded(row: list[int], ends: tuple[int, ...]) -> list[int]:
    at = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: at + 1]


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_the_beams_are_those_of_transformers(
    tiny_model: Path, reference: PreTrainedModel, width: int, early_stopping: EarlyStopping
) -> None:
    assert_equal_beams(tiny_model, reference, width, early_stopping, LENGTHS[width % 3 : width % 3 + 1])


@pytest.mark.wide
@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("width", range(1, 9))
def test_the_beams_are_those_of_transformers_for_all_lengths(
    tiny_model: Path, reference: PreTrainedModel, width: int, early_stopping: EarlyStopping
) -> None:
    assert_equal_beams(tiny_model, reference, width, early_stopping, LENGTHS)


def assert_equal_beams(
    tiny_model: Path,
    reference: PreTrainedModel,
    width: int,
    early_stopping: EarlyStopping,
    lengths: Sequence[tuple[int, int]],
) -> None:
    llm = LLM(tiny_model, **SIZES)
    for case, penalty in enumerate((-1.0, 0.0, 0.7, 1.0, 2.0)):
        params = BeamParams(width, penalty, early_stopping)
        ends = END_TOKENS[: (0, 1, 2, 5)[case % 4]]
        for num_prompt, max_tokens in lengths:
            prompt = prompt_of(num_prompt, start=case)
            found = llm.beam_search(prompt, sampling(params, max_tokens, (*ends, 2) if ends else ()))
            want = expected(reference, prompt, params, max_tokens, tuple({*ends, 2}) if ends else ())
            assert texts(found) == want, (penalty, ends, num_prompt, max_tokens)
            assert llm.engine.scheduler.check() == []
    assert llm.engine.blocks.usage().used == 0


def test_searches_share_steps_with_others_and_with_each_other(tiny_model: Path) -> None:
    """In a pool that does not hold all of them, so that some are preempted and begin anew."""
    params = [BeamParams(4), BeamParams(3, 0.0, EarlyStopping.NEVER), BeamParams(5, 2.0)]
    prompts = [prompt_of(40, start) for start in range(3)]
    searches = [sampling(one, 60) for one in params]
    alone = [LLM(tiny_model, **SIZES).beam_search(*one) for one in zip(prompts, searches, strict=True)]
    plain = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    alone_plain = LLM(tiny_model, **SIZES).generate(prompts, plain)
    for num_blocks in (64, 40):
        llm = LLM(tiny_model, **{**SIZES, "num_blocks": num_blocks})
        requests = [
            llm.begin(prompt, one) for prompt, one in zip(prompts * 2, [*searches, *[plain] * 3], strict=True)
        ]
        found: dict[str, object] = {}
        while llm.engine.has_work():
            for output in llm.engine.step():
                if output.finished:
                    found[output.request.request_id] = output
            assert llm.engine.scheduler.check() == []
        for request, want in zip(requests[:3], alone, strict=True):
            hypotheses = found[request.request_id].hypotheses
            assert [list(one.token_ids) for one in hypotheses] == texts(want)
        assert [request.output_token_ids for request in requests[3:]] == texts(alone_plain)
        assert (sum(request.num_preemptions for request in requests) > 0) is (num_blocks == 40)
        assert llm.engine.blocks.usage().used == 0


def test_the_full_blocks_of_the_prompt_are_computed_and_held_once(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **SIZES)
    request = llm.begin(prompt_of(40), sampling(BeamParams(4), 8))
    llm.engine.step()
    llm.engine.step()
    # Two full blocks of the prompt, and of each beam the third.
    assert llm.engine.blocks.usage().used == 2 + 4
    llm.engine.abort(request.request_id)
    assert llm.engine.blocks.usage().used == 0
    again = llm.begin(prompt_of(40), sampling(BeamParams(4), 8))
    llm.engine.step()
    assert again.num_cached_tokens == 32


def test_each_text_says_why_it_ended(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **SIZES)
    found = llm.beam_search(prompt_of(40), sampling(BeamParams(8, 0.0), 20, END_TOKENS, logprobs=2))
    assert {completion.finish_reason for completion in found} == {FinishReason.STOP}
    for completion in found:
        last = completion.token_ids[-1]
        assert completion.stop_reason == ("" if last == 2 else str(last))
        assert [one.token_id for one in completion.logprobs] == completion.token_ids
    found = llm.beam_search(prompt_of(40), sampling(BeamParams(2), 3))
    assert {completion.finish_reason for completion in found} == {FinishReason.LENGTH}


def test_a_search_that_only_the_context_limits_is_cut_to_the_pool(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **SIZES)
    context, pool = llm.engine.scheduler.config.max_model_len, SIZES["num_blocks"] * SIZES["block_size"]
    request = llm.begin(prompt_of(40), sampling(BeamParams(8), context - 40))
    # Each beam has the last block of the prompt for itself.
    size = SIZES["block_size"]
    shared = 40 // size
    most = ((SIZES["num_blocks"] - shared) // 8 + shared) * size + 1
    assert most < pool
    assert request.sampling.max_tokens == most - 40
    assert request.search is not None


def test_what_cannot_be_searched_is_refused(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **{**SIZES, "max_batch": 4})
    with pytest.raises(InvalidRequestError, match="compute 4 sequences at once") as error:
        llm.beam_search(prompt_of(4), sampling(BeamParams(5), 8))
    assert error.value.field == "beam_width"
    with pytest.raises(CapacityError, match="each of 4 beams"):
        llm.beam_search(prompt_of(100), sampling(BeamParams(4), 400))
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        llm.beam_search(prompt_of(4), sampling(BeamParams(4), 8, tuple(range(3, 40))))
    with pytest.raises(InvalidRequestError) as error:
        llm.begin(prompt_of(4), sampling(BeamParams(2), 2000))
    assert error.value.field == "max_tokens"


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 1},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 1.0}},
        {"bad_words": ((3,),)},
        {"allowed_token_ids": (3,)},
        {"logits_processors": ("digits",)},
        {"stop": ("x",)},
        {"include_stop_str_in_output": True},
    ],
)
def test_parameters_that_would_change_the_search_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be combined with beam search") as error:
        sampling(BeamParams(2), 8, **more)
    assert [error.value.field] == list(more)
