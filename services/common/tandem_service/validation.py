"""Words for pydantic's errors in flags, settings files and keys files."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

#: A name this similar to a known one counts as misspelt.
_SIMILAR = 0.7
#: By type of error; the fields are those of its context.
_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    "json_invalid": "is not JSON: {error}",
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "greater_than_equal": "must be at least {ge:.10g}",
    "less_than_equal": "must be at most {le:.10g}",
    "greater_than": "must be more than {gt:.10g}",
    "less_than": "must be less than {lt:.10g}",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "has fewer than {min_length} characters",
    "too_short": "has fewer than {min_length} entries",
    "too_long": "has more than {max_length} entries",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name; "" if no known name is similar."""
    (similar,) = difflib.get_close_matches(name, known, 1, _SIMILAR) or ("",)
    return f"; did you mean {similar}?" if similar else ""


def reason(error: ErrorDetails) -> str:
    """What is wrong with a value."""
    words = _WORDS.get(error["type"])
    if words is None:
        return error["msg"].removeprefix("Value error, ").replace("Input should", "must")
    return words.format(**error.get("ctx", {}))


def first_problem(error: ValidationError, known: Iterable[str], whole: str) -> str:
    """Place and reason of the first problem. `known`: names of fields; `whole`: name of what is validated."""
    errors = error.errors(include_url=False, include_input=False)
    for one in errors:  # a misspelt name explains a missing one
        if one["type"] == "extra_forbidden" and (meant := did_you_mean(str(one["loc"][-1]), known)):
            return f"{'.'.join(map(str, one['loc']))}: is unknown{meant}"
    place = [str(part) for part in errors[0]["loc"] if part != "[key]"]
    return f"{'.'.join(place) or whole}: {reason(errors[0])}"
