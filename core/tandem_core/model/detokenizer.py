"""Turns a stream of tokens into text: whole UTF-8, as early as possible, and never taken back.

    tokens --decode--> text | up to 3 U+FFFD          a character may still be incomplete
                         |--match--> final text | what may begin a stop string

One StreamingDetokenizer per request. Its text does not depend on how the tokens are grouped into pushes,
because it decodes token by token: speculation does not change the text.

Only the tokenizer knows how tokens become text (byte-level, byte fallback, word boundaries). So each new
token decodes a window of the last tokens again, and the new text is what the window gained. The first tokens
of the window only give context, for example for a word's leading space, which decoders drop at the start of a
text. The window is cut at clean points, where every byte belongs to a whole character; this bounds the work
per token.

The text equals decoding all tokens at once, with one exception. In a run of byte tokens that contains invalid
UTF-8, sentencepiece-style byte fallback turns the whole run into U+FFFD; here, the characters that were
complete before the invalid byte are final already and stay.
"""

# Not tokenizers.decoders.DecodeStream (0.23): it raises on invalid UTF-8 in byte-fallback tokens, and holds
# back any amount of text that ends in U+FFFD.

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem_core.sampling import SamplingParams

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

#: A UTF-8 sequence that can still become whole has at most 3 bytes, each shown as one U+FFFD at most.
_MAX_INCOMPLETE = 3

#: Tokens in the window before it is cut. Decoding this many costs about twice as much as decoding one.
_MAX_WINDOW = 8

_DEFAULTS = SamplingParams()


class Decodes(Protocol):
    """The part of a tokenizer that is used here; `tokenizers.Tokenizer` has it."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = ...) -> str: ...


class StreamingDetokenizer:
    """The text of one request, as its `sampling` says.

    `stop`: the text ends before the first complete stop string (of several, the longest), or behind it with
    `include_stop_str_in_output`. `min_tokens`: the text of this many first tokens is not searched for stop
    strings. `skip_special_tokens`: special tokens have no text.
    """

    def __init__(self, tokenizer: Decodes, sampling: SamplingParams = _DEFAULTS) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = sampling.min_tokens
        self._skips_special = sampling.skip_special_tokens
        self._keeps_stop = sampling.include_stop_str_in_output
        self._matchers = tuple(_StopMatcher(s) for s in sampling.stop)
        #: Text that may be the beginning of a stop string.
        self._held = ""
        self._window: list[int] = []
        #: The decoded window, and how many of its characters are final.
        self._text = ""
        self._num_done = 0
        #: Tokens of the window up to its last clean point.
        self._num_clean = 0
        self._num_tokens = 0
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string found, if any; no text comes after it."""
        return self._stopped

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far; the one that completed a stop string is the last."""
        return self._num_tokens

    def push(self, token_ids: Sequence[int], *, ends: bool = False) -> str:
        """Takes the next tokens; returns the text that became final. Ignores tokens after a stop string.

        `ends`: the last one is an end or stop token, whose text belongs to the answer only with
        `include_stop_str_in_output`.
        """
        parts: list[str] = []
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            if self._stopped is not None:
                break
            self._num_tokens += 1
            if not (ends and index == last) or self._keeps_stop:
                parts.append(self._search(self._decode_next(token_id)))
        return "".join(parts)

    def flush(self) -> str:
        """The rest of the text when no more tokens come; an incomplete character is U+FFFD."""
        if self._stopped is not None:
            return ""
        rest = self._search(self._text[self._num_done :])
        self._num_done = len(self._text)
        rest, self._held = rest + self._held, ""
        return rest

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def _decode_next(self, token_id: int) -> str:
        """Text that no later token can change."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text[: self._num_done] != self._text[: self._num_done]:
            # Byte fallback replaced characters that are final, see above: begin a new window after them.
            self._window = self._window[self._num_clean :]
            text = self._decode(self._window)
            self._num_done = self._num_clean = 0
        elif text == self._text and self._decode([token_id, token_id]) == "":
            # A special token: no text even twice in a row, unlike a leading space or a part of a character.
            # It stays out of the window, so any number of them can follow each other.
            self._window.pop()
            return ""
        num_open = len(text) - len(text.rstrip(_REPLACEMENT))
        num_final = max(len(text) - min(num_open, _MAX_INCOMPLETE), self._num_done)
        final = text[self._num_done : num_final]
        self._text, self._num_done = text, num_final
        if num_open == 0:
            if len(self._window) > _MAX_WINDOW:
                self._cut_clean()
            self._num_clean = len(self._window)
        elif len(self._window) > 4 * _MAX_WINDOW:
            self._cut_open()
        return final

    def _cut_clean(self) -> None:
        """Keep the tokens after the last clean point but this one as context, if they have any text."""
        context = self._decode(self._window[self._num_clean :])
        if context:
            del self._window[: self._num_clean]
            self._text, self._num_done = context, len(context)

    def _cut_open(self) -> None:
        """Shorten a window that has had no clean point for long, as in a run of invalid bytes.

        A cut is correct where both sides decode to the same text separately as together, and the right side
        has text, so that no byte of the left side needs the right side. The smallest right side is tried
        first: of byte tokens, exactly those stay whose text is not final yet.
        """
        for size in range(_MAX_INCOMPLETE, _MAX_WINDOW):
            left, right = self._decode(self._window[:-size]), self._decode(self._window[-size:])
            if right and left + right == self._text and len(left) <= self._num_done:
                del self._window[:-size]
                self._text, self._num_done, self._num_clean = right, self._num_done - len(left), 0
                return

    def _search(self, text: str) -> str:
        """The text up to a stop string, or up to what may become one."""
        if not self._matchers or self._num_tokens <= self._min_tokens:
            return text
        for i, char in enumerate(text):
            found = [m.stop for m in self._matchers if m.advance(char)]
            if found:
                self._stopped = max(found, key=len)
                whole = self._held + text[: i + 1]
                self._held = ""
                return whole if self._keeps_stop else whole[: len(whole) - len(self._stopped)]
        whole = self._held + text
        num_final = len(whole) - max(m.num_matched for m in self._matchers)
        self._held = whole[num_final:]
        return whole[:num_final]


class _StopMatcher:
    """Knuth-Morris-Pratt: finds a string in a stream of characters, in amortised constant time for each."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        #: How many characters of `stop` the text so far ends with; fewer than len(stop) between calls.
        self.num_matched = 0
        #: borders[n]: length of the longest proper prefix of stop[:n] that also ends it.
        self._borders = [0, 0]
        for n in range(1, len(stop)):
            border = self._borders[n]
            while border and stop[border] != stop[n]:
                border = self._borders[border]
            self._borders.append(border + (stop[border] == stop[n]))

    def advance(self, char: str) -> bool:
        """Whether `stop` is complete with this character. Do not call it again after that."""
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched]
        if self.stop[self.num_matched] == char:
            self.num_matched += 1
        return self.num_matched == len(self.stop)
