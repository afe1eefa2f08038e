"""The contract between the readers of weights and the converter: how a checkpoint stores a matrix.

    Dense    floating-point values; also those of a quantized format whose grid no packing has
    Groups   code * scale + minimum, or (code - zero) * scale
    Lut      table[code] * scale

A scale belongs to `group` neighbours of a row. `Grid` says from headers alone which of these a reader will
return; `pick_packing` chooses our packing (tandem_kernels.quantized_weight) for it, one that holds the stored
numbers as they are where there is one, and `pack` converts some rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from tandem_kernels import GROUP_SIZE, Packing, QuantizedWeight, quantize_weight
from torch import Tensor


@dataclass(frozen=True)
class Dense:
    #: [R, K] floating point.
    values: Tensor


@dataclass(frozen=True)
class Groups:
    """At most one of zeros and minimums is given; without both the code 0 means 0."""

    #: [R, K] uint8.
    codes: Tensor
    #: [R, K / group] floating point, as are zeros (the codes that mean 0) and minimums.
    scales: Tensor
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    #: [R, K / 32, 2] int8, of GGUF's Q4_K and Q6_K: QuantizedWeight.factors.
    factors: Tensor | None = None
    #: [K] int64: the input that each column belongs to (GPTQ's act-order); None: its own position.
    order: Tensor | None = None


@dataclass(frozen=True)
class Lut:
    #: [R, K] uint8 below 16.
    codes: Tensor
    #: [16] float32.
    table: Tensor
    #: [R, K / group] floating point.
    scales: Tensor


Stored: TypeAlias = Dense | Groups | Lut


@dataclass(frozen=True)
class Grid:
    """What `WeightSource.stored` returns for a quantized matrix."""

    #: The format's name, for the log.
    name: str
    form: type[Dense] | type[Groups] | type[Lut]
    #: Of a code.
    bits: int
    #: Neighbours of a row that share a scale.
    group: int = GROUP_SIZE
    #: The minimum is a whole number of scales.
    has_zeros: bool = False
    #: Groups.factors are given.
    has_factors: bool = False


def pick_packing(grid: Grid) -> Packing:
    """The packing that holds the grid, or else 8 bits, whose error is the least."""
    if grid.form is Groups:
        if grid.has_factors:
            return Packing.Q4_K if grid.bits == 4 else Packing.Q6_K
        if grid.bits <= 4 and grid.group % GROUP_SIZE == 0:
            return Packing.INT4
    return Packing.INT8


def numbers_of(stored: Stored) -> list[Tensor]:
    """All but the codes: what must be finite."""
    if isinstance(stored, Dense):
        return [stored.values]
    if isinstance(stored, Lut):
        return [stored.table, stored.scales]
    return [part for part in (stored.scales, stored.zeros, stored.minimums) if part is not None]


def values_of(stored: Stored) -> Tensor:
    """[R, K] floating point: the numbers that are stored."""
    if isinstance(stored, Dense):
        return stored.values
    scales = _spread(stored.scales.float(), stored.codes)
    if isinstance(stored, Lut):
        return stored.table[stored.codes.long()] * scales
    codes = stored.codes.float()
    if stored.zeros is not None:
        codes -= _spread(stored.zeros.float(), codes)
    values = codes * scales
    if stored.minimums is not None:
        values += _spread(stored.minimums.float(), codes)
    if stored.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, stored.order, values)


def pack(stored: Stored, packing: Packing) -> QuantizedWeight:
    """Rows in the packing that was picked for their grid. Raises ValueError: scales exceed float16."""
    if isinstance(stored, Groups) and (packed := _pack_groups(stored, packing)):
        return packed
    return quantize_weight(values_of(stored), packing)


def _pack_groups(stored: Groups, packing: Packing) -> QuantizedWeight | None:
    """None: the packing does not have these groups."""
    blocks = stored.codes.shape[1] // packing.depth
    if blocks % stored.scales.shape[1]:
        return None
    scales, minimums = stored.scales.half(), stored.minimums
    if minimums is None:
        zeros = 0 if stored.zeros is None else stored.zeros.float()
        minimums = -zeros * stored.scales.float()
    repeats = blocks // stored.scales.shape[1]
    return QuantizedWeight(
        packing,
        stored.codes,
        scales.repeat_interleave(repeats, 1),
        minimums.half().repeat_interleave(repeats, 1),
        stored.factors,
    )


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """[R, K / group] -> [R, K]."""
    return values.repeat_interleave(like.shape[1] // values.shape[1], 1)
