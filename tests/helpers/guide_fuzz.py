"""Random sources of guides, many of them wrong: changed schemas and grammars, pieces of expressions."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator

from guide_schemas import corpus
from tandem_core.guide import GuideKind

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


def changed_schema(choices: random.Random) -> str:
    """One of the corpus with some parts replaced, at any depth."""
    value = copy.deepcopy(choices.choice(SCHEMAS))
    for _ in range(choices.randint(1, 4)):
        parts = [part for part in _parts(value) if part]
        if not parts:
            break
        part = choices.choice(parts)
        key = choices.choice(list(part) if isinstance(part, dict) else range(len(part)))
        kind = choices.randrange(4)
        if kind == 0:
            part[key] = copy.deepcopy(choices.choice(JUNK))
        elif kind == 1 and isinstance(part, dict):
            part[choices.choice(KEYWORDS)] = part.pop(key)
        elif kind == 2 and isinstance(part, dict):
            part[choices.choice(KEYWORDS)] = copy.deepcopy(choices.choice(JUNK))
        else:
            part[key] = copy.deepcopy(choices.choice(SCHEMAS))
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
