"""A projection with packed weights; a dozen rows take about as long as one.

out = x @ weight.T + bias

The packing interleaves 32 output columns, so that the compiled kernels read the weights in the order they
multiply them. Sums over K have one order: a row's bits do not depend on the other rows.

    float32     [panels, K, 32, 1]                                                    csrc/linear.cpp
    bfloat16    [panels, K / 2, 32, 2], neighbours of a row of the weight side by side
    quantized   [panels, K / 32, 128 or 256, bytes] uint8, scales before codes        csrc/quantized.cpp

Columns beyond the weight's own, in its last panel, are zeros. A PackedWeight joins several packings below
each other, so that each can have its own bits.

Quantized weights are multiplied in integers, with activations of 8 bits: each 32 neighbours of a row of x are
rounded to multiples of their largest magnitude / 127 (after GGML's Q8_0 products).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem_kernels import native
from tandem_kernels.quantized_weight import GROUP_SIZE, Packing, QuantizedWeight

PANEL = 32
_FLOATS = (torch.float32, torch.bfloat16)
_PLAIN = {torch.float32: 0, torch.bfloat16: 1}


def _block_bytes(packing: Packing) -> int:
    """Of the groups of a panel that share a scale: scales, minimums, then each group's factors and codes."""
    group = GROUP_SIZE * packing.bits // 8 + (2 if packing.has_factors else 0)
    return PANEL * ((4 if packing.has_minimums else 2) + packing.groups * group)


_PACKINGS = {_block_bytes(packing): packing for packing in Packing}


@dataclass(frozen=True)
class PackedWeight:
    """A weight [columns, depth]: what pack_weight or pack_quantized made of its rows, part after part.

    All parts but the last have whole panels. Weights that are not quantized ignore order and table.
    """

    parts: tuple[torch.Tensor, ...]
    columns: int
    #: [depth] int32: the input that each step along the depth of quantized parts multiplies; None: its own.
    order: torch.Tensor | None = None
    #: [16] uint8 of the parts in LUT4.
    table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        ends = sum(_panels_of(part) for part in self.parts) * PANEL
        if len({_depth_of(part) for part in self.parts}) != 1 or not ends - PANEL < self.columns <= ends:
            raise ValueError(
                f"parts have shapes {[list(part.shape) for part in self.parts]}, wanted one depth and "
                f"{self.columns} columns in total"
            )
        for name, wanted in (("order", (torch.int32, self.depth)), ("table", (torch.uint8, 16))):
            found = getattr(self, name)
            if found is not None and (found.dtype, *found.shape) != wanted:
                raise ValueError(
                    f"{name} is {list(found.shape)} {found.dtype}, wanted [{wanted[1]}] {wanted[0]}"
                )
        if self.order is not None and not torch.equal(self.order.sort().values, torch.arange(self.depth)):
            raise ValueError(f"order is no permutation of the {self.depth} inputs")
        kinds = {packing_of(part) for part in self.parts if part.dtype == torch.uint8}
        if self.table is None and Packing.LUT4 in kinds:
            raise ValueError("parts in LUT4 lack their table")

    @property
    def depth(self) -> int:
        return _depth_of(self.parts[0])

    @property
    def is_quantized(self) -> bool:
        return any(part.dtype == torch.uint8 for part in self.parts)

    @classmethod
    def of(cls, packed: torch.Tensor | PackedWeight) -> PackedWeight:
        """A lone packing has as many columns as its panels hold."""
        return packed if isinstance(packed, cls) else cls((packed,), _panels_of(packed) * PANEL)  # type: ignore[arg-type]


def packing_of(packed: torch.Tensor) -> Packing:
    """Of what pack_quantized made. Raises ValueError if that did not make it."""
    if packed.ndim != 3 or packed.shape[2] not in _PACKINGS:
        raise ValueError(f"shape {list(packed.shape)} is that of no packing")
    return _PACKINGS[packed.shape[2]]


def _panels_of(packed: torch.Tensor) -> int:
    return packed.shape[0]


def _depth_of(packed: torch.Tensor) -> int:
    return packed.shape[1] * (packing_of(packed).depth if packed.dtype == torch.uint8 else packed.shape[3])


