"""Our weight file: which tensors it holds and which Hugging Face tensors each is made of.

The file (`model-<dtype>.safetensors`) has the layout that the decoder computes with, so processes map it and
share its pages without a private copy:

    embed_tokens.weight              [V, H]
    layers.N.input_norm.weight       [H]
    layers.N.qkv_proj.weight         [(Hq + 2 Hkv) D, H]   queries, keys, values: one GEMM
    layers.N.qkv_proj.bias           [(Hq + 2 Hkv) D]      qwen2, or attention_bias
    layers.N.q_norm.weight, k_norm   [D]                   qwen3
    layers.N.o_proj.weight (, bias)  [H, Hq D]
    layers.N.post_norm.weight        [H]
    layers.N.gate_up_proj.weight     [2 I, H]              one GEMM
    layers.N.down_proj.weight        [H, I]
    norm.weight                      [H]
    lm_head.weight                   [V, H]                absent when tied to the embedding

Further forms of the file hold the projections as the compiled CPU kernels want them
(tandem_kernels.packed_linear), in dtype (`-packed`) or quantized (`-w8a8`, `-w4a8`), and always
lm_head.weight, as the embedding is looked up by row. Where the parts of a fused projection have different
bits, the file holds it in pieces: qkv_proj.weight, qkv_proj.weight.1 and so on.

Rows of queries, keys and their norms are interleaved within each head, dimension d beside d + D/2 (the
order of llama GGUFs), for rope.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from math import prod
from operator import itemgetter

import torch
from tandem_kernels import PANEL, Packing, packed_shape, quantized_shape
from torch import Tensor

from tandem_engine.models.config import ModelConfig


class Quantization(StrEnum):
    """How projections are multiplied: in the model's dtype, or by activations of 8 bits; weights then have 8
    bits (W8A8) or as many as the source's, 4 if that is not quantized (W4A8)."""

    NONE = "none"
    W8A8 = "w8a8"
    W4A8 = "w4a8"


@dataclass(frozen=True)
class WeightForm:
    """What one weight file holds."""

    #: Type of the embedding, of weights that are not quantized, of activations and of KV. Norms and biases
    #: are float32.
    dtype: torch.dtype
    packed: bool = False
    quantization: Quantization = Quantization.NONE

    @property
    def suffix(self) -> str:
        if self.quantization is not Quantization.NONE:
            return f"-{self.quantization}"
        return "-packed" if self.packed else ""

    @property
    def file_name(self) -> str:
        return f"model-{str(self.dtype).removeprefix('torch.')}{self.suffix}.safetensors"

    @property
    def holds_head(self) -> bool:
        """Whether lm_head.weight is there although it is tied to the embedding."""
        return self.packed or self.quantization is not Quantization.NONE


@dataclass(frozen=True)
class FileTensor:
    """Shape and dtype of one tensor in the file; a packed projection has more than two dimensions, and uint8
    where it is quantized."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorPart:
    """One Hugging Face tensor, with `num_rotary_heads` heads to interleave (0: copied as it is)."""

    hf_name: str
    shape: tuple[int, ...]
    num_rotary_heads: int = 0

    def arrange(self, tensor: Tensor) -> Tensor:
        """The tensor with rows in our order: [heads, 2, D/2] becomes [heads, D/2, 2]."""
        if not self.num_rotary_heads:
            return tensor
        half = self.shape[0] // self.num_rotary_heads // 2
        heads = tensor.reshape(self.num_rotary_heads, 2, half, -1)
        return heads.transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of our file: its parts joined along the first dimension."""

    name: str
    parts: tuple[TensorPart, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(p.shape[0] for p in self.parts), *self.parts[0].shape[1:])

    @property
    def is_projection(self) -> bool:
        return self.name.endswith(("_proj.weight", "lm_head.weight"))

    def by_packing(
        self, packings: Sequence[Packing | None]
    ) -> list[tuple[Packing | None, tuple[TensorPart, ...]]]:
        """Neighbouring parts with equal packings; packings: of each part, None for the form's dtype.

        They are apart only at the boundaries of panels; else all have 8 bits, or the form's dtype.
        """
        grouped = [
            (packing, tuple(part for part, _ in parts))
            for packing, parts in groupby(zip(self.parts, packings, strict=True), key=itemgetter(1))
        ]
        if any(sum(p.shape[0] for p in parts) % PANEL for _, parts in grouped[:-1]):
            return [(None if None in packings else Packing.INT8, self.parts)]
        return grouped

    def in_file(
        self, form: WeightForm, packing: Packing | None, parts: tuple[TensorPart, ...] = ()
    ) -> FileTensor:
        """Shape and dtype in a file of this form, of these parts or of all; packing: where quantized.

        A projection that the kernels do not take (tandem_kernels.packed_linear) stays as it is.
        """
        rows = sum(p.shape[0] for p in parts or self.parts)
        if not self.is_projection:
            dtype = torch.float32 if len(self.shape) == 1 else form.dtype
            return FileTensor((rows, *self.shape[1:]), dtype)
        depth = self.shape[1]
        if packing and (quantized := quantized_shape(rows, depth, packing)):
            return FileTensor(quantized, torch.uint8)
        if form.holds_head and (packed := packed_shape(rows, depth, form.dtype)):
            return FileTensor(packed, form.dtype)
        return FileTensor((rows, depth), form.dtype)


