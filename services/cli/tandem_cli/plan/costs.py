"""Step costs and KV capacity of a pod, from a GPU's data sheet (roofline).

A decode step reads the weights once and the KV of its sequences; a prompt needs two operations per parameter
and token, and attention four per pair of tokens, layer and query dimension. Both are scaled by the efficiency
that kernels reach. Tensor parallelism divides both by the number of GPUs and adds two all-reduces per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem_core.step_cost import StepCost

#: Shares of peak: matrix products of a prompt, and reads of a decode step. With these and the overhead, the
#: predicted steps of an 8B model at 4K on an H200 are within 2 % of measured ones for 1 to 64 sequences, and
#: 5 % too long for 128 and for prompts (benchmarks/results/gpu-h200.md).
COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY = 0.65, 0.8
#: Share of a GPU's memory for weights and KV; the rest holds activations, graphs and allocator overhead.
USABLE_MEMORY = 0.9
#: Kernel launches and host time of a step, with CUDA graphs.
STEP_OVERHEAD_S = 0.0015
#: Duration of an all-reduce of a few rows between GPUs of one host.
ALL_REDUCE_S = 12e-6


@dataclass(frozen=True)
class Gpu:
    """Figures of the vendor's data sheet; dense 16-bit operations."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops: float
    #: Default price per hour, in the currency of the reader's contract.
    per_hour: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("l40s", 48e9, 0.864e12, 362e12, 1.0),
        Gpu("a100-80", 80e9, 2.04e12, 312e12, 1.5),
        Gpu("h100", 80e9, 3.35e12, 989e12, 2.5),
        Gpu("h200", 141e9, 4.8e12, 989e12, 3.0),
        Gpu("b200", 180e9, 7.7e12, 2250e12, 5.0),
    )
}


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model that determine its costs."""

    name: str
    num_parameters: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    #: Bytes of a weight, and of an element of the KV cache.
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.kv_bytes


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen2.5-1.5b", 1.54e9, 28, 12, 2, 128),
        ModelShape("llama-3.1-8b", 8.03e9, 32, 32, 8, 128),
        ModelShape("qwen2.5-32b", 32.8e9, 64, 40, 8, 128),
        ModelShape("llama-3.1-70b", 70.6e9, 80, 64, 8, 128),
        ModelShape("qwen2.5-72b", 72.7e9, 80, 64, 8, 128),
    )
}


@dataclass(frozen=True)
class PodCosts:
    """Step costs, capacity and price of a pod of any role."""

    prefill: StepCost
    decode: StepCost
    #: Capacity of its KV cache in tokens.
    kv_tokens: int
    kv_bytes_per_token: float
    #: Its GPUs (hosts, where costs were measured).
    num_devices: int = 1
    #: Price of one device.
    per_hour: float = 0.0
    #: Cost of prompts on decode pods; None: as on prefill pods.
    own_prefill: StepCost | None = None

    @property
    def local_prefill(self) -> StepCost:
        return self.own_prefill or self.prefill


class DoesNotFitError(ValueError):
    """The model's weights leave no room for KV on the given GPUs."""


def of_gpu(
    gpu: Gpu,
    shape: ModelShape,
    num_gpus: int,
    *,
    per_hour: float | None = None,
    chunk_size: int = 2048,
) -> PodCosts:
    """Costs of a tensor-parallel pod of `num_gpus`. Raises DoesNotFitError."""
    weights = shape.num_parameters * shape.weight_bytes
    room = USABLE_MEMORY * gpu.memory_bytes * num_gpus - weights
    kv_tokens = int(room / shape.kv_bytes_per_token)
    if kv_tokens < chunk_size:
        raise DoesNotFitError(
            f"{shape.name} has {weights / 1e9:.0f} GB of weights; {num_gpus} x {gpu.name} leave room for "
            f"{max(kv_tokens, 0)} tokens of KV"
        )
    flops = COMPUTE_EFFICIENCY * gpu.flops * num_gpus
    bytes_per_s = MEMORY_EFFICIENCY * gpu.bytes_per_s * num_gpus
    per_token = 2 * shape.num_parameters / flops
    per_pair = 4 * shape.num_layers * shape.num_heads * shape.head_size / flops
    overhead = STEP_OVERHEAD_S + (2 * shape.num_layers * ALL_REDUCE_S if num_gpus > 1 else 0.0)
    return PodCosts(
        prefill=StepCost(overhead, per_token, per_pair),
        decode=StepCost(overhead + weights / bytes_per_s, per_token, shape.kv_bytes_per_token / bytes_per_s),
        kv_tokens=kv_tokens,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_devices=num_gpus,
        per_hour=gpu.per_hour if per_hour is None else per_hour,
    )
