"""Shapes, random weights and timing that the parts share. The tiny shapes are those of a dry run."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tandem_engine.cuda_graphs import CudaCapture
from tandem_engine.draft_tree import DraftTree
from tandem_engine.kv_pool import KVPool, KVShape
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.decoder import Decoder
from tandem_engine.models.layout import WeightForm, stored_tensors
from tandem_engine.models.linear import PlainLinear
from tandem_engine.runner import ModelRunner
from tandem_engine.warm_up import idle_batch, warm_up
from tandem_engine.workspace import StepLimits, make_workspace

BLOCK_SIZE = 64
#: config.json of Llama 3.1 8B, as Hugging Face has it, without the RoPE scaling that no speed depends on.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 2048,
}  # fmt: skip


def model_shape(dry: bool, num_layers: int | None = None) -> dict[str, Any]:
    """config.json of the 8B model, or of the tiny one, with another number of layers if wanted."""
    shape = TINY if dry else LLAMA_8B
    return shape | {"num_hidden_layers": num_layers or shape["num_hidden_layers"]}


def random_weights(config: ModelConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Norms around 1, all else around 0; bfloat16. Activations stay in range whatever the depth."""
    tensors = {}
    for stored in stored_tensors(config.spec, config.names, WeightForm(torch.bfloat16)):
        tensor = torch.empty(stored.shape, dtype=torch.bfloat16, device=device)
        is_norm = stored.name.endswith("norm.weight")
        tensors[stored.name] = tensor.fill_(1.0) if is_norm else tensor.normal_(std=0.02)
    return tensors


def random_decoder(shape: dict[str, Any], device: torch.device) -> Decoder:
    config = ModelConfig.from_hf(shape)
    return Decoder(config.spec, random_weights(config, device), PlainLinear)


def make_runner(decoder: Decoder, limits: StepLimits, num_blocks: int, *, graphs: bool = True) -> ModelRunner:
    """As the engine makes it; fewer blocks if they do not fit. In a dry run a graph is the padded step."""
    device = decoder.device
    shape = KVShape.of(decoder.spec, BLOCK_SIZE, decoder.dtype)
    workspace = make_workspace(decoder, BLOCK_SIZE, decoder.dtype, limits, graphs=graphs)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        num_blocks = min(num_blocks, int(0.8 * free) // (shape.block_bytes * shape.num_layers))
    runner = ModelRunner(decoder, KVPool([shape], [num_blocks], device), device, workspace)
    if device.type == "cuda":
        warm_up(runner, limits)
    if graphs:
        idle = idle_batch(runner.pool)
        runner.capture_graphs(CudaCapture() if device.type == "cuda" else lambda step: step, idle)
        if runner._graphs is None or runner._graphs.size_for(idle) is None:
            raise RuntimeError("no graph was captured; the log says why")
    return runner


def random_tree(num_nodes: int) -> list[int]:
    """Parents of the nodes after the root; half of them continue the node before them."""
    generator = random.Random(num_nodes)
    return [n if generator.random() < 0.5 else generator.randint(0, n) for n in range(num_nodes - 1)]


def tree_bits(num_nodes: int) -> list[int]:
    """Ancestor bits of the tree of `random_tree`, root first."""
    parents = tuple(random_tree(num_nodes))
    return DraftTree((0,) * len(parents), parents, ("",) * len(parents)).ancestor_bits()


def measure_us(calls: Sequence[Callable[[], object]], device: torch.device, least_ms: float = 5.0) -> float:
    """Median microseconds of one call, over rounds through all of them; on a GPU without the host's share.

    A CUDA graph holds as many rounds as take `least_ms`, so that clock and launch do not show.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        began = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - began) / len(calls) * 1e6
    torch.cuda.synchronize()
    once_us = _elapsed_us(lambda: [call() for call in calls])
    num_rounds = max(1, min(200, round(least_ms * 1e3 / once_us)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            for call in calls:
                call()
    graph.replay()
    times = [_elapsed_us(graph.replay) for _ in range(5)]
    return statistics.median(times) / (num_rounds * len(calls))


def _elapsed_us(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a copy on the device."""
    num_bytes = 1 << 20 if device.type == "cpu" else 1 << 30
    source, target = torch.ones(2, num_bytes, dtype=torch.uint8, device=device)
    return 2 * num_bytes / measure_us([lambda: target.copy_(source)] * 4, device) * 1e6
