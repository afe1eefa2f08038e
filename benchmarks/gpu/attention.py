"""Part B: attention of one decode step, beside FlashAttention 3 and SDPA on the same tensors.

A step has `batch` sequences with a context in the cache and n new tokens each. For n > 1 these form a random
tree; n = 1 is plain decoding. "of copy" is the rate of reading K and V, divided by the rate of a copy on the
device (bytes read and written per second).

Before a case is timed, the results of its first sequences are compared with float64: the error must be at
most twice that of SDPA. CUDA graphs capture the launches, so times exclude the host. Launches alternate
between block tables that together exceed the L2 cache. The work list is planned once, outside the timing.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tandem_engine.cuda_graphs import MAX_ROWS
from tandem_engine.workspace import graph_plan_sizes
from tandem_kernels import AttentionLayer, AttentionMetadata, make_attention, turbo_attention
from tandem_kernels.turbo_attention.reference import visible_slots

from gpu.runner import Bench, Stage
from gpu.shapes import copy_bytes_per_s, measure_us, tree_bits

KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
#: Factor between a random number and what a quantized cache holds of it.
SCALES = {"fp8": 1 / 2, "int8": 1 / 30}
#: The block tables of one case read at least this much on a GPU: more than its L2 cache (H200: 60 MB).
COLD_BYTES = 128 << 20
#: Sequences of a case that are compared with float64.
CHECKED = 2
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row of a table."""

    kv: str = "bf16"
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    context: int = 4096
    batch: int = 1
    num_new: int = 1
    #: Contexts vary from an eighth of `context` to nearly twice that.
    ragged: bool = False
    block_size: int = 64

    @property
    def seq_lens(self) -> list[int]:
        source = random.Random(self.batch)
        shares = [source.uniform(0.125, 1.875) if self.ragged else 1.0 for _ in range(self.batch)]
        return [int(share * self.context) + self.num_new for share in shares]

    @property
    def kv_bytes(self) -> int:
        """K and V that one launch reads."""
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_size * KV_DTYPES[self.kv].itemsize

    @property
    def names(self) -> tuple[object, ...]:
        heads = f"{self.num_heads}/{self.num_kv_heads}"
        context = f"{self.context}{' ragged' if self.ragged else ''}"
        return self.kv, heads, self.head_size, context, self.batch, self.num_new

    @property
    def variant(self) -> tuple[object, ...]:
        """What the kernel is compiled for."""
        return (
            self.kv,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.batch * self.num_new > MAX_ROWS,
        )


NAMES = ("KV", "heads", "D", "context", "batch", "n")


def grid(dry: bool) -> list[Case]:
    """All cases, by how much they differ from an 8B model in bfloat16 at 4K with 1 or 8 rows."""
    contexts = [(96, False), (40, True)] if dry else [(4096, False), (4096, True), (32768, False)]
    heads = [(4, 2), (4, 1)] if dry else [(32, 8), (64, 8), (32, 32)]
    sizes = [32] if dry else [128, 64]
    batches = [1, 3] if dry else [1, 8, 32, 128]
    kinds = [list(KV_DTYPES), heads, sizes, contexts, [1, 8, 16, 4, 32]]
    cases = []
    for batch in batches:
        for picked in itertools.product(*(range(len(kind)) for kind in kinds)):
            kv, (num_heads, num_kv), size, (context, ragged), n = (
                kind[i] for kind, i in zip(kinds, picked, strict=True)
            )
            distance = sum(i > (1 if kind is kinds[-1] else 0) for kind, i in zip(kinds, picked, strict=True))
            block_size = 16 if dry else 64
            case = Case(kv, num_heads, num_kv, size, context, batch, n, ragged, block_size)
            if not dry or distance == 0 or (distance == 1 and batch == 3):
                cases.append((distance, case))
    return [case for _, case in sorted(cases, key=lambda pair: pair[0])]


