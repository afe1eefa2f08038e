"""Builds an engine from a model folder and chooses its parts."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from tandem_core.errors import CapacityError, InvariantError, ModelLoadError
from tandem_core.guide import Guide
from tandem_core.model.guides import GuideCompiler
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.spec import CacheGroup, CacheKind
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.usable_cpus import usable_cpus

from tandem_engine.block_manager import BlockGroup, BlockManager
from tandem_engine.cuda_graphs import CudaCapture, graph_sizes
from tandem_engine.draft_source import DraftSource
from tandem_engine.engine import Engine
from tandem_engine.guided import GuideState
from tandem_engine.kv_pool import (
    GpuMemory,
    KVPool,
    KVShape,
    PoolSizes,
    gpu_num_blocks,
    graph_reserve,
)
from tandem_engine.memory import MemoryNeed, fit_pool, step_bytes, transfer_bytes
from tandem_engine.model_loader import load_decoder
from tandem_engine.model_loader.convert import LAYOUT_VERSION
from tandem_engine.model_loader.loading import Numerics, pick_numerics
from tandem_engine.models.decoder import Decoder
from tandem_engine.runner import ModelRunner
from tandem_engine.sampling.custom import LogitsProcessors
from tandem_engine.sampling.verify import Verifier
from tandem_engine.scheduler import Scheduler, SchedulerConfig
from tandem_engine.state_pool import (
    LayerStore,
    StatePool,
    num_state_slots,
    slot_bytes,
    state_group,
)
from tandem_engine.state_slots import StateSlots
from tandem_engine.transport.base import BlockStore
from tandem_engine.transport.layout import KVLayout
from tandem_engine.warm_up import idle_batch, warm_up
from tandem_engine.workspace import StepLimits, make_workspace

if TYPE_CHECKING:
    from tandem_engine.models.executors import AnyDecoder

log = logging.getLogger(__name__)

#: Rows that saturate a CPU: 128 rows take a quarter of the time of 512 (docs/decisions/chunk-sizes.md).
_CPU_ENOUGH_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and numerics of one engine; see EnginePodSettings for the meaning of each."""

    model: Path
    dtype: str = "auto"
    quantization: str = "auto"
    #: Refuse to start where a result would depend on the batch.
    deterministic: bool = False
    device: str = "auto"
    threads: int = 0
    num_blocks: int = 0
    max_model_len: int = 0
    memory_bytes: int = 0
    #: Most memory of the drafter's copies of shared text.
    shared_text_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    block_size: int = 64
    chunk_size: int = 512
    max_batch: int = 16
    prefix_cache: bool = True
    max_draft_nodes: int = 8
    logits_processors: tuple[str, ...] = ()
    #: False on a pod that computes prompts only.
    decodes: bool = True


@dataclass(frozen=True)
class EngineParts:
    engine: Engine
    pool: KVPool
    #: What transfers read and write.
    store: BlockStore
    tokenizer: Tokenizer
    guides: GuideCompiler
    manifest: ModelManifest
    layout: KVLayout
    #: Whether the CPU kernels compute all layers, which count their work.
    is_compiled: bool
    #: Whether sequences have a state that is in no KV block.
    is_recurrent: bool

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.manifest.eos_token_ids)

    def guide_state(self, guide: Guide | None) -> GuideState | None:
        """Guide state of a new request. Raises InvalidRequestError. Takes up to 100 ms: not on an event
        loop."""
        return None if guide is None else GuideState(self.guides, guide)


