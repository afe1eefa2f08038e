"""A projection with packed weights, as fast with a dozen rows as with one.

out = x @ weight.T + bias

The packing interleaves 32 output columns, so that the compiled kernel (csrc/linear.cpp) reads the weights in
the order it multiplies them: float32 [panels, K, 32, 1]; bfloat16 [panels, K / 2, 32, 2], with neighbours in
a row of the weight side by side. Sums over K have one order: a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch

from tandem_kernels import native

_PANEL = 32
_DTYPES = (torch.float32, torch.bfloat16)


def runs_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a compiled kernel for weights of this dtype there."""
    return native.LIBRARY is not None and device.type == "cpu" and dtype in _DTYPES


def packed_shape(num_columns: int, depth: int, dtype: torch.dtype) -> tuple[int, int, int, int] | None:
    """The packing's shape for a weight [num_columns, depth]; None when the kernel takes no such weight."""
    if dtype not in _DTYPES or num_columns % _PANEL or depth % 2:
        return None
    per_lane = 2 if dtype == torch.bfloat16 else 1
    return num_columns // _PANEL, depth // per_lane, _PANEL, per_lane


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
            f"bfloat16 with N a multiple of {_PANEL} and K even"
        )
    panels, lanes, _, per_lane = shape
    return weight.reshape(panels, _PANEL, lanes, per_lane).transpose(1, 2).contiguous()


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] -> [T, N] of the same dtype; packed as pack_weight made it of a weight [N, K], bias [N].

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    num_columns, depth = packed.shape[0] * _PANEL, packed.shape[1] * packed.shape[3]
    if x.shape[1:] != (depth,) or x.dtype != packed.dtype or not x.is_contiguous():
        raise ValueError(
            f"x has shape {list(x.shape)}, strides {list(x.stride())} and dtype {x.dtype}, "
            f"wanted a dense [T, {depth}] of {packed.dtype}"
        )
    out = x.new_empty(x.shape[0], num_columns)
    assert native.LIBRARY is not None
    native.LIBRARY.tandem_linear(
        x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        x.shape[0], num_columns, depth, native.DTYPE[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out