class Step:
    """The tensors of a case: a cache of random numbers and several tables of different blocks in it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        lens = case.seq_lens
        # A multiple of 16, as a table's width is in the engine.
        width = -(-max(lens) // (16 * case.block_size)) * 16
        num_tables = -(-COLD_BYTES // case.kv_bytes) if device.type == "cuda" else 1
        used = [-(-n // case.block_size) for n in lens]
        num_blocks = num_tables * sum(used)
        shape = (num_blocks, 2, case.num_kv_heads, case.block_size, case.head_size)
        dtype = KV_DTYPES[case.kv]
        self.cache = torch.empty(shape, dtype=dtype, device=device)
        factor = SCALES.get(case.kv, 1.0)
        for part in self.cache.split(1024):
            noise = torch.randn(part.shape, dtype=torch.bfloat16, device=device).div_(factor)
            part.copy_(noise.clamp_(-127, 127) if dtype == torch.int8 else noise)
        # On the device already: a number would be copied there during the capture, which fails.
        self.scale = torch.full((case.num_kv_heads,), factor, device=device) if case.kv in SCALES else None
        query_shape = (case.batch * case.num_new, case.num_heads, case.head_size)
        self.query = torch.randn(query_shape, dtype=torch.bfloat16, device=device)
        blocks = iter(torch.randperm(num_blocks, device=device).int().split(used * num_tables))
        #: Each [batch, width].
        self.tables = [
            torch.zeros(case.batch, width, dtype=torch.int32, device=device) for _ in range(num_tables)
        ]
        for table in self.tables:
            for row, ids in zip(table, blocks, strict=False):
                row[: len(ids)] = ids
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.num_new
        #: Of one sequence. Zeros are causal; the engine's graphs always pass bits.
        self.tree = tree_bits(case.num_new) if case.num_new > 1 else [0]
        self.bits = torch.tensor(self.tree * case.batch, device=device)
        self.layer = AttentionLayer(case.head_size**-0.5, k_scale=self.scale, v_scale=self.scale)

    def metadata(
        self, table: torch.Tensor, *, causal: bool = False, num_seqs: int | None = None
    ) -> AttentionMetadata:
        num_seqs = num_seqs or self.case.batch
        bits = None if causal else self.bits[: num_seqs * self.case.num_new]
        return AttentionMetadata(
            table[:num_seqs], self.seq_lens[:num_seqs], self.starts[: num_seqs + 1], bits
        )

    def mask(self, seq_len: int, *, causal: bool = False) -> torch.Tensor | None:
        """[n, seq_len] bool, which tokens a row sees; None for one row, which sees all."""
        if self.case.num_new == 1:
            return None
        bits = None if causal else self.tree
        return visible_slots(seq_len - self.case.num_new, bits, self.case.num_new, None).to(self.query.device)

    def blocks(self, ids: torch.Tensor) -> torch.Tensor:
        """Blocks of the cache; float8 has few operators."""
        same_size = torch.int8 if self.cache.element_size() == 1 else self.cache.dtype
        return self.cache.view(same_size)[ids.long()].view(self.cache.dtype)

    def dense(self, table: torch.Tensor, num_seqs: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [num_seqs, Hkv, seq_len, D] in bfloat16."""
        num_blocks = -(-seq_len // self.case.block_size)
        blocks = self.blocks(table[:num_seqs, :num_blocks]).to(torch.bfloat16)
        if self.scale is not None:
            blocks *= SCALES[self.case.kv]
        key, value = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[..., :seq_len, :].contiguous()
        return key, value

    def sdpa(
        self, table: torch.Tensor, first: int, num_seqs: int, *, causal: bool = False
    ) -> Callable[[], torch.Tensor]:
        """Attention of sequences of equal length, in torch."""
        n, seq_len = self.case.num_new, self.case.seq_lens[first]
        key, value = self.dense(table[first:], num_seqs, seq_len)
        rows = self.query[first * n : (first + num_seqs) * n].unflatten(0, (num_seqs, n)).transpose(1, 2)
        mask = self.mask(seq_len, causal=causal)
        return lambda: F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, enable_gqa=True)


