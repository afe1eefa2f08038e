"""Time of the CPU kernels beside torch's, in one run: attention and projections.

    python benchmarks/kernels_cpu.py --out OUT

Shapes are the default model's, and a time is that of all its layers, whose weights and caches together exceed
what the processor caches. Ours and torch's take turns; medians.

attention     turbo_attention on a paged cache (of bfloat16: interleaved, where the engine's is) beside
              scaled_dot_product_attention on dense K and V, its query heads folded into rows and its mask
              prepared beforehand, which is the fastest way to ask torch. n = 1 decodes, 8 to 32 verify a
              binary tree, 512 is a chunk of a prompt. torch has no int8 cache; beside one stands its time
              in bfloat16.
projections   packed_linear beside F.linear, M rows. Quantized weights stand beside F.linear in bfloat16.

Shares refer to the best that torch was seen to do before and after: reading a large tensor, and a large
product in bfloat16 (in float32 for float32 weights), which products of integers can exceed. T_n/T_1 is what n
rows cost over one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from reporting import describe_command, describe_machine, markdown_table
from tandem_engine.draft_tree import DraftTree
from tandem_kernels import (
    AttentionLayer,
    AttentionMetadata,
    interleave,
    pack_quantized,
    pack_weight,
    packed_linear,
    quantize_weight,
    runs_interleaved,
    turbo_attention,
)

# SmolLM2-135M.
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 64
#: [out, in] of a layer's projections: QKV, output, gate and up, down.
PROJECTIONS = ((960, 576), (576, 576), (3072, 576), (576, 1536))

CONTEXTS = (512, 4096)
SEQUENCES = (1, 4)
TREE_ROWS = (1, 8, 16, 32)
CHUNK_ROWS = 512
PROJECTION_ROWS = (1, 4, 8, 16, 32, 128, 512)
#: Name of a weight's form -> from a weight [N, K] in float32 to what packed_linear takes.
PACKINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": pack_weight,
    "bfloat16": lambda weight: pack_weight(weight.bfloat16()),
    "8 bit": lambda weight: pack_quantized(quantize_weight(weight, 8)),
    "4 bit": lambda weight: pack_quantized(quantize_weight(weight, 4)),
}
#: Spent on each line of a table, at least three and at most 50 turns.
_SECONDS_PER_LINE = 0.7


@dataclass(frozen=True)
class Peaks:
    """What the machine was seen to do: bytes and floating-point operations per second."""

    read: float
    bfloat16: float
    float32: float

    def flops(self, dtype: str) -> float:
        return self.bfloat16 if dtype == "bfloat16" else self.float32

    def best(self, other: Peaks) -> Peaks:
        return Peaks(*(max(mine, theirs) for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Line:
    """One line of a table; times of all layers in seconds."""

    case: tuple[str, ...]
    num_rows: int
    ours: float
    torch: float
    num_bytes: int
    num_flops: int
    #: Element type of the products that its arithmetic is compared with.
    peer_dtype: str
    #: Time of the same case with one row; set once it is known.
    one_row: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.md")
    parser.add_argument(
        "--layers", type=int, default=30, help="fewer: for a try; the numbers mean little then"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    before = measure_peaks()
    with torch.inference_mode():
        attention = with_one_row(measure_attention(options.layers))
        projections = with_one_row(measure_projections(options.layers))
    _report(before.best(measure_peaks()), attention, projections, options)


def measure_peaks() -> Peaks:
    large = torch.ones(1 << 27)
    read = large.nbytes / min(_seconds(large.sum) for _ in range(5))
    del large

    def product(dtype: torch.dtype) -> float:
        size = 2048
        a, b = torch.randn(2, size, size).to(dtype)
        return 2 * size**3 / min(_seconds(lambda: a @ b) for _ in range(5))

    return Peaks(read, product(torch.bfloat16), product(torch.float32))


def measure_attention(
    num_layers: int,
    *,
    contexts: Sequence[int] = CONTEXTS,
    batch_sizes: Sequence[int] = SEQUENCES,
    rows: Sequence[int] = (*TREE_ROWS, CHUNK_ROWS),
) -> list[Line]:
    lines = []
    for context, num_seqs, num_rows in itertools.product(contexts, batch_sizes, rows):
        lines += _attention_lines(context, num_seqs, num_rows, num_layers)
    return lines


def _attention_lines(context: int, num_seqs: int, num_rows: int, num_layers: int) -> list[Line]:
    """The line of a bfloat16 cache and that of an int8 cache. `context` includes the new rows."""
    blocks = context // BLOCK_SIZE
    caches = [
        torch.randn(num_seqs * blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE).bfloat16()
        for _ in range(num_layers)
    ]
    scale = 4 / 127
    quantized = [(cache.float() / scale).round().clamp(-127, 127).to(torch.int8) for cache in caches]
    # Blocks lie shuffled, as they do after some hours of serving.
    block_table = torch.randperm(num_seqs * blocks).view(num_seqs, blocks).int()
    dense = [_dense(cache, block_table) for cache in caches]
    query = torch.randn(num_seqs * num_rows, NUM_HEADS, HEAD_SIZE).bfloat16()
    is_tree = 1 < num_rows <= max(TREE_ROWS)
    tree_bits = _binary_tree(num_rows).ancestor_bits() if is_tree else [0] * num_rows
    seq_lens = torch.full((num_seqs,), context, dtype=torch.int32)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_rows
    bits = torch.tensor(tree_bits * num_seqs) if is_tree else None
    metadata = AttentionMetadata(block_table, seq_lens, starts, bits)
    folded = _fold(query.view(num_seqs, num_rows, NUM_HEADS, HEAD_SIZE))
    mask = _mask(tree_bits, context) if num_rows > 1 else None

    interleaved = runs_interleaved(torch.bfloat16, HEAD_SIZE, BLOCK_SIZE)
    if interleaved:
        caches = [interleave(cache) for cache in caches]

    def ours(cache: torch.Tensor, kv_scale: float | None) -> torch.Tensor:
        layer = AttentionLayer(HEAD_SIZE**-0.5, k_scale=kv_scale, v_scale=kv_scale)
        return turbo_attention(query, cache, metadata, layer, interleaved=interleaved and kv_scale is None)

    def torchs(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)

    _check(ours(caches[0], None), _unfold(torchs(*dense[0]), num_rows))
    plain_s, quantized_s, torch_s = _turns(
        lambda: [ours(cache, None) for cache in caches],
        lambda: [ours(cache, scale) for cache in quantized],
        lambda: [torchs(*kv) for kv in dense],
    )
    elements = 2 * num_layers * num_seqs * NUM_KV_HEADS * context * HEAD_SIZE
    # Pairs of a row and a key that it may see; a tree's few hidden pairs are counted too.
    seen = num_rows * context - (num_rows * (num_rows - 1) // 2 if num_rows > max(TREE_ROWS) else 0)
    flops = 4 * num_layers * num_seqs * NUM_HEADS * HEAD_SIZE * seen
    case = (str(context), str(num_seqs))
    return [
        Line((*case, "bfloat16"), num_rows, plain_s, torch_s, 2 * elements, flops, "bfloat16"),
        Line((*case, "int8"), num_rows, quantized_s, torch_s, elements, flops, "bfloat16"),
    ]


def _binary_tree(num_rows: int) -> DraftTree:
    guesses = num_rows - 1
    return DraftTree((0,) * guesses, tuple(i // 2 for i in range(guesses)), ("output",) * guesses)


def _dense(cache: torch.Tensor, block_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [B, Hkv, context, D] of a paged cache."""
    blocks = cache[block_table.long()].permute(2, 0, 3, 1, 4, 5)
    keys, values = blocks.flatten(3, 4).contiguous()
    return keys, values


