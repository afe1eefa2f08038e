"""turbo_attention's kernel in Triton: one launch for any mix of sequences, whatever their lengths.

    item             BLOCK_ROWS rows of one sequence x the keys [begin, end) of one split (`triton_plan`)
      rows           row = token * group_size + head within the group: all of them read the same K and V
      keys           tiles of BLOCK_KEYS slots with an online softmax; only tiles that some row does not see
                     whole are masked: the last ones, and with a window the first ones. While one is computed,
                     the next one's K and V arrive
    programs         as many as run at the same time; when it begins an item, each takes the next one of the
                     list, times the K/V heads, that nobody has

A tile of rows whose keys are split leaves one partial result for each split. Whichever program arrives last
at the tile's counter adds them in the order of the splits, so that the order of arrival changes no bit, and
sets the counter back to zero. Nobody waits.
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

#: Fields of an item in the work list, all int32.
ITEM_FIELDS = 8
#: Kinds of K's and V's dequantisation factors, K_SCALE and V_SCALE of the kernel.
NO_SCALE, HEAD_SCALE, TOKEN_SCALE = 0, 1, 2


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


@triton.jit
def finite_or_zero(maximum):
    """A maximum to subtract: a row that sees nothing has -inf, and -inf minus -inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def load_rows(item_ptr, num_rows, BLOCK_ROWS: tl.constexpr):
    """An item's rows within its sequence. Rows past the last one repeat it, which costs no mask.

    Read again where they are needed again: the compiler would keep all that follows from them in registers
    throughout the loops.
    """
    return tl.load(item_ptr + 1, volatile=True) + tl.minimum(tl.arange(0, BLOCK_ROWS), num_rows - 1)


@triton.jit
def load_block_ids(block_table_ptr, first_slot, end, BLOCK_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The cache block of a tile of keys, or of each key where tiles cross blocks; int64."""
    if BLOCK_SIZE % BLOCK_KEYS == 0:
        slots = tl.minimum(first_slot, end - 1)
    else:
        slots = tl.minimum(first_slot + tl.arange(0, BLOCK_KEYS), end - 1)
    return tl.load(block_table_ptr + slots // BLOCK_SIZE).to(tl.int64)


@triton.jit(do_not_specialize=("window", "num_partial_rows", "block_table_stride"))
def turbo_attention_kernel(
    query_ptr, kv_cache_ptr, block_table_ptr, seq_lens_ptr, query_start_loc_ptr, ancestor_bits_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr, out_ptr,
    items_ptr, num_items_ptr, schedule_ptr, counters_ptr, partials_ptr, maxima_ptr, sums_ptr,
    scale, softcap, window, num_partial_rows,
    query_token_stride, query_head_stride, out_token_stride, out_head_stride, block_table_stride,
    cache_block_stride, cache_kv_stride, cache_head_stride,
    k_scale_block_stride, k_scale_head_stride, k_scale_slot_stride,
    v_scale_block_stride, v_scale_head_stride, v_scale_slot_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    MAX_NODES: tl.constexpr, HAS_BITS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, KEY_STAGES: tl.constexpr,
):  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634
    # A factor per token goes into the weights, which costs less than V, but for float16, whose range small
    # factors would leave.
    SCALES_VALUES: tl.constexpr = V_SCALE == 2 and query_ptr.dtype.element_ty == tl.float16
    key_range = tl.arange(0, BLOCK_KEYS)
    row_range = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_SIZE
    # Partial results that are added: dimensions at a time, and splits whose loads are under way together.
    MERGED_DIM: tl.constexpr = min(BLOCK_DIM, 2048 // BLOCK_ROWS)
    MERGED_SPLITS: tl.constexpr = 4

    num_work = tl.load(num_items_ptr) * NUM_KV_HEADS
    work = tl.program_id(0)
    while work < num_work:
        next_work = tl.num_programs(0) + tl.atomic_add(schedule_ptr, 1, sem="relaxed")
        kv_head = work % NUM_KV_HEADS
        item_ptr = items_ptr + tl.cast(work // NUM_KV_HEADS, tl.int64) * 8
        seq = tl.load(item_ptr).to(tl.int64)
        first_row = tl.load(item_ptr + 1)
        begin = tl.load(item_ptr + 2)
        end = tl.load(item_ptr + 3)
        split = tl.load(item_ptr + 4)
        num_splits = tl.load(item_ptr + 5)
        row_start = tl.load(query_start_loc_ptr + seq)
        num_new = tl.load(query_start_loc_ptr + seq + 1) - row_start
        context_len = tl.load(seq_lens_ptr + seq) - num_new
        num_rows = tl.minimum(num_new * GROUP_SIZE - first_row, BLOCK_ROWS)

        rows = load_rows(item_ptr, num_rows, BLOCK_ROWS)
        heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
        row_ids = (row_start + rows // GROUP_SIZE).to(tl.int64)
        query = tl.load(
            query_ptr + (row_ids * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :],
            mask=is_dim[None, :], other=0.0,
        )  # fmt: skip

        is_tree = False
        first_token = first_row // GROUP_SIZE
        last_token = (first_row + num_rows - 1) // GROUP_SIZE
        # Every row sees the slots [seen_from, seen_to), but for the window.
        seen_to = context_len + first_token + 1
        if HAS_BITS:
            is_tree = (num_new <= MAX_NODES) & (tl.load(ancestor_bits_ptr + row_start) != 0)
            if is_tree:
                seen_to = context_len
        seen_to = tl.maximum(tl.minimum(seen_to, end) // BLOCK_KEYS * BLOCK_KEYS, begin)
        seen_from = begin
        if HAS_WINDOW:
            seen_from = tl.cdiv(tl.maximum(context_len + last_token - window + 1, 0), BLOCK_KEYS) * BLOCK_KEYS
            seen_from = tl.minimum(tl.maximum(seen_from, begin), seen_to)

        # Logits in units of log 2, so that the softmax needs exp2 alone.
        logit_scale = scale * LOG2_E
        if K_SCALE == 1:
            logit_scale *= tl.load(k_scale_ptr + kv_head)
        if HAS_SOFTCAP:
            logit_scale *= 2.0 / (softcap * LOG2_E)
        row_max = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
            row_max = tl.where(split == 0, sink, row_max)
            row_sum += tl.where(split == 0, 1.0, 0.0)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype=tl.float32)

        table_ptr = block_table_ptr + seq * block_table_stride
        key_ptr = kv_cache_ptr + tl.cast(kv_head, tl.int64) * cache_head_stride
        value_ptr = key_ptr + cache_kv_stride
        # The next tile's block ids are loaded a tile ahead: loads that wait for them cannot be pipelined.
        block_ids = load_block_ids(table_ptr, begin, end, BLOCK_SIZE, BLOCK_KEYS)
        # Phases: 0 the window's edge, 1 keys that every row sees, 2 the rest.
        for phase in tl.static_range(0 if HAS_WINDOW else 1, 3):
            if phase == 0:
                phase_begin, phase_end = begin, seen_from
            elif phase == 1:
                phase_begin, phase_end = seen_from, seen_to
            else:
                phase_begin, phase_end = seen_to, end
            for first_slot in tl.range(phase_begin, phase_end, BLOCK_KEYS, num_stages=KEY_STAGES):
                slots = first_slot + key_range
                is_key = slots < end
                offsets = block_ids * cache_block_stride + (slots % BLOCK_SIZE) * HEAD_SIZE
                if K_SCALE == 2:
                    k_scale = tl.load(
                        k_scale_ptr
                        + block_ids * k_scale_block_stride
                        + kv_head * k_scale_head_stride
                        + (slots % BLOCK_SIZE) * k_scale_slot_stride
                    )
                if V_SCALE == 2:
                    v_scale = tl.load(
                        v_scale_ptr
                        + block_ids * v_scale_block_stride
                        + kv_head * v_scale_head_stride
                        + (slots % BLOCK_SIZE) * v_scale_slot_stride,
                        mask=is_key,
                        other=0.0,
                    )
                block_ids = load_block_ids(table_ptr, first_slot + BLOCK_KEYS, end, BLOCK_SIZE, BLOCK_KEYS)
                tile = offsets[:, None] + dims[None, :]
                is_read = is_dim[None, :]
                if phase != 1:
                    # Slots past the sequence's end may hold NaN, which 0 times is NaN.
                    is_read = is_read & is_key[:, None]
                key = dequantized(tl.load(key_ptr + tile, mask=is_read, other=0.0), query.dtype)
                value = dequantized(tl.load(value_ptr + tile, mask=is_read, other=0.0), query.dtype)
                logits = tl.dot(query, tl.trans(key), input_precision="ieee")
                logits *= logit_scale
                if K_SCALE == 2:
                    logits *= k_scale[None, :]
                if HAS_SOFTCAP:
                    # tanh(x) = 2 sigmoid(2 x) - 1; the factor 2 is in logit_scale.
                    logits = (2.0 * tl.sigmoid(logits) - 1.0) * (softcap * LOG2_E)

                if phase != 1:
                    tokens = load_rows(item_ptr, num_rows, BLOCK_ROWS) // GROUP_SIZE
                    row_positions = context_len + tokens
                    nodes = (slots - context_len)[None, :]
                    sees = nodes <= tokens[:, None]
                    key_positions = slots
                    if HAS_BITS:  # noqa: SIM102 - decided at compile time, unlike the next
                        if is_tree:
                            row_bits = tl.load(ancestor_bits_ptr + row_start + tokens)
                            row_positions = context_len + popcount(row_bits) - 1
                            shifts = tl.minimum(tl.maximum(nodes, 0), MAX_NODES - 1).to(tl.int64)
                            sees = (nodes < 0) | (((row_bits[:, None] >> shifts) & 1) != 0)
                            if HAS_WINDOW:
                                is_node = (slots >= context_len) & is_key
                                bits = tl.load(
                                    ancestor_bits_ptr + row_start + slots - context_len,
                                    mask=is_node, other=1,
                                )  # fmt: skip
                                node_positions = context_len + popcount(bits) - 1
                                key_positions = tl.where(slots < context_len, slots, node_positions)
                    sees = sees & is_key[None, :]
                    if HAS_WINDOW:
                        sees = sees & (row_positions[:, None] - key_positions[None, :] < window)
                    logits = tl.where(sees, logits, float("-inf"))

                new_max = tl.maximum(row_max, tl.max(logits, 1))
                subtracted = new_max
                if phase != 1:
                    subtracted = finite_or_zero(new_max)
                weights = tl.exp2(logits - subtracted[:, None])
                correction = tl.exp2(row_max - subtracted)
                row_sum = row_sum * correction + tl.sum(weights, 1)
                row_max = new_max
                if V_SCALE == 2:
                    if SCALES_VALUES:
                        value = (value * v_scale[:, None]).to(query.dtype)
                    else:
                        weights *= v_scale[None, :]
                acc = tl.dot(
                    weights.to(query.dtype), value, acc * correction[:, None], input_precision="ieee"
                )
        is_row = row_range < num_rows
        rows = load_rows(item_ptr, num_rows, BLOCK_ROWS)
        heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
        row_ids = (row_start + rows // GROUP_SIZE).to(tl.int64)
        out_rows = row_ids * out_token_stride + heads * out_head_stride
        value_factor = 1.0
        if V_SCALE == 1:
            value_factor = tl.load(v_scale_ptr + kv_head)
        if num_splits == 1:
            normalizer = value_factor / tl.where(row_sum == 0.0, 1.0, row_sum)
            tl.store(
                out_ptr + out_rows[:, None] + dims[None, :],
                (acc * normalizer[:, None]).to(out_ptr.dtype.element_ty),
                mask=is_row[:, None] & is_dim[None, :],
            )
        else:
            head_rows = tl.cast(kv_head, tl.int64) * num_partial_rows + tl.load(item_ptr + 7) + row_range
            partial_rows = head_rows + split * num_rows
            tl.store(maxima_ptr + partial_rows, row_max, mask=is_row, cache_modifier=".cg")
            tl.store(sums_ptr + partial_rows, row_sum, mask=is_row, cache_modifier=".cg")
            tl.store(
                partials_ptr + partial_rows[:, None] * HEAD_SIZE + dims[None, :],
                acc,
                mask=is_row[:, None] & is_dim[None, :],
                cache_modifier=".cg",
            )
            # All threads' stores come before the one that counts them.
            tl.debug_barrier()
            counter_ptr = counters_ptr + tl.load(item_ptr + 6).to(tl.int64) * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_splits - 1:
                tl.store(counter_ptr, 0)
                for first_out_dim in tl.range(0, HEAD_SIZE, MERGED_DIM, num_stages=1):
                    out_dims = first_out_dim + tl.arange(0, MERGED_DIM)
                    stored = is_row[:, None] & (out_dims < HEAD_SIZE)[None, :]
                    total_max = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
                    total_sum = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
                    total = tl.zeros([BLOCK_ROWS, MERGED_DIM], dtype=tl.float32)
                    for first_split in tl.range(0, num_splits, MERGED_SPLITS, num_stages=1):
                        # Loads of several splits under way at once: one alone takes as long.
                        maxima = ()
                        sums = ()
                        parts = ()
                        for i in tl.static_range(MERGED_SPLITS):
                            part = head_rows + (first_split + i) * num_rows
                            is_part = is_row & (first_split + i < num_splits)
                            maxima += (
                                tl.load(
                                    maxima_ptr + part, mask=is_part, other=float("-inf"), cache_modifier=".cg"
                                ),
                            )
                            sums += (tl.load(sums_ptr + part, mask=is_part, other=0.0, cache_modifier=".cg"),)
                            parts += (
                                tl.load(
                                    partials_ptr + part[:, None] * HEAD_SIZE + out_dims[None, :],
                                    mask=stored & (first_split + i < num_splits),
                                    other=0.0, cache_modifier=".cg",
                                ),
                            )  # fmt: skip
                        for i in tl.static_range(MERGED_SPLITS):
                            new_total_max = tl.maximum(total_max, maxima[i])
                            subtracted_max = finite_or_zero(new_total_max)
                            kept = tl.exp2(total_max - subtracted_max)
                            share = tl.exp2(maxima[i] - subtracted_max)
                            total_sum = total_sum * kept + share * sums[i]
                            total = total * kept[:, None] + share[:, None] * parts[i]
                            total_max = new_total_max
                    normalizer = value_factor / tl.where(total_sum == 0.0, 1.0, total_sum)
                    tl.store(
                        out_ptr + out_rows[:, None] + out_dims[None, :],
                        (total * normalizer[:, None]).to(out_ptr.dtype.element_ty),
                        mask=stored,
                    )
        work = next_work
    # The last program to end prepares the next launch.
    if tl.atomic_add(schedule_ptr + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(schedule_ptr, 0)
        tl.store(schedule_ptr + 1, 0)
