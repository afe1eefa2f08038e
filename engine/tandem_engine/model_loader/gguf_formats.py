"""GGUF's weight formats: their values, and the packing of ours (tandem_kernels.quantized_weight) for each.

Q4_K and Q6_K are packings themselves. Most of the other formats round to a grid of equal steps in each group
of 32, which a packing holds as it is; at most a product of two scales is rounded to float16. The rest goes to
8 bits in groups of 32. The error that this adds, relative to the format's own (rms of normal random numbers,
llama.cpp's quantizer, benchmarks/gguf_quality.py; Student's t with 5 degrees of freedom gives the same within
.02):

    INT4   0     Q4_0 Q4_1 TQ1_0 TQ2_0    .001 IQ1_S   .005 IQ3_S   .07 IQ3_XXS
    LUT4   0     IQ4_NL MXFP4
    INT8   0     Q8_0 Q5_0   .001 IQ2_XXS   .003 IQ4_XS   .14 Q5_1   .15 Q5_K
           below .04   Q3_K Q2_K IQ2_XS IQ2_S IQ1_M

In 4 bits Q2_K and IQ1_M would add .22 and .16 of a large error of their own, which costs perplexity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from gguf.quants import IQ4_NL, MXFP4, Q4_K
from numpy.typing import NDArray
from tandem_kernels import Packing, QuantizedWeight, round_to_grid

from tandem_engine.model_loader.stored import Dense, Grid, Groups, Lut, Stored

_Kind: TypeAlias = GGMLQuantizationType
_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]

#: Formats of the model's own numbers.
FLOATS = (_Kind.F32, _Kind.F16, _Kind.BF16)


def _half(blocks: _Bytes, at: int) -> _Floats:
    """[blocks, 1]: the float16 at these bytes of each block."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _words(blocks: _Bytes, start: int, end: int, dtype: type[np.generic]) -> NDArray[Any]:
    return np.ascontiguousarray(blocks[:, start:end]).view(dtype)


