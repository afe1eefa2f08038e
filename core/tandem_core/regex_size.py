"""Checks of regular expressions for llguidance: size, syntax of classes, control characters. Writes out the
classes of ECMA's dialect, which JSON schemas have.

llguidance derives a lexer's states from the form in which repetitions are written out. `(a{1000}){1000}` has
few characters and a million parts, and a single token mask over it takes seconds.
"""

from __future__ import annotations

import re
import sys

MAX_SIZE = 20_000
_QUANTIFIER = re.compile(r"\{([0-9]{1,9})(,([0-9]{0,9}))?\}|[*+?]")
_MAX_COUNTED = 10**12
#: Control characters that a guide does not write, because it writes no \\u in JSON.
UNWRITTEN = "[\\x00-\\x07\\x0b\\x0e-\\x1f\\x7f]"
_ESCAPE = re.compile(
    r"\\(?:(v|a)|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\})"
)

#: ECMA's classes whose meaning differs in Rust's syntax: `.` excludes every line terminator, and white space
#: differs from Unicode's. Written as the contents of a [class].
_SPACE = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_NO_SPACE = (
    r"\x{0}-\x{8}\x{e}-\x{1f}!-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e}"
    r"\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{fefe}\x{ff00}-\x{10ffff}"
)
_INSIDES = {r"\s": _SPACE, r"\S": _NO_SPACE}
_ECMA = {".": r"[^\n\r\x{2028}\x{2029}]", **{escape: f"[{inside}]" for escape, inside in _INSIDES.items()}}
_CLASS_ESCAPE = re.compile(r"\\.", re.DOTALL)


def without_ecma_classes(pattern: str) -> str:
    """The expression with ECMA's `.`, `\\s` and `\\S` replaced by explicit classes."""
    parts = []
    position = 0
    while position < len(pattern):
        end = _atom_end(pattern, position)
        atom = pattern[position:end]
        if atom[0] == "[":
            atom = _CLASS_ESCAPE.sub(lambda escape: _INSIDES.get(escape[0], escape[0]), atom)
        parts.append(_ECMA.get(atom, atom))
        position = end
    return "".join(parts)


def check_size(pattern: str) -> str:
    """An error if the expression is too large, else ""."""
    size = expanded_size(pattern)
    return f"is too large: written out it has {size} parts, at most {MAX_SIZE} are allowed" * (
        size > MAX_SIZE
    )


def expanded_size(pattern: str) -> int:
    """Characters and classes when each `x{n,m}` is written as m times x; an estimate where the syntax is
    wrong."""
    #: For each open group, its size without the last part, and the size of that part.
    open_groups: list[tuple[int, int]] = []
    total = last = 0
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "(":
            open_groups.append((total, last))
            total = last = 0
            position += 1
        elif character == ")" and open_groups:
            inner = total + last
            before, previous = open_groups.pop()
            total, last = before + previous, max(inner, 1)
            position += 1
        elif quantifier := _QUANTIFIER.match(pattern, position):
            least, _, most = quantifier.groups()
            count = max(int(least or 1), int(most or 1), 1)
            last = min(last * count, _MAX_COUNTED)
            position = quantifier.end()
        else:
            total, last = total + last, 1
            position = _atom_end(pattern, position)
    return sum(before + previous for before, previous in open_groups) + total + last


def check_class_syntax(pattern: str) -> str:
    """An error if a [class] means something else outside ECMA's dialect, else ""."""
    position = 0
    while position < len(pattern):
        end = _atom_end(pattern, position)
        if pattern[position] == "[":
            inner = re.sub(r"\\.", "", pattern[position + 1 : end - 1], flags=re.DOTALL)
            for ambiguous in ("[", "&&", "--", "~~"):
                if ambiguous in inner:
                    return f"has {ambiguous!r} in a [class]; escape it"
        position = end
    return ""


def check_control_characters(pattern: str) -> str:
    """An error if the expression requires a control character that JSON escapes as \\u00.., else "". Classes
    with other characters may contain control characters."""
    position = 0
    while position < len(pattern):
        end = _atom_end(pattern, position)
        if pattern[position] == "[":
            parts = pattern[position + 1 : end - 1]
        else:
            escape = _ESCAPE.match(pattern, position)
            end = escape.end() if escape else end
            parts = pattern[position:end]
        written = _ESCAPE.sub(_unescaped, parts)
        if control := re.fullmatch(f"({UNWRITTEN})(?:{UNWRITTEN}|-)*", written):
            return f"asks for the control character {control[1]!r}, which is not written; leave it out"
        position = end
    return ""


def _unescaped(escape: re.Match[str]) -> str:
    if escape[1]:
        return {"a": "\a", "v": "\v"}[escape[1]]
    value = int(next(filter(None, escape.groups()), "0"), 16)
    return chr(value) if value <= sys.maxunicode else ""


def _atom_end(pattern: str, position: int) -> int:
    """Behind the character, escape or class that begins here."""
    if pattern[position] == "\\":
        return min(position + 2, len(pattern))
    if pattern[position] != "[":
        return position + 1
    position += 1
    if pattern[position : position + 1] == "^":
        position += 1
    if pattern[position : position + 1] == "]":  # a literal one, in Rust's syntax
        position += 1
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return min(position + 1, len(pattern))
