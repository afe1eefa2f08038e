"""Models whose layers have windows: their texts are transformers', however many windows long, while the
windows hold a bounded number of blocks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from free_drafts import FreeDrafts
from greedy import assert_same
from tandem_core.beams import BeamParams
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import drafter_for
from tandem_engine.kv_pool import KVShape, PoolSizes
from tandem_engine.llm import LLM
from toy_models import SIZES, prompt_of
from window_models import VARIANTS, WINDOW, save_model

BLOCK, CHUNK = SIZES["block_size"], SIZES["chunk_size"]
BOUND = math.ceil((WINDOW + CHUNK) / BLOCK) + 1
NUM_TOKENS = 90
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)


class Model:
    def __init__(self, name: str, folder: Path) -> None:
        self.has_full = name != "windows alone"
        #: Too few for the tests' prompts together.
        self.few_blocks = 40 if self.has_full else 15
        self.hf, self.folder = save_model(name, folder)

    def text(self, prompt: list[int], num_tokens: int = NUM_TOKENS, **options: object) -> list[int]:
        with torch.inference_mode():
            output = self.hf.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **options,
            )
        return output[0, len(prompt) :].tolist()

    def llm(self, speculation: str = "local", **sizes: object) -> LLM:
        drafter = drafter_for(speculation)
        if drafter is not None:
            drafter.step_cost = FreeDrafts()
        return LLM(self.folder, drafter=drafter, **{**SIZES, **sizes})


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("windows"))


PROMPTS = [prompt_of(n, start) for n, start in ((7, 1), (300, 2), (95, 3), (513, 4))]


@pytest.fixture(scope="module")
def reference(model: Model) -> list[list[int]]:
    return [model.text(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize(("speculation", "chunk_size"), [("local", 64), ("off", 17)])
def test_texts_of_many_windows_are_those_of_transformers(
    model: Model,
    reference: list[list[int]],
    native: str,
    speculation: str,
    chunk_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if native == "off":
        monkeypatch.setenv("TANDEM_NATIVE", "off")
    llm = model.llm(speculation, chunk_size=chunk_size)
    got = llm.generate(PROMPTS, GREEDY)
    assert_same(got, reference, f"{speculation}, chunks of {chunk_size}")
    assert llm.engine.scheduler.check() == []
    if speculation == "local":
        assert sum(c.stats.accepted_tokens for c in got) > 0


def test_preempted_texts_are_the_same(model: Model, reference: list[list[int]]) -> None:
    got = model.llm(num_blocks=model.few_blocks).generate([*PROMPTS, *PROMPTS], GREEDY)
    assert_same(got, [*reference, *reference], "preempted")
    # What windows hold is known when a request begins, so none is preempted later.
    assert (sum(c.stats.preemptions for c in got) > 0) == model.has_full


def test_a_cached_prefix_is_found_only_with_its_last_window(model: Model, reference: list[list[int]]) -> None:
    llm = model.llm(num_blocks=200)
    for _ in range(2):
        for prompt, expected in zip(PROMPTS, reference, strict=True):
            got = llm.generate([prompt], GREEDY)
            assert_same(got, [expected], "cached")
    # Each prompt was found as far as a block goes before its last token.
    assert got[0].stats.cached_tokens == (len(PROMPTS[-1]) - 1) // BLOCK * BLOCK
    # A prompt that leaves a cached text where its window is gone: what there is no window for is computed.
    other = [*PROMPTS[-1][:200], 5, 6, 7]
    (completion,) = llm.generate([other], GREEDY)
    assert_same([completion], [model.text(other)], "diverging")


def test_beams_are_those_of_transformers(model: Model) -> None:
    llm, prompt = model.llm("off"), PROMPTS[2]
    sampling = SamplingParams(beam_search=BeamParams(width=3), max_tokens=60, ignore_eos=True)
    found = llm.beam_search(prompt, sampling)
    assert found[0].token_ids == model.text(prompt, 60, num_beams=3)
    assert llm.engine.blocks.usage().used == 0


def test_a_window_holds_a_bounded_number_of_blocks(model: Model) -> None:
    llm = model.llm()
    request = llm.begin(PROMPTS[-1], GREEDY)
    blocks = llm.engine.blocks
    most = 0
    while llm.engine.has_work():
        llm.engine.step()
        if blocks.has_table(request.request_id):
            for group, ids in enumerate(blocks.block_ids(request.request_id)):
                if llm.engine._runner.pool.groups[group].shape.window is not None:
                    most = max(most, sum(blocks.is_block(group, block_id) for block_id in ids))
    assert 0 < most <= BOUND
    assert len(request.output_token_ids) == NUM_TOKENS


def test_windows_make_room_for_longer_texts_in_the_same_memory() -> None:
    """As Gemma 3 4B: 5 full layers of 34, windows of 1,024 tokens."""
    full = KVShape(5, 4, 256, 64, torch.bfloat16, layers=tuple(range(5)))
    window = KVShape(29, 4, 256, 64, torch.bfloat16, layers=tuple(range(5, 34)), window=1024)
    alike = PoolSizes((KVShape(34, 4, 256, 64, torch.bfloat16),), 8, 512)
    grouped = PoolSizes((full, window), 8, 512)
    memory = 8 << 30
    assert grouped.num_bytes(grouped.fitting(memory)) <= memory
    assert grouped.num_bytes(grouped.fitting(memory) + 1) > memory
    assert grouped.fitting(memory) > 2 * alike.fitting(memory)
    # A pool of few blocks has no more for windows than texts can have.
    assert grouped.num_blocks(20) == [20, 20]
