"""JSON schemas for tests and benchmarks of guides, and the check of generated texts. BY_HAND has the shapes
of real APIs; `generated` composes random schemas of similar nesting. jsonschema with its format checks judges
instances."""

from __future__ import annotations

import base64
import datetime
import json
import random
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from typing import Any

import jsonschema
from api_schemas import BY_HAND, Schema, array, obj, text
from jsonschema.validators import validator_for

NUM_GENERATED = 460
_PATTERNS = (
    "^[a-z]{1,6}$",
    "^[A-Z][a-z]{0,5}$",
    "^[0-9]{3}-[0-9]{4}$",
    "^(GET|POST|PUT) /[a-z]{1,5}$",
    "^v?[0-9]{1,2}(\\.[0-9]{1,2}){2}$",
    "^\\d{1,3}%$",
    "^#[0-9a-fA-F]{6}$",
    "^\\w{1,8}$",
    "^(a|b|c){2,5}$",
    '^[^\\s"\\\\]{1,6}$',
    "^$",
    "^.{0,5}$",
)
#: Length limit by format, because some formats have none.
_FORMATS = {
    "date": 10,
    "time": 25,
    "date-time": 40,
    "duration": 10,
    "email": 20,
    "hostname": 16,
    "ipv4": 15,
    "ipv6": 45,
    "uuid": 36,
    "uri": 20,
}
_WORDS = ("id", "name", "status", "total", "items", "created_at", "user", "tags", "price", "a b", "é", "$x")
_ANNOTATIONS: tuple[tuple[str, object], ...] = (
    ("title", "A title"),
    ("description", "What it means."),
    ("default", None),
    ("examples", ["x"]),
    ("deprecated", True),
    ("readOnly", True),
    ("writeOnly", False),
    ("$comment", "for readers"),
)


def generated(seed: int) -> Schema:
    """Equal for equal seeds."""
    return _Generator(random.Random(seed)).whole()


def corpus(num_generated: int = NUM_GENERATED) -> Iterator[tuple[str, Schema]]:
    yield from BY_HAND.items()
    for seed in range(num_generated):
        yield f"generated {seed}", generated(seed)


class _Generator:
    def __init__(self, choices: random.Random) -> None:
        self._random = choices
        self._defs: dict[str, object] = {}

    def whole(self) -> Schema:
        if self._random.random() < 0.5:
            for name in ("Address", "Money"):
                self._defs[name] = self._object(1)
        schema = self._random.choice([self._object, self._object, self._object, self._any])(3)
        return {**schema, "$defs": self._defs} if self._defs else schema

    def _any(self, depth: int) -> Schema:
        kinds = [self._string, self._number, self._constant]
        if depth > 0:
            kinds += [
                self._object,
                self._array,
                self._tuple,
                self._union,
                self._one_of,
                self._all_of,
                self._map,
            ]
            kinds += [self._reference] if self._defs else []
        schema = self._random.choice(kinds)(depth - 1)
        if self._random.random() < 0.2:
            schema = {**schema, **dict([self._random.choice(_ANNOTATIONS)])}
        return schema

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_WORDS, self._random.randint(1, 4 if depth > 1 else 3))
        properties: dict[str, object] = {name: self._any(depth) for name in names}
        optional = tuple(name for name in names if self._random.random() < 0.3)
        return obj(properties, optional)

    def _map(self, depth: int) -> Schema:
        """An object whose names are not known beforehand."""
        least = self._random.randint(0, 1)
        names: dict[str, object] = {"^[a-z]{1,4}$": self._any(0)}
        if self._random.random() < 0.3:
            names["^[0-9]{1,3}$"] = self._any(0)
        return {
            "type": "object",
            "patternProperties": names,
            "additionalProperties": False,
            "minProperties": least,
            "maxProperties": self._random.randint(1, 3),
        }

    def _array(self, depth: int) -> Schema:
        most = self._random.randint(1, 3)
        return array(self._any(depth), most, self._random.randint(0, most))

    def _tuple(self, depth: int) -> Schema:
        prefix = [self._any(depth) for _ in range(self._random.randint(1, 3))]
        rest: object = False if self._random.random() < 0.5 else self._any(0)
        most = len(prefix) + (0 if rest is False else self._random.randint(0, 2))
        least = self._random.randint(0, most)
        return {"type": "array", "prefixItems": prefix, "items": rest, "minItems": least, "maxItems": most}

    def _union(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth), self._any(0), {"type": "null"}][: self._random.randint(2, 3)]}

    def _one_of(self, depth: int) -> Schema:
        kinds = self._random.sample(["card", "bank", "cash", "coupon"], self._random.randint(2, 3))
        cases: list[object] = [obj({"kind": {"const": kind}, "value": self._any(depth)}) for kind in kinds]
        return {"oneOf": [*cases, {"type": "boolean"}]}

    def _all_of(self, depth: int) -> Schema:
        one, other = self._any(depth), self._any(0)
        return {
            "allOf": [
                {"type": "object", "properties": {"one": one}, "required": ["one"]},
                obj({"one": True, "other": other}, optional=("one",)),
            ]
        }

    def _reference(self, depth: int) -> Schema:
        return {"$ref": f"#/$defs/{self._random.choice(list(self._defs))}"}

    def _string(self, depth: int) -> Schema:
        kind = self._random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
        if kind == 1:
            name = self._random.choice(list(_FORMATS))
            return {"type": "string", "format": name, "maxLength": _FORMATS[name]}
        if kind == 2:
            return {
                "type": "string",
                "enum": self._random.sample(["new", "in progress", "done", "größer", "✓"], 3),
            }
        least = self._random.randint(0, 3)
        return text(least + self._random.randint(0, 9), least)

    def _number(self, depth: int) -> Schema:
        low = self._random.randint(-500, 500)
        high = low + self._random.randint(4, 2000)
        if self._random.random() < 0.3:
            step = self._random.choice([0.5, 0.25, 0.01, 0.1])
            return {"type": "number", "minimum": low, "maximum": high, "multipleOf": step}
        exclusive = self._random.random() < 0.3
        bounds = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
        schema: Schema = {"type": "integer", bounds[0]: low, bounds[1]: high}
        if self._random.random() < 0.3:
            schema["multipleOf"] = self._random.choice([2, 3])
        return schema

    def _constant(self, depth: int) -> Schema:
        values: list[object] = [None, True, -1, 0.5, "yes", [1, 2], {"k": ["v"]}, [], "日本"]
        if self._random.random() < 0.3:
            return {"enum": self._random.sample(values, 3)}
        return self._random.choice(
            [{"const": self._random.choice(values)}, {"type": "boolean"}, {"type": "null"}]
        )


