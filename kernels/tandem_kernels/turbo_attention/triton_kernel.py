"""turbo_attention in Triton: one launch for any mix of sequences, no synchronisation with the host.

    program (i, h)   query tile i, K/V head h
      rows           BLOCK_TOKENS new tokens of one sequence x the query heads of group h, folded
      keys           tiles of BLOCK_KEYS slots, each within one cache block, with an online softmax

Tiles do not cross sequences. Sequence b owns tiles from query_start_loc[b] // BLOCK_TOKENS + b, which leaves
every sequence enough of them whatever its length, so the grid depends on T and B alone; a program finds its
sequence by bisection, and one with no rows ends at once.

Not covered yet: split-KV (one sequence's context is one program's loop, which leaves a GPU idle at small
batches), float64, and head sizes above 256. Only `turbo_attention` imports this module, and on
demand, for it needs Triton.
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803, N806

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tandem_kernels.turbo_attention.inputs import MAX_TREE_NODES, AttentionInputs

MAX_HEAD_SIZE = 256


@dataclass(frozen=True)
class TileConfig:
    """Compile-time sizes of one launch."""

    block_rows: int
    block_tokens: int
    block_keys: int
    block_dim: int
    num_warps: int
    num_stages: int


def choose_tiles(
    num_tokens: int, num_seqs: int, group_size: int, head_size: int, block_size: int, element_bytes: int
) -> TileConfig:
    """Tiles that keep shared memory under 99 KB; rows by the mean number of new tokens per sequence."""
    mean_rows = group_size * num_tokens / max(num_seqs, 1)
    block_dim = max(16, triton.next_power_of_2(head_size))
    row_bytes = block_dim * element_bytes
    # float32 is multiplied without tensor cores and keeps its operands in registers.
    tile_bytes = 1 << 13 if element_bytes == 4 else 1 << 14
    block_rows = 16
    while block_rows < mean_rows and block_rows < 64 and block_rows * row_bytes <= tile_bytes:
        block_rows *= 2
    block_rows = max(block_rows, triton.next_power_of_2(group_size))
    # A key tile lies within one cache block.
    block_keys = block_size & -block_size
    while block_keys > 16 and (block_keys > 64 or block_keys * row_bytes > tile_bytes):
        block_keys //= 2
    return TileConfig(
        block_rows=block_rows,
        block_tokens=block_rows // group_size,
        block_keys=block_keys,
        block_dim=block_dim,
        num_warps=8 if block_rows * block_dim >= 64 * 128 else 4,
        num_stages=2,
    )


def attend(inputs: AttentionInputs, out: torch.Tensor | None) -> torch.Tensor:
    """Return out [T, Hq, D], or a new tensor when None; see `turbo_attention`."""
    query, kv_cache = inputs.query, inputs.kv_cache
    num_tokens, _, head_size = query.shape
    num_seqs = inputs.seq_lens.shape[0]
    if query.dtype == torch.float64:
        raise ValueError('query has dtype float64, wanted float32, float16 or bfloat16 for backend "triton"')
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(
            f'query has head size {head_size}, wanted at most {MAX_HEAD_SIZE} for backend "triton"'
        )
    if inputs.block_size % 16:
        raise ValueError(
            f'kv_cache has block size {inputs.block_size}, wanted a multiple of 16 for backend "triton"'
        )
    if (
        kv_cache.dtype == torch.float8_e4m3fn
        and query.is_cuda
        and torch.cuda.get_device_capability() < (8, 9)
    ):
        raise ValueError(
            "kv_cache has dtype float8_e4m3fn, which this GPU cannot convert: use float8_e5m2 or int8"
        )
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_tokens == 0 or num_seqs == 0:
        return out
    tiles = choose_tiles(
        num_tokens, num_seqs, inputs.group_size, head_size, inputs.block_size, query.element_size()
    )
    has_scales = inputs.k_scale is not None or inputs.v_scale is not None
    k_scale = inputs.scale_per_kv_head(inputs.k_scale, torch.float32).contiguous() if has_scales else query
    v_scale = inputs.scale_per_kv_head(inputs.v_scale, torch.float32).contiguous() if has_scales else query
    grid = (num_tokens // tiles.block_tokens + num_seqs, inputs.num_kv_heads)
    # Pointers a launch does not use still need a tensor to point to: the query's.
    turbo_attention_kernel[grid](
        query, kv_cache, inputs.block_table, inputs.seq_lens, inputs.query_start_loc,
        query if inputs.ancestor_bits is None else inputs.ancestor_bits,
        query if inputs.sinks is None else inputs.sinks,
        k_scale, v_scale, out,
        inputs.scale, inputs.softcap or 0.0, inputs.window or 0, num_seqs,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        inputs.block_table.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2),
        GROUP_SIZE=inputs.group_size, HEAD_SIZE=head_size, BLOCK_SIZE=inputs.block_size,
        BLOCK_ROWS=tiles.block_rows, BLOCK_TOKENS=tiles.block_tokens, BLOCK_KEYS=tiles.block_keys,
        BLOCK_DIM=tiles.block_dim, MAX_NODES=MAX_TREE_NODES,
        HAS_BITS=inputs.ancestor_bits is not None, HAS_WINDOW=inputs.window is not None,
        HAS_SOFTCAP=inputs.softcap is not None, HAS_SINKS=inputs.sinks is not None, HAS_SCALES=has_scales,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def popcount(bits):
    """Number of bits set in each int64; masks follow the shifts, which repeat the sign bit."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def dequantized(tile, dtype: tl.constexpr):
    """K or V as the query's dtype; float8 by way of float16, the one conversion every GPU has."""
    if tile.dtype.is_fp8():
        tile = tile.to(tl.float16)
    return tile.to(dtype)


