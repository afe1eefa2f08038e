"""Compares the CPU kernels with torch's: attention, projections and mixtures of experts.

    python benchmarks/kernels_cpu.py --out FILE.md

Shapes are those of SmolLM2-135M, and those of experts Qwen3-30B-A3B's. A time covers all layers, of experts
one; weights and caches exceed the processor's caches. The kernels and torch take turns; figures are medians.

attention     turbo_attention on a paged cache and scaled_dot_product_attention on dense K and V in
              bfloat16, with query heads folded into rows and a prepared mask, torch's fastest way. n = 1
              decodes, 8 to 32 verify a binary tree, 512 is a chunk of a prompt.
projections   packed_linear and F.linear with M rows; for quantized weights F.linear in bfloat16
experts       moe and a loop of F.linear over the chosen experts in bfloat16, one layer with M rows; the bytes
              are those of the chosen experts and of the router

"of read" and "of peak" are shares of the best that torch reached before and after (machine.py): reading, and
products of the peer's type, which products of integers can exceed. T_n/T_1: n rows over one row.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from timeit import default_timer, timeit
from typing import NamedTuple

import torch
import torch.nn.functional as F
from machine import Peaks, measure_peaks
from reporting import markdown_table, write_page
from tandem_kernels import (
    AttentionLayer,
    AttentionMetadata,
    ExpertProjection,
    MoeWeights,
    PackedExperts,
    Packing,
    RouterScore,
    Routing,
    interleave,
    moe,
    pack_quantized,
    pack_weight,
    packed_linear,
    quantize_weight,
    runs_interleaved,
    turbo_attention,
)
from tandem_kernels.moe import route
from tandem_kernels.turbo_attention.reference import visible_slots

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 64
#: [out, in] of a layer's projections: QKV, output, gate and up, down.
PROJECTIONS = ((960, 576), (576, 576), (3072, 576), (576, 1536))

MAX_TREE_ROWS = 32
#: (context, sequences, rows of each): a page of results has at most 60 lines.
ATTENTION_CASES = (
    *((512, 1, rows) for rows in (1, 8, 16, MAX_TREE_ROWS)),
    *((4096, 1, rows) for rows in (1, 8, 16, MAX_TREE_ROWS, 512)),
    *((context, 4, rows) for context in (512, 4096) for rows in (1, 8, 16)),
)
#: Rows that are shown with an int8 cache too.
QUANTIZED_ROWS = (1, 8)
PROJECTION_ROWS = (1, 4, 8, 16, 32, 512)
#: Form of a weight -> from a weight [N, K] in float32 to what packed_linear takes.
PACKINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": pack_weight,
    "bfloat16": lambda weight: pack_weight(weight.bfloat16()),
    "8 bit": lambda weight: pack_quantized(quantize_weight(weight, Packing.INT8)),
    "4 bit": lambda weight: pack_quantized(quantize_weight(weight, Packing.INT4)),
}
#: For each line of a table, with at least 3 and at most 50 turns.
_SECONDS_PER_LINE = 0.7


class Line(NamedTuple):
    """One line of a table; times of all layers in seconds."""

    case: tuple[str, ...]
    num_rows: int
    ours: float
    torch: float
    num_bytes: int
    num_flops: int
    peer_dtype: torch.dtype


def measure_attention(context: int, num_seqs: int, num_rows: int, num_layers: int) -> list[Line]:
    """With a bfloat16 and with an int8 cache; `context` includes the new rows."""
    blocks = context // BLOCK_SIZE
    shape = (num_seqs * blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    caches = [torch.randn(shape).bfloat16() for _ in range(num_layers)]
    scale = 4 / 127
    quantized = [(cache.float() / scale).round().clamp(-127, 127).to(torch.int8) for cache in caches]
    # Shuffled, as after some hours of serving.
    block_table = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).int()
    dense = [_dense(cache, block_table) for cache in caches]
    interleaved = runs_interleaved(torch.bfloat16, HEAD_SIZE, BLOCK_SIZE)
    if interleaved:
        caches = [interleave(cache) for cache in caches]

    bits = _binary_tree(num_rows) if 1 < num_rows <= MAX_TREE_ROWS else None
    metadata = AttentionMetadata(
        block_table,
        torch.full((num_seqs,), context, dtype=torch.int32),
        torch.arange(num_seqs + 1, dtype=torch.int32) * num_rows,
        torch.tensor(bits * num_seqs) if bits else None,
    )
    query = torch.randn(num_seqs * num_rows, NUM_HEADS, HEAD_SIZE).bfloat16()
    folded = _fold(query, num_seqs)
    visible = visible_slots(context - num_rows, bits, num_rows, None)
    mask = None
    if num_rows > 1:
        mask = torch.zeros(visible.shape).bfloat16().masked_fill(~visible, -torch.inf)
        mask = mask.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=0)

    def ours(cache: torch.Tensor, kv_scale: float | None) -> torch.Tensor:
        layer = AttentionLayer(HEAD_SIZE**-0.5, k_scale=kv_scale, v_scale=kv_scale)
        return turbo_attention(query, cache, metadata, layer, interleaved=interleaved and kv_scale is None)

    def torchs(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)

    _check(_fold(ours(caches[0], None), num_seqs), torchs(*dense[0]))
    plain_s, quantized_s, torch_s = _turns(
        lambda: [ours(cache, None) for cache in caches],
        lambda: [ours(cache, scale) for cache in quantized],
        lambda: [torchs(*kv) for kv in dense],
    )
    elements = 2 * num_layers * num_seqs * NUM_KV_HEADS * context * HEAD_SIZE
    flops = 4 * num_layers * num_seqs * NUM_HEADS * HEAD_SIZE * int(visible.sum())
    case = (str(context), str(num_seqs))
    return [
        Line((*case, "bfloat16"), num_rows, plain_s, torch_s, 2 * elements, flops, torch.bfloat16),
        Line((*case, "int8"), num_rows, quantized_s, torch_s, elements, flops, torch.bfloat16),
    ]


def _binary_tree(num_rows: int) -> list[int]:
    """Ancestor bits."""
    bits = [1]
    for row in range(1, num_rows):
        bits.append(bits[(row - 1) // 2] | 1 << row)
    return bits


def _dense(cache: torch.Tensor, block_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [B, Hkv, context, D] of a paged cache."""
    keys, values = cache[block_table.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4).contiguous()
    return keys, values