def tandem_calls(step: Step) -> list[Call]:
    """Launches over each table."""
    query = step.query
    attentions = []
    if query.is_cuda:
        # Imported on demand: they need Triton.
        from tandem_kernels.turbo_attention.triton_backend import TritonAttention

        plan = make_plan(step)
        attentions = [TritonAttention([plan]) for _ in step.tables]
    else:
        attentions = [make_attention(query.dtype, step.case.head_size, query.device) for _ in step.tables]
    calls: list[Call] = []
    for attention, table in zip(attentions, step.tables, strict=True):
        attention.prepare(step.metadata(table))
        calls.append(partial(attention.run, query, step.cache, step.layer))
    return calls


def make_plan(step: Step) -> Any:
    """The plan of the engine's graphs, or of its eager steps where the rows are too many for these."""
    from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

    case, rows = step.case, len(step.query)
    max_seqs = max(case.batch, 16)  # the default of --max-batch
    sizes = {"max_tokens": rows, "max_seqs": max_seqs}
    if rows <= MAX_ROWS:
        sizes = graph_plan_sizes(MAX_ROWS, max_seqs)
    return AttentionPlan(
        max_seq_len=max(case.seq_lens), num_heads=case.num_heads, num_kv_heads=case.num_kv_heads,
        head_size=case.head_size, dtype=step.query.dtype, cache_dtype=step.cache.dtype,
        device=step.query.device, draft_tokens=case.num_new, **sizes,
    )  # fmt: skip


class WrongResultError(Exception):
    """The kernel's, or a peer's."""


