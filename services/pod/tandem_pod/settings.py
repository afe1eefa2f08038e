"""Settings that prefill and decode pods share: the model and the size of the engine around it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from tandem_service.settings import Entries, PodSettings

if TYPE_CHECKING:
    from tandem_engine.assemble import EngineConfig


class EnginePodSettings(PodSettings):
    """A pod that runs the engine."""

    model: Path
    """folder of a model, as `tandem model pull` prints it"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """element type of weights and KV; auto: bfloat16 where this machine computes it natively"""
    quantization: Literal["auto", "none", "w8a8", "w4a8"] = "auto"
    """8-bit or 4-bit weights with 8-bit activations (CPU); auto: as stored, unless a dtype is given"""
    deterministic: bool = False
    """refuse to start if a result could depend on the batch"""
    device: str = "auto"
    """where to compute: cpu, cuda or cuda:N; auto: the GPU if there is one"""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads for the model; 0: one per core, or per CPU of the container's quota"""
    num_blocks: Annotated[int, Field(ge=0)] = 0
    """KV blocks in the pool; 0: as many as fit on the GPU, or in 3 GiB or a quarter of the free RAM, and
    --max-model-len at least"""
    max_model_len: Annotated[int, Field(ge=0)] = 0
    """longest text, prompt and answer, in tokens, which the pool must hold; 0: the model's context"""
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    """RAM that this pod may take in addition to the mapped weights (CPU); 0: what is free. `tandem up` sets
    it"""
    shares_cores: bool = False
    """a gateway and clients use the same cores: until measured, steps are assumed to take longer than alone.
    `tandem up` sets it"""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """share of the GPU's memory that may be used, by other processes too"""
    block_size: Annotated[int, Field(ge=16, le=128, multiple_of=16)] = 64
    """tokens per KV block"""
    chunk_size: Annotated[int, Field(ge=16)] = 512
    """most prompt tokens computed in one step"""
    max_batch: Annotated[int, Field(ge=1)] = 16
    """most sequences in one step"""
    prefix_cache: bool = True
    """keep the KV of finished requests for later ones with the same beginning"""
    logits_processors: Entries = ()
    """functions that requests may name to change logits: NAME=MODULE:FUNCTION,...; the same for all pods"""

    def engine_config(self, *, max_draft_nodes: int, decodes: bool = True) -> EngineConfig:
        # With torch, which takes seconds; commands read the settings without it.
        from tandem_engine.assemble import EngineConfig

        shared = self.model_dump(include={field.name for field in fields(EngineConfig)})
        return EngineConfig(**shared, max_draft_nodes=max_draft_nodes, decodes=decodes)
