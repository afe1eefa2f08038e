"""Which JSON schemas a guide may have: each keyword is enforced, an annotation, or refused by its name.

llguidance refuses the keywords that it knows and does not enforce, but ignores those that it does not know,
as the standard requires. A misspelt `maxlength` would then have no effect, so it is refused
here, and so are uses in which llguidance 1.9 differs from the standard. A keyword whose value is null is
ignored, because serialisers write unset fields as null.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.regex_size import (
    UNWRITTEN,
    check_class_syntax,
    check_control_characters,
    check_size,
    without_ecma_classes,
)
from tandem_core.schema_parts import MAY_BE_NULL, SchemaPart
from tandem_core.schema_recursion import conditions_of, endless_part

#: Limit of one schema, because all pairs are compared.
MAX_PATTERN_PROPERTIES = 32
#: The least common multiple of all steps, as integers; a lexer has as many states.
MAX_STEPS = 10_000
#: Integers beyond are not exact in llguidance's double precision.
MAX_INTEGER = 2**53
#: Enforced, where llguidance does not refuse their values.
ENFORCED = frozenset(
    {"$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf"}
    | {"properties", "patternProperties", "additionalProperties", "propertyNames", "required"}
    | {"minProperties", "maxProperties"}
    | {"items", "prefixItems", "additionalItems", "minItems", "maxItems"}
    | {"minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
#: Values of `format` that are enforced; others are annotations. The last three are OpenAPI's.
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
    | {"int32", "int64", "byte"}
)
#: Annotations of the standard and of OpenAPI. Except for `nullable` they do not constrain the text.
_ANNOTATIONS = frozenset(
    {"$schema", "$id", "id", "$anchor", "$comment", "$vocabulary", "$defs", "definitions", "nullable"}
    | {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"contentMediaType", "contentEncoding", "contentSchema", "externalDocs", "xml", "discriminator"}
    | {"uniqueItems"}
)
_LENGTHS = frozenset({"minLength", "maxLength"})
#: Keywords of `propertyNames` that are enforced, as properties or as a pattern of their names.
_NAME_KEYWORDS = frozenset({"type", "title", "description", "format", "enum", "pattern"}) | _LENGTHS
#: Longest length of names that is enforced.
_MAX_NAME_LENGTH = 1000
#: Limit on the copies of additionalProperties, one for each name in the enum of propertyNames.
MAX_NAMED_COPIES_BYTES = 32 * 1024
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMBERS = (*_BOUNDS, "multipleOf", "const", "enum")
#: Counts, which may be written 2.0.
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
_DIALECT = re.compile(r"https?(://json-schema\.org/(?:(draft-0[3-7])|draft/(?:2019-09|2020-12))/schema#?)")
#: Before prefixItems.
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07", "2019-09")

_DAY = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
#: llguidance's own allow February 29 in each year, leap seconds, and fractions without end. Parsers of dates
#: know no year 0.
_EXACT_FORMATS = {
    "date": (rf"^{_DAY}$", "^(?:000[1-9]|00[1-9]|0[1-9]|[1-9])"),
    "time": (rf"^{_TIME}$",),
    "date-time": (rf"^{_DAY}[Tt]{_TIME}$", "^(?:000[1-9]|00[1-9]|0[1-9]|[1-9])"),
}


#: Equivalents for llguidance, which does not support these formats. int64 is limited to exact integers.
_OPENAPI_FORMATS: Mapping[str, Mapping[str, object]] = {
    "int32": {"minimum": -(2**31), "maximum": 2**31 - 1, "multipleOf": 1},
    "int64": {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER, "multipleOf": 1},
    "byte": {"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"},
}


def check_enforceable(schema: object) -> None:
    """Raises InvalidRequestError naming the first keyword that would not be enforced, and where it is; or the
    place of a recursion without an end, because no text can meet it."""
    root = _root(schema)
    parts = root.with_descendants()
    is_old = any(draft in str(root.keywords.get("$schema")) for draft in _OLD_DRAFTS)
    for part in parts:
        for keyword in part.keywords:
            if not (keyword in ENFORCED or keyword in _ANNOTATIONS or _is_extension(keyword)):
                raise _refused(part, keyword, "is not supported; remove it or check its spelling")
        _check_numbers(part)
        _check_strings(part)
        _check_containers(part, is_old=is_old)
        _check_nullable(part)
        if part is not root and any(
            not str(part.keywords.get(name, "#")).startswith("#") for name in ("$id", "id", "$schema")
        ):
            raise _refused(part, "$id", "is supported at the top only; remove it here")
        _names_of(root, part)
    targets = _targets(root, parts)
    _check_steps(parts)
    dialect = root.keywords.get("$schema")
    if isinstance(dialect, str) and dialect and not _DIALECT.fullmatch(dialect):
        raise _refused(
            root, "$schema", f"has {quoted(dialect)}; use a draft of json-schema.org, or remove it"
        )
    if targets and (endless := endless_part(conditions_of(parts, targets)[root])) is not None:
        raise InvalidRequestError(
            "json_schema",
            f"cannot be met by any text: {endless.where or 'the schema'} requires itself without an end; "
            "make a property optional, or allow null or an empty list",
        )


def _root(schema: object) -> SchemaPart:
    return SchemaPart(schema if isinstance(schema, dict | bool) else {})


def rewrite(schema: object) -> None:
    """Rewrites a checked schema in place: keywords that llguidance does not support, formats that it accepts
    more broadly than parsers do, and parts that no text can meet."""
    if isinstance(schema, dict) and (known := _DIALECT.fullmatch(str(schema.get("$schema")))):
        schema["$schema"] = ("http" if known[2] else "https") + known[1]
    root = _root(schema)
    parts = root.with_descendants()
    if targets := _targets(root, parts):
        for unmet in conditions_of(parts, targets).values():
            if unmet.num_missing > 0:
                unmet.part.forbid()
    names = {found: _names_of(root, found) for found in parts}
    for found in parts:
        part = found.schema
        if isinstance(part, bool):
            continue
        for keyword in [name for name, value in part.items() if value is None and name not in MAY_BE_NULL]:
            del part[keyword]
        most = 0 if "prefixItems" in part else _num_values(found.child("items"))
        if part.pop("uniqueItems", False) is True and most:
            part["maxItems"] = min(part.get("maxItems", most), most)
        for keyword in _COUNTS:
            if isinstance(count := part.get(keyword), float) and count.is_integer():
                part[keyword] = int(count)
        for keyword in [name for name in _BOUNDS if _allows_all(name, part.get(name))]:
            del part[keyword]
        for keyword in _BOUNDS:
            if isinstance(bound := part.get(keyword), int) and not isinstance(bound, bool):
                part[keyword] = min(max(bound, -MAX_INTEGER), MAX_INTEGER)
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = without_ecma_classes(pattern)
        if isinstance(patterns := part.get("patternProperties"), dict):
            part["patternProperties"] = {without_ecma_classes(name): patterns[name] for name in patterns}
        if part.pop("nullable", False):
            types = part["type"]
            part["type"] = [*(types if isinstance(types, list) else [types]), "null"]
        name = str(part.get("format"))
        own: list[object] = [{"pattern": pattern} for pattern in _EXACT_FORMATS.get(name, ())]
        if name in _OPENAPI_FORMATS:
            own.append(_OPENAPI_FORMATS[name])
        if name not in FORMATS or name in _OPENAPI_FORMATS:
            part.pop("format", None)
        if own:
            others = part.get("allOf")
            part["allOf"] = [*others, *own] if isinstance(others, list) else own
    for found, allowed in names.items():
        if isinstance(found.schema, dict) and found.schema.pop("propertyNames", True) is not True and allowed:
            _restrict_names(found.schema, allowed)


def _restrict_names(part: dict[str, Any], allowed: tuple[str, Sequence[str]]) -> None:
    """Allows only properties with these names, or with names that match this pattern, all with one schema."""
    keyword, names = allowed
    others = part.get("additionalProperties", True)
    if keyword == "pattern":
        part["patternProperties"] = {without_ecma_classes(names[0]): others}
    else:
        listed = part.get("properties") or {}
        part["properties"] = {name: listed.get(name, others) for name in names}
    part["additionalProperties"] = False


def _names_of(root: SchemaPart, part: SchemaPart) -> tuple[str, Sequence[str]] | None:
    """What `propertyNames` allows: "enum" with the names, or "pattern" with the pattern; None: any name.

    Raises InvalidRequestError if it cannot be expressed by properties.
    """
    given = part.keywords.get("propertyNames", True)
    if isinstance(given, dict) and isinstance(ref := given.get("$ref"), str) and ref.startswith("#"):
        target = root.at(ref[1:])
        given = given if target is None else target.schema
    given = {} if given is True else given
    keywords: Mapping[str, Any] = given if isinstance(given, dict) else {"not": {}}
    pattern, names = keywords.get("pattern"), keywords.get("enum")
    if pattern is names is None and not _LENGTHS.isdisjoint(keywords):
        pattern = _pattern_of_lengths(part, keywords)
    elif not _LENGTHS.isdisjoint(keywords):
        raise _refused(part, "propertyNames", "may have lengths, an enum or a pattern; use one of them")
    if (
        not _NAME_KEYWORDS.issuperset(keywords)
        or keywords.get("type", "string") != "string"
        or not isinstance(pattern, str | None)
        or not (names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)))
        or (names is not None and pattern is not None)
    ):
        raise _refused(part, "propertyNames", "may have an enum or a pattern of strings; use one of them")
    if pattern is not None:
        if part.keywords.get("properties") or "patternProperties" in part.keywords:
            raise _refused(part, "propertyNames", "with a pattern excludes properties and patternProperties")
        if fault := check_class_syntax(pattern) or check_control_characters(pattern) or check_size(pattern):
            raise _refused(part, "propertyNames", fault)
        return "pattern", [pattern]
    if names is not None:
        num_bytes = len(names) * len(json.dumps(part.keywords.get("additionalProperties", True)))
        if "patternProperties" in part.keywords or num_bytes > MAX_NAMED_COPIES_BYTES:
            raise _refused(part, "propertyNames", "with an enum excludes patternProperties and long schemas")
        return "enum", names
    return None


def _pattern_of_lengths(part: SchemaPart, keywords: Mapping[str, object]) -> str:
    bounds = []
    for keyword in ("minLength", "maxLength"):
        length = keywords.get(keyword)
        if isinstance(length, float) and length.is_integer():
            length = int(length)
        if length is not None and not (type(length) is int and 0 <= length <= _MAX_NAME_LENGTH):
            raise _refused(part, "propertyNames", f"may have lengths up to {_MAX_NAME_LENGTH}")
        bounds.append(length)
    return rf"^[\s\S]{{{bounds[0] or 0},{'' if bounds[1] is None else bounds[1]}}}$"


def _num_values(part: SchemaPart | None) -> int:
    """The number of values of an enum; 0: unknown."""
    values = part.keywords.get("enum") if part is not None else None
    return len(values) if isinstance(values, list) else 0


def parse_schema(text: str) -> dict[str, Any] | bool:
    """The schema of a guide. Raises InvalidRequestError when it is no JSON schema."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("json_schema", f"is not JSON: {error}; send a JSON schema") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError("json_schema", f"is {quoted(text)}; send an object")
    return schema


