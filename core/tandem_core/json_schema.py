"""Which JSON schemas a guide may have: each keyword is enforced, an annotation, or refused by its name.

llguidance refuses the keywords that it knows and does not enforce, but ignores those that it does not know,
as the standard wants. A misspelt `maxlength` would then be a promise that nobody keeps, so it is refused
here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tandem_core.errors import InvalidRequestError, quoted

MAX_DEPTH = 64
#: Enforced, where llguidance does not refuse their values.
_ENFORCED = frozenset(
    {"$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf"}
    | {
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
    }
    | {"items", "prefixItems", "additionalItems", "minItems", "maxItems"}
    | {"minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
#: Of the standard, and OpenAPI's; they promise nothing about the text.
_ANNOTATIONS = frozenset(
    {"$schema", "$id", "id", "$anchor", "$comment", "$vocabulary", "$defs", "definitions"}
    | {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"contentMediaType", "contentEncoding", "contentSchema", "externalDocs", "xml", "discriminator"}
)
#: Keywords whose value is a schema, a list of schemas, or schemas by name.
_SCHEMA = ("additionalProperties", "items", "additionalItems")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def check_schema(schema: object) -> None:
    """Raises InvalidRequestError naming the first keyword that would not be enforced, and where it is."""
    for where, part in _schemas(schema, "", 0):
        for keyword in part:
            if keyword in _ENFORCED or keyword in _ANNOTATIONS or _is_extension(keyword):
                continue
            raise InvalidRequestError(
                "json_schema",
                f"{where or 'the schema'}: the keyword {quoted(str(keyword))} is not supported; remove it or "
                "check its spelling",
            )


def parse_schema(text: str) -> dict[str, Any] | bool:
    """The schema of a guide. Raises InvalidRequestError when it is no JSON schema."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("json_schema", f"is no JSON: {error}; send a JSON schema") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError("json_schema", f"is {quoted(text)}; send an object")
    return schema


def _is_extension(keyword: str) -> bool:
    """OpenAPI's `x-`; llguidance's own would change what is enforced."""
    return keyword.startswith("x-") and keyword != "x-guidance"


def _schemas(schema: object, where: str, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schema and all within it, each with its JSON pointer."""
    if not isinstance(schema, dict):
        return
    if depth > MAX_DEPTH:
        raise InvalidRequestError("json_schema", f"is nested more than {MAX_DEPTH} schemas deep; use $ref")
    yield where, schema
    for keyword in _SCHEMA:
        yield from _schemas(schema.get(keyword), f"{where}/{keyword}", depth + 1)
    for keyword in _SCHEMAS:
        if isinstance(parts := schema.get(keyword), list):
            for index, part in enumerate(parts):
                yield from _schemas(part, f"{where}/{keyword}/{index}", depth + 1)
    for keyword in _NAMED_SCHEMAS:
        if isinstance(named := schema.get(keyword), dict):
            for name, part in named.items():
                yield from _schemas(part, f"{where}/{keyword}/{name}", depth + 1)
