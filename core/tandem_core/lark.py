"""Checks a Lark grammar before llguidance compiles it: embedded JSON schemas, and the size of its terminals.

A schema behind `%json` is checked and written like any other. A terminal becomes one regular expression, with
the terminals that it names written out, so its size is bounded as that of a regular expression is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from tandem_core.errors import InvalidRequestError
from tandem_core.json_schema import check_enforceable, rewrite
from tandem_core.regex_size import MAX_SIZE, expanded_size

#: Terminals that name each other in turn, in a grammar that repeats parts of them.
MAX_TERMINAL_DEPTH = 8
#: What may hold text that is no Lark syntax, and the embedded schemas. A string without its end ends with the
#: line, because a search that fails would begin again at each quotation mark.
_TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*(?:"i?)?)|(?P<regex>/(?:\\.|[^/\\\n])+(?:/[a-z]*)?)"""
    r"""|//[^\n]*|(?P<json>%json\b)"""
)
_TERMINAL = re.compile(
    r"^(?P<name>_?[A-Z][A-Z0-9_]*)(?:\[[^\]\n]*\])?(?:\.-?[0-9]+)?\s*:(?P<body>.*(?:\n\s*\|.*)*)",
    re.MULTILINE,
)
_NAME = re.compile(r"_?[A-Z][A-Z0-9_]*")
_TILDE = re.compile(r"~\s*(?:[0-9]{1,9}\s*\.\.\s*)?([0-9]{1,9})")
_COUNT = re.compile(r"[{~][0-9,.\s]*[0-9]")
#: Most of them in a grammar. A mask may have to step through all of them for each token.
MAX_REGEXES = 256


def checked_lark(source: str, json_options: Mapping[str, object]) -> str:
    """The grammar whose schemas have these options of llguidance. Raises InvalidRequestError."""
    parts: list[str] = []
    #: The grammar with strings replaced by `x`, and regular expressions by an `x` for each of their parts.
    syntax: list[str] = []
    end = num_regexes = 0
    while token := _TOKEN.search(source, end):
        syntax.append(source[end : token.start()])
        parts.append(source[end : token.end()])
        end = token.end()
        if token["string"]:
            syntax.append("x")
        elif token["regex"]:
            num_regexes += 1
            if num_regexes > MAX_REGEXES:
                raise InvalidRequestError(
                    "guide", f"its lark has more than {MAX_REGEXES} regular expressions; join some of them"
                )
            size = expanded_size(token["regex"])
            if size > MAX_SIZE:
                raise _too_large(size)
            syntax.append(f"(x{{{size}}})")
        elif token["json"]:
            schema, end = _embedded_schema(source, end, json_options)
            parts.append(f" {schema}")
    syntax.append(source[end:])
    parts.append(source[end:])
    _check_terminals("".join(syntax))
    return "".join(parts)


def _embedded_schema(source: str, start: int, json_options: Mapping[str, object]) -> tuple[str, int]:
    """The schema behind `%json` and where it ends."""
    while start < len(source) and source[start].isspace():
        start += 1
    try:
        schema, end = json.JSONDecoder().raw_decode(source, start)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("guide", f"its lark has a %json without a JSON schema: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequestError("guide", "its lark has a %json without an object")
    check_enforceable(schema)
    rewrite(schema)
    return json.dumps({**schema, "x-guidance": dict(json_options)}), end


def _check_terminals(syntax: str) -> None:
    bodies = {found["name"]: found["body"] for found in _TERMINAL.finditer(syntax)}
    if not any(_COUNT.search(body) for body in bodies.values()):
        return
    sizes = dict.fromkeys(bodies, 1)
    for _ in range(MAX_TERMINAL_DEPTH):
        before = dict(sizes)
        for name, body in bodies.items():
            written = _NAME.sub(lambda found: f"(x{{{sizes.get(found[0], 1)}}})", _TILDE.sub(r"{\1}", body))
            sizes[name] = expanded_size("".join(written.split()))
            if sizes[name] > MAX_SIZE:
                raise _too_large(sizes[name])
        if sizes == before:
            return
    raise InvalidRequestError(
        "guide", f"its lark has terminals that name each other more than {MAX_TERMINAL_DEPTH} deep"
    )


def _too_large(size: int) -> InvalidRequestError:
    return InvalidRequestError(
        "guide", f"its lark has a terminal of {size} parts when written out; at most {MAX_SIZE} are allowed"
    )
