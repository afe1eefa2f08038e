"""Sources that nobody meant to be guides are compiled or refused soon, and their masks are soon computed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator

import guided_models
import numpy as np
import pytest
from guide_schemas import corpus
from model_folders import make_folder
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide, GuideKind
from tandem_core.model.guides import GuideCompiler, check_guide
from tandem_core.model.manifest import ModelManifest

SCHEMAS = [schema for _, schema in corpus()]
JUNK = (
    *(None, True, False, -1, 0, 3, 1.5, 1e300, 2**70, "", "#", "x", "^(", "\ud800", [], [[]], {}, {"": {}}),
    *(
        {"type": "string"},
        {"$ref": "#"},
        {"enum": []},
        ["a", "a"],
        "date",
        "integer",
        {"not": {}},
        [True, {}],
    ),
)
KEYWORDS = (
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "patternProperties"),
    *("additionalProperties", "required", "minProperties", "maxProperties", "items", "prefixItems"),
    *("additionalItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum"),
    *(
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "not",
        "if",
        "$id",
        "$schema",
        "$defs",
    ),
    *("x-guidance", "x-y", "title", "definitions", "uniqueItems", "$anchor", "nullable", "maxlength"),
)
REGEX_PIECES = (
    *(
        "a",
        "b",
        ".",
        "\\d",
        "\\w",
        "\\s",
        "[a-z]",
        "[^x]",
        "(",
        ")",
        "|",
        "*",
        "+",
        "?",
        "{2}",
        "{3,}",
        "{0,40}",
    ),
    *("^", "$", "\\b", "(?i)", "(?=a)", "\\1", "é", "🙂", "\\p{L}", "[", "]", "\\", "\n", "&", "~", "{1000}"),
)
LARK_PIECES = (
    *(
        "start: ",
        "a: ",
        "A: ",
        '"x"',
        "/[a-z]+/",
        "/.*/",
        "a",
        "A",
        "b",
        "|",
        "(",
        ")",
        "*",
        "+",
        "?",
        "{2,5}",
    ),
    *(
        "\n",
        " ",
        "%json {}",
        '%json {"type": "integer"}',
        "%ignore / /",
        "<s>",
        "<[3]>",
        "~",
        "&",
        "//c\n",
        '""',
    ),
    *(
        "a[max_tokens=3]: ",
        "%lark {",
        "}",
        "%import common.WORD\n",
        "%llguidance {}\n",
        "é",
        "->",
        "::=",
        "\\",
    ),
)
GRAMMARS = (
    'start: "x" a | A\na: "y" A?\nA: /[a-z]{1,5}/',
    'start: (/[^<]*/ "<call>" %json {"type": "object", "maxProperties": 2})+',
    'start: a{1,3}\na: B ("," B)*\nB: C "x"~2..3 | /\\d+/\nC: /[A-Z]/ & ~/[AEIOU]/',
    'start: "(" start ")" | "" | start start',
)
CHECK_S, MASK_S = 2.0, 0.2


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GuideCompiler:
    tokenizer = guided_models.byte_level()
    folder = make_folder(
        tmp_path_factory.mktemp("models") / "m", tokenizer, vocab_size=tokenizer.get_vocab_size()
    )
    return GuideCompiler(folder, ModelManifest.read(folder))


def changed_schema(choices: random.Random) -> str:
    """One of the corpus with some parts replaced, at any depth."""
    value = json.loads(json.dumps(choices.choice(SCHEMAS)))
    for _ in range(choices.randint(1, 4)):
        parts = [part for part in _parts(value) if part]
        if not parts:
            break
        part = choices.choice(parts)
        key = choices.choice(list(part) if isinstance(part, dict) else range(len(part)))
        kind = choices.randrange(4)
        if kind == 0:
            part[key] = choices.choice(JUNK)
        elif kind == 1 and isinstance(part, dict):
            part[choices.choice(KEYWORDS)] = part.pop(key)
        elif kind == 2 and isinstance(part, dict):
            part[choices.choice(KEYWORDS)] = choices.choice(JUNK)
        else:
            part[key] = json.loads(json.dumps(choices.choice(SCHEMAS)))
    return json.dumps(value)


def _parts(value: object) -> Iterator[dict | list]:
    if isinstance(value, (dict, list)):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part)


def text_of(pieces: tuple[str, ...], choices: random.Random) -> str:
    return "".join(choices.choice(pieces) for _ in range(choices.randint(1, 30)))


def changed_grammar(choices: random.Random) -> str:
    """A small one with some characters replaced by pieces."""
    text = choices.choice(GRAMMARS)
    for _ in range(choices.randint(1, 3)):
        start = choices.randrange(len(text))
        text = text[:start] + choices.choice(LARK_PIECES) + text[start + choices.randrange(3) :]
    return text


SOURCES: dict[GuideKind, Callable[[random.Random], str]] = {
    GuideKind.JSON_SCHEMA: changed_schema,
    GuideKind.REGEX: lambda choices: text_of(REGEX_PIECES, choices),
    GuideKind.LARK: changed_grammar,
}


def use(compiler: GuideCompiler, guide: Guide, choices: random.Random) -> bool:
    """Whether it could be compiled. Follows one of its texts for a while."""
    start = time.thread_time()
    try:
        check_guide(guide)
        matcher = compiler.matcher(guide)
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
