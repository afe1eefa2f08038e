"""Memory of steps on a GPU in addition to weights and KV: input buffers, work lists of attention, graph
logits.

All of it is allocated before the KV pool, so that the pool gets what is left (kv_pool.py), and none of it in
a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tandem_kernels import Attention
from torch import Tensor

from tandem_engine.cuda_graphs import MAX_ROWS, TYPICAL_NEW_TOKENS
from tandem_engine.device_inputs import StaticInputs
from tandem_engine.draft_tree import MAX_TREE_NODES

if TYPE_CHECKING:
    from tandem_engine.models.executors import AnyDecoder


@dataclass(frozen=True)
class StepLimits:
    """The largest step."""

    #: Rows of a step, prompt chunks included.
    max_tokens: int
    max_seqs: int
    #: Rows of a step that only decodes.
    max_decode_tokens: int


@dataclass(frozen=True)
class Workspace:
    limits: StepLimits
    #: Buffers of eager steps.
    inputs: StaticInputs
    attention: Attention | None
    #: Buffers of graphs; None for a pod that computes prompts only.
    graph_inputs: StaticInputs | None
    graph_attention: Attention | None
    graph_logits: Tensor | None


def graph_plan_sizes(rows: int, max_seqs: int) -> dict[str, int]:
    """AttentionPlan's sizes for graphs of at most `rows` and `max_seqs`; GPU benchmarks use them too."""
    return {"max_tokens": rows, "max_seqs": max_seqs, "max_new_tokens": TYPICAL_NEW_TOKENS}


def make_workspace(
    decoder: AnyDecoder, block_size: int, cache_dtype: torch.dtype, limits: StepLimits, *, graphs: bool
) -> Workspace:
    """On the decoder's device. On a CPU, where only tests need one, attention is the decoder's own."""
    device = decoder.device
    # A draft's nodes take one slot each, though their positions end with the model's.
    max_blocks = -(-(decoder.spec.max_len + MAX_TREE_NODES) // block_size)
    inputs = StaticInputs(limits.max_tokens, limits.max_seqs, max_blocks, device)
    rows = min(limits.max_decode_tokens, MAX_ROWS)
    graph_inputs = None
    if graphs:
        graph_inputs = StaticInputs(rows, min(rows, limits.max_seqs), max_blocks, device)
    graph_logits = None
    if graphs:
        graph_logits = torch.empty(rows, decoder.spec.vocab_size, dtype=torch.float32, device=device)
    attention: Attention | None = None
    graph_attention: Attention | None = None
    if device.type == "cuda":
        attention, graph_attention = step_attentions(decoder, max_blocks * block_size, cache_dtype, limits)
    return Workspace(limits, inputs, attention, graph_inputs, graph_attention, graph_logits)


def step_attentions(
    decoder: AnyDecoder, max_seq_len: int, cache_dtype: torch.dtype, limits: StepLimits
) -> tuple[Attention, Attention]:
    """In Triton, for eager steps and for graphs; both use one memory for partial results."""
    # Imported on demand: this needs Triton.
    from tandem_kernels.turbo_attention.triton_backend import TritonAttention

    first = decoder.spec.attentions[0]
    sizes: dict[str, Any] = {
        "max_seq_len": max_seq_len,
        "num_heads": first.heads,
        "num_kv_heads": first.kv_heads,
        "head_size": first.k_dim,
        "dtype": decoder.dtype,
        "cache_dtype": cache_dtype,
        "device": decoder.device,
        "draft_tokens": max(1, limits.max_decode_tokens // limits.max_seqs),
    }
    windows = {a.window for a in decoder.spec.attentions}
    rows = min(limits.max_decode_tokens, MAX_ROWS)
    eager = TritonAttention.for_steps(
        windows, max_tokens=limits.max_tokens, max_seqs=limits.max_seqs, **sizes
    )
    graph_sizes = graph_plan_sizes(rows, min(rows, limits.max_seqs))
    graphs = TritonAttention.for_steps(windows, beside=eager, **graph_sizes, **sizes)
    return eager, graphs
