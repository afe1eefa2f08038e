"""The operators of tandem_kernels.elementwise in Triton.

add_rms_norm   one program per token, which reads and writes its row once
silu_mul       one pass over memory; torch makes two and writes silu(gate) in between
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.gpu import check_dense

#: A row is held in registers, 32 numbers a thread at most.
MAX_WIDTH = 32768
#: Elements of one silu_mul program.
SILU_BLOCK = 1024


def num_warps_for(block: int) -> int:
    """At most 32 numbers a thread, at least 4 warps."""
    return min(max(block // 1024, 4), 32)


def add_rms_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return normed [T, H] of dtype, None: weight's; hidden [T, H] float32, delta [T, H] and weight [H]
    dense; hidden is changed."""
    check_dense(hidden=hidden, delta=delta, weight=weight)
    num_tokens, width = hidden.shape
    if width > MAX_WIDTH:
        raise ValueError(f"hidden has rows of {width} numbers, wanted at most {MAX_WIDTH} on a GPU")
    out = torch.empty_like(hidden, dtype=dtype or weight.dtype)
    if num_tokens:
        block = triton.next_power_of_2(width)
        add_rms_norm_kernel[(num_tokens,)](
            hidden, hidden if delta is None else delta, weight, out, eps, width,
            BLOCK=block, HAS_DELTA=delta is not None, num_warps=num_warps_for(block),
        )  # fmt: skip
    return out


@triton.jit
def add_rms_norm_kernel(
    hidden_ptr, delta_ptr, weight_ptr, out_ptr, eps, width, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    hidden = tl.load(hidden_ptr + row + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        hidden += tl.load(delta_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden_ptr + row + columns, hidden, mask=inside)
    scale = 1.0 / tl.sqrt_rn(tl.sum(hidden * hidden, 0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + columns, (hidden * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * F], dense -> [T, F] of the same dtype; computed in float32."""
    check_dense(gate_up=gate_up)
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    if out.numel():
        silu_mul_kernel[(num_tokens, triton.cdiv(width, SILU_BLOCK))](gate_up, out, width, BLOCK=SILU_BLOCK)
    return out


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_ptr = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + columns, product.to(out_ptr.dtype.element_ty), mask=inside)
