"""Tokenizers out of GGUF files cut and merge text as llama.cpp does."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest
from gguf import TokenType
from gguf_files import VOCABULARY, Kind, write_gguf
from tandem_core.errors import ModelLoadError
from tandem_engine.model_loader import pull
from tandem_engine.model_loader.gguf_file import GgufFile
from tandem_engine.model_loader.gguf_tokenizer import GgufTokenizer
from tandem_engine.model_loader.tokenizer_files import write_tokenizer

#: From the sources that PyPI's llama-cpp-python ships: vendor/llama.cpp/models.
VECTORS = os.environ.get("LLAMA_CPP_VOCABULARIES", "")
TEXT = "It's 20245  x\n\n Über WORLDs!"
WORDS = {
    "gpt-2": ["It", "'s", " 20245", " ", " x", "\n\n", " Über", " WORLDs", "!"],
    "smollm": ["It", "'s", " ", "2", "0", "2", "4", "5", " ", " x", "\n\n", " Über", " WORLDs", "!"],
    "starcoder": ["It", "'s", " ", "2", "0", "2", "4", "5", " ", " x", "\n\n", " Über", " WORLDs", "!"],
    "llama-bpe": ["It", "'s", " ", "202", "45", " ", " x", "\n\n", " Über", " WORLDs", "!"],
    "qwen2": ["It", "'s", " ", "2", "0", "2", "4", "5", " ", " x", "\n\n", " Über", " WORLDs", "!"],
    "tekken": ["It", "'s", " ", "2", "0", "2", "4", "5", " ", " x", "\n\n", " Über", " WORLDs", "!"],
    "falcon": ["It", "'", "s", " ", "202", "45", " ", " x", "\n\n", " Über", " WORLDs", "!"],
    # Its expression for punctuation, holds ASCII letters too.
    "deepseek-llm": ["It", "'", "s", " ", "20245", " ", " x", "\n", "\n", " Ü", "ber", " WORLDs", "!"],
    "default": ["It", "'", "s", " ", "202", "45", " ", " x", "\n\n", " Über", " WORLDs", "!"],
}


def write(path: Path, model: str, tokens: list[str], kinds: list[TokenType], **more: object) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def bpe(path: Path, pre: str, **more: object) -> GgufFile:
    tokens = ["<|begin|>", "<|im_end|>", "<tool>", "a", "b", "Ġ", "ab", "Ġab", "abab", "<|eot_id|>"]
    kinds = [TokenType.NORMAL] * len(tokens)
    kinds[0] = kinds[1] = TokenType.CONTROL
    kinds[2] = TokenType.USER_DEFINED
    return write(
        path, "gpt2", tokens, kinds, tokenizer_pre=pre, token_merges=["a b", "Ġ ab"], bos_token_id=0,
        eos_token_id=3, **more,
    )  # fmt: skip


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_cut_as_the_file_says(tmp_path: Path, pre: str) -> None:
    backend = GgufTokenizer(bpe(tmp_path / "model.gguf", pre)).backend
    # The last step, bytes as characters, is undone.
    cut = backend.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in cut] == WORDS[pre]


def test_byte_level_merges_special_tokens_and_the_beginning(tmp_path: Path) -> None:
    tokenizer = GgufTokenizer(bpe(tmp_path / "model.gguf", "llama-bpe", add_bos_token=True))
    assert tokenizer.backend.encode("ab ab<|im_end|><tool>abab").ids == [0, 6, 7, 1, 2, 8]
    assert tokenizer.backend.decode([6, 7, 1, 2], skip_special_tokens=True) == "ab ab<tool>"
    # By key, by name, and by a name that the file lists as text.
    assert tokenizer.ends == (1, 3, 9)
    # Whole words that are tokens are taken without merges in some kinds only.
    assert GgufTokenizer(bpe(tmp_path / "b.gguf", "gpt-2")).backend.encode("abab").ids == [6, 6]
    facts = write_tokenizer(tmp_path / "model.gguf", tmp_path, vocab_size=10)
    assert (facts.bos_token, facts.eos_token, facts.eos_token_ids) == ("<|begin|>", "a", (1, 3, 9))
    assert facts.add_bos and (tmp_path / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", [TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.CONTROL])
@pytest.mark.parametrize(
    "name",
    ["<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<EOT>", "<|end|>",
     "<end_of_turn>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
)  # fmt: skip
def test_a_token_with_the_name_of_an_end_token_is_one(tmp_path: Path, name: str, kind: TokenType) -> None:
    tokens, kinds = ["a", "b", name], [TokenType.NORMAL, TokenType.NORMAL, kind]
    file = write(tmp_path / "m.gguf", "gpt2", tokens, kinds, tokenizer_pre="gpt-2", token_merges=[])
    tokenizer = GgufTokenizer(file)
    assert tokenizer.ends == (2,)
    assert tokenizer.backend.encode(f"a{name}b").ids == [0, 2, 1]
    assert tokenizer.backend.decode([0, 2, 1], skip_special_tokens=True) == "ab"


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_a_key_names_an_end_whatever_its_text(tmp_path: Path, key: str) -> None:
    path, tokens = tmp_path / "m.gguf", ["a", "<x>", "b"]
    kinds = [TokenType.NORMAL, TokenType.CONTROL, TokenType.NORMAL]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([])
    writer.add_uint32(f"tokenizer.ggml.{key}_token_id", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GgufTokenizer(GgufFile(path)).ends == (1,)


def test_merged_text_is_not_an_end_token_and_fim_marks_are_control_tokens(tmp_path: Path) -> None:
    tokens = ["<", "/", "s", ">", "</", "s>", "</s>", "<|fim_middle|>"]
    merges = ["< /", "s >", "</ s>"]
    kinds = [TokenType.NORMAL] * len(tokens)
    file = write(tmp_path / "m.gguf", "gpt2", tokens, kinds, tokenizer_pre="gpt-2", token_merges=merges)
    tokenizer = GgufTokenizer(file)
    assert tokenizer.ends == ()
    assert tokenizer.backend.decode(tokenizer.backend.encode("</s>").ids) == "</s>"
    assert tokenizer.backend.encode("s<|fim_middle|>").ids == [2, 7]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc"]
    scores = [0.0] * len(tokens) + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0]
    file = write(
        tmp_path / "model.gguf", "llama", tokens + words, kinds + [TokenType.NORMAL] * len(words),
        token_scores=scores, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tokenizer = GgufTokenizer(file)
    first = len(tokens)
    # ▁ab c or ▁a bc: the merge with the higher score comes first.
    assert tokenizer.backend.encode("abc").ids == [1, first + 6, first + 5]
    euro = [3 + byte for byte in "€".encode()]
    assert tokenizer.backend.encode("€").ids == [1, first, *euro]
    assert tokenizer.backend.decode(tokenizer.backend.encode("€ ab").ids, skip_special_tokens=True) == "€ ab"


@pytest.mark.parametrize(
    ("model", "pre", "reason"),
    [
        ("bert", "default", "a tokenizer of kind 'bert'"),
        ("gpt2", "unheard-of", "cuts words .* by 'unheard-of'"),
    ],
)
def test_other_tokenizers_are_refused_in_a_sentence(
    tmp_path: Path, model: str, pre: str, reason: str
) -> None:
    file = write(tmp_path / "model.gguf", model, ["a"], [TokenType.NORMAL], tokenizer_pre=pre)
    with pytest.raises(ModelLoadError, match=reason + ".* use the safetensors version"):
        GgufTokenizer(file)
    with pytest.raises(ModelLoadError, match="holds no vocabulary"):
        GgufTokenizer(write(tmp_path / "empty.gguf", "gpt2", [], []))


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_long_tokens_are_refused(tmp_path: Path, model: str) -> None:
    """Finding the merges of a token takes the square of its length."""
    for length in (1024, 1025):
        tokens = ["a", "a" * length]
        file = write(
            tmp_path / f"{length}.gguf", model, tokens, [TokenType.NORMAL] * 2, token_scores=[0.0, 0.0],
            token_merges=[], tokenizer_pre="default",
        )  # fmt: skip
        if length <= 1024:
            GgufTokenizer(file)
        else:
            with pytest.raises(ModelLoadError, match="token of 1,025 characters, over the limit of 1,024"):
                GgufTokenizer(file)


def test_a_damaged_vocabulary_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        # "ab" is a token, but its half "b" is none.
        writer.add_token_list(["a", "ab", *(f"token {n}" for n in range(VOCABULARY - 2))])
        writer.add_token_merges(["a b"])

    (path,) = write_gguf(tmp_path / "model.gguf", lambda name: Kind.Q4_0, keys=keys)
    with pytest.raises(ModelLoadError, match=r"the tokenizer in .* is damaged .*`b`.*; download it") as error:
        pull(str(path))
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "home/models").iterdir())


@pytest.mark.wide
@pytest.mark.skipif(
    not VECTORS, reason="LLAMA_CPP_VOCABULARIES names no folder with llama.cpp's vocabularies"
)
@pytest.mark.parametrize(
    "name",
    [
        "llama-bpe",
        "llama-spm",
        "qwen2",
        "gpt-2",
        "starcoder",
        "refact",
        "command-r",
        "mpt",
        "phi-3",
        "deepseek-coder",
        "deepseek-llm",
        "falcon",
    ],
)
def test_vectors_of_llama_cpp(name: str) -> None:
    path = Path(VECTORS) / f"ggml-vocab-{name}.gguf"
    tokenizer = GgufTokenizer(GgufFile(path)).backend
    texts = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 40
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(n) for n in line.split()], text