def keywords(schema: object) -> set[str]:
    """All keywords in it and its parts; names of properties and values do not count."""
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            parts = list(value.values())
        elif keyword in (
            "items",
            "additionalItems",
            "additionalProperties",
            "anyOf",
            "oneOf",
            "allOf",
            "prefixItems",
        ):
            parts = value if isinstance(value, list) else [value]
        else:
            parts = []
        found |= set().union(*(keywords(part) for part in parts))
    return found


def formats(schema: object) -> set[str]:
    """The values of `format`."""
    return set(_formats(schema))


def _formats(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("format"), str):
            yield value["format"]
        for part in value.values():
            yield from _formats(part)
    elif isinstance(value, list):
        for part in value:
            yield from _formats(part)


def fault(schema: object, instance: str) -> str:
    """Why the text is no instance of the schema; "" if it is.

    Numbers are decimal, since 0.3 is a multiple of 0.1 though not of its binary approximation.
    """
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    cls: Any = validator_for(exact, default=jsonschema.Draft202012Validator)
    try:
        value = json.loads(instance, parse_float=Decimal)
    except ValueError as error:
        return f"no JSON: {error}"
    error = next(cls(exact, format_checker=_CHECKER).iter_errors(value), None)
    return "" if error is None else str(error.message)


_CHECKER = jsonschema.FormatChecker(formats=())
for _name in ("email", "ipv4", "ipv6", "uuid"):
    _CHECKER.checkers[_name] = jsonschema.FormatChecker.checkers[_name]


@_CHECKER.checks("date")
def _is_date(value: object) -> bool:
    return not isinstance(value, str) or _parses(datetime.date.fromisoformat, value)


@_CHECKER.checks("date-time")
def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or (
        "t" in value.lower() and _parses(datetime.datetime.fromisoformat, value)
    )


@_CHECKER.checks("time")
def _is_time(value: object) -> bool:
    return not isinstance(value, str) or _parses(datetime.time.fromisoformat, value)


@_CHECKER.checks("int32")
def _is_int32(value: object) -> bool:
    return not isinstance(value, (int, Decimal)) or (value % 1 == 0 and -(2**31) <= value < 2**31)


@_CHECKER.checks("int64")
def _is_int64(value: object) -> bool:
    return not isinstance(value, (int, Decimal)) or (value % 1 == 0 and -(2**63) <= value < 2**63)


@_CHECKER.checks("byte")
def _is_base64(value: object) -> bool:
    return not isinstance(value, str) or _parses(partial(base64.b64decode, validate=True), value, upper=False)


def _parses(parse: Any, value: str, *, upper: bool = True) -> bool:
    try:
        parse(value.upper() if upper else value)
    except ValueError:
        return False
    return True
