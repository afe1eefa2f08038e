"""silu_mul in Triton: one pass over memory, where torch makes two and writes silu(gate) in between."""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.gpu import check_dense

BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * F], dense -> [T, F] of the same dtype; computed in float32."""
    check_dense(gate_up=gate_up)
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    if out.numel():
        silu_mul_kernel[(num_tokens, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK)
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
