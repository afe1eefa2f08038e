"""Finds tool calls in the text of an answer as it streams.

    text --marker--> opened --{--> object --}--> after --closer--> text
                        +--name[ARGS]{ ----------^  +--, ; ]

Text that turns out to be no call becomes content, including its marker. A call that breaks off within its
arguments keeps them as they are. The result depends only on the text so far, not on how it is cut into
pieces, so a resumed stream shows the same.

The model chooses the text, so each character takes constant time in each state. Text that turns out to be no
call is parsed again, at most twice: a marker inside of an object lies in one of its strings, so at most two
objects that begin at markers overlap.
"""

from __future__ import annotations

import re
from typing import Protocol

from tandem_gateway.tools.formats import MAX_HELD_CHARS, Opener, ToolFormat
from tandem_gateway.tools.json_scanner import CallObjectReader, CallReader

_NAME_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
#: Precedes the arguments' object in Mistral's newer format.
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]*\s*)?(?:\[ARGS\]\s*)?")
_MAX_NAMED_CHARS = 256
#: Most text of a call before its name and the beginning of its arguments are known; more is no call.
_MAX_UNDECIDED_CHARS = 128 * 1024
#: The beginning of a marker that is more likely a marker than other text.
_MIN_MARKER_CHARS = 2
_BARE = Opener("", is_certain=False)


class Sink(Protocol):
    """Receives content and calls."""

    def content(self, text: str) -> None: ...

    def begin_call(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...


class CallsParser:
    def __init__(
        self,
        form: ToolFormat,
        tool_names: frozenset[str],
        sink: Sink,
        *,
        is_guided: bool = False,
        is_required: bool = False,
    ) -> None:
        """`is_guided`: a grammar enforces the calls' schemas, with the name first; `is_required`: it allows
        calls alone."""
        self._form = form
        self._is_guided = is_guided
        self._is_required = is_required
        self._tool_names = tool_names
        self._sink = sink
        self._state = self._in_text
        self._opener = _BARE
        #: Whether there was only whitespace so far.
        self._is_start = True
        #: Text that may be a marker, including whitespace before it.
        self._held = ""
        #: Characters since the whitespace before the marker, while they may be no call.
        self._raw: list[str] = []
        self._num_before_call = 0
        self._is_list = self._is_continued = False
        self._call = CallReader()
        self._is_begun = False

    def push(self, text: str) -> None:
        for char in text:
            self._state(char)

    @property
    def is_in_call(self) -> bool:
        """Whether the last call has begun and is not complete."""
        return self._is_begun and self._state in (self._in_call, self._in_broken)

    def finish(self, *, is_cut: bool) -> None:
        """Call it at the end of the text. Text held back becomes content, except for parts of a closing
        marker, and with `is_cut` for the beginning of a call."""
        is_cut_call = is_cut and self._begins_call()
        if self._state == self._in_text:
            self._show("" if is_cut_call else self._held)
        elif self._state == self._in_broken:
            self._sink.arguments(self._held)
        elif self._state != self._after_call and not self._is_begun and not is_cut_call:
            self._show("".join(self._raw))
        self._held, self._raw = "", []

    def _begins_call(self) -> bool:
        """Whether the text held back is the beginning of a call, and no other text."""
        if self._is_required:
            return True
        if self._state == self._in_text:
            marker = self._held.lstrip()
            certain = (opener.marker for opener in self._form.openers if opener.is_certain)
            return len(marker) >= _MIN_MARKER_CHARS and any(one.startswith(marker) for one in certain)
        is_named = self._state == self._in_call and bool(self._call.name)
        return self._opener.is_certain or self._is_continued or is_named

    def _show(self, text: str) -> None:
        if text:
            self._is_start = self._is_start and text.isspace()
            self._sink.content(text)

    def _in_text(self, char: str) -> None:
        self._held += char
        while self._held:
            marker = self._held.lstrip()
            space = self._held[: len(self._held) - len(marker)]
            if not marker:
                if len(self._held) > MAX_HELD_CHARS:
                    self._show(self._held[0])
                    self._held = self._held[1:]
                return
            for opener in self._form.openers:
                if marker == opener.marker:
                    self._open(opener, self._held)
                    return
            if marker == "{" and self._is_start and self._form.takes_bare_object:
                self._open(_BARE, space)
                self._in_opened("{")
                return
            if any(opener.marker.startswith(marker) for opener in self._form.openers):
                return
            self._held = marker[1:]
            self._show(space + marker[0])

    def _open(self, opener: Opener, raw: str) -> None:
        self._opener, self._raw, self._held = opener, list(raw), ""
        self._num_before_call = len(raw)
        self._is_list = self._is_continued = False
        self._state = self._in_opened

    def _in_opened(self, char: str) -> None:
        """Before a call's first character."""
        self._raw.append(char)
        if char.isspace():
            if len(self._raw) > _MAX_UNDECIDED_CHARS:
                self._take_back()
            return
        if char == "{":
            is_certain = self._opener.is_certain
            known = None if is_certain else self._tool_names
            self._begin_reading(CallObjectReader(known, has_name_first=self._is_guided), char)
        elif char == "[" and not self._is_list and self._opener is not _BARE:
            self._is_list = True
        elif self._form.takes_named_arguments and not self._is_list and char in _NAME_CHARS:
            self._held = char
            self._state = self._in_name
        else:
            self._take_back()

    def _in_name(self, char: str) -> None:
        self._raw.append(char)
        if char != "{":
            self._held += char
            if len(self._held) > _MAX_NAMED_CHARS:
                self._take_back()
            return
        named = _NAMED.fullmatch(self._held)
        if named is None:
            self._take_back()
        else:
            self._held = ""
            self._begin_reading(CallReader(named[1]), char)

    def _begin_reading(self, call: CallReader, char: str) -> None:
        self._call, self._is_begun = call, False
        self._state = self._in_call
        self._read(char)

    def _in_call(self, char: str) -> None:
        if not self._is_begun:
            self._raw.append(char)
        self._read(char)

    def _read(self, char: str) -> None:
        call = self._call
        call.advance(char)
        if not self._is_begun and call.has_begun:
            self._is_begun, self._is_start, self._raw = True, False, []
            self._sink.begin_call(call.name or "")
        if self._is_begun and (text := call.take_arguments()):
            self._sink.arguments(text)
        if call.is_complete and self._is_begun:
            self._state = self._after_call
            self._held = ""
        elif call.is_wrong and self._is_begun:
            self._state = self._in_broken
            self._held = ""
            self._in_broken(char)
        elif call.is_wrong or len(self._raw) > _MAX_UNDECIDED_CHARS:
            self._take_back()

    def _take_back(self) -> None:
        """Turns the opened text into content, because it is no call, and parses the rest again."""
        raw = "".join(self._raw)
        num_shown = max(self._num_before_call, 1 + len(raw) - len(raw.lstrip()))
        shown, rest = raw[:num_shown], raw[num_shown:]
        self._held, self._raw = "", []
        self._state = self._in_text
        self._show(shown)
        self.push(rest)

    def _after_call(self, char: str) -> None:
        self._held += char
        closer = self._opener.closer
        # Small models write one brace too many.
        rest = self._held.lstrip("} \t\r\n") if closer else self._held.lstrip()
        if not rest:
            if len(self._held) > MAX_HELD_CHARS:
                self._end_call()
            return
        if closer and closer.startswith(rest):
            if rest == closer:
                self._held = ""
                self._state = self._in_text
            return
        if self._is_list and rest == "]":
            self._is_list, self._held = False, ""
        elif rest == ("," if self._is_list else self._form.separator):
            self._continue()
        else:
            self._end_call()

    def _end_call(self) -> None:
        """Reads the text after a call again as text."""
        held, self._held = self._held, ""
        self._state = self._in_text
        self.push(held)

    def _continue(self) -> None:
        """Begins another call without a marker."""
        self._raw, self._held, self._is_begun = list(self._held), "", False
        self._num_before_call = len(self._raw)
        self._is_continued = True
        self._state = self._in_opened

    def _in_broken(self, char: str) -> None:
        """Reads arguments that are no valid JSON, up to the closing marker."""
        self._held += char
        closer = self._opener.closer
        while self._held and not (closer and closer.startswith(self._held)):
            self._sink.arguments(self._held[0])
            self._held = self._held[1:]
        if self._held and self._held == closer:
            self._held = ""
            self._state = self._in_text
