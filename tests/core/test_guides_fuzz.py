"""Sources that nobody meant to be guides are compiled or refused soon, and their masks are soon computed."""

from __future__ import annotations

import random
import time

import guided_models
import numpy as np
import pytest
from guide_fuzz import SOURCES
from model_folders import make_folder
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide, GuideKind
from tandem_core.model.guides import GuideCompiler, check_guide
from tandem_core.model.manifest import ModelManifest

CHECK_S, MASK_S = 2.0, 0.2


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GuideCompiler:
    tokenizer = guided_models.byte_level()
    folder = make_folder(
        tmp_path_factory.mktemp("models") / "m", tokenizer, vocab_size=tokenizer.get_vocab_size()
    )
    return GuideCompiler(folder, ModelManifest.read(folder))


def use(compiler: GuideCompiler, guide: Guide, choices: random.Random) -> bool:
    """Whether it could be compiled. Follows one of its texts for a while."""
    start = time.thread_time()
    try:
        check_guide(guide)
        matcher, _ = compiler.matcher(guide)
    except InvalidRequestError as error:
        assert str(error).startswith(("guide: ", "json_schema: ")), error
        assert len(str(error)) < 3000
        return False
    finally:
        assert time.thread_time() - start < CHECK_S, guide
    for _ in range(25):
        start = time.thread_time()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        matcher.compute_ff_tokens()
        assert time.thread_time() - start < MASK_S, guide
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if matcher.is_stopped() or not len(allowed):
            break
        matcher.consume_token(int(choices.choice(allowed.tolist())))
    return True


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(1, 15))])
def test_each_is_used_or_refused_by_an_error_that_says_why(
    compiler: GuideCompiler, kind: GuideKind, part: int
) -> None:
    num_used = 0
    for seed in range(300 * part, 300 * (part + 1)):
        choices = random.Random(seed)
        try:
            guide = Guide(kind, SOURCES[kind](choices))
        except InvalidRequestError:
            continue
        num_used += use(compiler, guide, choices)
    assert 15 < num_used < 285, "both happen"