def _fold(query: torch.Tensor, num_seqs: int) -> torch.Tensor:
    """[B * n, Hq, D] -> [B, Hkv, n * group, D]: the query heads of a K/V head as rows of one product."""
    grouped = query.view(num_seqs, -1, NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS, HEAD_SIZE)
    return grouped.transpose(1, 2).flatten(2, 3).contiguous()


def measure_projections(num_layers: int) -> list[Line]:
    lines = []
    weights = [torch.randn(shape) / shape[1] ** 0.5 for shape in PROJECTIONS]
    for name, pack in PACKINGS.items():
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        # Copies suffice: the time depends on where a layer's numbers are, not on their values.
        packed = [[w.clone() for _ in range(num_layers)] for w in map(pack, weights)]
        plain = [[w.to(dtype).clone() for _ in range(num_layers)] for w in weights]
        num_bytes = sum(w.nbytes for copies in packed for w in copies)
        for num_rows in PROJECTION_ROWS:
            inputs = [torch.randn(num_rows, depth).to(dtype) for _, depth in PROJECTIONS]
            tolerance = 0.2 if name == "4 bit" else 0.03
            _check(packed_linear(inputs[0], packed[0][0]), F.linear(inputs[0], plain[0][0]), tolerance)
            ours_s, torch_s = _turns(
                lambda: [packed_linear(x, w) for x, ws in zip(inputs, packed, strict=True) for w in ws],  # noqa: B023
                lambda: [F.linear(x, w) for x, ws in zip(inputs, plain, strict=True) for w in ws],  # noqa: B023
            )
            flops = 2 * num_rows * num_layers * sum(n * k for n, k in PROJECTIONS)
            lines.append(Line((name,), num_rows, ours_s, torch_s, num_bytes, flops, dtype))
    return lines


