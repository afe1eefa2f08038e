"""Reads JSON character by character: a value's end, and the parts of a tool call inside an object.

A model writes a call as `{"name": "find", "arguments": {...}}`. Its arguments are shown as they stream, so
nothing is parsed twice and nothing waits for the end. The result depends only on the text so far, not on how
it is cut into pieces.
"""

from __future__ import annotations

import contextlib
import enum
import json
import re

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("0123456789+-.eE")
_LITERALS = ("true", "false", "null")
_SPACE = frozenset(" \t\r\n")
_ARGUMENTS = ("arguments", "parameters")
#: Keys that models write in addition to name and arguments.
_OTHER_KEYS = ("type", "id")


class _At(enum.Enum):
    """What a scanner expects next, or the token it is in."""

    VALUE = enum.auto()
    FIRST_VALUE = enum.auto()  # or "]"
    FIRST_KEY = enum.auto()  # or "}"
    KEY = enum.auto()
    COLON = enum.auto()
    AFTER_VALUE = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    LITERAL = enum.auto()
    END = enum.auto()
    WRONG = enum.auto()


class JsonScanner:
    """One JSON object or array, up to its last bracket."""

    def __init__(self) -> None:
        self.at = _At.VALUE
        self._open: list[str] = []
        self._is_key = False
        #: The current literal or \\u escape.
        self._word = ""
        self._number: list[str] = []

    @property
    def depth(self) -> int:
        return len(self._open)

    def advance(self, char: str) -> None:
        """Do not call it after the end."""
        at = self.at
        if at is _At.STRING:
            if char == "\\":
                self.at = _At.ESCAPE
            elif char == '"':
                self.at = _At.COLON if self._is_key else _At.AFTER_VALUE
        elif at is _At.ESCAPE:
            self._word = ""
            self.at = _At.HEX if char == "u" else _At.STRING if char in '"\\/bfnrt' else _At.WRONG
        elif at is _At.HEX:
            self._word += char
            if char not in "0123456789abcdefABCDEF":
                self.at = _At.WRONG
            elif len(self._word) == 4:
                self.at = _At.STRING
        elif at is _At.NUMBER:
            if char in _NUMBER_CHARS:
                self._number.append(char)
                return
            self.at = _At.AFTER_VALUE if _NUMBER.fullmatch("".join(self._number)) else _At.WRONG
            self.advance(char)
        elif at is _At.LITERAL:
            self._word += char
            if self._word in _LITERALS:
                self.at = _At.AFTER_VALUE
            elif not any(literal.startswith(self._word) for literal in _LITERALS):
                self.at = _At.WRONG
        elif char not in _SPACE:
            self.at = self._between(at, char)

    def _between(self, at: _At, char: str) -> _At:
        """The next state at a character outside of strings, numbers and literals."""
        if at in (_At.KEY, _At.FIRST_KEY) and char == '"':
            self._is_key = True
            return _At.STRING
        if at is _At.COLON:
            return _At.VALUE if char == ":" else _At.WRONG
        if at is _At.AFTER_VALUE and char == ",":
            return _At.KEY if self._open[-1] == "{" else _At.VALUE
        if char in "}]" and at in (_At.AFTER_VALUE, _At.FIRST_KEY, _At.FIRST_VALUE):
            if self._open.pop() + char not in ("{}", "[]"):
                return _At.WRONG
            return _At.AFTER_VALUE if self._open else _At.END
        if at in (_At.VALUE, _At.FIRST_VALUE):
            return self._begin_value(char)
        return _At.WRONG

    def _begin_value(self, char: str) -> _At:
        if char in "{[":
            self._open.append(char)
            return _At.FIRST_KEY if char == "{" else _At.FIRST_VALUE
        if not self._open:
            return _At.WRONG
        self._is_key, self._word = False, char
        if char == '"':
            return _At.STRING
        if char in "-0123456789":
            self._number = [char]
            return _At.NUMBER
        return _At.LITERAL if char in "tfn" else _At.WRONG


