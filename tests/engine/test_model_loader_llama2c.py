"""A llama2.c checkpoint gives the tokens that its run.c gives, which is written out here in numpy."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.sampling import SamplingParams
from tandem_engine.llm import LLM
from tandem_engine.model_loader import pull

WORDS = [
    "he",
    "ll",
    "llo",
    "hello",
    " h",
    " hello",
    " w",
    "or",
    "ld",
    "orld",
    " world",
    "é",
    " é",
    "aa",
    "aaa",
]
CONTEXT = 64


def vocabulary() -> list[tuple[float, bytes]]:
    tokens = [(0.0, b"<unk>"), (0.0, b"\n<s>\n"), (0.0, b"\n</s>\n")]
    tokens += [(0.0, f"<0x{n:02X}>".encode()) for n in range(256)]
    merged = [(-float(rank), word.encode()) for rank, word in enumerate(WORDS)]
    letters = [(-1000.0 - n, c.encode()) for n, c in enumerate(" abcdefghijklmnopqrstuvwxyz.")]
    return tokens + merged + letters


def tokenizer_bytes() -> bytes:
    tokens = vocabulary()
    packed = b"".join(struct.pack("<fi", score, len(text)) + text for score, text in tokens)
    return struct.pack("<i", max(len(text) for _, text in tokens)) + packed


def encode(tokens: list[tuple[float, bytes]], text: str) -> list[int]:
    """run.c's encode(): characters, then always the two neighbours that merge to the highest score."""
    ids = {piece: index for index, (_, piece) in enumerate(tokens) if index >= 259}
    found = [1]
    for character in f" {text}" if text else "":
        raw = character.encode()
        found += [ids[raw]] if raw in ids else [byte + 3 for byte in raw]
    while True:
        pairs = [
            (tokens[ids[piece]][0], -n, ids[piece])
            for n in range(1, len(found) - 1)
            if (piece := tokens[found[n]][1] + tokens[found[n + 1]][1]) in ids
        ]
        if not pairs:
            return found
        _, n, merged = max(pairs)
        found[-n : -n + 2] = [merged]


