"""The streaming detokenizer hands out whole characters, never takes text back and finds every stop string.

Tokenizers are built here: byte-level BPE (GPT-2, Llama 3, Qwen), byte fallback with word marks
(sentencepiece: Llama 2, Gemma) and WordPiece, whose decoder inserts spaces.
"""

import random
from collections.abc import Sequence

import pytest
import toy_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_core.model.detokenizer import StreamingDetokenizer
from tandem_core.sampling import SamplingParams
from tokenizers import AddedToken, Tokenizer, decoders, models

CORPUS = [
    "The shop is open from nine to five, and the refund takes three days. Hello, world! Hello again.",
    "你好，世界。请问我的订单什么时候到？ こんにちは、ご注文ありがとうございます。",
    "Ça va très bien: naïve café, Zürich, kůň. e\u0301 o\u0308 \u0928\u092e\u0938\u094d\u0924\u0947",
    "🎉🎉 👩‍👩‍👧 👍🏽 🇨🇭 family and flags",
]
SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    tokenizer = toy_tokenizers.trained(CORPUS, 400, [SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {"<unk>": 0, SPECIAL: 1}
    vocab |= {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for piece in ["▁", *"abcdehlotwr好", "▁he", "ll", "▁wor", "ld", "▁▁", "\ufffd"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", SPECIAL, "hello", "world", "##ing", "##s", ",", "do", "n't", "."]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE = byte_level(), byte_fallback(), word_piece()
TEXTS = st.text(st.sampled_from("he lo,wrd\n你好🎉👩\u200d👧é\u0301क\u094d\ufffd"), max_size=40)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any token sequence, so mostly torn characters; single-byte tokens are common."""
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60)


def fallback_ids(text: str) -> list[int]:
    """The text as a sentencepiece model without merges writes it: known characters, else bytes."""
    known = [BYTE_FALLBACK.token_to_id("▁" if c == " " else c) for c in text]
    return [
        i
        for char, token_id in zip(text, known, strict=True)
        for i in ([token_id] if token_id is not None else [2 + byte for byte in char.encode()])
    ]


def split(ids: Sequence[int], seed: int) -> list[Sequence[int]]:
    """Groups of 0 to 4 tokens, as speculation delivers them."""
    generator, groups, start = random.Random(seed), [], 0
    while start < len(ids):
        size = generator.randint(0, 4)
        groups.append(ids[start : start + size])
        start += size
    return groups


def stream(tokenizer: Tokenizer, ids: Sequence[int], stop: tuple[str, ...] = (), seed: int = 0) -> str:
    detokenizer = StreamingDetokenizer(tokenizer, SamplingParams(stop=tuple(stop)))
    return "".join(map(detokenizer.push, split(ids, seed))) + detokenizer.flush()


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that ends first, the longest of those."""
    found = [(text.index(s) + len(s), -len(s)) for s in stop if s in text]
    return text[: sum(min(found))] if found else text


@settings(max_examples=400)
@given(ids_of(BYTE_LEVEL), st.integers(0, 3))
def test_byte_level_equals_the_whole_decode_for_any_tokens(ids: list[int], seed: int) -> None:
    assert stream(BYTE_LEVEL, ids, seed=seed) == BYTE_LEVEL.decode(ids)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 256), max_size=120), st.integers(0, 3))
def test_byte_level_equals_the_whole_decode_for_any_bytes(ids: list[int], seed: int) -> None:
    assert {len(BYTE_LEVEL.id_to_token(i)) for i in ids} <= {1}
    assert stream(BYTE_LEVEL, ids, seed=seed) == BYTE_LEVEL.decode(ids)


@settings(max_examples=200)
@given(TEXTS)
def test_byte_level_equals_the_text_that_was_encoded(text: str) -> None:
    assert stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids) == text