def assemble(config: EngineConfig, drafter: DraftSource | None = None) -> EngineParts:
    """Loads the model and wires scheduler, runner and verifier around it.

    Sets the process's CPU thread count. Raises ModelLoadError and CapacityError.
    """
    torch.set_num_threads(config.threads or usable_cpus())
    device = pick_device(config.device)
    manifest = ModelManifest.read(config.model).limited_to(config.max_model_len)
    tokenizer = Tokenizer(config.model)
    numerics = pick_numerics(config.model, config.dtype, config.quantization, str(device))
    decoder = load_decoder(
        config.model, numerics.dtype, str(device), numerics.quantization, manifest.max_model_len
    )
    if config.deterministic and not isinstance(decoder, Decoder):
        raise ModelLoadError(
            f"--deterministic cannot be kept for {manifest.name}: it runs through transformers, where "
            "results depend on the batch; use a model of a native family (`tandem model list --families`)"
        )
    if decoder.is_recurrent and not config.decodes:
        raise ModelLoadError(
            f"{manifest.name} has recurrent layers that run through transformers: their state is not sent "
            "between pods yet; start decode pods alone (tandem up --prefill 0)"
        )
    if config.deterministic and not decoder.is_batch_invariant:
        raise ModelLoadError(
            f"--deterministic cannot be kept on {device} here: results that do not depend on the batch need "
            "a CPU with the compiled kernels (install with g++ present, TANDEM_NATIVE unset) and widths "
            "that are multiples of 32"
        )
    interleaved = decoder.reads_interleaved(config.block_size)
    limits = step_limits(config)
    states: StatePool | None = None
    # Blocks that a sequence holds behind its window depend on the longest step of one.
    sizes = PoolSizes(
        tuple(
            KVShape.of_group(group, config.block_size, decoder.dtype, interleaved=interleaved)
            for group in _pooled(decoder.spec.kv_groups(), device)
        ),
        config.max_batch,
        max(config.chunk_size, config.max_draft_nodes + 1),
    )
    if device.type == "cuda":
        runner = make_gpu_runner(config, decoder, sizes.shapes[0], limits)
        held = runner.pool.groups[0].num_blocks * config.block_size
        if held < config.max_model_len:
            raise CapacityError(
                f"--max-model-len {config.max_model_len}: the KV pool holds {held} tokens; set that or less, "
                "or raise --num-blocks or --gpu-memory-utilization"
            )
    else:
        num_blocks = _num_blocks(config, decoder, sizes, limits, manifest, numerics)
        group = state_group(decoder.spec)
        if group is not None:
            num_slots = num_state_slots(group, decoder.dtype, limits.max_seqs)
            states = StatePool(group, num_slots, decoder.dtype, device)
        pools = KVPool(sizes.shapes, sizes.num_blocks(num_blocks), device)
        runner = ModelRunner(decoder, pools, device, states=states)
    pool = runner.pool
    manager = BlockManager(
        [BlockGroup(group.num_blocks, group.shape.window) for group in pool.groups],
        config.block_size,
        max_step_tokens=sizes.max_step_tokens,
        # Blocks hold no recurrent state of modules.
        enable_prefix_caching=config.prefix_cache and not decoder.is_recurrent,
        states=None if states is None else StateSlots(states.num_slots, config.block_size),
    )
    if not isinstance(decoder, Decoder):
        decoder.watch_blocks(manager.is_free)
    scheduler = Scheduler(
        manager,
        SchedulerConfig(
            max_batch=config.max_batch,
            max_tokens_per_step=limits.max_tokens,
            chunk_size=config.chunk_size,
            max_model_len=manifest.max_model_len,
            enough_prompt_tokens=_CPU_ENOUGH_PROMPT_TOKENS if device.type == "cpu" else None,
        ),
    )
    engine = Engine(
        runner,
        scheduler,
        Verifier(LogitsProcessors.load(config.logits_processors)),
        manager,
        vocab_size=manifest.vocab_size,
        drafter=drafter if decoder.takes_drafts else None,
        max_draft_nodes=config.max_draft_nodes,
    )
    layout = _layout(manifest, decoder, sizes.shapes[0], numerics)
    guides = GuideCompiler(config.model, manifest)
    store = pool if states is None else LayerStore(pool, states, decoder.spec)
    return EngineParts(
        engine, pool, store, tokenizer, guides, manifest, layout, decoder.is_compiled, decoder.is_recurrent
    )


def _pooled(groups: tuple[CacheGroup, ...], device: torch.device) -> tuple[CacheGroup, ...]:
    """Layers that share a pool and block tables; on a GPU all do, since its steps read one block table."""
    if device.type == "cpu":
        return groups
    layers = tuple(sorted(layer for group in groups for layer in group.layers))
    return (CacheGroup(CacheKind.FULL, layers, groups[0].parts),)