class CallReader:
    """Reads a call character by character: its name, once known, and its arguments as they stream."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.is_complete = False
        self.is_wrong = False
        self._arguments: list[str] = []
        self._scanner = JsonScanner()

    @property
    def has_begun(self) -> bool:
        """Whether it is certainly a call: its name is known and its arguments have begun."""
        return bool(self.name) and (bool(self._arguments) or self.is_complete)

    def take_arguments(self) -> str:
        """The arguments' text since the last call."""
        taken, self._arguments = self._arguments, []
        return "".join(taken)

    def advance(self, char: str) -> None:
        """Reads the next character of the arguments. Do not call it after the end."""
        was_inside = self._scanner.depth > 0
        self._scanner.advance(char)
        self.is_wrong = self._scanner.at is _At.WRONG
        self.is_complete = self._scanner.at is _At.END
        if not self.is_wrong and (was_inside or self._scanner.depth):
            self._arguments.append(self._shown(char))

    def _shown(self, char: str) -> str:
        """The character, escaped if it is a control character in a string."""
        if char < " " and self._scanner.at is _At.STRING:
            return json.dumps(char)[1:-1]
        return char


class CallObjectReader(CallReader):
    """{"name": ..., "arguments": {...}} in any order; `parameters` means arguments too.

    `known`: the only valid names, for objects that no marker identifies as calls. Then other keys are
    wrong, and with `has_name_first` also a first key other than the name. None: any names and keys.
    """

    def __init__(self, known: frozenset[str] | None, *, has_name_first: bool = False) -> None:
        super().__init__()
        self._known = known
        self._has_name_first = has_name_first
        self._key: str | None = None
        #: Text of the current key or value at the first level; None outside of them.
        self._text: list[str] | None = None
        self._shows = False
        self._has_arguments = False

    def advance(self, char: str) -> None:
        scanner = self._scanner
        before, depth_before = scanner.at, scanner.depth
        scanner.advance(char)
        if scanner.at is _At.WRONG or (depth_before == 0 and char == "["):
            self.is_wrong = True
            return
        if depth_before == 1 and before is _At.NUMBER and scanner.at is not _At.NUMBER:
            self._end_value()
        elif depth_before == 1 and before in (_At.KEY, _At.FIRST_KEY) and scanner.at is _At.STRING:
            self._text = [char]
        elif depth_before == 1 and before is _At.VALUE and scanner.at is not _At.VALUE:
            self._text = []
            self._shows = self._key in _ARGUMENTS and not self._has_arguments and scanner.depth == 2
            self._has_arguments |= self._key in _ARGUMENTS
            self._add(char)
        elif self._text is not None:
            self._add(char)
            if scanner.depth == 1 and scanner.at is _At.COLON:
                self._end_key()
            elif scanner.depth == 1 and scanner.at is _At.AFTER_VALUE:
                self._end_value()
        if scanner.at is _At.END and not self.is_wrong:
            if not self._has_arguments:
                self._arguments.append("{}")
            self.is_complete = True
            self.is_wrong = not self.name

    @property
    def has_begun(self) -> bool:
        return super().has_begun and not self.is_wrong

    def _add(self, char: str) -> None:
        if self._shows:
            self._arguments.append(self._shown(char))
        elif self._text is not None:
            self._text.append(self._shown(char))

    def _taken_text(self) -> str:
        text, self._text = "".join(self._text or ()), None
        return text

    def _end_key(self) -> None:
        self._key = json.loads(self._taken_text())
        allowed = ("name", *_ARGUMENTS, *_OTHER_KEYS)
        is_late = self._has_name_first and self.name is None and self._key != "name"
        if self._known is not None and (self._key not in allowed or is_late):
            self.is_wrong = True

    def _end_value(self) -> None:
        text = self._taken_text()
        if self._key == "name" and self.name is None:
            value = json.loads(text) if text.startswith('"') else None
            if not value or (self._known is not None and value not in self._known):
                self.is_wrong = True
            else:
                self.name = value
        elif self._key in _ARGUMENTS and not self._shows:
            self._arguments.append(_as_object(text))
        self._shows = False


def _as_object(text: str) -> str:
    """Arguments as an object, if they are JSON in a string, or null."""
    with contextlib.suppress(ValueError, RecursionError):  # also of numbers with thousands of digits
        value = json.loads(text)
        if not value:
            return "{}"
        if isinstance(value, str) and isinstance(json.loads(value), dict):
            return value
    return text