@settings(max_examples=200)
@given(st.lists(TEXTS, max_size=4))
def test_byte_fallback_equals_the_whole_decode_of_valid_text(texts: list[str]) -> None:
    special = BYTE_FALLBACK.token_to_id(SPECIAL)
    ids = [i for text in texts for i in [*fallback_ids(text), special]]
    assert stream(BYTE_FALLBACK, ids) == BYTE_FALLBACK.decode(ids)


@settings(max_examples=200)
@given(ids_of(WORD_PIECE))
def test_word_piece_equals_the_whole_decode(ids: list[int]) -> None:
    assert stream(WORD_PIECE, ids) == WORD_PIECE.decode(ids)


@settings(max_examples=300)
@given(ids_of(BYTE_FALLBACK))
def test_byte_fallback_never_loses_or_repeats_what_is_not_a_byte(ids: list[int]) -> None:
    text = stream(BYTE_FALLBACK, ids)
    words = BYTE_FALLBACK.decode([i for i in ids if not 2 <= i < 258])
    # Bytes add ASCII, U+FFFD and rare characters; the pieces' letters must be there in order.
    rest = iter(text)
    assert all(char in rest for char in words if char != " ")
    whole = BYTE_FALLBACK.decode(ids)
    assert len(text) <= len(whole), "a valid character stands where the whole decode has one U+FFFD per byte"


def test_byte_fallback_keeps_what_was_valid_before_an_invalid_byte() -> None:
    ids = [*fallback_ids("🎉"), 2 + 0xFF, *fallback_ids(" a")]
    assert BYTE_FALLBACK.decode(ids) == "\ufffd" * 5 + " a"
    assert stream(BYTE_FALLBACK, ids) == "🎉\ufffd a"


@settings(max_examples=200)
@given(ids_of(BYTE_FALLBACK), st.integers(0, 5), st.integers(0, 5))
def test_the_text_does_not_depend_on_the_grouping(ids: list[int], one: int, other: int) -> None:
    stop = ("he", "l\ufffd")
    assert stream(BYTE_FALLBACK, ids, stop, one) == stream(BYTE_FALLBACK, ids, stop, other)


def test_a_character_comes_out_with_its_last_byte() -> None:
    detokenizer = StreamingDetokenizer(BYTE_FALLBACK)
    assert [detokenizer.push([i]) for i in fallback_ids("a🎉b")] == ["a", "", "", "", "🎉", "b"]


def test_text_is_given_out_at_once_when_nothing_is_open() -> None:
    detokenizer = StreamingDetokenizer(BYTE_LEVEL, SamplingParams(stop=("\n\n",)))
    ids = BYTE_LEVEL.encode("Hello, world! The refund takes three days.").ids
    for n, token_id in enumerate(ids, start=1):
        assert (
            detokenizer.push([token_id]) == BYTE_LEVEL.decode(ids[:n])[len(BYTE_LEVEL.decode(ids[: n - 1])) :]
        )


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_an_invalid_byte_holds_nothing_back_for_long(tokenizer: Tokenizer) -> None:
    invalid = next(i for i in range(2, 258) if tokenizer.decode([i]) == "\ufffd")
    detokenizer = StreamingDetokenizer(tokenizer)
    for n in range(1, 200):
        detokenizer.push([invalid])
        assert len(detokenizer._text) - detokenizer._num_done <= 3, n
    letter = tokenizer.token_to_id("a")
    assert detokenizer.push([letter]).endswith("\ufffda")


