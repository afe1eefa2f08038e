"""Each keyword of a schema is enforced, an annotation, or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tandem_core.errors import InvalidRequestError
from tandem_core.json_schema import check_enforceable, parse_schema
from tandem_core.schema_parts import MAX_DEPTH


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "string", "maxlength": 3}, "the schema: the keyword 'maxlength'"),
        ({"properties": {"a": {"maxlength": 3}}}, "/properties/a: the keyword 'maxlength'"),
        ({"anyOf": [{}, {"not": {}}]}, "/anyOf/1: the keyword 'not'"),
        ({"$defs": {"x": {"items": {"if": {}}}}}, "/\\$defs/x/items: the keyword 'if'"),
        ({"additionalProperties": {"patternProperties": {"^a": {"contains": {}}}}}, "the keyword 'contains'"),
        ({"items": [{"unevaluatedItems": False}]}, "/items/0: the keyword"),
        ({"x-guidance": {"lenient": True}}, "the keyword 'x-guidance'"),
    ],
)
def test_what_would_not_be_enforced_is_refused_by_name_and_place(schema: Any, where: str) -> None:
    with pytest.raises(InvalidRequestError, match=where):
        check_enforceable(schema)


def test_names_of_properties_and_values_are_no_keywords() -> None:
    check_enforceable(
        {
            "properties": {"maxlength": {"const": {"not": 1}}, "if": True},
            "required": ["if"],
            "enum": [{"contains": 1}],
            "default": {"not": {}},
            "examples": [{"if": 1}],
            "x-internal": {"not": {}},
            "title": "T",
        }
    )


def test_nesting_is_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        schema = {"items": schema}
    check_enforceable(schema)
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_DEPTH} schemas deep"):
        check_enforceable({"items": schema})


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", '"string"', "[" * 100_000])
def test_a_schema_is_an_object_or_a_boolean(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="json_schema: is"):
        parse_schema(text)


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = parse_schema('{"properties": {"b": {}, "a": {}}}')
    assert json.dumps(schema) == '{"properties": {"b": {}, "a": {}}}'


ITSELF: dict[str, Any] = {"$ref": "#/$defs/a"}


def recursive(schema: Any, **definitions: Any) -> dict[str, Any]:
    return {**ITSELF, "$defs": {"a": schema, **definitions}}


ENDLESS: dict[str, Any] = {
    "a definition that is itself": recursive(ITSELF),
    "three definitions": recursive({"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/c"}, c=ITSELF),
    "the whole": {"$ref": "#"},
    "anyOf": recursive({"anyOf": [ITSELF]}),
    "oneOf": recursive({"oneOf": [ITSELF, ITSELF]}),
    "allOf": recursive({"allOf": [{}, ITSELF]}),
    "a required property": recursive({"type": "object", "properties": {"n": ITSELF}, "required": ["n"]}),
    "a required property without a schema of its own": recursive(
        {"type": "object", "additionalProperties": ITSELF, "required": ["n"]}
    ),
    "objects that require each other": {
        "type": "object", "properties": {"n": {"$ref": "#/$defs/b"}}, "required": ["n"],
        "$defs": {"b": {"type": "object", "properties": {"m": {"$ref": "#"}}, "required": ["m"]}},
    },
    "a property of any name": recursive(
        {"type": "object", "additionalProperties": ITSELF, "minProperties": 1}
    ),
    "a property of one name": recursive(
        {"type": "object", "properties": {"n": ITSELF}, "additionalProperties": False, "minProperties": 1}
    ),
    "minItems": recursive({"type": "array", "items": ITSELF, "minItems": 1}),
    "prefixItems": recursive({"type": "array", "prefixItems": [{}, ITSELF], "minItems": 2}),
    "items after prefixItems": recursive(
        {"type": "array", "prefixItems": [{}], "items": ITSELF, "minItems": 2}
    ),
    "each of two types": recursive(
        {"type": ["object", "array"], "properties": {"n": ITSELF}, "required": ["n"], "items": ITSELF,
         "minItems": 1}
    ),
    "an alternative that is false": recursive({"anyOf": [False, ITSELF]}),
    "an anchor": {"$ref": "#x", "$defs": {"q": {"$anchor": "x", "anyOf": [{"$ref": "#x"}]}}},
    "a required property that is a cycle": {
        "type": "object", "properties": {"n": ITSELF}, "required": ["n"], "$defs": {"a": ITSELF}
    },
}  # fmt: skip
FINITE: dict[str, Any] = {
    "null": recursive({"anyOf": [ITSELF, {"type": "null"}]}),
    "an optional property": recursive({"type": "object", "properties": {"n": ITSELF}}),
    "an empty list": recursive({"type": "array", "items": ITSELF}),
    "a tree": recursive(
        {"type": "object", "properties": {"l": {"type": "array", "items": ITSELF}}, "required": ["l"]}
    ),
    "a list shorter than prefixItems": recursive(
        {"type": "array", "prefixItems": [{}, ITSELF], "minItems": 1}
    ),
    "one of two types": recursive(
        {"type": ["object", "null"], "properties": {"n": ITSELF}, "required": ["n"]}
    ),
    "nullable": recursive(
        {"type": "object", "nullable": True, "properties": {"n": ITSELF}, "required": ["n"]}
    ),
    "no type": recursive({"properties": {"n": ITSELF}, "required": ["n"]}),
    "a name with a pattern": recursive(
        {"type": "object", "patternProperties": {"n": {}}, "additionalProperties": ITSELF, "required": ["n"]}
    ),
    "values of another kind": recursive(
        {"anyOf": 5, "required": 5, "properties": [], "minItems": "a", "type": 5}
    ),
    "an unused definition": {"type": "null", "$defs": {"a": ITSELF}},
}  # fmt: skip


@pytest.mark.parametrize("schema", ENDLESS)
def test_a_schema_that_requires_itself_without_an_end_is_refused(schema: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot be met by any text: .* requires itself"):
        check_enforceable(ENDLESS[schema])


@pytest.mark.parametrize("schema", FINITE)
def test_a_recursion_with_an_end_is_taken(schema: str) -> None:
    check_enforceable(FINITE[schema])


def test_the_place_of_an_endless_recursion_is_named() -> None:
    schema = {"properties": {"x/y": {"$ref": "#/$defs/a"}}, "required": ["x/y"], "type": "object"}
    with pytest.raises(InvalidRequestError, match="text: /properties/x~1y requires itself"):
        check_enforceable({**schema, "$defs": {"a": {"$ref": "#/properties/x~1y"}}})
