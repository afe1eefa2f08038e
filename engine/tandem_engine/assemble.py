"""Builds an engine from a model folder and chooses its parts."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_kernels.turbo_attention import MAX_HEAD_SIZE

from tandem_engine.block_manager import BlockManager
from tandem_engine.draft_source import DraftSource
from tandem_engine.engine import Engine
from tandem_engine.kv_pool import KVPool, KVShape, default_num_blocks
from tandem_engine.model_loader import load_decoder
from tandem_engine.model_loader.convert import LAYOUT_VERSION
from tandem_engine.model_loader.loading import Numerics, pick_numerics
from tandem_engine.models.decoder import Decoder
from tandem_engine.runner import ModelRunner
from tandem_engine.sampling.verify import Verifier
from tandem_engine.scheduler import Scheduler, SchedulerConfig
from tandem_engine.transport.layout import KVLayout

#: Rows that saturate a CPU: 128 rows take a quarter of the time of 512.
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
    block_size: int = 64
    chunk_size: int = 512
    max_batch: int = 16
    prefix_cache: bool = True
    max_draft_nodes: int = 8


@dataclass(frozen=True)
class EngineParts:
    engine: Engine
    pool: KVPool
    tokenizer: Tokenizer
    manifest: ModelManifest
    layout: KVLayout

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.manifest.eos_token_ids)


def assemble(config: EngineConfig, drafter: DraftSource | None = None) -> EngineParts:
    """Loads the model and wires scheduler, runner and verifier around it.

    Sets the process's CPU thread count. Raises ModelLoadError and CapacityError.
    """
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    manifest = ModelManifest.read(config.model)
    device = _pick_device(config.device)
    numerics = pick_numerics(config.model, config.dtype, config.quantization, str(device))
    decoder = load_decoder(config.model, numerics.dtype, str(device), numerics.quantization)
    if device.type == "cuda" and decoder.config.head_dim > MAX_HEAD_SIZE:
        raise ModelLoadError(
            f"head size {decoder.config.head_dim} is more than the {MAX_HEAD_SIZE} that attention on a "
            "GPU takes; use --device cpu, or another model"
        )
    if config.deterministic and not decoder.is_batch_invariant:
        raise ModelLoadError(
            f"--deterministic cannot be kept on {device} here: results that do not depend on the batch need "
            "a CPU with the compiled kernels (install with g++ present, TANDEM_NATIVE unset) and widths "
            "that are multiples of 32"
        )
    shape = KVShape(
        decoder.config.num_layers,
        decoder.config.num_kv_heads,
        decoder.config.head_dim,
        config.block_size,
        decoder.dtype,
        interleaved=decoder.reads_interleaved(config.block_size),
    )
    pool = KVPool(shape, config.num_blocks or default_num_blocks(shape), device)
    manager = BlockManager(pool.num_blocks, config.block_size, enable_prefix_caching=config.prefix_cache)
    scheduler = Scheduler(
        manager,
        SchedulerConfig(
            max_batch=config.max_batch,
            max_tokens_per_step=max(config.chunk_size, config.max_batch * (config.max_draft_nodes + 1)),
            chunk_size=config.chunk_size,
            max_model_len=manifest.max_model_len,
            enough_prompt_tokens=_CPU_ENOUGH_PROMPT_TOKENS if device.type == "cpu" else None,
        ),
    )
    engine = Engine(
        ModelRunner(decoder, pool, device),
        scheduler,
        Verifier(),
        manager,
        vocab_size=manifest.vocab_size,
        drafter=drafter,
        max_draft_nodes=config.max_draft_nodes,
    )
    layout = _layout(manifest, decoder, shape, numerics)
    return EngineParts(engine, pool, Tokenizer(config.model), manifest, layout)


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(
            "--device cuda: no CUDA device is visible to torch; install its CUDA build and the driver, or "
            "use --device cpu"
        )
    return torch.device(name)


def _layout(manifest: ModelManifest, decoder: Decoder, shape: KVShape, numerics: Numerics) -> KVLayout:
    rope = ",".join(f"{name}={value}" for name, value in asdict(decoder.config.rope).items())
    return KVLayout(
        model_revision=manifest.revision,
        dtype=str(shape.dtype).removeprefix("torch."),
        kv_quantization="none",
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_size=shape.block_size,
        block_layout="KV,H,interleaved" if shape.interleaved else "KV,H,T,D",
        # The order of a key's elements depends on the weight file's format. Pods with different quantization
        # would compute one text with different numbers.
        rope=f"{rope},weights={LAYOUT_VERSION},quantization={numerics.quantization}",
    )