def _num_blocks(
    config: EngineConfig,
    decoder: AnyDecoder,
    sizes: PoolSizes,
    limits: StepLimits,
    manifest: ModelManifest,
    numerics: Numerics,
) -> int:
    """Blocks for texts on a CPU; logs what the pod will take. Raises CapacityError."""
    group = state_group(decoder.spec)
    without_kv = MemoryNeed(
        # Modules have their weights in the process.
        weights=decoder.num_bytes if isinstance(decoder, Decoder) else 0,
        process=psutil.Process().memory_full_info().uss,
        kv=0,
        kv_tokens=0,
        step=step_bytes(
            decoder.spec,
            decoder.dtype,
            limits,
            packed=decoder.is_compiled,
            quantization=numerics.quantization,
            threads=torch.get_num_threads(),
        )
        + decoder.state_bytes * limits.max_seqs,
        transfer=transfer_bytes(sizes.shapes, limits.max_seqs),
        shared_text=config.shared_text_bytes,
        states=0
        if group is None
        else num_state_slots(group, decoder.dtype, limits.max_seqs) * slot_bytes(group, decoder.dtype),
    )
    num_blocks, need = fit_pool(
        sizes,
        without_kv,
        num_blocks=config.num_blocks,
        context=manifest.max_model_len,
        max_model_len=config.max_model_len,
        memory_bytes=config.memory_bytes,
    )
    log.info("memory: %s", need)
    if need.kv_tokens < manifest.max_model_len:
        log.warning(
            "the KV pool holds texts of at most %d tokens of the context's %d; longer requests are refused. "
            "Raise --num-blocks, or set --max-model-len",
            need.kv_tokens, manifest.max_model_len,
        )  # fmt: skip
    return num_blocks


def step_limits(config: EngineConfig) -> StepLimits:
    num_decode_tokens = config.max_batch * (config.max_draft_nodes + 1)
    return StepLimits(max(config.chunk_size, num_decode_tokens), config.max_batch, num_decode_tokens)


def make_gpu_runner(
    config: EngineConfig, decoder: AnyDecoder, shape: KVShape, limits: StepLimits
) -> ModelRunner:
    """A runner whose pool takes the memory that is left; it has run every kind of step."""
    device = decoder.device
    torch.cuda.set_device(device)
    try:
        # Modules choose experts and states in Python.
        graphs = config.decodes and isinstance(decoder, Decoder)
        workspace = make_workspace(decoder, shape.block_size, shape.dtype, limits, graphs=graphs)
        num_blocks = config.num_blocks
        if num_blocks == 0:
            memory = _measure(ModelRunner(decoder, KVPool([shape], [1], device), device, workspace))
            num_blocks = gpu_num_blocks(shape, memory, config.gpu_memory_utilization)
        runner = ModelRunner(decoder, KVPool([shape], [num_blocks], device), device, workspace)
        warm_up(runner, limits)
        if config.decodes:
            runner.capture_graphs(CudaCapture(), idle_batch(runner.pool))
            warm_up(runner, limits)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            "the GPU's memory does not hold the engine; lower --gpu-memory-utilization (or --num-blocks), "
            f"--chunk-size or --max-batch, or end other processes on it: {error}"
        ) from error
    return runner


def _measure(runner: ModelRunner) -> GpuMemory:
    """Memory with the workspace allocated, and what the largest step takes beyond it."""
    workspace, device = runner.workspace, runner.device
    if workspace is None:
        raise InvariantError("only a runner with a workspace is measured")
    allocated = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    warm_up(runner, workspace.limits)
    activations = torch.cuda.max_memory_allocated(device) - allocated
    # The driver counts what torch keeps of it as used.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    num_graphs = 0 if workspace.graph_inputs is None else len(graph_sizes(workspace.graph_inputs.max_rows))
    return GpuMemory(total, free, activations, graph_reserve(num_graphs, activations))


def pick_device(name: str) -> torch.device:
    """The one device that a pod computes on. Raises ModelLoadError."""
    if "," in name:
        raise ModelLoadError(
            f"--device {name}: a pod computes on one GPU, for there is no tensor parallelism yet; name one "
            "device, such as cuda:0"
        )
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is None:
        raise ModelLoadError(f"--device {name}: wanted auto, cpu, cuda or cuda:N")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelLoadError(
            f"--device {name}: no CUDA device is visible to torch; install its CUDA build and the driver, or "
            "use --device cpu"
        )
    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ModelLoadError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def _layout(
    manifest: ModelManifest,
    decoder: AnyDecoder,
    shape: KVShape,
    numerics: Numerics,
) -> KVLayout:
    groups = decoder.spec.cache_groups()
    states = tuple(group for group in groups if group.kind is CacheKind.STATE)
    blocks = tuple(group for group in groups if group.kind is not CacheKind.STATE)
    return KVLayout(
        model_revision=manifest.revision,
        dtype=str(shape.dtype).removeprefix("torch."),
        kv_quantization="none",
        groups=_pooled(blocks, decoder.device) + states,
        block_size=shape.block_size,
        block_layout="KV,H,interleaved" if shape.interleaved else "KV,H,T,D",
        # The order of a key's elements depends on the weight file's format. Pods with different quantization
        # would compute one text with different numbers.
        spec=f"{decoder.spec.hash},{decoder.executor},weights={LAYOUT_VERSION},quantization={numerics.quantization}",
    )