def _fold(query: torch.Tensor) -> torch.Tensor:
    """[B, n, Hq, D] -> [B, Hkv, n * group, D]: the query heads of a K/V head as rows of one product."""
    grouped = query.unflatten(2, (NUM_KV_HEADS, -1)).permute(0, 2, 1, 3, 4)
    return grouped.flatten(2, 3).contiguous()


def _unfold(folded: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The inverse, as [B * n, Hq, D]."""
    return folded.unflatten(2, (num_rows, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)


def _mask(bits: Sequence[int], context: int) -> torch.Tensor:
    """[n * group, context] to add to the logits: the tree's, or a causal one where all bits are 0."""
    num_rows = len(bits)
    sees = torch.ones(num_rows, context, dtype=torch.bool)
    if any(bits):
        sees[:, context - num_rows :] = torch.tensor(
            [[bool(row >> j & 1) for j in range(num_rows)] for row in bits]
        )
    else:
        sees = sees.tril(context - num_rows)
    added = torch.zeros(num_rows, context, dtype=torch.bfloat16).masked_fill(~sees, -torch.inf)
    return added.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=0)


def measure_projections(num_layers: int) -> list[Line]:
    lines = []
    weights = [torch.randn(shape) / shape[1] ** 0.5 for shape in PROJECTIONS]
    for name, pack in PACKINGS.items():
        dtype_name = "float32" if name == "float32" else "bfloat16"
        dtype = getattr(torch, dtype_name)
        # Copies, since the layers' numbers do not matter to the time, but where they lie does.
        packed = [[w.clone() for _ in range(num_layers)] for w in map(pack, weights)]
        plain = [[w.to(dtype).clone() for _ in range(num_layers)] for w in weights]
        num_bytes = sum(w.nbytes for copies in packed for w in copies)
        for num_rows in PROJECTION_ROWS:
            inputs = [torch.randn(num_rows, depth).to(dtype) for _, depth in PROJECTIONS]
            _check(
                packed_linear(inputs[0], packed[0][0]),
                F.linear(inputs[0], plain[0][0]),
                tolerance=0.2 if name == "4 bit" else 0.03,
            )
            ours_s, torch_s = _turns(
                lambda: [packed_linear(x, w) for x, ws in zip(inputs, packed, strict=True) for w in ws],  # noqa: B023
                lambda: [F.linear(x, w) for x, ws in zip(inputs, plain, strict=True) for w in ws],  # noqa: B023
            )
            flops = 2 * num_rows * num_layers * sum(n * k for n, k in PROJECTIONS)
            lines.append(Line((name,), num_rows, ours_s, torch_s, num_bytes, flops, dtype_name))
    return lines