@triton.jit(do_not_specialize=("num_seqs", "window"))
def turbo_attention_kernel(
    query_ptr, kv_cache_ptr, block_table_ptr, seq_lens_ptr, query_start_loc_ptr, ancestor_bits_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, out_ptr,
    scale, softcap, window, num_seqs,
    query_token_stride, query_head_stride, out_token_stride, out_head_stride,
    block_table_stride, cache_block_stride, cache_kv_stride, cache_head_stride,
    GROUP_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    MAX_NODES: tl.constexpr,
    HAS_BITS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    # The last sequence whose first tile is not after this one.
    seq = 0
    beyond = num_seqs
    while beyond - seq > 1:
        middle = (seq + beyond) // 2
        first_tile = tl.load(query_start_loc_ptr + middle) // BLOCK_TOKENS + middle
        if first_tile <= tile:
            seq = middle
        else:
            beyond = middle
    row_start = tl.load(query_start_loc_ptr + seq)
    num_new = tl.load(query_start_loc_ptr + seq + 1) - row_start
    first_token = (tile - row_start // BLOCK_TOKENS - seq) * BLOCK_TOKENS
    if first_token >= num_new:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    context_len = seq_len - num_new

    rows = tl.arange(0, BLOCK_ROWS)
    tokens = first_token + rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    is_row = (rows < BLOCK_TOKENS * GROUP_SIZE) & (tokens < num_new)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_SIZE
    row_ids = (row_start + tokens).to(tl.int64)
    query = tl.load(
        query_ptr
        + row_ids[:, None] * query_token_stride
        + heads[:, None] * query_head_stride
        + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )

    is_tree = False
    row_bits = tl.zeros([BLOCK_ROWS], dtype=tl.int64)
    row_positions = context_len + tokens
    if HAS_BITS:
        is_tree = (num_new <= MAX_NODES) & (tl.load(ancestor_bits_ptr + row_start) != 0)
        row_bits = tl.load(ancestor_bits_ptr + row_ids, mask=is_row, other=0)
        if is_tree:
            row_positions = context_len + popcount(row_bits) - 1

    # Slots that any row of the tile sees.
    end = tl.where(is_tree, seq_len, tl.minimum(context_len + first_token + BLOCK_TOKENS, seq_len))
    start = 0
    if HAS_WINDOW:
        first_position = context_len + tl.where(is_tree, 0, first_token)
        start = tl.maximum(first_position - window + 1, 0) // BLOCK_KEYS * BLOCK_KEYS

    # Logits in units of log 2, so that the softmax needs exp2 alone.
    logit_scale = scale * LOG2_E
    if HAS_SCALES:
        logit_scale *= tl.load(k_scale_ptr + kv_head)
    if HAS_SOFTCAP:
        logit_scale *= 2.0 / (softcap * LOG2_E)
    row_max = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    if HAS_SINKS:
        row_max = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        row_sum += 1.0
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype=tl.float32)

    block_ids_ptr = block_table_ptr + tl.cast(seq, tl.int64) * block_table_stride
    head_ptr = kv_cache_ptr + kv_head * cache_head_stride
    key_range = tl.arange(0, BLOCK_KEYS)
    # The next tile's block id is loaded one tile ahead: loads that wait for it cannot be pipelined.
    block_id = tl.load(block_ids_ptr + start // BLOCK_SIZE).to(tl.int64)
    for first_slot in tl.range(start, end, BLOCK_KEYS):
        tile_ptr = head_ptr + block_id * cache_block_stride + (first_slot % BLOCK_SIZE) * HEAD_SIZE
        next_slot = tl.minimum(first_slot + BLOCK_KEYS, end - 1)
        block_id = tl.load(block_ids_ptr + next_slot // BLOCK_SIZE).to(tl.int64)
        slots = first_slot + key_range
        is_key = slots < end
        # Slots past the sequence's end may hold NaN: they are not read.
        offsets = key_range[:, None] * HEAD_SIZE + dims[None, :]
        key = tl.load(tile_ptr + offsets, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        key = dequantized(key, query.dtype)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee") * logit_scale
        if HAS_SOFTCAP:
            # tanh(x) = 2 sigmoid(2 x) - 1; the factor 2 is in logit_scale.
            logits = (2.0 * tl.sigmoid(logits) - 1.0) * (softcap * LOG2_E)

        nodes = slots - context_len
        sees = nodes[None, :] <= tokens[:, None]
        key_positions = slots
        if HAS_BITS:  # noqa: SIM102 - decided at compile time, unlike the next
            if is_tree:
                shifts = tl.minimum(tl.maximum(nodes, 0), MAX_NODES - 1).to(tl.int64)
                in_tree = ((row_bits[:, None] >> shifts[None, :]) & 1) != 0
                sees = (nodes[None, :] < 0) | in_tree
                if HAS_WINDOW:
                    is_node = (nodes >= 0) & is_key
                    key_bits = tl.load(ancestor_bits_ptr + row_start + nodes, mask=is_node, other=1)
                    key_positions = tl.where(nodes < 0, slots, context_len + popcount(key_bits) - 1)
        sees = sees & is_key[None, :]
        if HAS_WINDOW:
            sees = sees & (row_positions[:, None] - key_positions[None, :] < window)
        logits = tl.where(sees, logits, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(logits, 1))
        # A row that has seen nothing yet: -inf minus -inf would be NaN.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(logits - safe_max[:, None])
        correction = tl.exp2(row_max - safe_max)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        value_ptr = tile_ptr + cache_kv_stride + offsets
        value = tl.load(value_ptr, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        value = dequantized(value, query.dtype)
        acc = tl.dot(weights.to(query.dtype), value, acc * correction[:, None], input_precision="ieee")
        row_max = new_max

    if HAS_SCALES:
        acc *= tl.load(v_scale_ptr + kv_head)
    acc /= tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(
        out_ptr + row_ids[:, None] * out_token_stride + heads[:, None] * out_head_stride + dims[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )
