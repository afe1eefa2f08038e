"""Separates reasoning from the answer: `<think>...</think>` at the beginning of the text.

Some templates put the opening marker into the prompt; then the text begins inside. Whitespace around the
markers belongs to neither side, up to MAX_HELD_CHARS before one. Without the closing marker the whole text is
reasoning.
"""

from __future__ import annotations

from tandem_gateway.tools.formats import MAX_HELD_CHARS

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    def __init__(self, *, is_inside: bool) -> None:
        self._is_inside = is_inside
        self._has_ended = False
        self._is_start = True
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Returns the new reasoning and the new rest."""
        reasoning: list[str] = []
        rest: list[str] = []
        for index, char in enumerate(text):
            if self._has_ended and not self._is_start:
                rest.append(text[index:])
                break
            if self._has_ended:
                if not char.isspace():
                    self._is_start = False
                    rest.append(char)
                continue
            self._held += char
            if self._is_inside:
                reasoning.append(self._inside())
            else:
                rest.append(self._before())
        return "".join(reasoning), "".join(rest)

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._has_ended:
            return "", ""
        return (held.rstrip(), "") if self._is_inside else ("", held)

    def _before(self) -> str:
        """Looks for the opening marker; other text is the rest."""
        marker = self._held.lstrip()
        if marker == OPEN:
            self._is_inside, self._held = True, ""
        elif not OPEN.startswith(marker):
            self._has_ended, self._is_start = True, False
            held, self._held = self._held, ""
            return held
        elif len(self._held) > MAX_HELD_CHARS:
            return self._first_held()
        return ""

    def _inside(self) -> str:
        """The reasoning's text, without whitespace before the closing marker."""
        shown = ""
        while self._held:
            marker = self._held.lstrip()
            if not marker and self._is_start:
                self._held = ""
            elif marker == CLOSE:
                self._has_ended, self._is_start, self._held = True, True, ""
            if CLOSE.startswith(marker) or not self._held:
                if len(self._held) > MAX_HELD_CHARS:
                    shown += self._first_held()
                break
            num_space = len(self._held) - len(marker)
            shown += "" if self._is_start else self._held[:num_space]
            shown += marker[0]
            self._is_start = False
            self._held = marker[1:]
        return shown

    def _first_held(self) -> str:
        first, self._held = self._held[0], self._held[1:]
        return first
