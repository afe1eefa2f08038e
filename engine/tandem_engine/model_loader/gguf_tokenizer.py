"""A tokenizer from a GGUF's keys, with llama.cpp's meaning of them.

BPE is byte-level; tokenizer.ggml.pre says how text is cut into words first. SPM (SentencePiece) merges by
scores. transformers reads such tokenizers too, but cuts words by the architecture: wrong for many files.
"""

from __future__ import annotations

from typing import Any, NoReturn

from gguf import TokenType
from tandem_core.errors import ModelLoadError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tandem_engine.model_loader.end_tokens import END_TOKENS, FIM_TOKENS
from tandem_engine.model_loader.gguf_file import GgufFile

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Letters with a case, without the scripts that came to Unicode, or got a case there, later than these files.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}"
    r"\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF1E}]]"
)
_HAN = "[一-龥ࠀ-一가-퟿]+"
_WORDS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
    "tekken": (_TEKKEN,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED}+",
        r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
}
_SAME = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "pixtral": "llama-bpe",
    "dbrx": "llama-bpe", "smaug-bpe": "llama-bpe", "deepseek-r1-qwen": "qwen2", "stablelm2": "qwen2",
    "starcoder": "smollm", "refact": "smollm", "command-r": "smollm", "codeshell": "smollm",
    "exaone": "smollm", "minerva-7b": "smollm", "mpt": "gpt-2", "olmo": "gpt-2", "phi-2": "gpt-2",
    "mellum": "gpt-2", "trillion": "gpt-2",
}  # fmt: skip
#: Words that are tokens are taken whole, and texts begin with BOS unless a key says otherwise.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
#: Keys of tokens that end a text, in addition to the names in end_tokens.py.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id",
             "fim_sep_token_id")  # fmt: skip
#: Finding the merges of a token takes the square of its length.
_MAX_TOKEN_CHARS = 1024


class GgufTokenizer:
    """Raises ModelLoadError for a tokenizer that is not there, damaged or of another kind."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.tokens: list[str] = [str(token) for token in file.array("tokenizer.ggml.tokens")]
        model, self.pre = self._text("model"), self._text("pre", "default")
        if not self.tokens:
            self._fail("holds no vocabulary")
        longest = max(map(len, self.tokens))
        if longest > _MAX_TOKEN_CHARS:
            self._fail(f"has a token of {longest:,} characters, over the limit of {_MAX_TOKEN_CHARS:,}")
        self._kinds = file.array("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(self.tokens)
        if len(self._kinds) != len(self.tokens):
            self._fail(f"lists {len(self.tokens)} tokens but {len(self._kinds)} of their types")
        self._correct_kinds()
        if model == "gpt2":
            self.backend = self._bpe()
        elif model == "llama":
            self.backend = self._spm()
        else:
            self._fail(f"has a tokenizer of kind {model!r}")
        self.bos, self.eos = self._id("bos_token_id"), self._id("eos_token_id")
        begins = self._file.fields.get(
            "tokenizer.ggml.add_bos_token", model == "llama" or self.pre in _WHOLE_WORDS
        )
        self.add_bos = bool(begins) and self.bos is not None
        self.backend.add_tokens(
            [
                AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
                for token, kind in zip(self.tokens, self._kinds, strict=True)
                if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and token
            ]
        )
        if self.add_bos and self.bos is not None:
            self.backend.post_processor = processors.TemplateProcessing(
                single=f"{self.tokens[self.bos]}:0 $A:0",
                pair=f"{self.tokens[self.bos]}:0 $A:0 $B:0",
                special_tokens=[(self.tokens[self.bos], self.bos)],
            )

    def _fail(self, what: str) -> NoReturn:
        raise ModelLoadError(
            f"{self._file.path} {what}, which is not supported; use the safetensors version of the model, "
            "which has a tokenizer.json"
        )

    def _text(self, key: str, default: str = "") -> str:
        return str(self._file.fields.get(f"tokenizer.ggml.{key}", default))

    def _id(self, key: str) -> int | None:
        number = self._file.fields.get(f"tokenizer.ggml.{key}")
        return number if isinstance(number, int) and 0 <= number < len(self.tokens) else None

    def text_of(self, number: int | None) -> str:
        return "" if number is None else self.tokens[number]

    @property
    def chat_template(self) -> str:
        return str(self._file.fields.get("tokenizer.chat_template", ""))

    @property
    def ends(self) -> tuple[int, ...]:
        """All tokens that end a text: those with such a key, and control tokens with such a name."""
        named = {n for n, token in enumerate(self.tokens) if token in END_TOKENS and self._is_control(n)}
        keyed = {n for n in map(self._id, _END_KEYS) if n is not None}
        return tuple(sorted(named | keyed))

    def _is_control(self, number: int) -> bool:
        return bool(self._kinds[number] == TokenType.CONTROL)

    def _correct_kinds(self) -> None:
        """Marks tokens with the name of a control token as control tokens, because many files list them as
        text. A BPE token that merges produce stays text, such as "</s>" in HTML."""
        names = END_TOKENS | FIM_TOKENS
        named = {n for n, token in enumerate(self.tokens) if token in names and not self._is_control(n)}
        if named:
            merged = {str(merge).replace(" ", "", 1) for merge in self._file.array("tokenizer.ggml.merges")}
            self._kinds = [
                TokenType.CONTROL if n in named and self.tokens[n] not in merged else kind
                for n, kind in enumerate(self._kinds)
            ]

    def _bpe(self) -> Tokenizer:
        words = _WORDS.get(_SAME.get(self.pre, self.pre))
        if words is None:
            self._fail(f"cuts words for its tokenizer by {self.pre!r}")
        merges = [tuple(str(merge).split(" ", 1)) for merge in self._file.array("tokenizer.ggml.merges")]
        vocabulary = {token: n for n, token in enumerate(self.tokens)}
        tokenizer = Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=[m for m in merges if len(m) == 2 and "".join(m) in vocabulary],
                ignore_merges=self.pre in _WHOLE_WORDS,
            )
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _spm(self) -> Tokenizer:
        scores = self._file.array("tokenizer.ggml.scores")
        if len(scores) != len(self.tokens):
            self._fail(f"lists {len(self.tokens)} tokens but {len(scores)} scores")
        ids = {token: n for n, token in enumerate(self.tokens)}
        merges = [
            (-scores[n], ids[token[:at]], ids[token[at:]])
            for token, n in ids.items()
            for at in range(1, len(token))
            if token[:at] in ids and token[at:] in ids
        ]
        unknown = next(
            (t for t, k in zip(self.tokens, self._kinds, strict=True) if k == TokenType.UNKNOWN), None
        )
        tokenizer = Tokenizer(
            models.BPE(
                vocab=ids,
                merges=[(self.tokens[left], self.tokens[right]) for _, left, right in sorted(merges)],
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = bool(self._file.fields.get("tokenizer.ggml.add_space_prefix", True))
        steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
        return tokenizer