def _refused(part: SchemaPart, keyword: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        "json_schema", f"{part.where or 'the schema'}: the keyword {quoted(keyword)} {why}"
    )


def _is_extension(keyword: str) -> bool:
    """OpenAPI's `x-`; llguidance's own would change what is enforced."""
    return keyword.startswith("x-") and keyword != "x-guidance"


def _check_numbers(part: SchemaPart) -> None:
    keywords = part.keywords
    for keyword in _NUMBERS:
        value = keywords.get(keyword, 0)
        is_draft_4 = keyword.startswith("exclusive") and isinstance(value, bool)
        if keyword not in ("const", "enum") and not is_draft_4 and not _is_number(value):
            raise _refused(part, keyword, "has no number")
        for number in _leaves(keywords.get(keyword)):
            if not isinstance(number, (int, float)):
                continue
            if isinstance(number, int) and abs(number) > MAX_INTEGER and _is_inexact(keyword, number):
                raise _refused(part, keyword, f"has an integer beyond {MAX_INTEGER}, which is not exact")
            if not math.isfinite(number) and not _allows_all(keyword, number):
                raise _refused(part, keyword, "has a number that is not finite")


def _is_inexact(keyword: str, number: int) -> bool:
    """Whether an integer beyond MAX_INTEGER must be refused. Tightens a bound that allows all integers
    here."""
    return keyword not in _BOUNDS or (number > 0) == keyword.lower().endswith("minimum")