class Counting:
    """A tokenizer that counts the tokens it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    "ids",
    [BYTE_LEVEL.encode("Hello 你好🎉 " * 100).ids, [BYTE_LEVEL.token_to_id(SPECIAL)] * 1000, [256] * 1000],
    ids=["text", "special tokens only", "invalid bytes only"],
)
def test_the_work_per_token_is_bounded(ids: list[int]) -> None:
    counting = Counting(BYTE_LEVEL)
    detokenizer = StreamingDetokenizer(counting)
    for token_id in ids:
        detokenizer.push([token_id])
    assert len(ids) >= 500
    assert counting.num_decoded <= 30 * len(ids)


@settings(max_examples=400)
@given(
    ids_of(BYTE_LEVEL),
    st.lists(st.text("he lo\ufffd你a", min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_text_ends_before_the_first_stop_string(ids: list[int], stop: list[str], seed: int) -> None:
    assert stream(BYTE_LEVEL, ids, tuple(stop), seed) == cut(BYTE_LEVEL.decode(ids), stop)


@settings(max_examples=300)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_stop_strings_that_overlap_themselves(text: str, stop: list[str]) -> None:
    assert stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids, tuple(stop)) == cut(text, stop)


def test_a_stop_string_with_repetitions_inside_repetitions() -> None:
    """After a mismatch the match must go on from the longest border, not from the beginning."""
    assert stream(BYTE_FALLBACK, fallback_ids("aaabaaabaaaa"), ("aabaaaa",)) == "aaaba"


def test_what_may_begin_a_stop_string_is_held_until_decided() -> None:
    detokenizer = StreamingDetokenizer(BYTE_FALLBACK, SamplingParams(stop=("ello",)))
    assert [detokenizer.push([i]) for i in fallback_ids("hellhello")] == ["h", "", "", "", "ellh"] + [""] * 4
    assert detokenizer.stopped == "ello"
    assert detokenizer.flush() == ""


def test_flush_gives_what_was_held() -> None:
    detokenizer = StreamingDetokenizer(BYTE_FALLBACK, SamplingParams(stop=("ello",)))
    assert detokenizer.push(fallback_ids("hell")) == "h"
    assert detokenizer.push([2 + 0xF0, 2 + 0x9F]) == ""
    assert detokenizer.flush() == "ell\ufffd\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.stopped is None


def test_tokens_after_a_stop_string_are_ignored_and_not_counted() -> None:
    detokenizer = StreamingDetokenizer(BYTE_FALLBACK, SamplingParams(stop=("l",)))
    assert detokenizer.push(fallback_ids("helloo")) == "he"
    assert detokenizer.num_tokens == 3
    assert detokenizer.push(fallback_ids("a")) == ""
    assert detokenizer.num_tokens == 3


def test_the_longest_of_two_stop_strings_that_end_together_is_cut() -> None:
    detokenizer = StreamingDetokenizer(BYTE_FALLBACK, SamplingParams(stop=("l", "el")))
    assert detokenizer.push(fallback_ids("hello")) == "h"
    assert detokenizer.stopped == "el"


def test_stop_strings_wait_for_min_tokens() -> None:
    detokenizer = StreamingDetokenizer(BYTE_FALLBACK, SamplingParams(stop=("el",), min_tokens=3))
    assert detokenizer.push(fallback_ids("helloel")) == "hello"
    assert detokenizer.num_tokens == 7


def test_a_stop_string_may_stay_in_the_text() -> None:
    sampling = SamplingParams(stop=("ello",), include_stop_str_in_output=True)
    detokenizer = StreamingDetokenizer(BYTE_LEVEL, sampling)
    assert detokenizer.push(BYTE_LEVEL.encode("Hello world").ids) == "Hello"
    assert detokenizer.stopped == "ello"


@pytest.mark.parametrize("keeps", [False, True])
def test_the_text_of_an_end_token_stays_only_where_it_is_asked_for(keeps: bool) -> None:
    ids = BYTE_LEVEL.encode("Hello world").ids
    detokenizer = StreamingDetokenizer(BYTE_LEVEL, SamplingParams(include_stop_str_in_output=keeps))
    whole, last = BYTE_LEVEL.decode(ids), BYTE_LEVEL.decode(ids[-1:])
    text = detokenizer.push(ids, ends=True) + detokenizer.flush()
    assert text == (whole if keeps else whole.removesuffix(last))
    assert detokenizer.num_tokens == len(ids)
