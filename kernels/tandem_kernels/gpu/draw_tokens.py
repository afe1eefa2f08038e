"""draw_tokens in Triton: one program per row, in as many passes over the row as its parameters ask for.

    always      the largest logit; the race
    top-k       31 counts: the k-th largest by bisection of the floats' bits, which are ordered as the floats
    top-p       31 sums: the lightest weight of the nucleus likewise

After the first pass the row is read from the L2 cache. Sorting would read as much, and needs the memory.
"""

# Triton's decorator and the kernel's parameters have no types; its constants are in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.draw_tokens import FACTORS, GAMMA

BLOCK = 4096
NUM_WARPS = 16
#: About the number of multiprocessors; more rows would only take more memory.
ROWS_PER_LAUNCH = 128


def draw_tokens(logits: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """Return token ids [R] int64; arguments as the public operator has checked them, all dense."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    # The kernel reads the scaled row and its weights more than once.
    scratch = torch.empty(
        min(num_rows, ROWS_PER_LAUNCH), 2, vocab_size, dtype=torch.float32, device=logits.device
    )
    for first in range(0, num_rows, ROWS_PER_LAUNCH):
        rows = slice(first, first + ROWS_PER_LAUNCH)
        draw_tokens_kernel[(min(num_rows - first, ROWS_PER_LAUNCH),)](
            logits[rows], scratch, out[rows], *(p[rows] for p in parameters), vocab_size,
            BLOCK=BLOCK, GAMMA_BITS=GAMMA, FACTOR_1=FACTORS[0], FACTOR_2=FACTORS[1], num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


@triton.jit
def draw_tokens_kernel(
    logits_ptr, scratch_ptr, out_ptr, keys_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr,
    vocab_size,
    BLOCK: tl.constexpr, GAMMA_BITS: tl.constexpr, FACTOR_1: tl.constexpr, FACTOR_2: tl.constexpr,
):  # fmt: skip
    INFINITY_BITS: tl.constexpr = 0x7F800000
    ONE_BITS: tl.constexpr = 0x3F800000
    r = tl.program_id(0).to(tl.int64)
    logits_ptr += r * vocab_size
    row_ptr = scratch_ptr + r * 2 * vocab_size
    weights_ptr = row_ptr + vocab_size
    lanes = tl.arange(0, BLOCK)

    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    largest_id = lanes
    is_bad = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + lanes
        logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        is_bad |= (logits != logits).to(tl.int32)
        is_larger = logits > largest
        largest = tl.where(is_larger, logits, largest)
        largest_id = tl.where(is_larger, ids, largest_id)
    top = tl.max(largest, 0)
    # Padding lanes of a short row never hold its maximum, unless all is -inf.
    greedy_id = tl.min(tl.where(largest == top, largest_id, 0x7FFFFFFF), 0)
    temperature = tl.load(temperature_ptr + r)
    if (tl.max(is_bad, 0) != 0) | (tl.abs(top) == float("inf")):
        tl.store(out_ptr + r, tl.full([], -1, dtype=tl.int64))
        return
    if temperature == 0.0:
        tl.store(out_ptr + r, greedy_id.to(tl.int64))
        return

    # Rows are at most 0: the larger, the smaller the bits of their magnitude.
    for first in range(0, vocab_size, BLOCK):
        ids = first + lanes
        logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        row = tl.div_rn(logits - top, tl.broadcast_to(temperature, [BLOCK]))
        tl.store(row_ptr + ids, row, mask=ids < vocab_size)
    tl.debug_barrier()

    top_k = tl.load(top_k_ptr + r)
    kth_bits = tl.full([], INFINITY_BITS, dtype=tl.int32)
    if (top_k > 0) & (top_k < vocab_size):
        low = tl.full([], 0, dtype=tl.int32)
        while low < kth_bits:
            middle = low + (kth_bits - low) // 2
            count = tl.zeros([BLOCK], dtype=tl.int32)
            for first in range(0, vocab_size, BLOCK):
                ids = first + lanes
                row = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("nan"))
                bits = tl.abs(row).to(tl.int32, bitcast=True)
                count += (bits <= middle).to(tl.int32)
            if tl.sum(count, 0) >= top_k:
                kth_bits = middle
            else:
                low = middle + 1

    total = tl.zeros([BLOCK], dtype=tl.float64)
    for first in range(0, vocab_size, BLOCK):
        ids = first + lanes
        row = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        weights = tl.exp(row.to(tl.float64)).to(tl.float32)
        weights = tl.where(tl.abs(row).to(tl.int32, bitcast=True) <= kth_bits, weights, 0.0)
        tl.store(weights_ptr + ids, weights, mask=ids < vocab_size)
        total += weights.to(tl.float64)
    tl.debug_barrier()

    # In the nucleus: all weights above lightest_bits, and the first num_equal of those that have them.
    top_p = tl.load(top_p_ptr + r)
    lightest_bits = tl.full([], 0, dtype=tl.int32)
    num_equal = tl.full([], 0, dtype=tl.int32)
    if top_p < 1.0:
        target = top_p * tl.sum(total, 0)
        high = tl.full([], ONE_BITS, dtype=tl.int32)
        while lightest_bits < high:
            middle = high - (high - lightest_bits) // 2
            mass = tl.zeros([BLOCK], dtype=tl.float64)
            for first in range(0, vocab_size, BLOCK):
                ids = first + lanes
                weights = tl.load(weights_ptr + ids, mask=ids < vocab_size, other=0.0)
                is_in = weights.to(tl.int32, bitcast=True) >= middle
                mass += tl.where(is_in, weights, 0.0).to(tl.float64)
            if tl.sum(mass, 0) >= target:
                lightest_bits = middle
            else:
                high = middle - 1
        mass = tl.zeros([BLOCK], dtype=tl.float64)
        for first in range(0, vocab_size, BLOCK):
            ids = first + lanes
            weights = tl.load(weights_ptr + ids, mask=ids < vocab_size, other=0.0)
            is_in = weights.to(tl.int32, bitcast=True) > lightest_bits
            mass += tl.where(is_in, weights, 0.0).to(tl.float64)
        lightest = lightest_bits.to(tl.float32, bitcast=True).to(tl.float64)
        missing = tl.ceil((target - tl.sum(mass, 0)) / lightest)
        num_equal = tl.minimum(tl.maximum(missing, 1.0), 2147483647.0).to(tl.int32)

    log_min_p = tl.load(log_min_p_ptr + r)
    key = tl.load(keys_ptr + r).to(tl.uint64, bitcast=True)
    earliest = tl.full([BLOCK], float("inf"), dtype=tl.float64)
    earliest_id = lanes
    num_seen = tl.full([], 0, dtype=tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + lanes
        is_token = ids < vocab_size
        weights = tl.load(weights_ptr + ids, mask=is_token, other=0.0)
        row = tl.load(row_ptr + ids, mask=is_token, other=float("-inf"))
        bits = weights.to(tl.int32, bitcast=True)
        is_equal = ((bits == lightest_bits) & is_token).to(tl.int32)
        rank = num_seen + tl.cumsum(is_equal, 0)
        num_seen += tl.sum(is_equal, 0)
        races = (bits > lightest_bits) | ((is_equal != 0) & (rank <= num_equal))
        races = races & (row >= log_min_p) & (weights > 0.0)

        z = (ids + 1).to(tl.uint64) * tl.full([BLOCK], GAMMA_BITS, dtype=tl.uint64) + key
        z = (z ^ (z >> 30)) * tl.full([BLOCK], FACTOR_1, dtype=tl.uint64)
        z = (z ^ (z >> 27)) * tl.full([BLOCK], FACTOR_2, dtype=tl.uint64)
        z = z ^ (z >> 31)
        u = ((z >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
        # 1 - u is exact, as u has 53 bits behind the point.
        times = -tl.log(1.0 - u) / tl.where(races, weights, 1.0).to(tl.float64)
        times = tl.where(races, times, float("inf"))
        is_earlier = times < earliest
        earliest = tl.where(is_earlier, times, earliest)
        earliest_id = tl.where(is_earlier, ids, earliest_id)
    first_time = tl.min(earliest, 0)
    drawn = tl.min(tl.where(earliest == first_time, earliest_id, 0x7FFFFFFF), 0)
    tl.store(out_ptr + r, drawn.to(tl.int64))
