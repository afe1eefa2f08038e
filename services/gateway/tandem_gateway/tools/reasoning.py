"""Separates reasoning from the answer: `<think>...</think>` at the beginning of the text.

Some templates put the opening marker into the prompt; then the text begins inside. Whitespace around the
markers belongs to neither side. Without the closing marker the whole text is reasoning.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    def __init__(self, *, is_inside: bool) -> None:
        self._is_inside = is_inside
        self._has_ended = False
        self._is_start = True
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Returns the new reasoning and the new rest."""
        reasoning, rest = "", ""
        for index, char in enumerate(text):
            if self._has_ended and not self._is_start:
                return reasoning, rest + text[index:]
            self._held += char
            if self._has_ended:
                self._held = self._held.lstrip()
                if self._held:
                    self._is_start = False
                    rest, self._held = rest + self._held, ""
            elif self._is_inside:
                reasoning += self._inside()
            else:
                rest += self._before()
        return reasoning, rest

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
                break
            num_space = len(self._held) - len(marker)
            shown += "" if self._is_start else self._held[:num_space]
            shown += marker[0]
            self._is_start = False
            self._held = marker[1:]
        return shown