def piece_name(name: str, piece: int) -> str:
    """Name of the n-th tensor in the file that makes up a stored tensor."""
    return f"{name}.{piece}" if piece else name


def stored_tensors(config: ModelConfig, form: WeightForm) -> Iterator[StoredTensor]:
    """Every tensor of the file for this config, in file order."""
    hidden, inner, d = config.hidden_size, config.intermediate_size, config.head_dim

    def plain(name: str, hf_name: str, *shape: int) -> StoredTensor:
        return StoredTensor(name, (TensorPart(hf_name, shape),))

    yield plain("embed_tokens.weight", "model.embed_tokens.weight", config.vocab_size, hidden)
    for n in range(config.num_layers):
        ours, theirs = f"layers.{n}", f"model.layers.{n}"
        attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        yield plain(f"{ours}.input_norm.weight", f"{theirs}.input_layernorm.weight", hidden)
        for kind, rest in [("weight", (hidden,)), ("bias", ())][: 1 + config.qkv_bias]:
            q = TensorPart(f"{attn}.q_proj.{kind}", (config.q_size, *rest), config.num_heads)
            k = TensorPart(f"{attn}.k_proj.{kind}", (config.kv_size, *rest), config.num_kv_heads)
            v = TensorPart(f"{attn}.v_proj.{kind}", (config.kv_size, *rest))
            yield StoredTensor(f"{ours}.qkv_proj.{kind}", (q, k, v))
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                yield StoredTensor(f"{ours}.{norm}.weight", (TensorPart(f"{attn}.{norm}.weight", (d,), 1),))
        yield plain(f"{ours}.o_proj.weight", f"{attn}.o_proj.weight", hidden, config.q_size)
        if config.o_bias:
            yield plain(f"{ours}.o_proj.bias", f"{attn}.o_proj.bias", hidden)
        yield plain(f"{ours}.post_norm.weight", f"{theirs}.post_attention_layernorm.weight", hidden)
        for kind, rest in [("weight", (hidden,)), ("bias", ())][: 1 + config.mlp_bias]:
            gate = TensorPart(f"{mlp}.gate_proj.{kind}", (inner, *rest))
            up = TensorPart(f"{mlp}.up_proj.{kind}", (inner, *rest))
            yield StoredTensor(f"{ours}.gate_up_proj.{kind}", (gate, up))
        yield plain(f"{ours}.down_proj.weight", f"{mlp}.down_proj.weight", hidden, inner)
        if config.mlp_bias:
            yield plain(f"{ours}.down_proj.bias", f"{mlp}.down_proj.bias", hidden)
    yield plain("norm.weight", "model.norm.weight", hidden)
    if form.holds_head or not config.tie_word_embeddings:
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        yield plain("lm_head.weight", head, config.vocab_size, hidden)