def _allows_all(keyword: str, bound: object) -> bool:
    """Whether all float64 numbers are within a bound, such as the largest of them, or 1.8e308."""
    if keyword not in _BOUNDS or not isinstance(bound, float):
        return False
    limit = math.inf if keyword.startswith("exclusive") else sys.float_info.max
    return bound <= -limit if keyword.lower().endswith("minimum") else bound >= limit


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _leaves(value: object) -> Iterator[object]:
    """The values that are neither lists nor objects."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values.extend(value)
        elif isinstance(value, dict):
            values.extend(value.values())
        else:
            yield value


def _check_strings(part: SchemaPart) -> None:
    keywords = part.keywords
    names = keywords.get("patternProperties")
    patterns = [("pattern", keywords.get("pattern"))]
    if isinstance(names, dict):
        if len(names) > MAX_PATTERN_PROPERTIES:
            raise _refused(part, "patternProperties", f"has more than {MAX_PATTERN_PROPERTIES} patterns")
        patterns += [("patternProperties", name) for name in names]
    for keyword, pattern in patterns:
        if isinstance(pattern, str) and (
            fault := check_class_syntax(pattern) or check_control_characters(pattern) or check_size(pattern)
        ):
            raise _refused(part, keyword, fault)
    for keyword in ("const", "enum"):
        # llguidance would leave the character out.
        if any(
            re.search(UNWRITTEN, text) for text in _leaves(keywords.get(keyword)) if isinstance(text, str)
        ):
            raise _refused(part, keyword, "has a control character, which is not written; leave it out")


def _check_containers(part: SchemaPart, *, is_old: bool) -> None:
    keywords = part.keywords
    has_list = isinstance(keywords.get("items"), list)
    if "prefixItems" in keywords and (is_old or has_list or "additionalItems" in keywords):
        raise _refused(part, "prefixItems", "excludes items as a list, additionalItems and old drafts")
    if "additionalItems" in keywords and not has_list:
        raise _refused(part, "additionalItems", "has no effect unless items is a list; remove it")
    required = keywords.get("required")
    least = keywords.get("minProperties")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, (int, float)) and least > num_required + 1:
        # Names that are not listed may repeat, and then count once.
        raise _refused(part, "minProperties", f"may be {num_required + 1} at most, one more than required")


def _check_nullable(part: SchemaPart) -> None:
    """OpenAPI 3.0 allows it only with `type`, and null must be one of `enum` too."""
    keywords = part.keywords
    nullable = keywords.get("nullable", False)
    if not isinstance(nullable, bool):
        raise _refused(part, "nullable", "has no boolean")
    if nullable and "type" not in keywords:
        raise _refused(part, "nullable", "has no effect without type; use anyOf with null")


def _check_steps(parts: Sequence[SchemaPart]) -> None:
    """Several steps may meet in one number, by allOf or $ref."""
    steps = 1
    for part in parts:
        step = part.keywords.get("multipleOf")
        if isinstance(step, (int, float)) and step > 0:
            steps = math.lcm(steps, Fraction(str(step)).numerator)
            if steps > MAX_STEPS:
                raise _refused(
                    part, "multipleOf", f"has too many steps: the least common multiple is over {MAX_STEPS}"
                )


def _targets(root: SchemaPart, parts: Sequence[SchemaPart]) -> dict[SchemaPart, SchemaPart]:
    """The part behind each part's $ref. Only parts that are checked here may be named."""
    root_id = str(root.keywords.get("$id", root.keywords.get("id", ""))).partition("#")[0]
    anchors = {str(part.keywords["$anchor"]): part for part in parts if "$anchor" in part.keywords}
    targets = {}
    for part in parts:
        if "$ref" not in part.keywords:
            continue
        ref = str(part.keywords["$ref"])
        base, _, fragment = ref.partition("#")
        target = (root.at(fragment) or anchors.get(fragment)) if base in ("", root_id) else None
        if target is None:
            raise _refused(part, "$ref", f"{quoted(ref)} is none of a schema in here; put it under $defs")
        targets[part] = target
    return targets
