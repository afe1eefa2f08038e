"""Steps on a GPU that is not there: what they wait for, copy and launch. No kernel runs.

The waits: an engine over tensors that claim to be on a GPU and hold nothing, so that reading one fails.
What is compiled: real memory on the CPU, and the key under which Triton looks a kernel up.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from native_libraries import native_library
from tandem_core.errors import CapacityError
from tandem_core.model.spec import Attention
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_engine import assemble, device_copies, kv_pool
from tandem_engine.assemble import EngineConfig
from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.block_manager import BlockGroup, BlockManager
from tandem_engine.cuda_graphs import graph_sizes
from tandem_engine.draft_tree import DraftTree
from tandem_engine.engine import Engine
from tandem_engine.kv_pool import KVPool, KVShape, graph_reserve
from tandem_engine.model_loader import load_decoder
from tandem_engine.models import decoder as decoder_module
from tandem_engine.models import mixers
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.decoder import Decoder
from tandem_engine.models.linear import PlainLinear
from tandem_engine.request import Request
from tandem_engine.runner import ModelRunner
from tandem_engine.sampling import device as device_module
from tandem_engine.sampling.device import read_back
from tandem_engine.sampling.verify import Verifier
from tandem_engine.scheduler import Scheduler, SchedulerConfig
from tandem_engine.warm_up import idle_batch, warm_up
from tandem_engine.workspace import StepLimits, Workspace, make_workspace, step_attentions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy_models import VOCABULARY

triton = pytest.importorskip("triton")

BLOCK_SIZE = 16
LIMITS = StepLimits(max_tokens=72, max_seqs=6, max_decode_tokens=54)
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def record_launches(patch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """From now on Triton launches nothing: counts (kernel, the key of what would be compiled)."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    launches: Counter[tuple[str, str]] = Counter()

    def run(self, *args, grid, warmup, **kwargs) -> None:
        binder = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = binder(*args, **kwargs)
        launches[self.fn.__name__, f"{specialization} {options}"] += 1

    patch.setattr(JITFunction, "run", run)
    return launches


# What is compiled


def random_batch(rng: random.Random, pool: KVPool) -> Batch:
    """Decoding sequences, some with drafts, some with filters; in half of the batches a prompt's chunk."""
    sequences = []
    left = LIMITS.max_tokens
    if rng.random() < 0.5:
        start, n = rng.randrange(200), rng.randint(1, 18)
        sequences.append(scheduled(rng, pool, start, n, None, samples=rng.random() < 0.5))
        left -= n
    for _ in range(rng.randint(0 if sequences else 1, LIMITS.max_seqs - len(sequences))):
        n = rng.randint(1, 9)
        draft = None
        if n > 1:
            draft = DraftTree((1,) * (n - 1), tuple(rng.randint(0, i) for i in range(n - 1)), ("",) * (n - 1))
        sequences.append(scheduled(rng, pool, rng.randrange(900), n, draft, samples=True))
    return Batch(tuple(sequences))