class Reference:
    """run.c's forward(), from the file's own numbers."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        numbers = struct.unpack_from("<7i", data)
        self.dim, inner, self.layers, self.heads, self.kv_heads, vocabulary, context = numbers
        self.size, rest = self.dim // self.heads, np.frombuffer(data[28:], "<f4", len(data) // 4 - 7)
        kv, dim, n = self.kv_heads * self.size, self.dim, self.layers

        def take(*shape: int) -> NDArray[np.float32]:
            nonlocal rest
            block, rest = rest[: int(np.prod(shape))].reshape(shape), rest[int(np.prod(shape)) :]
            return block

        self.embedding = take(abs(vocabulary), dim)
        self.norm1, self.wq, self.wk = take(n, dim), take(n, dim, dim), take(n, kv, dim)
        self.wv, self.wo, self.norm2 = take(n, kv, dim), take(n, dim, dim), take(n, dim)
        self.w1, self.w2, self.w3 = take(n, inner, dim), take(n, dim, inner), take(n, inner, dim)
        self.norm = take(dim)
        take(2, context, self.size // 2)
        self.head = take(abs(vocabulary), dim) if vocabulary < 0 else self.embedding

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Of the last token."""

        def rms(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

        x, count = self.embedding[tokens], len(tokens)
        angle = np.arange(count)[:, None] * 10000.0 ** (-np.arange(0, self.size, 2) / self.size)
        turn = np.exp(1j * angle)[:, None]
        hidden = np.tril(np.ones((count, count))) == 0
        for n in range(self.layers):
            h = rms(x, self.norm1[n])
            q = (h @ self.wq[n].T).reshape(count, self.heads, -1, 2)
            k = (h @ self.wk[n].T).reshape(count, self.kv_heads, -1, 2)
            v = (h @ self.wv[n].T).reshape(count, self.kv_heads, -1)
            q, k = ((y[..., 0] + 1j * y[..., 1]) * turn for y in (q, k))
            k, v = (np.repeat(y, self.heads // self.kv_heads, axis=1) for y in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k.conj()).real / np.sqrt(self.size)
            scores = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
            mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
            x = x + mixed.reshape(count, -1) @ self.wo[n].T
            h = rms(x, self.norm2[n])
            gate = h @ self.w1[n].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ self.w3[n].T)) @ self.w2[n].T
        return rms(x[-1], self.norm) @ self.head.T

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        for _ in range(count):
            tokens = [*tokens, int(self.logits(tokens).argmax())]
        return tokens[-count:]


def write_model(path: Path, *, shared_head: bool = True, kv_heads: int = 1) -> Path:
    """A random checkpoint with heads of 48, as stories15M has them."""
    dim, inner, layers, heads, num_tokens = 96, 128, 2, 2, len(vocabulary())
    kv, generator = 48 * kv_heads, np.random.default_rng(0)

    signed = num_tokens if shared_head else -num_tokens
    header = struct.pack("<7i", dim, inner, layers, heads, kv_heads, signed, CONTEXT)
    shapes: list[tuple[int, ...]] = [(num_tokens, dim), (layers, dim), (layers, dim, dim), (layers, kv, dim)]
    shapes += [(layers, kv, dim), (layers, dim, dim), (layers, dim)]
    shapes += [(layers, inner, dim), (layers, dim, inner), (layers, inner, dim), (dim,)]
    shapes += [(2, CONTEXT, 24)] + ([] if shared_head else [(num_tokens, dim)])
    weights = [(generator.standard_normal(shape) * 0.2).astype("<f4").tobytes() for shape in shapes]
    path.write_bytes(header + b"".join(weights))
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(("shared_head", "kv_heads"), [(True, 1), (False, 2)])
def test_texts_are_those_of_run_c(tmp_path: Path, shared_head: bool, kv_heads: int) -> None:
    path = write_model(tmp_path / "story.bin", shared_head=shared_head, kv_heads=kv_heads)
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bytes())
    folder = pull(str(path))
    manifest = ModelManifest.read(folder)
    assert (manifest.max_model_len, manifest.eos_token_ids, manifest.add_bos) == (CONTEXT, (1, 2), True)
    llm = LLM(folder, dtype="float32", num_blocks=8)
    prompt = llm.tokenizer.encode("hello world")
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    assert llm.generate([prompt], sampling)[0].token_ids == Reference(path).greedy(prompt, 24)


def test_the_vocabulary_may_follow_the_weights_in_one_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "story.data")
    with path.open("ab") as file:
        file.write(tokenizer_bytes())
    tokenizer = Tokenizer(pull(str(path)))
    generator = np.random.default_rng(1)
    for length in range(1, 40):
        text = "".join(generator.choice([*WORDS, "h", "e", " ", "ü", "✓", "\n", "x"], length)).strip()
        ids = tokenizer.encode(text)
        assert ids == encode(vocabulary(), text), text
        assert tokenizer.decode(ids[1:]) == text


def test_what_is_no_checkpoint_or_lacks_a_piece_is_one_sentence(tmp_path: Path) -> None:
    path = write_model(tmp_path / "story.bin")
    with pytest.raises(ModelLoadError, match=r"put llama2\.c's tokenizer\.bin into the same folder"):
        pull(str(path))
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"vocabulary of .* is damaged"):
        pull(str(path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"of .* bytes; download it again"):
        pull(str(path))
    for start in (b"", b"\0" * 28, b"PK" * 40, struct.pack("<7i", 96, 128, 2, 5, 1, 300, 64)):
        path.write_bytes(start)
        with pytest.raises(ModelLoadError, match=r"no llama2\.c checkpoint|is empty|is a text file"):
            pull(str(path))
