"""A projection with packed weights; a dozen rows take about as long as one.

out = x @ weight.T + bias

The packing interleaves 32 output columns, so that the compiled kernels read the weights in the order they
multiply them. Sums over K have one order: a row's bits do not depend on the other rows.

    float32     [panels, K, 32, 1]                                                    csrc/linear.cpp
    bfloat16    [panels, K / 2, 32, 2], neighbours of a row of the weight side by side
    quantized   [panels, K / 32, bytes] uint8, each group's scales before its codes   csrc/quantized.cpp

Quantized weights are multiplied in integers, with activations of 8 bits: each 32 neighbours of a row of x are
rounded to multiples of their largest magnitude / 127 (after GGML's Q8_0 products).
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F

from tandem_kernels import native
from tandem_kernels.quantized_weight import GROUP_SIZE, QuantizedWeight

PANEL = 32
_FLOATS = (torch.float32, torch.bfloat16)
#: Bytes of one group of a panel -> bits of a weight; the numbers the kernel knows packings by.
_GROUP_BITS = {2 * PANEL + PANEL * GROUP_SIZE: 8, 4 * PANEL + PANEL * GROUP_SIZE // 2: 4}
_PACKING = {torch.float32: 0, torch.bfloat16: 1, 8: 2, 4: 3}


def runs_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a compiled kernel for weights of this dtype there (uint8: quantized)."""
    return native.LIBRARY is not None and device.type == "cpu" and dtype in (*_FLOATS, torch.uint8)


def packed_shape(num_columns: int, depth: int, dtype: torch.dtype) -> tuple[int, int, int, int] | None:
    """The packing's shape for a weight [num_columns, depth]; None when the kernel takes no such weight."""
    if dtype not in _FLOATS or num_columns % PANEL or depth % 2:
        return None
    per_lane = 2 if dtype == torch.bfloat16 else 1
    return num_columns // PANEL, depth // per_lane, PANEL, per_lane


def quantized_shape(num_columns: int, depth: int, bits: int) -> tuple[int, int, int] | None:
    """The same for a quantized weight."""
    if num_columns % PANEL or depth % GROUP_SIZE:
        return None
    group_bytes = next(size for size, of in _GROUP_BITS.items() if of == bits)
    return num_columns // PANEL, depth // GROUP_SIZE, group_bytes


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
            f"bfloat16 with N a multiple of {PANEL} and K even"
        )
    panels, lanes, _, per_lane = shape
    return weight.reshape(panels, PANEL, lanes, per_lane).transpose(1, 2).contiguous()


def pack_quantized(weight: QuantizedWeight) -> torch.Tensor:
    """Its packing, as quantized_shape has it.

    Raises:
        ValueError: N is not a multiple of 32.
    """
    num_columns, depth = weight.codes.shape
    shape = quantized_shape(num_columns, depth, weight.bits)
    if shape is None:
        raise ValueError(f"weight has {num_columns} rows, wanted a multiple of {PANEL}")
    panels, groups, _ = shape
    codes = weight.codes.view(panels, PANEL, groups, GROUP_SIZE)
    if weight.bits == 4:
        low, high = codes.chunk(2, dim=3)
        codes = low | (high << 4)
    # Four neighbours of a row side by side, then the panel's columns.
    quads = codes.view(*codes.shape[:3], -1, 4).permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)
    factors = [weight.scales] if weight.bits == 8 else [weight.scales, weight.minimums]
    heads = [f.view(panels, PANEL, groups).transpose(1, 2).contiguous().view(torch.uint8) for f in factors]
    return torch.cat([*heads, quads], dim=2)


def unpack_quantized(packed: torch.Tensor) -> QuantizedWeight:
    """The inverse of pack_quantized."""
    panels, groups, group_bytes = packed.shape
    bits = _GROUP_BITS[group_bytes]

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
    packed: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, K] -> [T, N] of out_dtype, None: x's own.

    packed is what pack_weight made of a weight [N, K] of x's dtype, or pack_quantized of any (then x is
    float32 or bfloat16); bias [N] is of x's dtype. Without compiled kernels only quantized weights are taken.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    columns, depth = shape_of_packed(packed)
    quantized = packed.dtype == torch.uint8
    if (
        x.shape[1:] != (depth,)
        or (x.dtype not in _FLOATS if quantized else x.dtype != packed.dtype)
        or not x.is_contiguous()
    ):
        raise ValueError(
            f"x has shape {list(x.shape)}, strides {list(x.stride())} and dtype {x.dtype}, "
            f"wanted a dense [T, {depth}] of {'float32 or bfloat16' if quantized else packed.dtype}"
        )
    if native.LIBRARY is None:
        if not quantized:
            raise ValueError(f"packed weights of {packed.dtype} need compiled kernels, which are not here")
        return _quantized_reference(x, unpack_quantized(packed), bias).to(out_dtype or x.dtype)
    out = x.new_empty(x.shape[0], columns, dtype=out_dtype or x.dtype)
    native.LIBRARY.tandem_linear(
        x.data_ptr(), ctypes.byref(native_weight(packed, bias)), out.data_ptr(), x.shape[0],
        native.DTYPE[x.dtype], native.DTYPE[out.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def shape_of_packed(packed: torch.Tensor) -> tuple[int, int]:
    """N and K of the weight that was packed."""
    if packed.dtype == torch.uint8:
        return packed.shape[0] * PANEL, packed.shape[1] * GROUP_SIZE
    return packed.shape[0] * PANEL, packed.shape[1] * packed.shape[3]


def native_weight(packed: torch.Tensor, bias: torch.Tensor | None) -> native.LinearWeight:
    """The kernels' description of a packed weight; holds no reference to the tensors."""
    columns, depth = shape_of_packed(packed)
    kind = _GROUP_BITS[packed.shape[2]] if packed.dtype == torch.uint8 else packed.dtype
    bias_pointer = None if bias is None else bias.data_ptr()
    return native.LinearWeight(packed.data_ptr(), bias_pointer, columns, depth, _PACKING[kind])


def _quantized_reference(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The definition of the quantized product; float32, whose rounding is small beside x's."""
    groups = x.float().view(x.shape[0], -1, GROUP_SIZE)
    scales = groups.abs().amax(2, keepdim=True) / 127
    codes = torch.where(scales == 0, 0.0, groups / scales).round()
    return F.linear((codes * scales).flatten(1), weight.dequantize(), None if bias is None else bias.float())
