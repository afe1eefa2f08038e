"""What a guide accepts, jsonschema accepts, near each schema's boundary.

Outputs of models rarely come close to what a schema forbids. Here valid texts are changed a little, as values
and as characters, and each that the guide still accepts has to validate.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import guided_models
import numpy as np
import pytest
from guide_schemas import corpus, fault, generated
from llguidance import LLMatcher
from model_folders import MANIFEST, make_folder
from tandem_core.guide import Guide, GuideKind
from tandem_core.model.guides import GuideCompiler
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer

SCHEMAS = dict(corpus())
EOS = MANIFEST.eos_token_ids[0]
VALUES = (
    *(None, True, 0, -1, 1, 7, 100, 0.5, 0.005, 10**9),
    *("", "a", "é", "🙂", "2023-02-29", "x" * 40),
    *([], [1], {}, {"a": 1}),
)
CHARACTERS = '"\\{}[]:, 019.eE+-abé\u0001u/'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[GuideCompiler, Tokenizer]:
    tokenizer = guided_models.byte_level()
    folder = make_folder(
        tmp_path_factory.mktemp("models") / "m", tokenizer, vocab_size=tokenizer.get_vocab_size()
    )
    return GuideCompiler(folder, ModelManifest.read(folder)), Tokenizer(folder)


def guide(schema: object) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))


def written(matcher: LLMatcher, tokenizer: Tokenizer, choices: random.Random) -> str:
    """A text that the guide leads to, its tokens chosen evenly."""
    token_ids: list[int] = []
    while not matcher.is_stopped() and len(token_ids) < 2000:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        token_ids.append(int(choices.choice(allowed.tolist())))
        assert matcher.consume_token(token_ids[-1]), matcher.get_error()
    assert matcher.is_stopped(), "the schema has no end"
    return tokenizer.decode([token for token in token_ids if token != EOS])


def accepts(matcher: LLMatcher, tokenizer: Tokenizer, text: str) -> bool:
    matcher = matcher.deep_copy()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def changed_values(value: object, choices: random.Random) -> object:
    """The value with one part replaced, left out, repeated or moved."""
    if isinstance(value, list) and value and choices.random() < 0.7:
        copy: list[object] = list(value)
        index = choices.randrange(len(copy))
        kind = choices.randrange(4)
        if kind == 0:
            del copy[index]
        elif kind == 1:
            copy.insert(index, copy[index])
        elif kind == 2:
            copy.append(choices.choice(VALUES))
        else:
            copy[index] = changed_values(copy[index], choices)
        return copy
    if isinstance(value, dict) and value and choices.random() < 0.8:
        name = choices.choice(list(value))
        kind = choices.randrange(4)
        if kind == 0:
            return {key: part for key, part in value.items() if key != name}
        if kind == 1:
            return value | {choices.choice(["zz", "Z", "1", "", name + "x"]): choices.choice(VALUES)}
        return value | {name: changed_values(value[name], choices)}
    if isinstance(value, (int, float)) and not isinstance(value, bool) and choices.random() < 0.7:
        return value + choices.choice([1, -1, 0.5, 0.001, 1000, -10000])
    if isinstance(value, str) and value and choices.random() < 0.7:
        return choices.choice([value[1:], value + value[-1], value[::-1], value.upper(), value + "\n"])
    return choices.choice(VALUES)


def changed_characters(text: str, choices: random.Random) -> str:
    start = choices.randrange(len(text) + 1)
    end = min(start + choices.randint(0, 3), len(text))
    kind = choices.randrange(3)
    if kind == 0:
        return text[:start] + text[end:]
    if kind == 1:
        return text[:start] + choices.choice(CHARACTERS) + text[start:]
    return text[:end] + text[start:end] + text[end:]


def near(text: str, choices: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        value = changed_values(json.loads(text), choices)
        yield json.dumps(value, ensure_ascii=choices.random() < 0.2)
        yield changed_characters(text, choices)


def check(model: tuple[GuideCompiler, Tokenizer], schema: object, seed: int, count: int) -> tuple[int, int]:
    """Texts tried and accepted."""
    compiler, tokenizer = model
    choices = random.Random(seed)
    start, _ = compiler.matcher(guide(schema))
    text = written(start.deep_copy(), tokenizer, choices)
    assert fault(schema, text) == "", text
    assert accepts(start, tokenizer, text)
    num_accepted = 0
    for other in near(text, choices, count):
        if accepts(start, tokenizer, other):
            num_accepted += 1
            assert fault(schema, other) == "", other
    return 2 * count, num_accepted


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(1, 4))])
def test_what_is_accepted_near_a_valid_text_validates(
    model: tuple[GuideCompiler, Tokenizer], part: int
) -> None:
    counts = [check(model, schema, seed, 12) for seed, schema in enumerate(list(SCHEMAS.values())[part::4])]
    tried, accepted = map(sum, zip(*counts, strict=True))
    assert 0.02 * tried < accepted < 0.6 * tried, "both sides of the boundary are tried"


@pytest.mark.wide
@pytest.mark.parametrize("part", range(20))
def test_of_many_more_schemas_too(model: tuple[GuideCompiler, Tokenizer], part: int) -> None:
    for seed in range(1000 + 200 * part, 1200 + 200 * part):
        check(model, generated(seed), seed, 25)


@pytest.mark.parametrize(
    ("schema", "text", "why"),
    [
        ({"type": "integer"}, "1.5", "is not of type 'integer'"),
        ({"type": "string"}, '"a', "no JSON"),
        ({"format": "date"}, '"2023-02-29"', "is not a 'date'"),
        ({"format": "date-time"}, '"2023-02-28"', "is not a 'date-time'"),
        ({"multipleOf": 0.1}, "0.35", "is not a multiple of"),
        ({"multipleOf": 0.1}, "0.3", ""),
    ],
)
def test_the_judge_can_refuse(schema: object, text: str, why: str) -> None:
    assert why in fault(schema, text)
    assert bool(why) is bool(fault(schema, text))
