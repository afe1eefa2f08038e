"""Checks that a value is a JSON schema, as far as a tool's prompt requires.

Keywords that constrain values are checked where they are enforced, when a strict tool becomes a grammar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from tandem_core.errors import MAX_FIELD_CHARS, InvalidRequestError, quoted
from tandem_core.model.conversation import Json
from tandem_core.schema_parts import MAY_BE_NULL

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
#: Keywords whose value is a schema; below, a list of schemas and an object of schemas.
_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
           "unevaluatedProperties", "unevaluatedItems")  # fmt: skip
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_well_formed(where: str, schema: Json) -> None:
    """Raises InvalidRequestError naming the part of field `where` that is not a schema."""
    where = where[: MAX_FIELD_CHARS + 1]  # long names must not be copied for each part below them
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(where, f"is {_kind(schema)}; send a JSON schema, which is an object")
    if None in schema.values():
        schema = {name: value for name, value in schema.items() if value is not None or name in MAY_BE_NULL}
    kinds = schema.get("type", [])
    listed = kinds if _is_list(kinds) else [kinds]
    for kind in listed:
        if kind not in _TYPES:
            shown = quoted(kind) if isinstance(kind, str) else _kind(kind)
            raise InvalidRequestError(f"{where}.type", f"is {shown}; use one of {', '.join(_TYPES)}")
    required = schema.get("required", [])
    if not _is_list(required) or not all(isinstance(name, str) for name in required):
        raise InvalidRequestError(f"{where}.required", "is not a list of names; list properties' names")
    if "enum" in schema and not (_is_list(schema["enum"]) and schema["enum"]):
        raise InvalidRequestError(f"{where}.enum", "is not a list of values; list at least one")
    for keyword in _SCHEMA:
        if keyword in schema:
            value = schema[keyword]
            if keyword == "items" and _is_list(value):  # tuples before draft 2020-12
                _check_all(f"{where}.items", value)
            else:
                check_well_formed(f"{where}.{keyword}", value)
    for keyword in _SCHEMAS:
        if keyword in schema:
            _check_all(f"{where}.{keyword}", schema[keyword])
    for keyword in _NAMED_SCHEMAS:
        named = schema.get(keyword, {})
        if not isinstance(named, Mapping):
            raise InvalidRequestError(f"{where}.{keyword}", f"is {_kind(named)}; send an object of schemas")
        for name, value in named.items():
            check_well_formed(f"{where}.{keyword}.{name}", value)


def _check_all(where: str, schemas: Json) -> None:
    if not isinstance(schemas, Sequence) or isinstance(schemas, str) or not schemas:
        raise InvalidRequestError(where, "is not a list of schemas; list at least one")
    for index, schema in enumerate(schemas):
        check_well_formed(f"{where}[{index}]", schema)


def _is_list(value: Json) -> TypeGuard[Sequence[Json]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _kind(value: Json) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    return "a number" if isinstance(value, int | float) else "a list" if _is_list(value) else "an object"