def check(step: Step, result: torch.Tensor, *, causal: bool = False) -> None:
    """WrongResultError unless the error against float64 is at most twice that of SDPA, plus a rounding."""
    case, table = step.case, step.tables[0]
    count = min(CHECKED, case.batch)
    n = case.num_new
    used = table[:count, : -(-max(case.seq_lens[:count]) // case.block_size)]
    order = torch.arange(used.numel(), dtype=torch.int32, device=table.device).view_as(used)
    cache = step.blocks(used.flatten()).to(torch.float64) * SCALES.get(case.kv, 1.0)
    metadata = step.metadata(order, causal=causal, num_seqs=count)
    unscaled = AttentionLayer(step.layer.scale)
    exact = turbo_attention(step.query[: count * n].double(), cache, metadata, unscaled, backend="reference")
    twin = torch.cat(
        [step.sdpa(table, b, 1, causal=causal)().transpose(1, 2).flatten(0, 1) for b in range(count)]
    )
    error = (result[: count * n].double() - exact).abs().max().item()
    twin_error = (twin.double() - exact).abs().max().item()
    rounding = torch.finfo(torch.bfloat16).eps / 2 * exact.abs().max().item()
    if not error <= 2 * twin_error + rounding:
        raise WrongResultError(f"wrong result for {case}: error {error:.3g}, SDPA's {twin_error:.3g}")


def timed(step: Step, calls: Sequence[Call], *, causal: bool = False) -> float:
    """Microseconds of a launch, once its result is known to be right."""
    check(step, calls[0](), causal=causal)
    return measure_us(calls, step.query.device)


def measure_grid(bench: Bench) -> None:
    """Attention with the engine's plan, the most important cases first, beside SDPA on contiguous K and V."""
    cases = grid(bench.dry)
    compile_variants(bench, cases)
    if not bench.dry and torch.cuda.get_device_capability() < (8, 9):
        cases = [case for case in cases if case.kv != "fp8"]
    copy_speed = copy_bytes_per_s(bench.device)
    bench.note(f"A copy on the device reads and writes {copy_speed / 1e9:.0f} GB/s.")
    bench.table(*NAMES, "tandem µs", "T_n/T_1", "of copy", "SDPA µs")
    one_row_us: dict[Case, float] = {}
    failed = 0
    for number, case in enumerate(cases):
        if bench.left_s < 10:
            bench.note(f"{len(cases) - number} of {len(cases)} cases did not fit the time.")
            break
        step = None  # of two caches at once the large cases would have no room
        try:
            step = Step(case, bench.device)
            microseconds = timed(step, tandem_calls(step))
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # nothing runs in this process after it
            # A cache that does not fit is no failure.
            failed += not isinstance(error, torch.OutOfMemoryError)
            print(f"{case}: {error}", file=sys.stderr)
            bench.row(*case.names, type(error).__name__)
            continue
        one_row_us[case] = microseconds
        one = one_row_us.get(replace(case, num_new=1))
        of_copy = f"{case.kv_bytes / microseconds * 1e6 / copy_speed:.0%}"
        ratio = f"{microseconds / one:.2f}" if one else "-"
        sdpa = sdpa_cell(step) if case.kv == "bf16" and case.num_new in (1, 8) and not case.ragged else "-"
        bench.row(*case.names, f"{microseconds:.1f}", ratio, of_copy, sdpa)
    if failed:
        raise RuntimeError(f"{failed} cases failed")


def sdpa_cell(step: Step) -> str:
    try:
        calls = [step.sdpa(table, 0, step.case.batch) for table in step.tables]
        return f"{measure_us(calls, step.query.device):.1f}"
    except torch.OutOfMemoryError as error:
        return type(error).__name__


def compile_variants(bench: Bench, cases: Iterable[Case]) -> None:
    """Compiles what the cases launch, one process per core, into Triton's cache on disk."""
    if bench.dry:
        return
    firsts: dict[tuple[object, ...], Case] = {}
    for case in cases:
        firsts.setdefault(case.variant, case)
    # A launch of a small case compiles what a large one needs.
    jobs = [replace(case, context=256) for case in firsts.values()]
    # A process that has touched CUDA cannot be forked.
    assert not torch.cuda.is_initialized()
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(len(jobs), len(os.sched_getaffinity(0))), fork) as pool:
        try:
            for error in pool.map(_launch_once, jobs):
                print(error, end="", file=sys.stderr)
        except BrokenProcessPool as error:
            print(f"a process that compiled died: {error}", file=sys.stderr)


def _launch_once(case: Case) -> str:
    try:
        tandem_calls(Step(case, torch.device("cuda")))[0]()
        torch.cuda.synchronize()
    except Exception as error:  # shows again when the case is measured
        return f"{case}: {error}\n"
    return ""


def fa3_calls(step: Step) -> list[Call]:
    """FlashAttention 3, from the extension inside vLLM's wheel. It knows no tree: causal."""
    library = Path(os.environ.get("TANDEM_GPU_BUNDLE", "")) / "_vllm_fa3_C.abi3.so"
    if not library.exists():
        raise ImportError("the bundle holds no _vllm_fa3_C.abi3.so")
    torch.ops.load_library(str(library))
    op = torch.ops._vllm_fa3_C.fwd.default
    case, (key, value) = step.case, step.cache.transpose(2, 3).unbind(1)
    given = {
        "cu_seqlens_q": step.starts, "seqused_k": step.seq_lens, "max_seqlen_q": case.num_new,
        "max_seqlen_k": max(case.seq_lens), "softmax_scale": step.layer.scale, "is_causal": True,
        "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True,
        "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
        "q": step.query, "k": key, "v": value,
    }  # fmt: skip
    # By name, because the number of arguments differs between versions.
    names = [argument.name for argument in op._schema.arguments]
    return [
        lambda table=table: op(*[(given | {"page_table": table}).get(name) for name in names])[0]
        for table in step.tables
    ]


def beside_fa3(bench: Bench) -> None:
    """FlashAttention 3 (causal also for n > 1)."""
    bench.table(*NAMES, "tandem µs", "FA3 µs", "tandem/FA3")
    for case in grid(bench.dry):
        if case.kv != "bf16" or bench.left_s < 10:
            continue
        # Of two caches at once the large cases would have no room.
        step = None
        try:
            step = Step(case, bench.device)
            theirs = timed(step, fa3_calls(step), causal=True)
            ours = timed(step, tandem_calls(step))
        except (ImportError, OSError) as error:
            bench.row("not measured:", str(error) or "not importable")
            return
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # nothing runs in this process after it
            # A case it does not cover, a wrong result, or too little memory.
            print(f"{case}: {error}", file=sys.stderr)
            bench.row(*case.names, "-", type(error).__name__)
            continue
        bench.row(*case.names, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}")


STAGES = [Stage("grid", 190, measure_grid), Stage("fa3", 45, beside_fa3)]
