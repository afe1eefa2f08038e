"""turbo_attention on one GPU: right against float64, then timed beside a device copy and every peer at hand.

    python benchmarks/gpu_attention.py --out benchmarks/results/NAME        # at most 8 minutes
    python benchmarks/gpu_attention.py --dry-run                            # tiny shapes, any machine

A step has `batch` sequences with `context` tokens in the cache and n new ones, which form a random tree
(n = 1: plain decoding). T_n / T_1 is what verifying n tokens costs beside decoding one. "of copy" is the K
and V read per second beside the bytes that a copy on the device reads and writes per second.

Launches are captured into CUDA graphs, so the host's part is not in the times, and go round several block
tables, so that K and V come from memory and not from the L2 cache. The work list is planned once a step for
all layers and therefore outside, for us as for FlashInfer; ours is printed. Peers: FlashInfer on the same
paged cache, with the tree as its custom mask; torch SDPA, flex_attention and xformers on K and V that lie
contiguous, as they take no pages (which favours them), with the tree as a mask. fp8 is e4m3, from sm_89 on.

What does not fit in memory or in the time is left out and listed; the most important comes first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from tandem_kernels import Attention, AttentionLayer, AttentionMetadata, make_attention

if TYPE_CHECKING:
    from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

KV_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
#: Several block tables together read at least this much, more than the L2 cache holds (H200: 50 MB).
COLD_BYTES = 128 << 20
#: Of the time, for each peer: some compile for every shape.
PEER_SHARE = 1 / 8
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}"


@dataclass(frozen=True)
class Group:
    """What one row of the report has in common."""

    kv: str
    heads: Heads
    context: int


@dataclass(frozen=True)
class Plan:
    """What is measured, most important first."""

    groups: tuple[Group, ...]
    batches: tuple[int, ...]
    num_new: tuple[int, ...]
    peer_num_new: tuple[int, ...]
    checked: tuple[Group, ...]
    head_size: int
    block_size: int
    pool_bytes: int
    budget_s: float


def full_plan() -> Plan:
    free_bytes, _ = torch.cuda.mem_get_info()
    gqa, wide, mha, mqa = Heads(32, 8), Heads(64, 8), Heads(32, 32), Heads(32, 1)
    kv_dtypes = [kv for kv in KV_DTYPES if kv != "fp8" or torch.cuda.get_device_capability() >= (8, 9)]
    first = [Group(kv, gqa, 4096) for kv in kv_dtypes]
    by_context = [Group("bf16", gqa, context) for context in (512, 32768)]
    by_heads = [Group("bf16", heads, 4096) for heads in (wide, mha, mqa)]
    everything = [
        Group(kv, heads, context)
        for kv in kv_dtypes
        for heads in (gqa, wide, mha, mqa)
        for context in (512, 4096, 32768)
    ]
    return Plan(
        groups=tuple(dict.fromkeys([*first, *by_context, *by_heads, *everything])),
        batches=(1, 8, 32, 128),
        num_new=(1, 2, 4, 8, 16, 32),
        peer_num_new=(1, 8),
        checked=(*first, Group("bf16", wide, 512), Group("bf16", mha, 512), Group("bf16", mqa, 4096)),
        head_size=128,
        block_size=64,
        pool_bytes=int(free_bytes * 0.8),
        budget_s=8 * 60 - 15,
    )


def dry_plan() -> Plan:
    groups = (
        Group("bf16", Heads(4, 2), 100),
        Group("int8", Heads(4, 2), 100),
        Group("fp8", Heads(2, 1), 20),
        Group("bf16", Heads(4, 2), 100_000),  # more than the pool holds
    )
    return Plan(
        groups=groups,
        batches=(1, 3),
        num_new=(1, 8),
        peer_num_new=(1, 8),
        checked=groups[:3],
        head_size=32,
        block_size=16,
        pool_bytes=1 << 20,
        budget_s=60.0,
    )


@dataclass
class Report:
    machine: str
    copy_gb_per_s: float = 0.0
    checks: list[dict[str, object]] = field(default_factory=list)
    #: kv, heads, context, batch, n, peer, microseconds, of_copy
    times: list[dict[str, object]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, what: str) -> None:
        print(f"left out: {what}", flush=True)
        self.left_out.append(what)


class Pool:
    """One piece of memory that serves as the KV cache of each group in turn."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self._memory = torch.empty(plan.pool_bytes, dtype=torch.uint8, device=device)
        self._filled = ""

    def cache(self, group: Group) -> torch.Tensor:
        """[num_blocks, 2, Hkv, block_size, D] of the group's dtype, random numbers."""
        dtype = KV_DTYPES[group.kv]
        if self._filled != group.kv:
            flat = self._memory.view(dtype)
            for part in flat.split(1 << 26):
                noise = torch.randn(part.shape, dtype=torch.bfloat16, device=self.device)
                part.copy_((noise * 30).clamp(-127, 127) if dtype == torch.int8 else noise)
            self._filled = group.kv
        shape = (2, group.heads.num_kv_heads, self.plan.block_size, self.plan.head_size)
        num_blocks = self._memory.numel() // (math.prod(shape) * dtype.itemsize)
        num_bytes = num_blocks * math.prod(shape) * dtype.itemsize
        return self._memory[:num_bytes].view(dtype).view(num_blocks, *shape)


