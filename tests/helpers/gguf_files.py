"""Small GGUF files with random weights in any format, as llama.cpp's converter names and orders them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

Kind = GGMLQuantizationType
#: Where the float16 factors of a block lie.
FACTORS = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,),
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,), Kind.IQ3_S: (0,), Kind.IQ3_XXS: (0,), Kind.IQ2_XXS: (0,),
    Kind.IQ2_XS: (0,),
    Kind.IQ2_S: (0,), Kind.IQ1_S: (0,), Kind.TQ1_0: (52,), Kind.TQ2_0: (64,),
}  # fmt: skip
#: Formats whose scales are no float16.
OTHERS = (Kind.IQ1_M, Kind.MXFP4, Kind.NVFP4)
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCABULARY, CONTEXT = 256, 512, 4, 2, 2, 105, 256


def random_blocks(kind: Kind, rows: int, depth: int, seed: int, scale: float = 0.06) -> NDArray[np.uint8]:
    """[rows, bytes]: any bits are valid codes; the factors make the values' deviation about `scale`."""
    generator = np.random.default_rng(seed)
    if kind in FLOATS:
        return gguf.quantize(generator.normal(0, scale, (rows, depth)).astype(np.float32), kind).view(
            np.uint8
        )
    block, size = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * depth // block, size), dtype=np.uint8)
    if kind in OTHERS:
        _set_other_scales(kind, blocks, generator)
        return blocks.reshape(rows, -1)
    factors = generator.uniform(0.5, 1.5, (len(blocks), len(FACTORS[kind]))).astype(np.float32)
    # A minimum subtracts the codes' mean.
    unit = 1.0
    for _ in range(2):
        for n, at in enumerate(FACTORS[kind]):
            sign = -8 if n and kind is Kind.Q4_1 else -16 if n and kind is Kind.Q5_1 else 1
            column = (factors[:, n] * sign * unit).astype(np.float16)
            blocks[:, at : at + 2] = column.view(np.uint8).reshape(-1, 2)
        unit *= scale / gguf.dequantize(blocks, kind).std()
    return blocks.reshape(rows, -1)


def _set_other_scales(kind: Kind, blocks: NDArray[np.uint8], generator: np.random.Generator) -> None:
    count = len(blocks)
    if kind is Kind.MXFP4:
        blocks[:, 0] = generator.integers(121, 124, count)
    elif kind is Kind.NVFP4:
        blocks[:, :4] = generator.integers(8, 24, (count, 4))
    else:
        words = blocks[:, 48:56].copy().view(np.uint16)
        half = int(np.float16(0.01).view(np.uint16))
        for n in range(4):
            words[:, n] = (words[:, n] & 0x0FFF) | ((half >> 4 * n & 15) << 12)
        blocks[:, 48:56] = words.view(np.uint8)


def tensor_shapes(layers: int = LAYERS, arch: str = "llama") -> dict[str, tuple[int, ...]]:
    """llama.cpp's names; torch's order of dimensions."""
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for n in range(layers):
        p = f"blk.{n}"
        shapes |= {f"{p}.attn_norm.weight": (HIDDEN,), f"{p}.ffn_norm.weight": (HIDDEN,)}
        shapes |= {f"{p}.attn_q.weight": (HIDDEN, HIDDEN), f"{p}.attn_output.weight": (HIDDEN, HIDDEN)}
        shapes |= {f"{p}.attn_k.weight": (kv, HIDDEN), f"{p}.attn_v.weight": (kv, HIDDEN)}
        shapes |= {f"{p}.ffn_{x}.weight": (INNER, HIDDEN) for x in ("gate", "up")}
        shapes[f"{p}.ffn_down.weight"] = (HIDDEN, INNER)
        if arch == "qwen2":
            shapes |= {f"{p}.attn_{x}.bias": (HIDDEN if x == "q" else kv,) for x in "qkv"}
    return shapes | {"output.weight": (VOCABULARY, HIDDEN)}


def write_gguf(
    path: Path,
    kind_of: Callable[[str], Kind],
    *,
    arch: str = "llama",
    keys: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    extra: Mapping[str, NDArray[Any]] | None = None,
    split: int = 0,
) -> list[Path]:
    """A model whose matrices have the formats of kind_of; norms and biases are float32. keys adds metadata,
    extra adds float32 tensors. split: tensors per file. Returns the files."""
    options = {"split_max_tensors": split} if split else {}
    writer = gguf.GGUFWriter(path, arch, **options)
    writer.add_vocab_size(VOCABULARY)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    keys(writer)
    for seed, (name, shape) in enumerate(tensor_shapes(arch=arch).items()):
        if len(shape) == 1:
            noise = np.random.default_rng(seed).normal(0, 0.2, shape)
            writer.add_tensor(name, (noise + ("norm" in name)).astype(np.float32))
            continue
        kind = kind_of(name)
        rows = random_blocks(kind, *shape, seed)
        if kind in (Kind.F32, Kind.F16):
            writer.add_tensor(name, rows.view(np.float32 if kind is Kind.F32 else np.float16))
        else:
            writer.add_tensor(name, rows, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))
