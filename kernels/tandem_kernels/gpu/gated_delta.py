"""tandem_kernels.gated_delta in Triton.

prepare   program (token, head of q, k or v): convolution, lengths, beta and decay, in float32
scan      program (sequence, value head, COLUMNS columns): token by token; the state stays in registers
keep      program (sequence, channels): the last inputs, for the tokens after these
finish    program (token, value head): norm and gate

A node of a tree that does not follow its parent starts again from the state before the tree and repeats its
ancestors, instead of copies of states in memory: drafts are small, and long chains repeat nothing.
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# Conditions on constants are for the compiler, others for the device: they are not joined.
# ruff: noqa: N803, N806, SIM102

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.gated_delta import LENGTH_EPS, GatedDeltaWeights, StateMetadata
from tandem_kernels.turbo_attention.interface import MAX_TREE_NODES

#: Columns of a state, per program: 128 x 32 numbers are 32 registers a thread.
COLUMNS = 32
NUM_WARPS = 4
#: Channels of one keep program.
KEEP_BLOCK = 1024


def gated_delta(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: GatedDeltaWeights,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    metadata: StateMetadata,
) -> torch.Tensor:
    """As `tandem_kernels.gated_delta`, which has checked shapes; values in metadata are not checked."""
    num_tokens = qkv.shape[0]
    _, v_heads, k_dim, v_dim = recurrent.shape
    num_taps, channels = weights.conv.shape
    k_heads = (channels - v_heads * v_dim) // (2 * k_dim)
    num_seqs = metadata.initial_slots.shape[0]
    per_row = a.shape[1] != v_heads
    out = qkv.new_empty(num_tokens, v_heads * v_dim)
    if num_tokens == 0 or num_seqs == 0:
        return out
    x, outs, beta, decay = (
        torch.empty(num_tokens, width, dtype=torch.float32, device=qkv.device)
        for width in (channels, v_heads * v_dim, v_heads, a.shape[1])
    )
    bits = metadata.query_start_loc if metadata.ancestor_bits is None else metadata.ancestor_bits
    has_trees = metadata.ancestor_bits is not None
    block_seqs = triton.next_power_of_2(num_seqs)
    block_k, block_v = triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim)
    prepare_kernel[(num_tokens, 2 * k_heads + v_heads)](
        qkv, b, a, weights.conv, weights.decay_rate, weights.decay_bias, conv, x, beta, decay,
        metadata.query_start_loc, bits, metadata.initial_slots,
        qkv.stride(0), b.stride(0), a.stride(0), num_seqs,
        K_HEADS=k_heads, V_HEADS=v_heads, K_DIM=k_dim, V_DIM=v_dim, TAPS=num_taps, PER_ROW=per_row,
        HAS_TREES=has_trees, BLOCK_SEQS=block_seqs, BLOCK_DIM=max(block_k, block_v), BLOCK_K=block_k,
        LENGTH_EPS=LENGTH_EPS, MAX_NODES=MAX_TREE_NODES, num_warps=1,
    )  # fmt: skip
    scan_kernel[(num_seqs, v_heads, triton.cdiv(v_dim, COLUMNS))](
        x, outs, beta, decay, recurrent, metadata.query_start_loc, bits, metadata.initial_slots,
        metadata.final_slots, metadata.snapshot_slots, metadata.snapshot_rows,
        K_HEADS=k_heads, V_HEADS=v_heads, K_DIM=k_dim, V_DIM=v_dim, PER_ROW=per_row, HAS_TREES=has_trees,
        BLOCK_K=block_k, COLUMNS=COLUMNS, MAX_NODES=MAX_TREE_NODES, num_warps=NUM_WARPS,
    )  # fmt: skip
    keep_kernel[(num_seqs, triton.cdiv(channels, KEEP_BLOCK))](
        qkv, conv, metadata.query_start_loc, metadata.initial_slots, metadata.final_slots,
        metadata.snapshot_slots, metadata.snapshot_rows, qkv.stride(0), channels,
        TAPS=num_taps, BLOCK=KEEP_BLOCK, BLOCK_TAPS=triton.next_power_of_2(num_taps - 1),
    )  # fmt: skip
    finish_kernel[(num_tokens, v_heads)](
        outs, z, weights.norm, out, z.stride(0), weights.eps,
        V_HEADS=v_heads, V_DIM=v_dim, BLOCK_V=block_v,
        SIGMOID=weights.gate == "sigmoid", num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def sigmoid_of(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def is_tree(bits_ptr, first, end, HAS_TREES: tl.constexpr, MAX_NODES: tl.constexpr):
    tree = False
    if HAS_TREES:
        if (end > first) & (end - first <= MAX_NODES):
            tree = tl.load(bits_ptr + first) != 0
    return tree


@triton.jit
def parent_of(bits_ptr, first, node, tree, HAS_TREES: tl.constexpr, MAX_NODES: tl.constexpr):
    """The row that a row of the sequence continues; before the first row, the input before."""
    parent = node - 1
    if HAS_TREES:
        if tree & (node >= 0):
            bits = tl.load(bits_ptr + first + node)
            nodes = tl.arange(0, MAX_NODES)
            earlier = ((bits >> nodes.to(tl.int64)) & 1 != 0) & (nodes < node)
            parent = tl.max(tl.where(earlier, nodes, -1), 0)
    return parent


@triton.jit(do_not_specialize=("num_seqs",))
def prepare_kernel(
    qkv_ptr, b_ptr, a_ptr, conv_weight_ptr, rate_ptr, bias_ptr, conv_ptr, x_ptr, beta_ptr, decay_ptr,
    query_start_loc_ptr, bits_ptr, initial_slots_ptr, qkv_stride, b_stride, a_stride, num_seqs,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    TAPS: tl.constexpr, PER_ROW: tl.constexpr, HAS_TREES: tl.constexpr, BLOCK_SEQS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_K: tl.constexpr, LENGTH_EPS: tl.constexpr, MAX_NODES: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    token = tl.program_id(0)
    piece = tl.program_id(1)
    seqs = tl.arange(0, BLOCK_SEQS)
    ends = tl.load(query_start_loc_ptr + 1 + seqs, mask=seqs < num_seqs, other=2147483647)
    seq = tl.sum((ends <= token).to(tl.int32), 0)
    if seq < num_seqs:
        first = tl.load(query_start_loc_ptr + seq)
        end = tl.load(query_start_loc_ptr + seq + 1)
        slot = tl.load(initial_slots_ptr + seq).to(tl.int64)
        tree = is_tree(bits_ptr, first, end, HAS_TREES, MAX_NODES)
        is_value = piece >= 2 * K_HEADS
        head = piece - 2 * K_HEADS
        dims = tl.arange(0, BLOCK_DIM)
        inside = dims < tl.where(is_value, V_DIM, K_DIM)
        channels = tl.where(is_value, 2 * K_HEADS * K_DIM + head * V_DIM, piece * K_DIM) + dims
        x = tl.zeros([BLOCK_DIM], tl.float32)
        row = token - first
        for back in tl.static_range(TAPS):
            if row >= 0:
                input_ptr = qkv_ptr + (first + row).to(tl.int64) * qkv_stride
            else:
                input_ptr = conv_ptr + (slot * (TAPS - 1) + TAPS - 1 + row) * CHANNELS
            value = tl.load(input_ptr + channels, mask=inside & ((row >= 0) | (slot >= 0)), other=0.0)
            weight = tl.load(
                conv_weight_ptr + (TAPS - 1 - back) * CHANNELS + channels, mask=inside, other=0.0
            )
            x += value.to(tl.float32) * weight
            row = parent_of(bits_ptr, first, row, tree, HAS_TREES, MAX_NODES)
        x = x * sigmoid_of(x)
        if is_value:
            beta = sigmoid_of(tl.load(b_ptr + token.to(tl.int64) * b_stride + head).to(tl.float32))
            tl.store(beta_ptr + token.to(tl.int64) * V_HEADS + head, beta)
            rate = tl.load(rate_ptr + head)
            if PER_ROW:
                rows = tl.arange(0, BLOCK_K)
                of = head * K_DIM + rows
                a = tl.load(a_ptr + token.to(tl.int64) * a_stride + of, mask=rows < K_DIM, other=0.0)
                y = a.to(tl.float32) + tl.load(bias_ptr + of, mask=rows < K_DIM, other=0.0)
                decay = decay_of(rate, y)
                tl.store(decay_ptr + token.to(tl.int64) * V_HEADS * K_DIM + of, decay, mask=rows < K_DIM)
            else:
                a = tl.load(a_ptr + token.to(tl.int64) * a_stride + head).to(tl.float32)
                decay = decay_of(rate, a + tl.load(bias_ptr + head))
                tl.store(decay_ptr + token.to(tl.int64) * V_HEADS + head, decay)
        else:
            x = x / tl.sqrt_rn(tl.sum(tl.where(inside, x * x, 0.0), 0) + LENGTH_EPS)
            if piece < K_HEADS:
                x = x * (1.0 / K_DIM**0.5)
        tl.store(x_ptr + token.to(tl.int64) * CHANNELS + channels, x, mask=inside)


@triton.jit
def decay_of(rate, x):
    # ln(1 + y) with y = e^-|x| is 2 artanh(s), s = y / (2 + y) <= 1 / 3: exact also for small y.
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    series = square * (1.0 / 15) + 1.0 / 13
    series = series * square + 1.0 / 11
    series = series * square + 1.0 / 9
    series = series * square + 1.0 / 7
    series = series * square + 1.0 / 5
    series = series * square + 1.0 / 3
    series = series * square + 1.0
    return tl.exp(-rate * (tl.maximum(x, 0.0) + 2.0 * s * series))


@triton.jit
def scan_kernel(
    x_ptr, outs_ptr, beta_ptr, decay_ptr, recurrent_ptr, query_start_loc_ptr, bits_ptr, initial_slots_ptr,
    final_slots_ptr, snapshot_slots_ptr, snapshot_rows_ptr,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    PER_ROW: tl.constexpr, HAS_TREES: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr,
    MAX_NODES: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    seq = tl.program_id(0)
    head = tl.program_id(1)
    k_head = head // (V_HEADS // K_HEADS)
    first = tl.load(query_start_loc_ptr + seq)
    end = tl.load(query_start_loc_ptr + seq + 1)
    rows = tl.arange(0, BLOCK_K)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = rows < K_DIM
    is_column = columns < V_DIM
    inside = is_row[:, None] & is_column[None, :]
    at = rows[:, None] * V_DIM + columns[None, :]
    initial = tl.load(initial_slots_ptr + seq).to(tl.int64)
    final = tl.load(final_slots_ptr + seq).to(tl.int64)
    snapshot = tl.load(snapshot_slots_ptr + seq).to(tl.int64)
    snapshot_rows = tl.load(snapshot_rows_ptr + seq)
    initial_ptrs = recurrent_ptr + (initial * V_HEADS + head) * K_DIM * V_DIM + at
    state = tl.load(initial_ptrs, mask=inside & (initial >= 0), other=0.0)
    tree = is_tree(bits_ptr, first, end, HAS_TREES, MAX_NODES)
    for node in range(0, end - first):
        start = node
        if HAS_TREES:
            if tree:
                if parent_of(bits_ptr, first, node, tree, HAS_TREES, MAX_NODES) != node - 1:
                    start = 0
                    state = tl.load(initial_ptrs, mask=inside & (initial >= 0), other=0.0)
        for row in range(start, node + 1):
            is_taken = row == node
            if HAS_TREES:
                is_taken = is_taken | ((tl.load(bits_ptr + first + node) >> row) & 1 != 0)
            if is_taken:
                token = (first + row).to(tl.int64)
                q = tl.load(x_ptr + token * CHANNELS + k_head * K_DIM + rows, mask=is_row, other=0.0)
                k_ptr = x_ptr + token * CHANNELS + (K_HEADS + k_head) * K_DIM
                k = tl.load(k_ptr + rows, mask=is_row, other=0.0)
                v_ptr = x_ptr + token * CHANNELS + 2 * K_HEADS * K_DIM + head * V_DIM
                v = tl.load(v_ptr + columns, mask=is_column, other=0.0)
                beta = tl.load(beta_ptr + token * V_HEADS + head)
                if PER_ROW:
                    decay_ptrs = decay_ptr + (token * V_HEADS + head) * K_DIM + rows
                    state = state * tl.load(decay_ptrs, mask=is_row, other=0.0)[:, None]
                else:
                    state = state * tl.load(decay_ptr + token * V_HEADS + head)
                known = tl.sum(state * k[:, None], 0)
                state = state + k[:, None] * (beta * (v - known))[None, :]
                if row == node:
                    out = tl.sum(state * q[:, None], 0)
                    tl.store(outs_ptr + (token * V_HEADS + head) * V_DIM + columns, out, mask=is_column)
        if (snapshot >= 0) & (node + 1 == snapshot_rows):
            tl.store(recurrent_ptr + (snapshot * V_HEADS + head) * K_DIM * V_DIM + at, state, mask=inside)
    if (final >= 0) & (end > first):
        tl.store(recurrent_ptr + (final * V_HEADS + head) * K_DIM * V_DIM + at, state, mask=inside)


@triton.jit(do_not_specialize=("channels",))
def keep_kernel(
    qkv_ptr, conv_ptr, query_start_loc_ptr, initial_slots_ptr, final_slots_ptr, snapshot_slots_ptr,
    snapshot_rows_ptr, qkv_stride, channels,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TAPS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    first = tl.load(query_start_loc_ptr + seq)
    end = tl.load(query_start_loc_ptr + seq + 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    taps = tl.arange(0, BLOCK_TAPS)
    inside = (taps < TAPS - 1)[:, None] & (columns < channels)[None, :]
    initial = tl.load(initial_slots_ptr + seq).to(tl.int64)
    final = tl.load(final_slots_ptr + seq).to(tl.int64)
    snapshot = tl.load(snapshot_slots_ptr + seq).to(tl.int64)
    if end > first:
        # Both are read before either is written: the final slot may be the initial one.
        kept = last_inputs(
            qkv_ptr, conv_ptr, first, end - first, initial, qkv_stride, channels, taps, columns, inside, TAPS
        )  # fmt: skip
        earlier = last_inputs(
            qkv_ptr, conv_ptr, first, tl.load(snapshot_rows_ptr + seq), initial, qkv_stride, channels, taps,
            columns, inside & (snapshot >= 0), TAPS,
        )  # fmt: skip
        tl.debug_barrier()
        at = taps[:, None] * channels + columns[None, :]
        tl.store(conv_ptr + final * (TAPS - 1) * channels + at, kept, mask=inside & (final >= 0))
        tl.store(conv_ptr + snapshot * (TAPS - 1) * channels + at, earlier, mask=inside & (snapshot >= 0))


@triton.jit
def last_inputs(
    qkv_ptr, conv_ptr, first, num_rows, initial, qkv_stride, channels, taps, columns, inside,
    TAPS: tl.constexpr,
):  # fmt: skip
    """The TAPS - 1 inputs up to num_rows tokens of a causal sequence."""
    rows = num_rows - (TAPS - 1) + taps
    is_new = (rows >= 0)[:, None]
    new_ptrs = qkv_ptr + (first + rows).to(tl.int64)[:, None] * qkv_stride + columns[None, :]
    new = tl.load(new_ptrs, mask=inside & is_new, other=0.0)
    old_at = (initial * (TAPS - 1) + (TAPS - 1) + rows)[:, None] * channels + columns[None, :]
    old = tl.load(conv_ptr + old_at, mask=inside & ~is_new & (initial >= 0), other=0.0)
    return tl.where(is_new, new, old)


@triton.jit
def finish_kernel(
    outs_ptr, z_ptr, norm_ptr, out_ptr, z_stride, eps,
    V_HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_V)
    inside = dims < V_DIM
    x = tl.load(outs_ptr + (token * V_HEADS + head) * V_DIM + dims, mask=inside, other=0.0)
    z = tl.load(z_ptr + token * z_stride + head * V_DIM + dims, mask=inside, other=0.0).to(tl.float32)
    gate = sigmoid_of(z)
    if not SIGMOID:
        gate = gate * z
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / V_DIM + eps)
    weight = tl.load(norm_ptr + dims, mask=inside, other=0.0)
    at = (token * V_HEADS + head) * V_DIM + dims
    tl.store(out_ptr + at, (x * scale * weight * gate).to(out_ptr.dtype.element_ty), mask=inside)
