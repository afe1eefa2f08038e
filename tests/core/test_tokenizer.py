"""Tokens are the same as Hugging Face's, and every token's bytes join to the text."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import model_folders
import pytest
import toy_tokenizers
from tandem_core.errors import ModelLoadError
from tandem_core.model.conversation import Message
from tandem_core.model.piece_cache import PieceCache
from tandem_core.model.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

TEXTS = ["hello world", "  two  spaces\n\ttab", "naïve café — 東京 🙂", "Ünïcödé\r\n", "a\x00b"]


def byte_level() -> RustTokenizer:
    return toy_tokenizers.trained(["hello world hello there 東京 東京 🙂🙂"] * 5, 320)


def sentencepiece() -> RustTokenizer:
    """As Llama 2's: the space is a visible character, unknown characters fall back to bytes."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcdehlorstuw"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def metaspace() -> RustTokenizer:
    """Puts a space before the first piece of a text alone."""
    tokenizer = sentencepiece()
    tokenizer.normalizer, tokenizer.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def make_folder(folder: Path, tokenizer: RustTokenizer, add_bos: bool, **fields: object) -> Path:
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|im_end|>", special=True)])
    return model_folders.make_folder(folder, tokenizer, bos_token="<s>", add_bos=add_bos, **fields)


@pytest.fixture(params=[byte_level, sentencepiece])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return Tokenizer(make_folder(tmp_path, request.param(), add_bos=False))


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_a_character_split_over_tokens_has_bytes_of_its_own_in_each(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9"]


def test_control_tokens_are_one_id_and_are_skipped_in_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello<|im_end|>")
    assert tokenizer.token_bytes(ids[-1]) == b"<|im_end|>"
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<|im_end|>"


def test_bos_goes_once_before_raw_prompts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path, byte_level(), add_bos=True))
    bos = tokenizer.encode("<s>", add_special_tokens=False)
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == tokenizer.encode("<s>hello") == [*bos, *hello]
    assert len(bos) == 1


CHAT = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<s>"


def added_tokens(tokenizer: RustTokenizer) -> RustTokenizer:
    """Which overlap the control tokens of the template, and each other."""
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<|im", "<|im_end|>\n<s>us", "\n<s")]
    )
    tokenizer.add_tokens([AddedToken("lo<", normalized=True)])
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [byte_level, sentencepiece, metaspace, lambda: added_tokens(byte_level()),
     lambda: added_tokens(sentencepiece())],
)  # fmt: skip
def test_a_chat_has_the_same_tokens_with_the_pieces_of_earlier_ones(make, tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path, make(), add_bos=False, chat_template=CHAT))
    rng, cache = random.Random(0), PieceCache(max_chars=3000)
    words = [*TEXTS, "hello", "lo<", "us", "user", "<s>", "<|im_end|>", "<", "|im", " ", "\n"]
    for number in range(300):
        chat = [Message(rng.choice(["system", "user"]), "".join(rng.choices(words, k=rng.randrange(6))))
                for _ in range(rng.randrange(1, 4))]  # fmt: skip
        expected = tokenizer.encode_chat(chat)
        assert tokenizer.encode_chat(chat, cache=cache, tenant=f"{number % 2}") == expected, chat


def test_a_tokenizer_that_asks_where_a_piece_is_is_not_cut(tmp_path: Path) -> None:
    assert Tokenizer(make_folder(tmp_path / "a", metaspace(), add_bos=False))._cuts is None
    assert Tokenizer(make_folder(tmp_path / "b", byte_level(), add_bos=False))._cuts is not None


def test_tenants_find_their_own_pieces_only_and_the_oldest_go_first() -> None:
    cache, encoded = PieceCache(max_chars=1000), []

    def ids(tenant: str, piece: str) -> list[int]:
        return list(cache.ids(tenant, piece, lambda text: encoded.append((tenant, text)) or [len(text)]))

    assert ids("a", "long" * 50) == ids("a", "long" * 50) == ids("b", "long" * 50) == [200]
    assert encoded == [("a", "long" * 50), ("b", "long" * 50)]
    ids("a", "long" * 50)  # the newest again
    ids("a", "other")
    del encoded[:]
    for tenant in ("a", "b"):
        ids(tenant, "long" * 50)
    assert encoded == [("b", "long" * 50)]


def test_ids_outside_the_vocabulary_have_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(10_000) == b""


def test_a_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    make_folder(tmp_path, byte_level(), add_bos=False)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="pull the model again"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["encode", "_encode_quoted"])
async def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer: Tokenizer, name: str) -> None:
    text = "the order has not arrived " * 40_000
    done = asyncio.create_task(asyncio.to_thread(getattr(tokenizer, name), text))
    num_turns = 0
    while not done.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 10


def test_a_text_of_as_many_tokens_as_the_context_is_within_the_limit(tokenizer: Tokenizer) -> None:
    longest = max(
        (tokenizer.token_bytes(token_id) for token_id in range(tokenizer.manifest.vocab_size)), key=len
    )
    assert len(longest) * tokenizer.manifest.max_model_len <= tokenizer.max_text_bytes
    assert len(longest) * tokenizer.manifest.max_model_len * 5 > tokenizer.max_text_bytes