def _nibbles(packed: _Bytes) -> _Bytes:
    """[blocks, bytes] -> [blocks, 2 * bytes], the lower half of each byte first."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)


def _q4_k(blocks: _Bytes) -> QuantizedWeight:
    """Each block as a row."""
    scale, minimum = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    # 32 bytes hold a group in their lower halves and the next one in the upper halves.
    codes = np.stack([blocks[:, 16:].reshape(-1, 4, 32) & 15, blocks[:, 16:].reshape(-1, 4, 32) >> 4], axis=2)
    return QuantizedWeight(
        Packing.Q4_K,
        torch.from_numpy(codes.reshape(-1, 256)),
        torch.from_numpy(_words(blocks, 0, 2, np.float16)),
        torch.from_numpy(-_words(blocks, 2, 4, np.float16)),
        torch.from_numpy(np.stack([scale, minimum], axis=2).astype(np.int8)),
    )


def _q6_k(blocks: _Bytes) -> QuantizedWeight:
    """Each block as a row."""
    # Per 128 codes, 64 bytes have the lower bits of codes 64 apart, 32 the upper bits of codes 32 apart.
    lower = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(2, 1) & 15
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    scales = torch.from_numpy(_words(blocks, 208, 210, np.float16))
    return QuantizedWeight(
        Packing.Q6_K,
        torch.from_numpy(lower.reshape(-1, 256) | upper.reshape(-1, 256) << 4),
        scales,
        scales * -32,
        torch.from_numpy(_words(blocks, 192, 208, np.int8)).view(-1, 8, 2),
    )


def _iq4_xs(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    low = _nibbles(blocks[:, 4:8])
    high = (_words(blocks, 2, 4, np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    return _symmetric(_half(blocks, 0) * ((low | high << 4).astype(np.float32) - 32), 128)


def _iq3_s(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    step = _half(blocks, 0) * (1 + 2 * _nibbles(blocks[:, 106:110]))
    return _symmetric(2 * step, 7.5)


def _iq3_xxs(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    # Levels 4, 12 .. 52 and 62, the last of which becomes 60.
    factors = (_words(blocks, 66, 98, np.uint32) >> 28).astype(np.float32)
    return _symmetric(_half(blocks, 0) * (2 + 4 * factors), 7.5)


def _iq2_xxs(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    # Levels 8, 25 and 43 with a sign.
    factors = (_words(blocks, 2, 66, np.uint32)[:, 1::2] >> 28).astype(np.float32)
    return _symmetric(_half(blocks, 0) * (1 + 2 * factors) * np.float32(0.125), 128)


def _iq2(at: int) -> Callable[[_Bytes], tuple[_Floats, _Floats]]:
    def grid(blocks: _Bytes) -> tuple[_Floats, _Floats]:
        # The same levels, with a scale for each 16 values. Codes of twice these levels hold the half with the
        # larger scale as it is. Rounded to 127 steps, the level 8 would always be 2 % too large.
        factors = _nibbles(blocks[:, at : at + 8]).reshape(len(blocks), -1, 2).max(axis=2)
        return _symmetric(_half(blocks, 0) * (1 + 2 * factors.astype(np.float32)) * np.float32(0.0625), 128)

    return grid


def _iq1_s(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    words = _words(blocks, 34, 50, np.uint16)
    step = _half(blocks, 0) * (2 * ((words >> 12) & 7) + 1)
    return step, step * np.where(words & 0x8000, -1.125, -0.875)


def _symmetric(scales: _Floats, zero: float) -> tuple[_Floats, _Floats]:
    """Scales, and minimums for which the code `zero` means 0."""
    return scales, -zero * scales


def _ternary(at: int) -> Callable[[_Bytes], tuple[_Floats, _Floats]]:
    return lambda blocks: _symmetric(np.repeat(_half(blocks, at), 8, axis=1), 1)


#: Formats that are packings.
_NATIVE: dict[_Kind, tuple[Packing, Callable[[_Bytes], QuantizedWeight]]] = {
    _Kind.Q4_K: (Packing.Q4_K, _q4_k),
    _Kind.Q6_K: (Packing.Q6_K, _q6_k),
}

#: Formats on a grid -> the packing that holds it, and scales and minimums [blocks, groups of a block].
_GRIDS: dict[_Kind, tuple[Packing, Callable[[_Bytes], tuple[_Floats, _Floats]]]] = {
    _Kind.Q4_0: (Packing.INT4, lambda blocks: _symmetric(_half(blocks, 0), 8)),
    _Kind.Q4_1: (Packing.INT4, lambda blocks: (_half(blocks, 0), _half(blocks, 2))),
    _Kind.IQ3_S: (Packing.INT4, _iq3_s),
    _Kind.IQ3_XXS: (Packing.INT4, _iq3_xxs),
    _Kind.IQ1_S: (Packing.INT4, _iq1_s),
    _Kind.TQ1_0: (Packing.INT4, _ternary(52)),
    _Kind.TQ2_0: (Packing.INT4, _ternary(64)),
    _Kind.Q5_0: (Packing.INT8, lambda blocks: _symmetric(_half(blocks, 0), 128)),
    _Kind.Q8_0: (Packing.INT8, lambda blocks: _symmetric(_half(blocks, 0), 128)),
    _Kind.IQ4_XS: (Packing.INT8, _iq4_xs),
    _Kind.IQ2_XXS: (Packing.INT8, _iq2_xxs),
    _Kind.IQ2_XS: (Packing.INT8, _iq2(66)),
    _Kind.IQ2_S: (Packing.INT8, _iq2(74)),
}

#: Formats of 32 codes of 4 bits -> what codes stand for, the bytes before the codes, and scales [blocks, 1].
_TABLES: dict[_Kind, tuple[tuple[float, ...], int, Callable[[_Bytes], _Floats]]] = {
    _Kind.IQ4_NL: (tuple(map(float, IQ4_NL.kvalues)), 2, lambda blocks: _half(blocks, 0)),
    _Kind.MXFP4: (tuple(map(float, MXFP4.kvalues)), 1, lambda b: MXFP4.e8m0_to_fp32_half(b[:, :1])),
}


def grid_of(kind: _Kind) -> Grid | None:
    """How a format's weights are stored; None: floats."""
    if kind in FLOATS:
        return None
    if kind in _NATIVE:
        bits = _NATIVE[kind][0].bits
        return Grid(kind.name, Groups, bits, GGML_QUANT_SIZES[kind][0], has_factors=True)
    if kind in _GRIDS:
        return Grid(kind.name, Groups, _GRIDS[kind][0].bits)
    if kind in _TABLES:
        return Grid(kind.name, Lut, 4, table=_TABLES[kind][0])
    return Grid(kind.name, Dense, 8)


def values_of(kind: _Kind, rows: _Bytes) -> torch.Tensor:
    """rows [R, bytes] -> [R, K] float32. Raises NotImplementedError for formats that gguf cannot read."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.array(dequantize(np.array(rows), kind), dtype=np.float32))


def stored_of(kind: _Kind, rows: _Bytes) -> Stored:
    """rows [R, bytes] of a format that is not of floats, as grid_of says; values where a grid's scales exceed
    float16. Raises NotImplementedError for formats that gguf cannot read."""
    blocks = rows.reshape(-1, GGML_QUANT_SIZES[kind][1])
    if kind in _NATIVE:
        made = _NATIVE[kind][1](blocks)
        assert made.factors is not None
        codes, scales, minimums = (
            part.view(len(rows), -1) for part in (made.codes, made.scales, made.minimums)
        )
        return Groups(codes, scales, minimums=minimums, factors=made.factors.view(len(rows), -1, 2))
    if kind in _TABLES:
        table, start, scales_of = _TABLES[kind]
        # The first 16 codes are the lower halves of the bytes.
        codes = np.concatenate([blocks[:, start:] & 15, blocks[:, start:] >> 4], axis=1)
        scales = torch.from_numpy(np.array(scales_of(blocks), dtype=np.float32))
        return Lut(
            torch.from_numpy(codes).view(len(rows), -1), torch.tensor(table), scales.view(len(rows), -1)
        )
    values = values_of(kind, rows)
    if kind not in _GRIDS:
        return Dense(values)
    packing, grid = _GRIDS[kind]
    with np.errstate(all="ignore"):
        scales, minimums = (
            torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32)).view(len(rows), -1).half()
            for part in grid(blocks)
        )
    if not (scales.isfinite().all() and minimums.isfinite().all()):
        return Dense(values)
    return Groups(round_to_grid(values, packing, scales, minimums).codes, scales, minimums=minimums)
