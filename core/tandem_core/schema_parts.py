"""A JSON schema taken apart into the schemas within it, with the way to each.

{"$ref": "#/$defs/a", "$defs": {"a": {"items": {...}}}}
''                    '/$defs/a'   '/$defs/a/items'         `where` of the parts, their JSON pointers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from tandem_core.errors import InvalidRequestError

MAX_DEPTH = 64
#: Keywords in which null is a value. Elsewhere it means that the keyword is absent.
MAY_BE_NULL = frozenset({"const", "default", "example"})
#: Keywords whose value is a schema, a list of schemas, or schemas by name.
_SCHEMA = ("additionalProperties", "items", "additionalItems")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


class SchemaPart:
    """A schema in a schema. Pointers are built on demand: long names would fill memory if each part had its
    own copy of them."""

    __slots__ = ("_children", "_parent", "_place", "_step", "keywords", "schema")

    def __init__(self, schema: dict[str, Any] | bool) -> None:
        self.schema = schema
        #: Without any for true and false.
        self.keywords: Mapping[str, Any] = schema if isinstance(schema, dict) else {}
        if None in self.keywords.values():
            self.keywords = {
                name: value
                for name, value in self.keywords.items()
                if value is not None or name in MAY_BE_NULL
            }
        self._parent: SchemaPart | None = None
        #: As in the pointer: "items", "anyOf/0", "properties/name".
        self._step = ""
        #: The object or list that has the schema, and its key there.
        self._place: tuple[Any, str | int] | None = None
        self._children: dict[str, SchemaPart] = {}

    @property
    def where(self) -> str:
        return "" if self._parent is None else f"{self._parent.where}/{self._step}"

    def child(self, keyword: str, name: str | None = None) -> SchemaPart | None:
        """The schema of the keyword, or the one of this name in it."""
        return self._children.get(keyword if name is None else f"{keyword}/{_escaped(name)}")

    def listed(self, keyword: str) -> list[SchemaPart]:
        """The schemas in a keyword's list or object."""
        values = self.keywords.get(keyword)
        if isinstance(values, dict):
            steps: Iterable[object] = map(_escaped, values)
        else:
            steps = range(len(values)) if isinstance(values, list) else ()
        found = (self._children.get(f"{keyword}/{step}") for step in steps)
        return [child for child in found if child is not None]

    def at(self, pointer: str) -> SchemaPart | None:
        """The part at a JSON pointer from this one, which may be percent-encoded; None if there is none."""
        first, *steps = unquote(pointer).split("/")
        part, keyword = self, None
        for step in steps:
            found = part._children.get(step if keyword is None else f"{keyword}/{step}")
            if found is not None:
                part, keyword = found, None
            elif keyword is None:
                keyword = step
            else:
                return None
        return part if keyword is None and not first else None

    def forbid(self) -> None:
        """Puts false in the place of the schema, unless it is the whole."""
        if self._place is not None:
            holder, key = self._place
            holder[key] = False

    def with_descendants(self) -> list[SchemaPart]:
        """This part and all below it, each before its own. Raises InvalidRequestError for too deep ones."""
        parts: list[SchemaPart] = []
        self._collect(parts, 0)
        return parts

    def _collect(self, parts: list[SchemaPart], depth: int) -> None:
        if depth > MAX_DEPTH:
            raise InvalidRequestError(
                "json_schema", f"is nested more than {MAX_DEPTH} schemas deep; use $ref"
            )
        parts.append(self)
        for step, holder, key in _steps(self.schema if isinstance(self.schema, dict) else {}):
            schema = holder[key]
            if isinstance(schema, dict | bool):
                child = self._children[step] = SchemaPart(schema)
                child._parent, child._step, child._place = self, step, (holder, key)
                child._collect(parts, depth + 1)


def _steps(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, str | int]]:
    """Steps to what may be a schema directly below this one, the object or list that has it, and its key."""
    for keyword in _SCHEMA:
        if keyword in schema:
            yield keyword, schema, keyword
    for keyword in _SCHEMAS:
        if isinstance(parts := schema.get(keyword), list):
            yield from ((f"{keyword}/{index}", parts, index) for index in range(len(parts)))
    for keyword in _NAMED_SCHEMAS:
        if isinstance(named := schema.get(keyword), dict):
            yield from ((f"{keyword}/{_escaped(name)}", named, name) for name in named)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
