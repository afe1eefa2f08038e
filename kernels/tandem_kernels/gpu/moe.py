"""The operator of tandem_kernels.moe in Triton: one product for all experts.

    plan      pairs (row, rank of a chosen expert) sorted by expert, in blocks of BLOCK_ROWS of one expert
    products  one program per block and BLOCK_COLUMNS columns reads its rows through the plan
    combine   sum of a row's experts in the order of their ranks, in float32

The number of blocks has a bound that does not depend on the choice; programs beyond the last block return at
once. So nothing waits for the device, and a CUDA graph can hold it.
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tandem_kernels.gpu import check_dense
from tandem_kernels.moe import ExpertProjection, MoeWeights, route

BLOCK_COLUMNS = 64
BLOCK_DEPTH = 64
COMBINE_BLOCK = 1024


@dataclass(frozen=True)
class Plan:
    """P pairs, pair p = row * top_k + rank, in B blocks."""

    #: [P] int64: the pairs by expert.
    order: torch.Tensor
    #: [B] int64, each block's expert and its first pair in `order`; P for a block without pairs.
    experts: torch.Tensor
    first: torch.Tensor
    #: [E] int64: the end of each expert's pairs in `order`.
    ends: torch.Tensor
    block_rows: int

    @classmethod
    def of(cls, chosen: torch.Tensor, num_experts: int) -> Plan:
        """chosen: [T, top_k] int64."""
        flat = chosen.flatten()
        num_pairs = len(flat)
        block_rows = block_rows_for(num_pairs, num_experts)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        ends = counts.cumsum(0)
        blocks = (counts + block_rows - 1) // block_rows
        block_ends = blocks.cumsum(0)
        most = num_pairs // block_rows + min(num_pairs, num_experts)
        number = torch.arange(most, device=flat.device)
        experts = torch.searchsorted(block_ends, number, right=True)
        is_used = experts < num_experts
        experts = experts.clamp(max=num_experts - 1)
        first = (
            ends[experts] - counts[experts] + (number - block_ends[experts] + blocks[experts]) * block_rows
        )
        return cls(
            flat.argsort(stable=True), experts, torch.where(is_used, first, num_pairs), ends, block_rows
        )


def block_rows_for(num_pairs: int, num_experts: int) -> int:
    """About the rows of an expert; a product of tensor cores has at least 16."""
    return min(max(1 << (num_pairs // num_experts).bit_length(), 16), 64)


def moe(x: torch.Tensor, weights: MoeWeights) -> torch.Tensor:
    """x [T, H] -> [T, H]; arguments as the public operator has checked them. Raises ValueError for packed
    weights, which the CPU kernels read."""
    check_dense(x=x)
    if len(x) == 0:
        return torch.empty_like(x)
    chosen, factors = route(x, weights.router, weights.router_bias, weights.correction, weights.routing)
    plan = Plan.of(chosen, len(weights.router))
    top_k = chosen.shape[1]
    inner = grouped_linear(x, weights.gate_up, plan, top_k, x.dtype)
    partial = grouped_linear(weights.activated(inner), weights.down, plan, 1, torch.float32)
    shared, share = None, None
    if weights.shared is not None:
        gate_up, down = weights.shared.gate_up, weights.shared.down
        if not (isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)):
            raise ValueError("the shared MLP's weights are packed for CPUs, wanted dense ones on a GPU")
        shared = F.linear(weights.activated(F.linear(x, gate_up)), down)
        if weights.shared.gate is not None:
            share = (x.float() @ weights.shared.gate).sigmoid()
    return combine(partial, factors, shared, share, x.dtype)


def grouped_linear(
    x: torch.Tensor, projection: ExpertProjection, plan: Plan, divisor: int, out_dtype: torch.dtype
) -> torch.Tensor:
    """Row p // divisor of x [*, K] times the weight of pair p's expert -> [P, N] of out_dtype."""
    weight, bias = projection.weight, projection.bias
    if not isinstance(weight, torch.Tensor):
        raise ValueError("experts' weights are packed for CPUs, wanted dense ones on a GPU")
    check_dense(weight=weight, bias=bias)
    _, columns, depth = weight.shape
    out = x.new_empty(len(plan.order), columns, dtype=out_dtype)
    grouped_linear_kernel[(triton.cdiv(columns, BLOCK_COLUMNS), len(plan.experts))](
        x, weight, weight if bias is None else bias, plan.order, plan.experts, plan.first, plan.ends, out,
        columns, depth, divisor,
        HAS_BIAS=bias is not None, BLOCK_ROWS=plan.block_rows, BLOCK_COLUMNS=BLOCK_COLUMNS,
        BLOCK_DEPTH=BLOCK_DEPTH, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def grouped_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, order_ptr, experts_ptr, first_ptr, ends_ptr, out_ptr,
    columns, depth, divisor,
    HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    expert = tl.load(experts_ptr + block)
    first = tl.load(first_ptr + block)
    end = tl.load(ends_ptr + expert)
    if first >= end:
        return
    places = first + tl.arange(0, BLOCK_ROWS)
    is_row = places < end
    pairs = tl.load(order_ptr + places, mask=is_row, other=0)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = column < columns
    k = tl.arange(0, BLOCK_DEPTH)
    x_ptrs = x_ptr + (pairs // divisor)[:, None] * depth + k[None, :]
    weight_ptrs = weight_ptr + (expert * columns + column)[None, :] * depth + k[:, None]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    for start in range(0, depth, BLOCK_DEPTH):
        inside = k < depth - start
        rows = tl.load(x_ptrs + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=is_column[None, :] & inside[:, None], other=0.0)
        total = tl.dot(rows, weight, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert * columns + column, mask=is_column, other=0.0)[None, :]
    tl.store(
        out_ptr + pairs[:, None] * columns + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


def combine(
    partial: torch.Tensor,
    factors: torch.Tensor,
    shared: torch.Tensor | None,
    share: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """float32 partial [T * top_k, H], factors [T, top_k] and share [T], and shared [T, H] -> [T, H]."""
    num_rows, top_k = factors.shape
    width = partial.shape[1]
    out = partial.new_empty(num_rows, width, dtype=out_dtype)
    combine_kernel[(num_rows, triton.cdiv(width, COMBINE_BLOCK))](
        partial, factors, partial if shared is None else shared, factors if share is None else share, out,
        width, top_k, HAS_SHARED=shared is not None, HAS_SHARE=share is not None, BLOCK=COMBINE_BLOCK,
    )  # fmt: skip
    return out


@triton.jit
def combine_kernel(
    partial_ptr, factors_ptr, shared_ptr, share_ptr, out_ptr, width, top_k,
    HAS_SHARED: tl.constexpr, HAS_SHARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in range(top_k):
        pair = row * top_k + rank
        factor = tl.load(factors_ptr + pair)
        total += factor * tl.load(partial_ptr + pair * width + column, mask=inside, other=0.0)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_SHARE:
            shared *= tl.load(share_ptr + row)
        total += shared
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)
