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
    #: Bits of a code.
    bits: int
    #: Neighbours of a row that share a scale.
    group: int = GROUP_SIZE
    #: Groups.zeros are given, not minimums.
    has_zeros: bool = False
    #: Groups.factors are given.
    has_factors: bool = False
    #: Groups.order is given.
    has_order: bool = False
    #: Lut.table.
    table: tuple[float, ...] | None = None


def pick_packing(grid: Grid) -> Packing:
    """The packing that holds the grid, or else 8 bits, whose error is the least."""
    if grid.form is Groups and grid.has_factors:
        return Packing.Q4_K if grid.bits == 4 else Packing.Q6_K
    if grid.group % GROUP_SIZE == 0:
        if grid.form is Lut:
            return Packing.LUT4
        if grid.form is Groups and grid.bits <= 4:
            in_blocks = grid.has_zeros and grid.group % Packing.INT4_ZEROS.depth == 0
            return Packing.INT4_ZEROS if in_blocks else Packing.INT4
    return Packing.INT8


def keeps_codes(grid: Grid) -> bool:
    """Whether the packing picked has the grid's codes, so that at most scales are rounded, to float16."""
    return grid.form is not Dense and grid.group % GROUP_SIZE == 0


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
        return stored.table[stored.codes.int()] * scales
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
    """Rows in the packing that was picked for their grid; scales are rounded to float16.

    Raises:
        ValueError: a scale exceeds float16.
    """
    packed = None
    if isinstance(stored, Groups):
        packed = _pack_groups(stored, packing)
    elif isinstance(stored, Lut) and packing is Packing.LUT4:
        table, unit = byte_table(tuple(stored.table.tolist()))
        scales = _repeated((stored.scales.float() / unit).half(), stored.codes, GROUP_SIZE)
        packed = QuantizedWeight(packing, stored.codes, scales, scales * -packing.zero, table=table)
    if packed is None:
        return quantize_weight(values_of(stored), packing)
    if not packed.scales.isfinite().all():
        raise ValueError("scales exceed the range of float16")
    return packed


def byte_table(table: tuple[float, ...]) -> tuple[Tensor, float]:
    """[16] uint8 and a unit: (bytes - 128) / unit is the table.

    It is exact where a power of two makes whole numbers of it, else has the least squared error.
    """
    values = torch.tensor(table, dtype=torch.float64)
    top = float(values.abs().max()) or 1.0
    powers = torch.arange(-8, 8, dtype=torch.float64).exp2()
    others = torch.linspace(96, 127, 3101, dtype=torch.float64) / top
    units = torch.cat([powers[powers * top <= 127], others]).unsqueeze(1)
    errors = ((values * units).round() / units - values).square().sum(1)
    unit = units[errors.argmin()].item()
    return ((values * unit).round() + 128).to(torch.uint8), unit


def _pack_groups(stored: Groups, packing: Packing) -> QuantizedWeight | None:
    """None: the packing does not have these groups."""
    codes, minimums = stored.codes, stored.minimums
    if codes.shape[1] % packing.depth or (codes.shape[1] // packing.depth) % stored.scales.shape[1]:
        return None
    scales = stored.scales.float()
    zeros = torch.zeros_like(scales) if stored.zeros is None else stored.zeros.float()
    if minimums is None and packing is Packing.INT8:
        shifted = codes.float() - _spread(zeros, codes) + packing.zero
        if shifted.amin() < 0 or shifted.amax() > 255:
            return None
        codes, minimums = shifted.to(torch.uint8), scales * -packing.zero
    elif minimums is None:
        minimums = -zeros if packing is Packing.INT4_ZEROS else -zeros * scales
    scales, minimums = (_repeated(part.half(), codes, packing.depth) for part in (stored.scales, minimums))
    return QuantizedWeight(packing, codes, scales, minimums, stored.factors)


def _repeated(values: Tensor, codes: Tensor, depth: int) -> Tensor:
    """[R, K / group] -> [R, K / depth]."""
    return values.repeat_interleave(codes.shape[1] // depth // values.shape[1], 1)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """[R, K / group] -> [R, K]."""
    return values.repeat_interleave(like.shape[1] // values.shape[1], 1)
