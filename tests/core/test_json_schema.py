"""Each keyword of a schema is enforced, an annotation, or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tandem_core.errors import InvalidRequestError
from tandem_core.json_schema import MAX_DEPTH, check_enforceable, parse_schema


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