def runs_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a compiled kernel for weights of this dtype there (uint8: quantized)."""
    return native.LIBRARY is not None and device.type == "cpu" and dtype in (*_FLOATS, torch.uint8)


def packed_shape(num_columns: int, depth: int, dtype: torch.dtype) -> tuple[int, int, int, int] | None:
    """The packing's shape for a weight [num_columns, depth]; None when the kernel takes no such weight."""
    if dtype not in _FLOATS or depth % 2:
        return None
    per_lane = 2 if dtype == torch.bfloat16 else 1
    return -(-num_columns // PANEL), depth // per_lane, PANEL, per_lane


def quantized_shape(num_columns: int, depth: int, packing: Packing) -> tuple[int, int, int] | None:
    """The same for a quantized weight."""
    if depth % packing.depth:
        return None
    return -(-num_columns // PANEL), depth // packing.depth, _block_bytes(packing)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] -> its packing, as packed_shape has it; dense.

    Raises:
        ValueError: the kernel does not take such a weight.
    """
    num_columns, depth = weight.shape
    shape = packed_shape(num_columns, depth, weight.dtype)
    if shape is None:
        raise ValueError(
            f"weight has shape {list(weight.shape)} and dtype {weight.dtype}, wanted [N, K] of float32 or "
            f"bfloat16 with K even"
        )
    panels, lanes, _, per_lane = shape
    weight = F.pad(weight, (0, 0, 0, panels * PANEL - num_columns))
    return weight.reshape(panels, PANEL, lanes, per_lane).transpose(1, 2).contiguous()


def pack_quantized(weight: QuantizedWeight) -> torch.Tensor:
    """Its packing, as quantized_shape has it."""
    num_columns, depth = weight.codes.shape
    packing = weight.packing
    shape = quantized_shape(num_columns, depth, packing)
    assert shape is not None
    panels, blocks, _ = shape

    def by_column(values: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [panels, 32, ...], with zeros for the columns that lack."""
        return F.pad(values, (0, 0) * (values.ndim - 1) + (0, panels * PANEL - num_columns)).view(
            panels, PANEL, *values.shape[1:]
        )

    codes = by_column(weight.codes).view(panels, PANEL, blocks, packing.groups, GROUP_SIZE)
    lines = codes
    if packing.bits < 8:
        low, high = (codes & 15).chunk(2, dim=4)
        lines = low | (high << 4)
    if packing.bits == 6:
        upper = (codes >> 4).view(*codes.shape[:4], 2, 4, 4)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
        lines = torch.cat([lines, (upper << shifts).sum(5, dtype=torch.uint8).flatten(4)], dim=4)
    # Four neighbours of a row side by side, then the panel's columns.
    groups = lines.view(*lines.shape[:4], -1, 4).permute(0, 2, 3, 4, 1, 5).flatten(3)
    if weight.factors is not None:
        factors = by_column(weight.factors).view(torch.uint8).view(panels, PANEL, blocks, packing.groups, 2)
        groups = torch.cat([factors.permute(0, 2, 3, 4, 1).flatten(3), groups], dim=3)
    heads = [
        by_column(head).transpose(1, 2).contiguous().view(torch.uint8)
        for head in (weight.scales, weight.minimums)[: 2 if packing.has_minimums else 1]
    ]
    return torch.cat([*heads, groups.flatten(2)], dim=2)


def unpack_quantized(packed: torch.Tensor, table: torch.Tensor | None = None) -> QuantizedWeight:
    """The inverse of pack_quantized; table: of LUT4."""
    panels, blocks, _ = packed.shape
    packing = packing_of(packed)
    num_columns, num_heads = panels * PANEL, 2 if packing.has_minimums else 1
    head, groups = packed.tensor_split([2 * PANEL * num_heads], dim=2)
    heads = [
        part.contiguous().view(torch.float16).transpose(1, 2).reshape(num_columns, blocks)
        for part in head.chunk(num_heads, dim=2)
    ]
    minimums = heads[1] if num_heads == 2 else heads[0] * -packing.zero
    groups = groups.reshape(panels, blocks, packing.groups, -1)
    factors = None
    if packing.has_factors:
        stored, groups = groups.tensor_split([2 * PANEL], dim=3)
        stored = stored.reshape(panels, blocks * packing.groups, 2, PANEL).permute(0, 3, 1, 2)
        factors = stored.reshape(num_columns, -1, 2).contiguous().view(torch.int8)
    lines = groups.reshape(panels, blocks, packing.groups, -1, PANEL, 4).permute(0, 4, 1, 2, 3, 5).flatten(4)
    codes = lines
    if packing.bits < 8:
        codes = torch.cat([lines[..., :16] & 15, lines[..., :16] >> 4], dim=4)
    if packing.bits == 6:
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
        upper = (lines[..., 16:].reshape(*lines.shape[:4], 2, 1, 4) >> shifts) & 3
        codes = codes | (upper.flatten(4) << 4)
    if packing is not Packing.LUT4:
        table = None
    return QuantizedWeight(packing, codes.reshape(num_columns, -1), heads[0], minimums, factors, table)


def packed_linear(
    x: torch.Tensor,
    packed: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, K] -> [T, N] of out_dtype, None: x's own.

    packed is what pack_weight made of a weight [N, K] of x's dtype, or pack_quantized of any (then x is
    float32 or bfloat16), or several of these; bias [N] is float32. Without compiled kernels only quantized
    weights are taken.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    weight = PackedWeight.of(packed)
    dtypes = {part.dtype for part in weight.parts} - {torch.uint8}
    if x.shape[1:] != (weight.depth,) or x.dtype not in (dtypes or _FLOATS) or not x.is_contiguous():
        raise ValueError(
            f"x has shape {list(x.shape)}, strides {list(x.stride())} and dtype {x.dtype}, "
            f"wanted a dense [T, {weight.depth}] of {' or '.join(str(d) for d in dtypes or _FLOATS)}"
        )
    bias = None if bias is None else bias.float()
    if native.LIBRARY is None:
        if dtypes:
            raise ValueError(f"packed weights of {x.dtype} need compiled kernels, which are not here")
        return _quantized_reference(x, weight, bias).to(out_dtype or x.dtype)
    out = x.new_empty(x.shape[0], weight.columns, dtype=out_dtype or x.dtype)
    pieces = native_weight(weight, bias)
    native.LIBRARY.tandem_packed_linear(
        x.data_ptr(), pieces, out.data_ptr(), x.shape[0],
        native.DTYPE[x.dtype], native.DTYPE[out.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def dequantize_packed(weight: PackedWeight) -> torch.Tensor:
    """[N, K] float32, of quantized parts."""
    values = _in_order(weight)
    if weight.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, weight.order.long(), values)


def _in_order(weight: PackedWeight) -> torch.Tensor:
    """[N, K] float32, of quantized parts, with the columns as they are stored."""
    parts = [unpack_quantized(part, weight.table).dequantize() for part in weight.parts]
    return torch.cat(parts)[: weight.columns]


def native_weight(weight: PackedWeight, bias: torch.Tensor | None) -> ctypes.Array[native.LinearWeight]:
    """The kernels' description of its parts; holds no reference to the tensors. bias: float32."""
    described: list[native.LinearWeight] = []
    first = 0
    for part in weight.parts:
        kind = packing_of(part) if part.dtype == torch.uint8 else _PLAIN[part.dtype]
        columns = min(_panels_of(part) * PANEL, weight.columns - first)
        bias_pointer = None if bias is None else bias.data_ptr() + 4 * first
        described.append(
            native.LinearWeight(
                part.data_ptr(), bias_pointer, columns, weight.depth, kind, first, weight.columns,
                len(weight.parts) - len(described), _pointer(weight.order), _pointer(weight.table),
            )
        )  # fmt: skip
        first += columns
    return (native.LinearWeight * len(described))(*described)


def _pointer(values: torch.Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def _quantized_reference(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The definition of the quantized product; float32, whose rounding is small beside x's."""
    if weight.order is not None:
        x = x[:, weight.order.long()]
    groups = x.float().view(x.shape[0], -1, GROUP_SIZE)
    scales = groups.abs().amax(2, keepdim=True) / 127
    codes = torch.where(scales == 0, 0.0, groups / scales).round()
    return F.linear((codes * scales).flatten(1), _in_order(weight), bias)