def scheduled(
    rng: random.Random, pool: KVPool, start: int, n: int, draft: DraftTree | None, *, samples: bool
) -> ScheduledSequence:
    sampling = rng.choice(
        [SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), SamplingParams(top_k=5)]
    )
    request = Request("r", [1] * (start + (1 if draft else n)), sampling)
    blocks = tuple(rng.randrange(pool.groups[0].num_blocks) for _ in range(-(-(start + n) // BLOCK_SIZE)))
    return ScheduledSequence(request, (blocks,), start, (1,) * n, draft, samples)


@pytest.mark.parametrize("num_blocks", [95, 160])  # with the scratch block, 96 and 161
def test_nothing_is_compiled_after_the_warm_up(
    tiny_model: Path, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem_kernels.gpu import draw_tokens, elementwise, move_slots, rope_store

    launches = record_launches(monkeypatch)

    def activate(x: torch.Tensor, act: str, gated: bool, limit: float | None) -> torch.Tensor:
        return elementwise.activate(x, act, gated, limit, x.dtype)

    monkeypatch.setattr(decoder_module, "add_norm", elementwise.add_norm)
    monkeypatch.setattr(mixers, "activate", activate)
    monkeypatch.setattr(mixers, "rope_store", rope_store.rope_store)
    monkeypatch.setattr(
        device_module, "draw_tokens", lambda *tensors: draw_tokens.draw_tokens(*tensors).zero_()
    )
    monkeypatch.setattr(
        kv_pool, "move_slots_in_layers", lambda caches, src, dst, **_: move_slots.move_slots(caches, src, dst)
    )
    with native_library("off"):
        decoder = load_decoder(tiny_model, torch.bfloat16)
    shape = KVShape.of(decoder.spec, BLOCK_SIZE, torch.bfloat16)
    space = make_workspace(decoder, BLOCK_SIZE, shape.dtype, LIMITS, graphs=True)
    max_seq_len = space.inputs.max_blocks * BLOCK_SIZE
    attention, graph_attention = step_attentions(decoder, max_seq_len, shape.dtype, LIMITS)
    space = replace(space, attention=attention, graph_attention=graph_attention)

    def make_runner(size: int) -> ModelRunner:
        pool = KVPool([shape], [size], decoder.device)
        for group in pool.groups:
            group._layers = torch.stack(group.caches)
            group.caches = list(group._layers)
        pool.caches = [cache for group in pool.groups for cache in group.caches]
        return ModelRunner(decoder, pool, decoder.device, space)

    warm_up(make_runner(1), LIMITS)
    before = set(launches)
    assert {name for name, _ in before} == {
        "add_norm_kernel", "activate_kernel", "rope_store_kernel", "plan_kernel",
        "turbo_attention_kernel", "draw_tokens_kernel", "move_slots_kernel",
    }  # fmt: skip
    runner = make_runner(num_blocks)
    warm_up(runner, LIMITS)
    assert set(launches) == before, "the size of the pool decides nothing"
    runner.capture_graphs(lambda step: step, idle_batch(runner.pool))
    warmed_up = set(launches)
    assert Counter(name for name, _ in warmed_up) == {
        **dict.fromkeys((name for name, _ in before), 1),
        "add_norm_kernel": 2,  # the first layer has no delta
        "plan_kernel": 2,  # graphs have other tiles than eager steps
        "turbo_attention_kernel": 2,
    }
    rng = random.Random(num_blocks)
    for _ in range(150):
        batch = random_batch(rng, runner.pool)
        logits = runner.execute(batch).values
        sampling = [s for s in batch.sequences if s.samples]
        if not sampling:
            continue
        read_back(sampling, logits, 4)
        paths = [(0, *sorted(rng.sample(range(1, n), rng.randrange(n)))) if s.draft else (0,)
                 for s in sampling for n in [s.num_new_tokens]]  # fmt: skip
        runner.compact(batch, paths)
        assert set(launches) == warmed_up


# What a step waits for


class FakeGpu(TorchDispatchMode):
    """Lets tensors on "cuda" exist without one, and refuses whatever would wait for it or block on a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        target = kwargs.get("device")
        makes_on_gpu = target is not None and torch.device(target).type == "cuda"
        if "cuda" in devices:
            assert func not in (aten.nonzero.default, aten._local_scalar_dense.default), f"{func} waits"
            assert target is None or makes_on_gpu, f"{func} copies to the host"
            # A number without dimensions is an argument of the launch.
            assert all(t.is_cuda or t.dim() == 0 for t in tensors), f"{func} copies to the device"
        elif makes_on_gpu:
            assert not tensors, f"{func} copies to the device"
        if "cuda" in devices or makes_on_gpu:
            with self.fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def getitem(tensor: torch.Tensor, index: object) -> torch.Tensor:
    """Slices and numbers only; others would need an index on the device."""
    dim = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            stop = 2**62 if part.stop is None else part.stop
            tensor = aten.slice(tensor, dim, part.start or 0, stop, part.step or 1)
            dim += 1
        else:
            assert isinstance(part, int), f"an index of {type(part)}"
            tensor = aten.select(tensor, dim, part)
    return tensor


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    assert target.is_cuda, "a copy to the host outside to_host"
    assert source.is_cuda or non_blocking, "a blocking copy to the device"
    assert target.shape == source.shape
    return target


class NoTransfers:
    """Stands in for the blocks' copies to and from other pods."""

    def __init__(self, caches: object, streams: object) -> None:
        pass

    def gather(self, layer: int, block_ids: object) -> SimpleNamespace:
        return SimpleNamespace(wait=bytes)

    def scatter(self, layer: int, block_ids: object, payload: object) -> Callable[[], None]:
        return lambda: None


class Waits:
    """Stands in for device_copies and counts: waits for results, and events of past copies."""

    def __init__(self, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
        self.num_reads = 0
        self.num_events = 0
        self._rng = rng
        patch.setattr(device_copies, "to_host", self.to_host)
        patch.setattr(
            device_copies,
            "to_device",
            lambda array, device: torch.empty(
                array.shape, dtype=torch.from_numpy(array).dtype, device=device
            ),
        )
        patch.setattr(
            device_copies, "staging", lambda size, device: torch.from_numpy(np.zeros(size, dtype=np.uint8))
        )
        for name, value in {
            "Event": lambda: SimpleNamespace(synchronize=self.event, record=lambda: None),
            "set_device": lambda device: None,
            "_lazy_init": lambda: None,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
        }.items():
            patch.setattr(torch.cuda, name, value)
        # Transfers have a stream and tests of their own.
        patch.setattr(kv_pool, "CudaStreams", lambda device: None)
        patch.setattr(kv_pool, "GpuBlockStore", NoTransfers)
        # Computed on the CPU and copied when the model is loaded, which may block.
        patch.setattr(
            decoder_module,
            "rotation_table",
            lambda rope, length: torch.empty(length, rope.dims // 2, dtype=torch.complex64, device="cuda:0"),
        )
        patch.setattr(FakeTensor, "__getitem__", getitem, raising=False)
        patch.setattr(FakeTensor, "copy_", copy_, raising=False)

    def event(self) -> None:
        self.num_events += 1

    def to_host(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.num_reads += 1
        assert all(tensor.is_cuda for tensor in tensors)
        # Few different tokens, so that drafts are made and sometimes accepted, side branches too.
        return tuple(
            torch.from_numpy(
                self._rng.integers(3, 7, t.shape)
                if t.dtype == torch.int64
                else self._rng.normal(size=t.shape).astype(np.float32)
            )
            for t in tensors
        )


def fake_decoder() -> Decoder:
    config = ModelConfig.from_hf(
        {
            "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "tie_word_embeddings": True,
        }
    )  # fmt: skip

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda:0")

    tensors = {"embed_tokens.weight": weight(VOCABULARY, 64), "norm.weight": weight(64)}
    for n in range(2):
        for name, shape in {
            f"{2 * n}.0.pre_norm": (64,), f"{2 * n}.0.qkv_proj": (128, 64), f"{2 * n}.0.o_proj": (64, 64),
            f"{2 * n + 1}.0.pre_norm": (64,), f"{2 * n + 1}.0.gate_up_proj": (224, 64),
            f"{2 * n + 1}.0.down_proj": (64, 112),
        }.items():  # fmt: skip
            tensors[f"sublayers.{name}.weight"] = weight(*shape)
    return Decoder(config.spec, tensors, PlainLinear)


SHAPE = KVShape(2, 2, 16, BLOCK_SIZE, torch.bfloat16)


def fake_engine(drafter: Drafter | None, *, graphs: bool) -> Engine:
    decoder = fake_decoder()
    space: Workspace = make_workspace(decoder, BLOCK_SIZE, SHAPE.dtype, LIMITS, graphs=graphs)
    pool = KVPool([SHAPE], [200], decoder.device)
    runner = ModelRunner(decoder, pool, decoder.device, space)
    runner.capture_graphs(lambda step: step, idle_batch(pool))
    blocks = BlockManager([BlockGroup(pool.groups[0].num_blocks)], BLOCK_SIZE, enable_prefix_caching=True)
    scheduler = Scheduler(
        blocks,
        SchedulerConfig(
            max_batch=LIMITS.max_seqs, max_tokens_per_step=LIMITS.max_tokens, chunk_size=32,
            max_model_len=1024,
        ),
    )  # fmt: skip
    return Engine(runner, scheduler, Verifier(), blocks, vocab_size=VOCABULARY, drafter=drafter)


KINDS: dict[str, Callable[[int], SamplingParams]] = {
    "greedy": lambda seed: SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    "sampled": lambda seed: SamplingParams(top_p=0.9, seed=seed, max_tokens=30, ignore_eos=True),
    "logprobs": lambda seed: SamplingParams(logprobs=3, seed=seed, max_tokens=30, ignore_eos=True),
    "penalties": lambda seed: SamplingParams(
        repetition_penalty=1.3, logprobs=1, seed=seed, max_tokens=30, ignore_eos=True
    ),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("kinds", [("greedy",), ("sampled",), ("logprobs",), tuple(KINDS)], ids=str)
def test_a_step_waits_for_the_device_once_and_plans_once(
    kinds: tuple[str, ...], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from free_drafts import FreeDrafts

    launches = record_launches(monkeypatch)
    waits = Waits(monkeypatch, np.random.default_rng(1))
    with FakeGpu():
        drafter = Drafter(None, DraftPolicy())
        drafter.step_cost = FreeDrafts(0.1)
        engine = fake_engine(drafter, graphs=graphs)
        for n in range(8):
            prompt = [3 + i % 4 for i in range(20 + 9 * n)]
            engine.add(Request(f"r{n}", prompt, KINDS[kinds[n % len(kinds)]](n)))
        num_drafted = num_moves = 0
        while engine.has_work():
            reads, events = waits.num_reads, waits.num_events
            moves = launches_of(launches, "move_slots_kernel")
            plans = launches_of(launches, "plan_kernel")
            attentions = launches_of(launches, "turbo_attention_kernel")
            outputs = engine.step()
            assert launches_of(launches, "plan_kernel") - plans == 1
            assert launches_of(launches, "turbo_attention_kernel") - attentions == SHAPE.num_layers == 2
            assert waits.num_reads - reads == bool(outputs)
            assert waits.num_events - events == 1, "the last step's inputs have long been copied"
            moved = launches_of(launches, "move_slots_kernel") - moves
            assert moved <= 1
            num_moves += moved
            num_drafted += sum(len(output.drafted_sources) for output in outputs)
    assert engine.num_steps > 15
    assert num_drafted > 30
    assert num_moves > 0


def launches_of(launches: Counter[tuple[str, str]], kernel: str) -> int:
    return sum(count for (name, _), count in launches.items() if name == kernel)


def test_the_fake_gpu_notices_every_kind_of_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    Waits(monkeypatch, np.random.default_rng(1))
    with FakeGpu():
        on_gpu = torch.empty(4, 4, device="cuda")
        for wait in (
            lambda: on_gpu.cpu(),
            lambda: on_gpu.argmax().item(),
            lambda: on_gpu.tolist(),
            lambda: bool((on_gpu > 0).any()),
            lambda: aten.nonzero(on_gpu),
            lambda: on_gpu[torch.tensor([1])],
            lambda: on_gpu.index_select(0, torch.tensor([1])),
            lambda: on_gpu.copy_(torch.zeros(4, 4)),
            lambda: torch.zeros(4, 4).to("cuda"),
            lambda: torch.tensor([1], device="cuda"),
        ):
            with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
                wait()
        on_gpu.copy_(torch.zeros(4, 4), non_blocking=True)
        assert on_gpu.argmax(-1).shape == (4,)


# What it takes of the GPU's memory


def test_plans_share_one_memory_of_partial_results() -> None:
    from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

    with FakeTensorMode():
        sizes = {"max_seqs": 8, "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "device": "cpu"}
        types = {"dtype": torch.bfloat16, "cache_dtype": torch.bfloat16}
        large = AttentionPlan(max_tokens=512, max_seq_len=131_072, **sizes, **types)
        small = AttentionPlan(max_tokens=64, max_seq_len=131_072, beside=large, window=4096, **sizes, **types)
        assert small.partials is large.partials
        assert small.counters is not large.counters
        with pytest.raises(ValueError, match="beside has room for"):
            AttentionPlan(max_tokens=513, max_seq_len=262_144, beside=large, **sizes, **types)


@pytest.mark.parametrize("max_seqs", [1, 16, 128, 600])
@pytest.mark.parametrize("chunk_size", [512, 8192])
def test_partial_results_stay_within_a_fixed_memory(max_seqs: int, chunk_size: int) -> None:
    decoder = SimpleNamespace(
        spec=SimpleNamespace(attentions=[Attention(32, 8, 128, 128, 0.1, None, w) for w in (None, 4096)]),
        dtype=torch.bfloat16,
        device="cpu",
    )
    limits = StepLimits(max(chunk_size, 9 * max_seqs), max_seqs, 9 * max_seqs)
    with FakeTensorMode():
        attentions = step_attentions(decoder, 131_072 + 64, torch.bfloat16, limits)
    plans = [plan for attention in attentions for plan in attention._plans.values()]
    assert len(plans) == 4
    eager = plans[0]
    assert all(plan.partials is eager.partials for plan in plans)
    partials_bytes = sum(t.nbytes for t in (eager.partials, eager.maxima, eager.sums))
    lists_bytes = sum(t.nbytes for plan in plans for t in (plan.items, plan.counters))
    assert partials_bytes <= 512 << 20
    assert lists_bytes <= 64 << 20
    # Every plan gives a sequence the same splits.
    assert len({(plan.max_token_splits, plan.draft_tokens, plan.split_size) for plan in plans}) == 1
    if max_seqs <= 128:
        splits = min(129, eager.max_token_splits // 9)
        assert splits >= 28, "one sequence's drafts occupy too little of the GPU"
        assert eager.num_partial_rows >= min(9 * max_seqs, limits.max_tokens) * 4 * splits


class FakeMemory:
    """torch's figures for a GPU of `total` bytes, of which `held` are taken before the pool is made."""

    def __init__(self, patch: pytest.MonkeyPatch, total: int, held: int, activations: int) -> None:
        self.calls: list[str] = []
        for name, result in {
            "memory_allocated": 5 << 30,
            "reset_peak_memory_stats": None,
            "max_memory_allocated": (5 << 30) + activations,
            "empty_cache": None,
            "mem_get_info": (total - held, total),
        }.items():
            patch.setattr(torch.cuda, name, self._call(name, result))

    def _call(self, name: str, result: object) -> Callable[..., object]:
        def call(device: object = None) -> object:
            self.calls.append(name)
            return result

        return call


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("utilization", [0.9, 0.5])
def test_the_pool_takes_the_memory_that_a_measured_step_leaves(
    decodes: bool, utilization: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = record_launches(monkeypatch)
    Waits(monkeypatch, np.random.default_rng(1))
    total, held, activations = 141 << 30, 20 << 30, 2 << 30
    memory = FakeMemory(monkeypatch, total, held, activations)
    num_captured = []
    monkeypatch.setattr(assemble, "CudaCapture", lambda: lambda step: num_captured.append(1) or step)
    config = EngineConfig(Path(), gpu_memory_utilization=utilization, decodes=decodes)
    with FakeGpu():
        runner = assemble.make_gpu_runner(config, fake_decoder(), SHAPE, LIMITS)
    num_graphs = len(graph_sizes(LIMITS.max_decode_tokens)) if decodes else 0
    assert len(num_captured) == num_graphs
    budget = int(total * utilization) - held - activations - graph_reserve(num_graphs, activations)
    assert runner.pool.groups[0].num_blocks == budget // (SHAPE.block_bytes * SHAPE.num_layers) - 1
    assert memory.calls == [
        "memory_allocated", "reset_peak_memory_stats", "max_memory_allocated", "empty_cache", "mem_get_info"
    ]  # fmt: skip
    assert launches_of(launches, "draw_tokens_kernel") > 0


def test_a_gpu_that_is_too_small_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    record_launches(monkeypatch)
    Waits(monkeypatch, np.random.default_rng(1))
    FakeMemory(monkeypatch, 8 << 30, 7 << 30, 1 << 30)
    with FakeGpu(), pytest.raises(CapacityError, match="raise --gpu-memory-utilization"):
        assemble.make_gpu_runner(EngineConfig(Path()), fake_decoder(), SHAPE, LIMITS)


def test_memory_that_runs_out_on_the_way_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    record_launches(monkeypatch)
    Waits(monkeypatch, np.random.default_rng(1))

    def fails(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")

    monkeypatch.setattr(assemble, "warm_up", fails)
    with FakeGpu(), pytest.raises(CapacityError, match="lower --gpu-memory-utilization"):
        assemble.make_gpu_runner(EngineConfig(Path(), num_blocks=100), fake_decoder(), SHAPE, LIMITS)


# What it computes


@pytest.mark.parametrize("cases", ["not wide", pytest.param("wide", marks=pytest.mark.wide)])
def test_steps_with_the_triton_attention_in_the_interpreter(cases: str) -> None:
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    file = Path(__file__).with_name("triton_step_cases.py")
    pytest_cases = ("-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", cases)
    process = subprocess.run(
        [sys.executable, *pytest_cases, str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-6000:]
    assert "passed" in process.stdout