@dataclass(frozen=True, eq=False)
class Step:
    """The tensors of one step; block_tables are several, of different blocks where the pool has as many."""

    group: Group
    num_new: int
    query: torch.Tensor
    cache: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    ancestor_bits: torch.Tensor | None
    #: [n, n] bool, node i sees node j.
    tree: torch.Tensor

    @property
    def batch(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def seq_len(self) -> int:
        return self.group.context + self.num_new

    @property
    def kv_bytes(self) -> int:
        """K and V that one launch must read at least."""
        return 2 * self.batch * self.seq_len * self.cache.shape[2] * self.cache.shape[4] * self.cache.itemsize

    @property
    def kv_scale(self) -> float | None:
        return 1 / 30 if self.cache.dtype == torch.int8 else None

    def layer(self, block_table: torch.Tensor, attention: Attention) -> Call:
        """A call of one layer over these blocks, with the step prepared."""
        attention.prepare(
            AttentionMetadata(block_table, self.seq_lens, self.query_start_loc, self.ancestor_bits)
        )
        layer = AttentionLayer(self.query.shape[2] ** -0.5, k_scale=self.kv_scale, v_scale=self.kv_scale)
        return lambda: attention.run(self.query, self.cache, layer)


def random_tree(num_nodes: int) -> tuple[list[int], torch.Tensor]:
    """Ancestor bits and the same as a mask; half the nodes continue the node before them."""
    generator = random.Random(num_nodes)
    bits = [1]
    for node in range(1, num_nodes):
        parent = node - 1 if generator.random() < 0.5 else generator.randrange(node)
        bits.append(bits[parent] | 1 << node)
    mask = torch.tensor([[bool(b >> j & 1) for j in range(num_nodes)] for b in bits])
    return bits, mask


def make_step(pool: Pool, group: Group, batch: int, num_new: int) -> Step | None:
    """None where the pool is too small."""
    plan, device = pool.plan, pool.device
    cache = pool.cache(group)
    blocks_per_seq = -(-(group.context + num_new) // plan.block_size)
    num_tables = cache.shape[0] // (batch * blocks_per_seq)
    if num_tables == 0:
        return None
    table_bytes = batch * blocks_per_seq * cache[0].numel() * cache.itemsize
    num_tables = min(num_tables, -(-COLD_BYTES // table_bytes))
    order = torch.randperm(num_tables * batch * blocks_per_seq, device=device).int()
    bits, tree = random_tree(num_new)
    return Step(
        group=group,
        num_new=num_new,
        query=torch.randn(
            batch * num_new, group.heads.num_heads, plan.head_size, dtype=torch.bfloat16, device=device
        ),
        cache=cache,
        block_tables=tuple(order.view(num_tables, batch, blocks_per_seq).unbind()),
        seq_lens=torch.full((batch,), group.context + num_new, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device) * num_new,
        ancestor_bits=torch.tensor(bits * batch, device=device) if num_new > 1 else None,
        tree=tree.to(device),
    )


def check(step: Step, backend: str) -> dict[str, object]:
    """The error against float64; right is at most twice that of plain torch in bfloat16, plus a rounding."""
    table = step.block_tables[0]
    exact: list[torch.Tensor] = []
    plain: list[torch.Tensor] = []
    visible = torch.ones(step.num_new, step.seq_len, dtype=torch.bool, device=table.device)
    visible[:, step.group.context :] = step.tree
    for dtype, results in ((torch.float64, exact), (torch.bfloat16, plain)):
        for row, query in zip(table, step.query.to(dtype).split(step.num_new), strict=True):
            kv = step.cache[row.long()].to(dtype) * (step.kv_scale or 1.0)
            kv = kv.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : step.seq_len]
            key, value = kv.repeat_interleave(step.group.heads.num_heads // kv.shape[1], dim=1)
            logits = query.transpose(0, 1) @ key.transpose(1, 2) * query.shape[2] ** -0.5
            weights = logits.masked_fill(~visible, -math.inf).softmax(2)
            results.append((weights @ value).transpose(0, 1))
    wanted = torch.cat(exact)
    result = tandem_calls(step, backend)[0]()
    error = (result.double() - wanted).abs().max().item()
    plain_error = (torch.cat(plain).double() - wanted).abs().max().item()
    floor = torch.finfo(torch.bfloat16).eps / 2 * wanted.abs().max().item()
    return {
        "kv": step.group.kv,
        "heads": str(step.group.heads),
        "context": step.group.context,
        "n": step.num_new,
        "error": error,
        "torch_error": plain_error,
        "passed": error <= 2 * plain_error + floor,
    }


def measure(calls: Sequence[Call], device: torch.device) -> float:
    """Median microseconds of a call, over rounds through all of them."""
    if device.type != "cuda":
        started = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started) / len(calls) * 1e6
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (calls[0], calls[-1]):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    num_rounds = max(1, 8 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for call in calls:
                call()
    times = []
    for replay in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end) * 1e3 / (num_rounds * len(calls)))
    return statistics.median(times)


def copy_speed(pool: Pool) -> float:
    """GB read and written per second by a copy within the device."""
    num_bytes = min(1 << 30, pool.plan.pool_bytes // 2)
    source, target = torch.empty(2, num_bytes, dtype=torch.uint8, device=pool.device)
    return 2 * num_bytes / measure([lambda: target.copy_(source)] * 4, pool.device) / 1e3


def tandem_calls(step: Step, backend: str) -> list[Call]:
    """One call per block table; on CUDA with the step's work list planned beforehand."""
    if not step.query.is_cuda:
        size, device = step.query.shape[2], step.query.device
        return [
            step.layer(table, make_attention(step.query.dtype, size, device, backend=backend))
            for table in step.block_tables
        ]
    # Imported on demand: it needs Triton.
    from tandem_kernels.turbo_attention.triton_backend import TritonAttention

    plan = attention_plan(step)
    return [step.layer(table, TritonAttention([plan])) for table in step.block_tables]


def planning_us(step: Step) -> float:
    """Time to plan the step's work list, once for all layers."""
    plan = attention_plan(step)
    return measure([lambda: plan.update(step.seq_lens, step.query_start_loc)] * 8, step.query.device)


def attention_plan(step: Step) -> AttentionPlan:
    # Imported on demand: it needs Triton.
    from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

    return AttentionPlan(
        max_tokens=step.query.shape[0],
        max_seqs=step.batch,
        max_seq_len=step.seq_len,
        num_heads=step.group.heads.num_heads,
        num_kv_heads=step.group.heads.num_kv_heads,
        head_size=step.query.shape[2],
        dtype=step.query.dtype,
        cache_dtype=step.cache.dtype,
        device=step.query.device,
        max_new_tokens=step.num_new,
    )


def contiguous_kv(step: Step) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V [B, Hkv, S, D] for peers without pages, one pair per block table; the pool's memory, reused."""
    batch, heads, size = step.batch, step.cache.shape[2], step.cache.shape[4]
    numel = batch * heads * step.seq_len * size
    flat = step.cache.flatten()
    pairs = flat[: flat.numel() // (2 * numel) * 2 * numel].view(-1, 2, batch, heads, step.seq_len, size)
    return [(key, value) for key, value in pairs[: len(step.block_tables)]]


def full_mask(step: Step) -> torch.Tensor | None:
    """[n, S] bool, None for plain decoding."""
    if step.num_new == 1:
        return None
    mask = torch.ones(step.num_new, step.seq_len, dtype=torch.bool, device=step.query.device)
    mask[:, step.group.context :] = step.tree
    return mask


def sdpa_calls(step: Step) -> list[Call]:
    query = step.query.view(step.batch, step.num_new, *step.query.shape[1:]).transpose(1, 2)
    mask = full_mask(step)
    return [
        lambda k=k, v=v: F.scaled_dot_product_attention(query, k, v, attn_mask=mask, enable_gqa=True)
        for k, v in contiguous_kv(step)
    ]


def flex_calls(step: Step) -> list[Call]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    query = step.query.view(step.batch, step.num_new, *step.query.shape[1:]).transpose(1, 2)
    context, tree = step.group.context, step.tree

    def sees(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key < context) | tree[row, (key - context).clamp(min=0)]

    mask = None
    if step.num_new > 1:
        mask = create_block_mask(sees, None, None, step.num_new, step.seq_len, device=str(query.device))
    return [
        lambda k=k, v=v: compiled(query, k, v, block_mask=mask, enable_gqa=True)
        for k, v in contiguous_kv(step)
    ]


def xformers_calls(step: Step) -> list[Call]:
    from xformers.ops import memory_efficient_attention

    heads = step.group.heads
    group_size = heads.num_heads // heads.num_kv_heads
    query = step.query.view(step.batch, step.num_new, heads.num_kv_heads, group_size, -1)
    bias = None
    if step.num_new > 1:
        # The kernels want rows of a multiple of 8 elements.
        width = -(-step.seq_len // 8) * 8
        bias = torch.zeros(
            step.batch, heads.num_kv_heads, group_size, step.num_new, width,
            dtype=torch.bfloat16, device=query.device,
        )[..., : step.seq_len]  # fmt: skip
        bias.masked_fill_(~full_mask(step), -math.inf)
    calls: list[Call] = []
    for k, v in contiguous_kv(step):
        key, value = (x.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, group_size, -1) for x in (k, v))
        calls.append(lambda k=key, v=value: memory_efficient_attention(query, k, v, attn_bias=bias))
    return calls


def flashinfer_calls(step: Step) -> list[Call]:
    import flashinfer

    heads, batch = step.group.heads, step.batch
    block_size, device = step.cache.shape[3], step.query.device
    pages = step.block_tables[0].shape[1]
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * pages
    last = torch.full((batch,), (step.seq_len - 1) % block_size + 1, dtype=torch.int32, device=device)
    sizes = (heads.num_heads, heads.num_kv_heads, step.query.shape[2], block_size)
    calls: list[Call] = []
    # Launches follow each other, so they share the memory of their partial results.
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    for table in step.block_tables:
        if step.num_new == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
            wrapper.plan(
                indptr, table.flatten(), last, *sizes,
                q_data_type=step.query.dtype, kv_data_type=step.cache.dtype,
            )  # fmt: skip
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            mask = full_mask(step)
            assert mask is not None
            wrapper.plan(
                step.query_start_loc, indptr, table.flatten(), last, *sizes,
                custom_mask=mask.flatten().repeat(batch),
                q_data_type=step.query.dtype, kv_data_type=step.cache.dtype,
            )  # fmt: skip
        calls.append(lambda wrapper=wrapper: wrapper.run(step.query, step.cache))
    return calls


PEERS: dict[str, Callable[[Step], list[Call]]] = {
    "flashinfer": flashinfer_calls,
    "sdpa": sdpa_calls,
    "xformers": xformers_calls,
    "flex": flex_calls,
}


def peers_at_hand(device: torch.device) -> dict[str, Callable[[Step], list[Call]]]:
    """Those that can be imported; flex_attention compiles and so is left to a GPU."""
    names = {"sdpa", *(name for name in ("flashinfer", "xformers") if importlib.util.find_spec(name))}
    if device.type == "cuda":
        names.add("flex")
    else:
        names = {"sdpa"}
    return {name: calls for name, calls in PEERS.items() if name in names}


def settings(plan: Plan) -> Iterator[tuple[Group, int, int]]:
    for group in plan.groups:
        for batch in plan.batches:
            for num_new in plan.num_new:
                yield group, batch, num_new


def run(plan: Plan, device: torch.device, backend: str) -> Report:
    deadline = time.monotonic() + plan.budget_s
    report = Report(describe_machine(device))
    print(report.machine)
    for kv in KV_DTYPES.keys() - {group.kv for group in plan.groups}:
        report.leave_out(f"{kv} KV: this GPU cannot convert it")
    pool = Pool(plan, device)
    peers = peers_at_hand(device)
    for name in PEERS.keys() - peers.keys():
        report.leave_out(f"peer {name}: not installed, or needs a GPU")
    for group in plan.checked:
        for num_new in (1, 8):
            step = make_step(pool, group, 2, num_new)
            assert step is not None, "the pool cannot hold a check of two sequences"
            report.checks.append(check(step, backend))
            print("check", report.checks[-1], flush=True)
    report.copy_gb_per_s = copy_speed(pool)
    print(f"device copy {report.copy_gb_per_s:.0f} GB/s")

    spent: Counter[str] = Counter()

    def record(step: Step, peer: str, calls: Callable[[], list[Call]]) -> None:
        name = f"{peer}: {step.group.kv} {step.group.heads} context {step.group.context} "
        name += f"batch {step.batch} n {step.num_new}"
        if time.monotonic() > deadline:
            report.leave_out(f"{name}: the time was over")
            return
        if spent[peer] > PEER_SHARE * plan.budget_s and peer != "tandem":
            report.leave_out(f"{name}: this peer's share of the time was over")
            return
        started = time.monotonic()
        try:
            microseconds = measure(calls(), device)
        except Exception as error:
            if peer == "tandem":
                raise
            # A peer that does not cover the case, or runs out of memory, must not end the run.
            report.leave_out(f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
            return
        finally:
            spent[peer] += time.monotonic() - started
        of_copy = step.kv_bytes / microseconds / 1e3 / report.copy_gb_per_s
        report.times.append(
            {
                "kv": step.group.kv, "heads": str(step.group.heads), "context": step.group.context,
                "batch": step.batch, "n": step.num_new, "peer": peer,
                "microseconds": round(microseconds, 2), "of_copy": float(f"{of_copy:.4g}"),
            }
        )  # fmt: skip
        print(f"{name}: {microseconds:.1f} us, {of_copy:.0%} of copy", flush=True)

    for group, batch, num_new in settings(plan):
        step = make_step(pool, group, batch, num_new) if time.monotonic() < deadline else None
        what = f"{group.kv} {group.heads} context {group.context} batch {batch} n {num_new}"
        if step is None:
            over = time.monotonic() >= deadline
            report.leave_out(f"{what}: {'the time was over' if over else 'does not fit in memory'}")
            continue
        record(step, "tandem", lambda step=step: tandem_calls(step, backend))
        if device.type == "cuda" and num_new == 1 and group == plan.groups[0]:
            print(f"planning a step of {batch} sequences: {planning_us(step):.1f} us", flush=True)
        if group.kv == "bf16" and num_new in plan.peer_num_new:
            for name, calls in peers.items():
                record(step, name, lambda step=step, calls=calls: calls(step))
    return report


def describe_machine(device: torch.device) -> str:
    if device.type != "cuda":
        return f"CPU (dry run), torch {torch.__version__}"
    import triton

    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
        f"{properties.multi_processor_count} multiprocessors, torch {torch.__version__}, "
        f"triton {triton.__version__}"
    )


def markdown(report: Report, plan: Plan) -> str:
    """The report as tables: ours over n, then the peers beside us."""
    ours = {
        (t["kv"], t["heads"], t["context"], t["batch"], t["n"]): t
        for t in report.times
        if t["peer"] == "tandem"
    }
    lines = [
        "# turbo_attention on a GPU",
        "",
        f"{report.machine}. A copy on the device reads and writes {report.copy_gb_per_s:.0f} GB/s.",
        f"bf16 queries, head size {plan.head_size}, blocks of {plan.block_size}; microseconds a launch.",
        "Made by `python benchmarks/gpu_attention.py`.",
        "",
        "| KV | heads | context | batch |"
        + "".join(f" n={n} |" for n in plan.num_new)
        + "".join(f" T_{n}/T_1 |" for n in plan.num_new if n in (8, 16, 32))
        + " of copy, n=1 |",
    ]
    lines.append("|---" * (lines[-1].count("|") - 1) + "|")
    for key in dict.fromkeys(key[:4] for key in ours):
        row = [ours.get((*key, n)) for n in plan.num_new]
        first = row[0]
        cells = [*map(str, key), *(f"{t['microseconds']:.1f}" if t else "-" for t in row)]
        for n, t in zip(plan.num_new, row, strict=True):
            if n in (8, 16, 32):
                cells.append(f"{t['microseconds'] / first['microseconds']:.2f}" if t and first else "-")
        cells.append(f"{first['of_copy']:.0%}" if first else "-")
        lines.append(f"| {' | '.join(cells)} |")
    beside = {
        (t["kv"], t["heads"], t["context"], t["batch"], t["n"], t["peer"]): t["microseconds"]
        for t in report.times
    }
    names = [name for name in PEERS if any(key[5] == name for key in beside)]
    head = ["heads", "context", "batch", "n", "tandem", *names]
    lines += ["", "Beside peers, bf16:", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for key in ours:
        others = [beside.get((*key, name)) for name in names]
        if any(others):
            cells = [*map(str, key[1:]), f"{beside[(*key, 'tandem')]:.1f}"]
            cells += [f"{other:.1f}" if other else "-" for other in others]
            lines.append(f"| {' | '.join(cells)} |")
    failed = [c for c in report.checks if not c["passed"]]
    num_passed = len(report.checks) - len(failed)
    lines += ["", f"Against float64: {num_passed} of {len(report.checks)} checks passed."]
    lines += [f"- FAILED {c}" for c in failed]
    lines += ["", "Left out:", *(f"- {what}" for what in report.left_out or ["nothing"]), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--budget", type=float, help="seconds to measure for")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry-run runs tiny shapes on the CPU")
    device = torch.device("cpu" if options.dry_run else "cuda")
    torch.manual_seed(0)
    plan = dry_plan() if options.dry_run else full_plan()
    if options.budget is not None:
        plan = Plan(**{**vars(plan), "budget_s": options.budget})
    report = run(plan, device, "cpu" if options.dry_run else "triton")
    text = markdown(report, plan)
    print(text)
    if options.out is not None:
        options.out.with_suffix(".md").write_text(text)
        options.out.with_suffix(".json").write_text(json.dumps(asdict(report), indent=1) + "\n")
    if not all(c["passed"] for c in report.checks):
        raise SystemExit("turbo_attention is wrong on this machine: see the checks above")


if __name__ == "__main__":
    main()
