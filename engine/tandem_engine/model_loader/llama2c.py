"""Checkpoints of llama2.c (stories15M.bin and its like), rewritten as a folder of Hugging Face safetensors.

    7 int32: dim, hidden dim, layers, heads, KV heads, vocabulary (negative: with a head of its own), context
    float32: embedding; then, for all layers together, attention norms, wq, wk, wv, wo, MLP norms, w1, w2, w3;
             final norm; two RoPE tables, which follow from the rest; the head, if it has one

The vocabulary (tokenizer.bin) is in the same folder, or follows in the same file: int32 longest token, then
for each token float32 score, int32 length, bytes. It is SentencePiece's, with spaces instead of "▁".
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file
from tandem_core.errors import ModelLoadError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

_SPECIAL = ["<unk>", "<s>", "</s>"]
_HEADER = struct.Struct("<7i")


class _Header(NamedTuple):
    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    context: int

    @property
    def vocab_size(self) -> int:
        return abs(self.vocabulary)

    @property
    def is_plausible(self) -> bool:
        return (
            all(0 < n < 1 << 20 for n in (*self[:5], self.vocab_size, self.context))
            and self.dim % (2 * self.num_heads) == 0
            and self.num_heads % self.num_kv_heads == 0
        )

    def blocks(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """In file order: Hugging Face name ("{}": the layer; "": unused) and shape of each run of numbers."""
        n, dim, inner = self.num_layers, self.dim, self.hidden_dim
        head_dim = dim // self.num_heads
        kv_dim = head_dim * self.num_kv_heads
        layer = "model.layers.{}."
        yield "model.embed_tokens.weight", (self.vocab_size, dim)
        yield f"{layer}input_layernorm.weight", (n, dim)
        yield f"{layer}self_attn.q_proj.weight", (n, dim, dim)
        yield f"{layer}self_attn.k_proj.weight", (n, kv_dim, dim)
        yield f"{layer}self_attn.v_proj.weight", (n, kv_dim, dim)
        yield f"{layer}self_attn.o_proj.weight", (n, dim, dim)
        yield f"{layer}post_attention_layernorm.weight", (n, dim)
        yield f"{layer}mlp.gate_proj.weight", (n, inner, dim)
        yield f"{layer}mlp.down_proj.weight", (n, dim, inner)
        yield f"{layer}mlp.up_proj.weight", (n, inner, dim)
        yield "model.norm.weight", (dim,)
        yield "", (2, self.context, head_dim // 2)
        if self.vocabulary < 0:
            yield "lm_head.weight", (self.vocab_size, dim)


def write_checkpoint(path: Path, folder: Path) -> None:
    """Makes folder with config.json, model.safetensors and the tokenizer. Raises ModelLoadError."""
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
    header = _Header(*_HEADER.unpack(start)) if len(start) == _HEADER.size else None
    if header is None or not header.is_plausible:
        raise ModelLoadError(
            f"{path} is no llama2.c checkpoint of version 0; pull a folder of safetensors or a GGUF file"
        )
    num_numbers = sum(math.prod(shape) for _, shape in header.blocks())
    size, end = path.stat().st_size, _HEADER.size + 4 * num_numbers
    if size < end:
        raise ModelLoadError(f"{path} has {size} of {end} bytes; download it again")
    vocabulary = path.with_name("tokenizer.bin")
    if size == end and not vocabulary.is_file():
        raise ModelLoadError(f"{path} has no vocabulary; put llama2.c's tokenizer.bin into the same folder")
    with (path if size > end else vocabulary).open("rb") as file:
        file.seek(end if size > end else 0)
        tokenizer = _read_tokenizer(file.read(), header.vocab_size, path)
    folder.mkdir()
    _write_tokenizer(tokenizer, folder)
    _write_config(header, folder)
    numbers = np.memmap(path, "<f4", "r", _HEADER.size, (num_numbers,))
    tensors: dict[str, np.ndarray] = {}
    offset = 0
    for name, shape in header.blocks():
        block = numbers[offset : offset + math.prod(shape)].reshape(shape)
        offset += block.size
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # Rotated pairs are neighbours here, and half a head apart in Hugging Face's order.
            pairs = block.reshape(header.num_layers, -1, header.dim // header.num_heads // 2, 2, header.dim)
            block = pairs.swapaxes(2, 3).reshape(shape)
        if "{}" in name:
            tensors |= {name.format(layer): np.ascontiguousarray(b) for layer, b in enumerate(block)}
        elif name:
            tensors[name] = np.ascontiguousarray(block)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes it for its owner alone


def _write_config(header: _Header, folder: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": header.dim,
        "intermediate_size": header.hidden_dim,
        "num_hidden_layers": header.num_layers,
        "num_attention_heads": header.num_heads,
        "num_key_value_heads": header.num_kv_heads,
        "vocab_size": header.vocab_size,
        "max_position_embeddings": header.context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": header.vocabulary > 0,
        "bos_token_id": 1,
        # The token that begins the next story ends one, as in run.c.
        "eos_token_id": [1, 2],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _read_tokenizer(data: bytes, vocab_size: int, path: Path) -> Tokenizer:
    """The vocabulary as byte-pair encoding that merges in the order of scores, as SentencePiece does."""
    pieces, scores, offset = list(_SPECIAL), [0.0] * 3, 4
    try:
        for index in range(vocab_size):
            score, length = struct.unpack_from("<fi", data, offset)
            text = data[offset + 8 : offset + 8 + length].decode()
            offset += 8 + length
            if not 0 < length <= offset <= len(data):
                raise ValueError(f"token {index} ends after the data")
            if index >= len(_SPECIAL):
                pieces.append(text.replace(" ", "▁"))
                scores.append(score)
    except (struct.error, ValueError) as error:
        raise ModelLoadError(f"the vocabulary of {path} is damaged ({error}); download it again") from error
    ids = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        (scores[index], piece[:cut], piece[cut:])
        for index, piece in enumerate(pieces)
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    merges.sort(key=lambda m: -m[0])
    model = models.BPE(
        ids, [(a, b) for _, a, b in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in _SPECIAL])
    return tokenizer


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    unk, bos, eos = _SPECIAL
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