def with_one_row(lines: Sequence[Line]) -> list[Line]:
    """The lines, each knowing the time of its case with one row."""
    one = {line.case: line.ours for line in lines if line.num_rows == 1}
    return [replace(line, one_row=one.get(line.case)) for line in lines]


def _turns(*calls: Callable[[], object]) -> list[float]:
    """Median seconds of each; they take turns, after one that warms up."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    began = time.perf_counter()
    while len(times[0]) < 3 or (time.perf_counter() - began < _SECONDS_PER_LINE and len(times[0]) < 50):
        for call, seen in zip(calls, times, strict=True):
            seen.append(_seconds(call))
    return [statistics.median(seen) for seen in times]


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _check(ours: torch.Tensor, torchs: torch.Tensor, tolerance: float = 0.03) -> None:
    """What is not the same computation is not worth timing. Exactness is what tests/kernels is for."""
    error = float((ours.float() - torchs.float()).norm() / torchs.float().norm())
    if error > tolerance:
        raise AssertionError(f"ours and torch's results differ by {error:.3f} of their size")


def _report(
    peaks: Peaks, attention: list[Line], projections: list[Line], options: argparse.Namespace
) -> None:
    command = describe_command()
    hardware = f"{describe_machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    text = "\n\n".join(
        [
            f"Command: `{command}`  \nHardware: {hardware}  \nSeen here: {peaks.read / 1e9:.1f} GB/s read, "
            f"{peaks.bfloat16 / 1e9:.0f} GFLOP/s in bfloat16, {peaks.float32 / 1e9:.0f} in float32. "
            f"Times are those of all {options.layers} layers.",
            "## Attention",
            table(["context", "sequences", "cache"], "n", "SDPA", attention, peaks),
            "## Projections",
            table(["weights"], "M", "F.linear", projections, peaks),
        ]
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_name(options.out.name + ".md").write_text(text + "\n")
    print(text)


def table(case: list[str], rows_name: str, peer: str, lines: Sequence[Line], peaks: Peaks) -> str:
    head = [*case, rows_name, "ms", f"{peer} ms", "ratio", f"T_{rows_name}/T_1"]
    head += ["GB/s", "of read", "GFLOP/s", "of peak"]
    return markdown_table(
        head,
        [
            [
                *line.case,
                str(line.num_rows),
                f"{1e3 * line.ours:.2f}",
                f"{1e3 * line.torch:.2f}",
                f"{line.torch / line.ours:.2f}x",
                "" if line.one_row is None else f"{line.ours / line.one_row:.2f}",
                f"{line.num_bytes / line.ours / 1e9:.1f}",
                f"{line.num_bytes / line.ours / peaks.read:.0%}",
                f"{line.num_flops / line.ours / 1e9:.0f}",
                f"{line.num_flops / line.ours / peaks.flops(line.peer_dtype):.0%}",
            ]
            for line in lines
        ],
    )


if __name__ == "__main__":
    main()