def measure_experts(
    num_experts: int = 128, hidden: int = 2048, inner: int = 768, top_k: int = 8
) -> list[Line]:
    routing = Routing(RouterScore.SOFTMAX, top_k, renorm=True)
    router = torch.randn(num_experts, hidden) / hidden**0.5
    up, down = (
        (torch.randn(num_experts, *shape) / shape[1] ** 0.5).bfloat16()
        for shape in ((2 * inner, hidden), (hidden, inner))
    )

    def loop(x: torch.Tensor) -> torch.Tensor:
        chosen, weights = route(x, router, None, None, routing)
        out = torch.zeros(x.shape)
        for expert in chosen.unique().tolist():
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            gate, value = F.linear(x[rows], up[expert]).chunk(2, 1)
            result = F.linear(F.silu(gate) * value, down[expert]).float()
            out.index_add_(0, rows, result * weights[rows, ranks, None])
        return out

    lines = []
    for name in ("bfloat16", "4 bit"):
        packed = [
            PackedExperts((torch.stack([PACKINGS[name](e.float()) for e in w]),), w.shape[1])
            for w in (up, down)
        ]
        weights = MoeWeights(routing, router, ExpertProjection(packed[0]), ExpertProjection(packed[1]))
        of_expert = sum(part[0].nbytes for w in packed for part in w.parts)
        for num_rows in (1, 4, 16):
            # Other experts each time: those of the last time would be in the caches.
            inputs = [torch.randn(num_rows, hidden).bfloat16() for _ in range(16)]
            _check(moe(inputs[0], weights), loop(inputs[0]), 0.2 if name == "4 bit" else 0.03)
            ours_s, torch_s = _turns(
                lambda: [moe(x, weights) for x in inputs],  # noqa: B023
                lambda: [loop(x) for x in inputs],  # noqa: B023
            )
            used = [len(route(x, router, None, None, routing)[0].unique()) for x in inputs]
            num_bytes = sum(used) * of_expert // len(inputs) + router.nbytes
            flops = 6 * num_rows * top_k * hidden * inner
            seconds = ours_s / len(inputs), torch_s / len(inputs)
            lines.append(Line((name,), num_rows, *seconds, num_bytes, flops, torch.bfloat16))
    return lines


def _turns(*calls: Callable[[], object]) -> list[float]:
    """Median seconds of each; they take turns, after one that warms up."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    began = default_timer()
    while len(times[0]) < 3 or (default_timer() - began < _SECONDS_PER_LINE and len(times[0]) < 50):
        for call, seconds in zip(calls, times, strict=True):
            seconds.append(timeit(call, number=1))
    return list(map(median, times))


def _check(ours: torch.Tensor, torchs: torch.Tensor, tolerance: float = 0.03) -> None:
    """Both compute the same, roughly; tests/kernels checks exactness."""
    error = float((ours.float() - torchs.float()).norm() / torchs.float().norm())
    if error > tolerance:
        raise AssertionError(f"ours and torch's results differ by {error:.3f} of their size")


def table(case: Sequence[str], rows_name: str, peer: str, lines: Sequence[Line], peaks: Peaks) -> str:
    one_row = {line.case: line.ours for line in lines if line.num_rows == 1}
    head = [*case, rows_name, "ms", f"{peer} ms", "ratio", f"T_{rows_name}/T_1"]
    rows = [
        [
            *line.case,
            str(line.num_rows),
            f"{1e3 * line.ours:.2f}",
            f"{1e3 * line.torch:.2f}",
            f"{line.torch / line.ours:.2f}x",
            f"{line.ours / one_row[line.case]:.2f}",
            f"{line.num_bytes / line.ours / 1e9:.1f}",
            f"{line.num_bytes / line.ours / peaks.read_bytes_per_s:.0%}",
            f"{line.num_flops / line.ours / 1e9:.0f}",
            f"{line.num_flops / line.ours / peaks.fastest(line.peer_dtype):.0%}",
        ]
        for line in lines
    ]
    return markdown_table([*head, "GB/s", "of read", "GFLOP/s", "of peak"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=30, help="fewer: a trial; its numbers mean little")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    before = measure_peaks()
    with torch.inference_mode():
        attention = [
            line
            for case in ATTENTION_CASES
            for line in measure_attention(*case, options.layers)
            if line.num_rows in QUANTIZED_ROWS or "int8" not in line.case
        ]
        projections = measure_projections(options.layers)
        experts = measure_experts()
    peaks = before.best(measure_peaks())
    tables = [
        table(("context", "sequences", "cache"), "n", "SDPA", attention, peaks),
        table(("weights",), "M", "F.linear", projections, peaks),
        table(("experts",), "M", "loop", experts, peaks),
    ]
    notes = f"Times are sums over {options.layers} layers, of experts over one. This machine {peaks}."
    write_page(options.out, "CPU kernels and torch", "\n\n".join(tables), notes)


if __name__ == "__main__":
    main()
