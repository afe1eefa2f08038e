"""Schemas in the shape of real APIs, and generated ones: whatever a random model writes under them validates,
with the same tokens whatever is drafted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import guided_models
import pytest
from free_drafts import FreeDrafts
from guide_schemas import corpus, fault, formats, keywords
from tandem_core.guide import Guide, GuideKind
from tandem_core.json_schema import ENFORCED, FORMATS
from tandem_core.sampling import FinishReason, SamplingParams
from tandem_core.speculation import SpeculationMode
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_engine.llm import LLM, Completion
from tokenizers import Tokenizer

SCHEMAS = dict(corpus())
MAX_TOKENS = 3000


def test_the_schemas_use_every_keyword_and_format_that_is_enforced() -> None:
    assert len(SCHEMAS) >= 500
    assert set().union(*map(keywords, SCHEMAS.values())) >= ENFORCED
    assert set().union(*map(formats, SCHEMAS.values())) == FORMATS


@pytest.fixture(scope="module", params=[guided_models.byte_level, guided_models.byte_fallback])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[], Tokenizer] = request.param
    return guided_models.save_model(tmp_path_factory.mktemp("model"), make(), seed=7)


def complete(folder: Path, names: Sequence[str], mode: SpeculationMode) -> list[Completion]:
    drafter = Drafter(None, DraftPolicy(mode=mode))
    drafter.step_cost = FreeDrafts()
    llm = LLM(
        folder, drafter=drafter, num_blocks=2048, block_size=16, max_batch=32, threads=1, dtype="float32"
    )
    params = [
        SamplingParams(
            guide=Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMAS[name])),
            max_tokens=MAX_TOKENS,
            temperature=(0.0, 0.7, 1.0)[number % 3],
            # Greedy texts of a random model repeat themselves; penalties keep them from filling every length.
            frequency_penalty=0.3,
            seed=number,
        )
        for number, name in enumerate(names)
    ]
    return llm.generate([[3 + number % 90, 5, 9] for number in range(len(names))], params)


@pytest.mark.parametrize(
    "part", [pytest.param(n, marks=[] if n == 0 else pytest.mark.wide) for n in range(6)]
)
def test_outputs_validate_and_drafts_change_no_token(folder: Path, part: int) -> None:
    names = list(SCHEMAS)[part::6]
    plain = complete(folder, names, SpeculationMode.OFF)
    for name, completion in zip(names, plain, strict=True):
        assert completion.finish_reason is FinishReason.STOP, (name, completion.text)
        assert fault(SCHEMAS[name], completion.text) == "", (name, completion.text)
    drafted = complete(folder, names, SpeculationMode.LOCAL)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(c.stats.accepted_tokens for c in drafted) > 0.2 * sum(len(c.token_ids) for c in plain)
