"""A projection with packed weights; a dozen rows take about as long as one.

out = x @ weight.T + bias

The packing interleaves 32 output columns, so that the compiled kernels read the weights in the order they
multiply them. Sums over K have one order: a row's bits do not depend on the other rows.

    float32     [panels, K, 32, 1]                                                    csrc/linear.cpp
    bfloat16    [panels, K / 2, 32, 2], neighbours of a row of the weight side by side
    quantized   [panels, K / 32, bytes] uint8, each group's scales before its codes   csrc/quantized.cpp

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
from tandem_kernels.quantized_weight import GROUP_SIZE, QuantizedWeight

PANEL = 32
_FLOATS = (torch.float32, torch.bfloat16)
#: Bytes of one group of a panel -> bits of a weight; the numbers the kernel knows packings by.
_GROUP_BITS = {2 * PANEL + PANEL * GROUP_SIZE: 8, 4 * PANEL + PANEL * GROUP_SIZE // 2: 4}
_PACKING = {torch.float32: 0, torch.bfloat16: 1, 8: 2, 4: 3}


@dataclass(frozen=True)
class PackedWeight:
    """A weight [columns, depth]: what pack_weight or pack_quantized made of its rows, part after part.

    All parts but the last have whole panels.
    """

    parts: tuple[torch.Tensor, ...]
    columns: int

    def __post_init__(self) -> None:
        ends = sum(_panels_of(part) for part in self.parts) * PANEL
        if len({_depth_of(part) for part in self.parts}) != 1 or not ends - PANEL < self.columns <= ends:
            raise ValueError(
                f"parts have shapes {[list(part.shape) for part in self.parts]}, wanted one depth and "
                f"{self.columns} columns in total"
            )

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


def bits_of_packed(packed: torch.Tensor) -> int:
    """Of what pack_quantized made: 4 or 8."""
    return _GROUP_BITS[packed.shape[2]]


def _panels_of(packed: torch.Tensor) -> int:
    return packed.shape[0]


def _depth_of(packed: torch.Tensor) -> int:
    return packed.shape[1] * (GROUP_SIZE if packed.dtype == torch.uint8 else packed.shape[3])


def runs_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a compiled kernel for weights of this dtype there (uint8: quantized)."""
    return native.LIBRARY is not None and device.type == "cpu" and dtype in (*_FLOATS, torch.uint8)


def packed_shape(num_columns: int, depth: int, dtype: torch.dtype) -> tuple[int, int, int, int] | None:
    """The packing's shape for a weight [num_columns, depth]; None when the kernel takes no such weight."""
    if dtype not in _FLOATS or depth % 2:
        return None
    per_lane = 2 if dtype == torch.bfloat16 else 1
    return -(-num_columns // PANEL), depth // per_lane, PANEL, per_lane


def quantized_shape(num_columns: int, depth: int, bits: int) -> tuple[int, int, int] | None:
    """The same for a quantized weight."""
    if depth % GROUP_SIZE:
        return None
    group_bytes = next(size for size, of in _GROUP_BITS.items() if of == bits)
    return -(-num_columns // PANEL), depth // GROUP_SIZE, group_bytes


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
    shape = quantized_shape(num_columns, depth, weight.bits)
    assert shape is not None
    panels, groups, _ = shape

    def padded(rows: torch.Tensor) -> torch.Tensor:
        return F.pad(rows, (0, 0, 0, panels * PANEL - num_columns))

    codes = padded(weight.codes).view(panels, PANEL, groups, GROUP_SIZE)
    if weight.bits == 4:
        low, high = codes.chunk(2, dim=3)
        codes = low | (high << 4)
    # Four neighbours of a row side by side, then the panel's columns.
    quads = codes.view(*codes.shape[:3], -1, 4).permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)
    factors = [weight.scales] if weight.bits == 8 else [weight.scales, weight.minimums]
    heads = [
        padded(f).view(panels, PANEL, groups).transpose(1, 2).contiguous().view(torch.uint8) for f in factors
    ]
    return torch.cat([*heads, quads], dim=2)


def unpack_quantized(packed: torch.Tensor) -> QuantizedWeight:
    """The inverse of pack_quantized."""
    panels, groups, _ = packed.shape
    bits = bits_of_packed(packed)

    def factors(index: int) -> torch.Tensor:
        part = packed[:, :, 2 * PANEL * index : 2 * PANEL * (index + 1)].contiguous().view(torch.float16)
        return part.transpose(1, 2).reshape(panels * PANEL, groups)

    scales = factors(0)
    quads = packed[:, :, 2 * PANEL * (1 if bits == 8 else 2) :].reshape(panels, groups, -1, PANEL, 4)
    codes = quads.permute(0, 3, 1, 2, 4).flatten(3)
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=3)
    minimums = scales * -128 if bits == 8 else factors(1)
    return QuantizedWeight(bits, codes.reshape(panels * PANEL, groups * GROUP_SIZE), scales, minimums)


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
        return _quantized_reference(x, dequantize_packed(weight), bias).to(out_dtype or x.dtype)
    out = x.new_empty(x.shape[0], weight.columns, dtype=out_dtype or x.dtype)
    pieces = native_weight(weight, bias)
    native.LIBRARY.tandem_packed_linear(
        x.data_ptr(), pieces, out.data_ptr(), x.shape[0],
        native.DTYPE[x.dtype], native.DTYPE[out.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def dequantize_packed(weight: PackedWeight) -> torch.Tensor:
    """[N, K] float32, of quantized parts."""
    return torch.cat([unpack_quantized(part).dequantize() for part in weight.parts])[: weight.columns]


def native_weight(weight: PackedWeight, bias: torch.Tensor | None) -> ctypes.Array[native.LinearWeight]:
    """The kernels' description of its parts; holds no reference to the tensors. bias: float32."""
    described: list[native.LinearWeight] = []
    first = 0
    for part in weight.parts:
        kind = bits_of_packed(part) if part.dtype == torch.uint8 else part.dtype
        columns = min(_panels_of(part) * PANEL, weight.columns - first)
        bias_pointer = None if bias is None else bias.data_ptr() + 4 * first
        described.append(
            native.LinearWeight(
                part.data_ptr(), bias_pointer, columns, weight.depth, _PACKING[kind], first, weight.columns,
                len(weight.parts) - len(described),
            )
        )  # fmt: skip
        first += columns
    return (native.LinearWeight * len(described))(*described)


def _quantized_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The definition of the quantized product; float32, whose rounding is small beside x's."""
    groups = x.float().view(x.shape[0], -1, GROUP_SIZE)
    scales = groups.abs().amax(2, keepdim=True) / 127
    codes = torch.where(scales == 0, 0.0, groups / scales).round()
    return F.linear((codes * scales).flatten(1), weight, bias)
