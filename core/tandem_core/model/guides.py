"""Compiles guides to matchers, which know at each position of a text the tokens that may follow.

The work is llguidance's: a lexer of derivatives and an Earley parser walk the vocabulary's trie, without a
table over all states, so compiling takes milliseconds and a mask some hundred microseconds. Here are its
options, its limits and the errors. The limits count steps instead of time, so each machine accepts and
refuses the same guides. Pods also limit the time of masks (tandem_engine/guided.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tandem_core.errors import InvalidRequestError, ModelLoadError
from tandem_core.guide import Guide, GuideKind
from tandem_core.json_schema import check_enforceable, parse_schema, rewrite
from tandem_core.lark import checked_lark
from tandem_core.model.manifest import ModelManifest
from tandem_core.regex_size import check_size

T = TypeVar("T")

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: JSON as json.dumps writes it, the form that models have seen most. No other whitespace: where any is
#: allowed, a model may write it without end.
_JSON: JsonCompileOptions = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,
    "coerce_one_of": False,
    # Not \\u: a name written with it would be a second property of that name, not bound by its schema.
    "json_allowed_escapes": '"\\\\bfnrt',
}
#: A state takes up to 2 kB. Errors must not quote other parts of the state than the caller's own text. A mask
#: of a grammar with 600 long alternatives takes 25 ms with the defaults of 200,000 and 50,000 steps. With
#: these it is refused after 8 ms.
_LIMITS = LLParserLimits(
    max_lexer_states=50_000, step_lexer_fuel=50_000, step_max_items=20_000, verbose_errors=False
)
#: Compiled guides that are kept; a hostile one takes up to 30 MB.
_MAX_KEPT = 8
#: llguidance recurses through rules that name each other; 128 KiB of them need less than half. Only pages
#: that are touched take memory.
_STACK_BYTES = 256 * 1024**2
_STACK_LOCK = threading.Lock()


def check_guide(guide: Guide) -> None:
    """Raises InvalidRequestError, with the guide's field, when it cannot be compiled: what is wrong, with a
    keyword's name.

    Needs no model, so names of special tokens in a Lark grammar are not checked. May take 100 ms; gives up
    the GIL.
    """
    try:
        grammar = _grammar(guide)
        is_error, messages = _on_deep_stack(
            lambda: LLMatcher.validate_grammar_with_warnings(grammar, None, limits=_LIMITS)
        )
        if is_error:
            raise _unusable(guide, messages[0])
    except InvalidRequestError as error:
        error.rename(guide.field)
        raise


class OwnMatcher(NamedTuple):
    """A matcher before any token."""

    matcher: LLMatcher
    #: Hold it while using the matcher. Matchers of a guide share a lexer that the library locks, and some
    #: calls wait for that lock without releasing the GIL.
    lock: threading.Lock


class GuideCompiler:
    """Belongs to a model, and to any thread. Takes a second to make for a large vocabulary, without giving up
    the GIL."""

    def __init__(self, folder: Path, manifest: ModelManifest) -> None:
        """Raises ModelLoadError."""
        self.has_end = bool(manifest.eos_token_ids)
        try:
            self._tokenizer = LLTokenizer(
                (folder / "tokenizer.json").read_text(encoding="utf-8"),
                n_vocab=manifest.vocab_size,
                eos_token=list(manifest.eos_token_ids) or None,
            )
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{folder}: guides cannot use its tokenizer ({error})") from error
        self._lock = threading.Lock()
        #: Initial matchers by guide, the most recently used last; requests get copies.
        self._kept: OrderedDict[Guide, OwnMatcher] = OrderedDict()

    def matcher(self, guide: Guide) -> OwnMatcher:
        """A new matcher that shares the guide's lexer. Raises InvalidRequestError. May take 100 ms; releases
        the GIL."""
        with self._lock:
            kept = self._kept.get(guide)
            if kept is not None:
                self._kept.move_to_end(guide)
        return self.fresh_matcher(guide) if kept is None else OwnMatcher(kept.matcher.deep_copy(), kept.lock)

    def fresh_matcher(self, guide: Guide) -> OwnMatcher:
        """As `matcher`, with a new lexer; matchers made later share that one."""
        if not self.has_end:
            raise InvalidRequestError("guide", "the model has no end token; use a model that has one")
        grammar = _grammar(guide)
        made = _on_deep_stack(lambda: LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS))
        if made.is_error():
            raise _unusable(guide, made.get_error())
        kept = OwnMatcher(made, threading.Lock())
        with self._lock:
            self._kept[guide] = kept
            self._kept.move_to_end(guide)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return OwnMatcher(made.deep_copy(), kept.lock)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of forced text, for drafts."""
        return self._tokenizer.tokenize_str(text)


def _grammar(guide: Guide) -> str:
    if guide.kind is GuideKind.REGEX:
        if fault := check_size(guide.source):
            raise InvalidRequestError("guide", f"its regex {fault}")
        return LLMatcher.grammar_from_regex(guide.source)
    if guide.kind is GuideKind.LARK:
        return LLMatcher.grammar_from_lark(checked_lark(guide.source, _JSON))
    schema = parse_schema(guide.source)
    check_enforceable(schema)
    rewrite(schema)
    if isinstance(schema, bool):  # "anything" and "nothing"
        schema = {} if schema else {"enum": []}
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
    except (ValueError, RecursionError) as error:  # constants nested without end
        raise _unusable(guide, str(error)) from None


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Runs `work` on its own thread with a stack of _STACK_BYTES."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(BaseException):  # a panic of the library is no Exception
            results.append(work())

    with _STACK_LOCK:
        default = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="guide")
            thread.start()
        finally:
            threading.stack_size(default)
    thread.join()
    if not results:
        raise InvalidRequestError("guide", "llguidance cannot read it; simplify it")
    return results[0]


def reason(error: str) -> str:
    """llguidance's sentence, without the mark of what it leaves out."""
    if error.startswith("panic:"):
        return "llguidance cannot read it; simplify it"
    if error.startswith("oneOf constraints are not supported"):
        return "the alternatives of a oneOf may both match; use anyOf"
    return error.replace("<non-verbose/>", "").strip() or "unknown"


def _unusable(guide: Guide, error: str) -> InvalidRequestError:
    return InvalidRequestError("guide", f"its {guide.kind.value} cannot be used: {reason(error)}")
