"""The operators of tandem_kernels.elementwise in Triton.

add_norm, norm_rows   one program per row, which reads and writes its row once
activate              one pass over memory; torch makes two and writes act(gate) in between
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.elementwise import ACTIVATIONS, NORM_KINDS, NormWeights
from tandem_kernels.gpu import check_dense

#: A row is held in registers, 32 numbers a thread at most.
MAX_WIDTH = 32768
#: Elements of one activate program.
ACTIVATE_BLOCK = 1024


def num_warps_for(block: int) -> int:
    """At most 32 numbers a thread, at least 4 warps."""
    return min(max(block // 1024, 4), 32)


def add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    norm: NormWeights | None,
    out_dtype: torch.dtype,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return normed [T, W] of out_dtype; hidden [T, W] float32 and delta [T, W] dense; hidden is changed."""
    check_dense(hidden=hidden, delta=delta)
    out = torch.empty_like(hidden, dtype=out_dtype)
    _launch(hidden, delta, norm, out, scale)
    return out


def norm_rows(x: torch.Tensor, norm: NormWeights, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T, W], dense -> the norm of each row, of out_dtype."""
    check_dense(x=x)
    out = torch.empty_like(x, dtype=out_dtype)
    _launch(x, None, norm, out, 1.0)
    return out


def norm_rows_in_place(x: torch.Tensor, norm: NormWeights) -> None:
    """x [T, W], dense in the last dimension, becomes the norm of each row."""
    _launch(x, None, norm, x, 1.0)


def _launch(
    x: torch.Tensor, delta: torch.Tensor | None, norm: NormWeights | None, out: torch.Tensor, scale: float
) -> None:
    num_tokens, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(f"rows have {width} numbers, wanted at most {MAX_WIDTH} on a GPU")
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    check_dense(weight=weight, bias=bias)
    if not num_tokens:
        return
    block = triton.next_power_of_2(width)
    # Pointers a launch does not use still need a tensor to point to.
    add_norm_kernel[(num_tokens,)](
        x, x if delta is None else delta, x if weight is None else weight, x if bias is None else bias, out,
        scale, 0.0 if norm is None else norm.eps, width, x.stride(0), out.stride(0),
        BLOCK=block, HAS_DELTA=delta is not None, KIND=0 if norm is None else NORM_KINDS[norm.kind],
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, num_warps=num_warps_for(block),
    )  # fmt: skip


@triton.jit
def normalized(x, columns, is_column, width, weight_ptr, bias_ptr, eps,
               KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """The norm of the last dimension of x [..., BLOCK], whose first `width` numbers count; KIND 0: none."""
    AXIS: tl.constexpr = len(x.shape) - 1
    if KIND == 2:
        mean = tl.sum(x, AXIS, keep_dims=True) / width
        x = tl.where(is_column, x - mean, 0.0)
    if KIND > 0:
        x *= 1.0 / tl.sqrt_rn(tl.sum(x * x, AXIS, keep_dims=True) / width + eps)
    if HAS_WEIGHT:
        x *= tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    return x


@triton.jit
def add_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, out_ptr, scale, eps, width, x_stride, out_stride,
    BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr, KIND: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += scale * tl.load(delta_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * x_stride + columns, x, mask=inside)
    x = normalized(x, columns, inside, width, weight_ptr, bias_ptr, eps, KIND, HAS_WEIGHT, HAS_BIAS)
    tl.store(out_ptr + row * out_stride + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


def activate(
    x: torch.Tensor, act: str, gated: bool, limit: float | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """x [T, 2 * F] if gated, else [T, F], dense -> [T, F] of out_dtype; computed in float32."""
    check_dense(x=x)
    num_tokens, width = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = x.new_empty(num_tokens, width, dtype=out_dtype)
    if out.numel():
        activate_kernel[(num_tokens, triton.cdiv(width, ACTIVATE_BLOCK))](
            x, out, width, limit or 0.0,
            BLOCK=ACTIVATE_BLOCK, ACT=ACTIVATIONS[act], GATED=gated, HAS_LIMIT=limit is not None,
        )  # fmt: skip
    return out


@triton.jit
def activate_kernel(
    x_ptr, out_ptr, width, limit,
    BLOCK: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_ptr = x_ptr + row * width * (2 if GATED else 1) + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    if HAS_LIMIT:
        gate = tl.where(gate > limit, limit, gate)
        result = gate / (1.0 + tl.exp(-1.702 * gate))
    elif ACT == 0:
        result = gate / (1.0 + tl.exp(-gate))
    elif ACT == 1:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACT == 2:
        # tanh(u) = 2 sigmoid(2 u) - 1, u = sqrt(2 / pi) (x + 0.044715 x^3)
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-twice))
    else:
        result = tl.where(gate < 0.0, 0.0, gate)
        if ACT == 4:
            result *= result
    if GATED:
        up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
        if HAS_LIMIT:
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        result *= up
    tl.store(out_ptr + row * width + columns, result.to(out_ptr.dtype.element_ty), mask=inside)
