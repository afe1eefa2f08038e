"""Times turbo_attention on one GPU over context, rows and batch, beside SDPA and FlashInfer.

    python benchmarks/gpu_attention.py --out FILE.md

A step has `batch` sequences with `context` tokens in the cache and n new tokens. For n > 1 the new tokens
form a random tree; n = 1 is plain decoding. T_n/T_1 is the cost of verifying n tokens relative to decoding
one. "of copy" is the rate of reading K and V divided by the rate of a copy on the device (bytes read and
written per second).

Before a case is timed, its result is compared with float64: the error must be at most twice that of SDPA.
CUDA graphs capture the launches, so times exclude the host. Launches alternate between block tables that
together exceed the L2 cache. The work list is planned once per step, outside the timing. FlashInfer uses the
same paged cache; SDPA uses contiguous K and V, because it supports no pages.

Each row goes to the file as soon as it is measured. A cell that fails holds the error's name.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from reporting import describe_command, markdown_table
from tandem_kernels import AttentionLayer, AttentionMetadata, make_attention, turbo_attention
from tandem_kernels.turbo_attention.reference import visible_slots

KV_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
#: The block tables of one case read at least this much on a GPU: more than its L2 cache (H200: 50 MB).
COLD_BYTES = 128 << 20
HEAD = (
    "KV", "heads", "context", "batch", "n", "tandem µs", "T_n/T_1", "of copy", "SDPA µs", "FlashInfer µs",
)  # fmt: skip
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    kv: str
    num_heads: int
    num_kv_heads: int
    context: int
    batch: int
    num_new: int
    head_size: int = 128
    block_size: int = 64

    @property
    def seq_len(self) -> int:
        return self.context + self.num_new

    @property
    def kv_bytes(self) -> int:
        """K and V that one launch reads."""
        elements = 2 * self.batch * self.seq_len * self.num_kv_heads * self.head_size
        return elements * KV_DTYPES[self.kv].itemsize


def gpu_cases() -> Iterator[Case]:
    """The most important first; n = 1 comes first of its context and batch."""
    kinds = [("bf16", 32, 8), ("int8", 32, 8), ("bf16", 64, 8), ("bf16", 32, 32), ("bf16", 32, 1)]
    if torch.cuda.get_device_capability() >= (8, 9):
        kinds.insert(2, ("fp8", 32, 8))
    for kv, num_heads, num_kv_heads in kinds:
        for context in (4096, 512, 32768):
            for batch in (1, 8, 32, 128):
                for num_new in (1, 2, 4, 8, 16, 32):
                    yield Case(kv, num_heads, num_kv_heads, context, batch, num_new)


class Step:
    """The tensors of a case: a cache of random numbers and several tables of different blocks in it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        blocks_per_seq = -(-case.seq_len // case.block_size)
        num_tables = -(-COLD_BYTES // case.kv_bytes) if device.type == "cuda" else 1
        num_blocks = num_tables * case.batch * blocks_per_seq
        shape = (num_blocks, 2, case.num_kv_heads, case.block_size, case.head_size)
        dtype = KV_DTYPES[case.kv]
        self.cache = torch.empty(shape, dtype=dtype, device=device)
        for part in self.cache.split(1024):
            noise = torch.randn(part.shape, dtype=torch.bfloat16, device=device)
            part.copy_((noise * 30).clamp(-127, 127) if dtype == torch.int8 else noise)
        self.scale = 1 / 30 if dtype == torch.int8 else None
        query_shape = (case.batch * case.num_new, case.num_heads, case.head_size)
        self.query = torch.randn(query_shape, dtype=torch.bfloat16, device=device)
        order = torch.randperm(num_blocks, device=device).int()
        #: Each [batch, blocks_per_seq].
        self.tables = order.view(num_tables, case.batch, blocks_per_seq).unbind()
        self.seq_lens = torch.full((case.batch,), case.seq_len, dtype=torch.int32, device=device)
        self.starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.num_new
        bits = random_tree(case.num_new)
        self.bits = torch.tensor(bits * case.batch, device=device) if case.num_new > 1 else None
        mask = visible_slots(case.context, bits, case.num_new, None).to(device)
        #: [n, seq_len] bool, which tokens a row sees; None for plain decoding.
        self.mask = mask if case.num_new > 1 else None
        self.layer = AttentionLayer(case.head_size**-0.5, k_scale=self.scale, v_scale=self.scale)

    def metadata(self, table: torch.Tensor) -> AttentionMetadata:
        return AttentionMetadata(table, self.seq_lens, self.starts, self.bits)

    def dense(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [B, Hkv, seq_len, D] in bfloat16."""
        blocks = self.cache[table.long()].to(torch.bfloat16) * (self.scale or 1.0)
        key, value = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[..., : self.case.seq_len, :].contiguous()
        return key, value


def random_tree(num_nodes: int) -> list[int]:
    """Ancestor bits; half of the nodes continue the node before them."""
    generator = random.Random(num_nodes)
    bits = [1]
    for node in range(1, num_nodes):
        parent = node - 1 if generator.random() < 0.5 else generator.randrange(node)
        bits.append(bits[parent] | 1 << node)
    return bits


def tandem_calls(step: Step) -> list[Call]:
    case, query = step.case, step.query
    plan = None
    if query.is_cuda:
        # Imported on demand: they need Triton.
        from tandem_kernels.turbo_attention.triton_backend import TritonAttention
        from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

        plan = AttentionPlan(
            max_tokens=len(query), max_seqs=case.batch, max_seq_len=case.seq_len, num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads, head_size=case.head_size, dtype=query.dtype,
            cache_dtype=step.cache.dtype, device=query.device, max_new_tokens=case.num_new,
        )  # fmt: skip
    calls: list[Call] = []
    for table in step.tables:
        if plan is None:
            attention = make_attention(query.dtype, case.head_size, query.device)
        else:
            attention = TritonAttention([plan])
        attention.prepare(step.metadata(table))
        calls.append(lambda attention=attention: attention.run(query, step.cache, step.layer))
    return calls


def sdpa_calls(step: Step) -> list[Call]:
    query = step.query.unflatten(0, (step.case.batch, step.case.num_new)).transpose(1, 2)
    return [
        lambda k=k, v=v: F.scaled_dot_product_attention(query, k, v, attn_mask=step.mask, enable_gqa=True)
        for k, v in map(step.dense, step.tables)
    ]


def flashinfer_calls(step: Step) -> list[Call]:
    import flashinfer

    case, device = step.case, step.query.device
    indptr = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * step.tables[0].shape[1]
    last = torch.full(
        (case.batch,), (case.seq_len - 1) % case.block_size + 1, dtype=torch.int32, device=device
    )
    sizes = (case.num_heads, case.num_kv_heads, case.head_size, case.block_size)
    dtypes = {"q_data_type": step.query.dtype, "kv_data_type": step.cache.dtype}
    # Shared: launches follow one another.
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    calls: list[Call] = []
    for table in step.tables:
        if step.mask is None:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
            wrapper.plan(indptr, table.flatten(), last, *sizes, **dtypes)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
            mask = step.mask.flatten().repeat(case.batch)
            wrapper.plan(step.starts, indptr, table.flatten(), last, *sizes, custom_mask=mask, **dtypes)
        calls.append(lambda wrapper=wrapper: wrapper.run(step.query, step.cache))
    return calls


def check(step: Step, result: torch.Tensor) -> None:
    """ValueError unless the error against float64 is at most twice that of SDPA, plus a rounding."""
    case, table = step.case, step.tables[0]
    cache = step.cache[table.flatten().long()].to(torch.float64) * (step.scale or 1.0)
    order = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table)
    unscaled = AttentionLayer(step.layer.scale)
    exact = turbo_attention(step.query.double(), cache, step.metadata(order), unscaled, backend="reference")
    twin = sdpa_calls(step)[0]().transpose(1, 2).flatten(0, 1)
    error = (result.double() - exact).abs().max().item()
    twin_error = (twin.double() - exact).abs().max().item()
    rounding = torch.finfo(torch.bfloat16).eps / 2 * exact.abs().max().item()
    if not error <= 2 * twin_error + rounding:
        raise ValueError(f"wrong result for {case}: error {error:.3g}, SDPA's {twin_error:.3g}")


def measure_us(calls: Sequence[Call], device: torch.device) -> float:
    """Median microseconds of a launch, over rounds through all calls."""
    for call in calls:
        call()
    if device.type != "cuda":  # in tests
        return timeit.timeit(lambda: [call() for call in calls], number=1) / len(calls) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    num_rounds = max(1, 8 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for call in calls:
                call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (num_rounds * len(calls)))
    return statistics.median(times[2:])


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a copy on the device."""
    source, target = torch.empty(2, 1 << 28, dtype=torch.uint8, device=device)
    return 2 * source.nbytes / measure_us([lambda: target.copy_(source)] * 4, device) * 1e6


def peer_cell(step: Step, make_calls: Callable[[Step], list[Call]], device: torch.device) -> str:
    """Microseconds, or the name of the error. Peers run in bfloat16 with 1 and 8 rows."""
    if step.case.kv != "bf16" or step.case.num_new not in (1, 8):
        return "-"
    try:
        return f"{measure_us(make_calls(step), device):.1f}"
    except Exception as error:
        print(f"{make_calls.__name__}, {step.case}: {error}", file=sys.stderr)
        return type(error).__name__


def row(case: Case, device: torch.device, one_row_us: dict[Case, float], copy_speed: float) -> list[str]:
    """Checks and measures a case; `one_row_us` gets the times of plain decoding."""
    step = Step(case, device)
    calls = tandem_calls(step)
    # A larger cache does not fit in memory a second time as float64.
    if step.cache.nbytes <= 1 << 30:
        check(step, calls[0]())
    microseconds = measure_us(calls, device)
    if case.num_new == 1:
        one_row_us[case] = microseconds
    one = one_row_us.get(replace(case, num_new=1))
    ratio = f"{microseconds / one:.2f}" if one else "-"
    of_copy = f"{case.kv_bytes / microseconds * 1e6 / copy_speed:.0%}"
    peers = [peer_cell(step, peer_calls, device) for peer_calls in (sdpa_calls, flashinfer_calls)]
    return [f"{microseconds:.1f}", ratio, of_copy, *peers]


def run(cases: Iterable[Case], device: torch.device, emit: Callable[[str], None]) -> bool:
    """Measures and emits row by row. Returns whether every launch of tandem succeeded and was correct."""
    copy_speed = copy_bytes_per_s(device)
    emit(markdown_table(HEAD, []))
    one_row_us: dict[Case, float] = {}
    all_passed = True
    for case in cases:
        try:
            cells = row(case, device, one_row_us, copy_speed)
        except Exception as error:
            # A case without memory for its cache is left out; any other failure fails the run at its end.
            all_passed &= isinstance(error, torch.OutOfMemoryError)
            print(f"{case}: {error}", file=sys.stderr)
            cells = [type(error).__name__, "", "", "", ""]
        heads = f"{case.num_heads}/{case.num_kv_heads}"
        names = [case.kv, heads, str(case.context), str(case.batch), str(case.num_new)]
        emit(f"| {' | '.join(names + cells)} |")
    return all_passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU found")
    torch.manual_seed(0)
    with options.out.open("w", buffering=1) as file:

        def emit(text: str) -> None:
            print(text, flush=True)
            print(text, file=file)

        hardware = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        emit(f"Command: `{describe_command()}`  \nHardware: {hardware}\n")
        if not run(gpu_cases(), torch.device("cuda"), emit):
            raise SystemExit("turbo_attention failed on this machine: see the messages above")


if __name__ == "__main__":
    main()
