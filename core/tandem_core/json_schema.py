"""Which JSON schemas a guide may have: each keyword is enforced, an annotation, or refused by its name.

llguidance refuses the keywords that it knows and does not enforce, but ignores those that it does not know,
as the standard wants. A misspelt `maxlength` would then have no effect, so it is refused
here, and so is what llguidance 1.9 takes in another sense than the standard.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.regex_size import check_class_syntax, check_size

MAX_DEPTH = 64
#: Of one schema, for each pair is compared.
MAX_PATTERN_PROPERTIES = 32
#: The least common multiple of all steps, as integers; a lexer has as many states.
MAX_STEPS = 100_000
#: Integers beyond are not exact in llguidance's double precision.
MAX_INTEGER = 2**53
#: Enforced, where llguidance does not refuse their values.
ENFORCED = frozenset(
    {"$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf"}
    | {"properties", "patternProperties", "additionalProperties", "required"}
    | {"minProperties", "maxProperties"}
    | {"items", "prefixItems", "additionalItems", "minItems", "maxItems"}
    | {"minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
#: Values of `format`.
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
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
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
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


def check_enforceable(schema: object) -> None:
    """Raises InvalidRequestError naming the first keyword that would not be enforced, and where it is."""
    parts = dict(_schemas(schema, "", 0))
    root = parts.get("")
    root_id = str(root.get("$id", root.get("id", ""))) if isinstance(root, dict) else ""
    is_old = isinstance(root, dict) and any(draft in str(root.get("$schema")) for draft in _OLD_DRAFTS)
    anchors = {
        str(part["$anchor"]) for part in parts.values() if isinstance(part, dict) and "$anchor" in part
    }
    for where, part in parts.items():
        if not isinstance(part, dict):
            continue
        for keyword in part:
            if not (keyword in ENFORCED or keyword in _ANNOTATIONS or _is_extension(keyword)):
                raise _refused(where, keyword, "is not supported; remove it or check its spelling")
        _check_numbers(where, part)
        _check_strings(where, part)
        _check_containers(where, part, is_old=is_old)
        if where and any(not str(part.get(name, "#")).startswith("#") for name in ("$id", "id", "$schema")):
            raise _refused(where, "$id", "is supported at the top only; remove it here")
        if "$ref" in part and not _is_reached(str(part["$ref"]), root_id, parts, anchors):
            raise _refused(
                where, "$ref", f"{quoted(str(part['$ref']))} is none of a schema in here; put it under $defs"
            )
    _check_steps(parts)


def exact_formats(schema: object) -> None:
    """Narrows formats, in place, where llguidance allows more than a parser does."""
    for _, part in list(_schemas(schema, "", 0)):
        if isinstance(part, dict) and (patterns := _EXACT_FORMATS.get(str(part.get("format")))):
            others = part.get("allOf")
            own = [{"pattern": pattern} for pattern in patterns]
            part["allOf"] = [*others, *own] if isinstance(others, list) else own


def parse_schema(text: str) -> dict[str, Any] | bool:
    """The schema of a guide. Raises InvalidRequestError when it is no JSON schema."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("json_schema", f"is no JSON: {error}; send a JSON schema") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError("json_schema", f"is {quoted(text)}; send an object")
    return schema


def _refused(where: str, keyword: str, why: str) -> InvalidRequestError:
    return InvalidRequestError("json_schema", f"{where or 'the schema'}: the keyword {quoted(keyword)} {why}")


def _is_extension(keyword: str) -> bool:
    """OpenAPI's `x-`; llguidance's own would change what is enforced."""
    return keyword.startswith("x-") and keyword != "x-guidance"


def _check_numbers(where: str, part: Mapping[str, Any]) -> None:
    for keyword in _NUMBERS:
        value = part.get(keyword, 0)
        is_draft_4 = keyword.startswith("exclusive") and isinstance(value, bool)
        if keyword not in ("const", "enum") and not is_draft_4 and not _is_number(value):
            raise _refused(where, keyword, "has no number")
        for number in _numbers(part.get(keyword)):
            if isinstance(number, int) and abs(number) > MAX_INTEGER:
                raise _refused(where, keyword, f"has an integer beyond {MAX_INTEGER}, which is not exact")
            if not math.isfinite(number):
                raise _refused(where, keyword, "has a number that is not finite")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(value: object) -> Iterator[int | float]:
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, (int, float)):
            yield value
        elif isinstance(value, list):
            values.extend(value)
        elif isinstance(value, dict):
            values.extend(value.values())


def _check_strings(where: str, part: Mapping[str, Any]) -> None:
    names = part.get("patternProperties")
    patterns = [("pattern", part.get("pattern"))]
    if isinstance(names, dict):
        if len(names) > MAX_PATTERN_PROPERTIES:
            raise _refused(where, "patternProperties", f"has more than {MAX_PATTERN_PROPERTIES} patterns")
        patterns += [("patternProperties", name) for name in names]
    for keyword, pattern in patterns:
        if isinstance(pattern, str) and (fault := check_class_syntax(pattern) or check_size(pattern)):
            raise _refused(where, keyword, fault)
    if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
        raise _refused(
            where, "format", f"has {quoted(part['format'])}; supported are {', '.join(sorted(FORMATS))}"
        )


def _check_containers(where: str, part: Mapping[str, Any], *, is_old: bool) -> None:
    has_list = isinstance(part.get("items"), list)
    if "prefixItems" in part and (is_old or has_list or "additionalItems" in part):
        raise _refused(where, "prefixItems", "excludes items as a list, additionalItems and old drafts")
    if "additionalItems" in part and not has_list:
        raise _refused(where, "additionalItems", "has no effect unless items is a list; remove it")
    required = part.get("required")
    least = part.get("minProperties")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, (int, float)) and least > num_required + 1:
        # Names that are not listed may repeat, and then count once.
        raise _refused(where, "minProperties", f"may be {num_required + 1} at most, one more than required")


def _check_steps(parts: Mapping[str, object]) -> None:
    """Several steps may meet in one number, by allOf or $ref."""
    steps = 1
    for where, part in parts.items():
        step = part.get("multipleOf") if isinstance(part, dict) else None
        if isinstance(step, (int, float)) and step > 0:
            steps = math.lcm(steps, Fraction(str(step)).numerator)
            if steps > MAX_STEPS:
                raise _refused(
                    where, "multipleOf", f"has too many steps: the least common multiple is over {MAX_STEPS}"
                )


def _is_reached(ref: str, root_id: str, places: Mapping[str, object], anchors: set[str]) -> bool:
    """Whether it is one of the schemas that are checked here."""
    base, _, fragment = ref.partition("#")
    return base in ("", root_id.partition("#")[0]) and (unquote(fragment) in places or fragment in anchors)


def _schemas(schema: object, where: str, depth: int) -> Iterator[tuple[str, dict[str, Any] | bool]]:
    """The schema and all within it, each with its JSON pointer."""
    if isinstance(schema, bool):
        yield where, schema
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
                pointer = name.replace("~", "~0").replace("/", "~1")
                yield from _schemas(part, f"{where}/{keyword}/{pointer}", depth + 1)
