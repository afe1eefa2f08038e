"""The least time that a pass over a model can take on a machine: the larger of reading and computing.

    reading     weights and cached keys and values, each once, at the measured bandwidth
    computing   the multiply-adds of projections, head and attention, at the measured rates of their types

Norms, activations, sampling and what a pass writes are left out. A time below its floor means that the
machine's peak was measured too low: the kernels of a system can be faster than torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import Peaks
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.spec import Attention, Mlp, ModelSpec
from tandem_engine.model_loader.convert import file_tensors, open_source
from tandem_engine.model_loader.loading import pick_numerics
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.layout import Quantization, WeightForm


@dataclass(frozen=True)
class Weights:
    """Weights as a system keeps them, and the types that it computes in."""

    #: All but the embedding, of which a pass reads some rows; the head is always among them.
    num_bytes: int
    #: Operands of the projections: int8 where weights are quantized.
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @classmethod
    def of(cls, folder: Path, dtype: str = "auto", quantization: str = "auto") -> Weights:
        """As Tandem packs the model of this folder. Raises ModelLoadError."""
        numerics = pick_numerics(folder, dtype, quantization)
        form = WeightForm(numerics.dtype, packed=True, quantization=numerics.quantization)
        source = open_source((folder / ModelManifest.read(folder).weights).resolve())
        tensors = file_tensors(ModelConfig.from_folder(folder), source, form)
        quantized = numerics.quantization is not Quantization.NONE
        return cls(
            sum(tensor.num_bytes for name, tensor in tensors.items() if name != "embed_tokens.weight"),
            torch.int8 if quantized else numerics.dtype,
            numerics.dtype,
        )


@dataclass(frozen=True)
class Pass:
    """One forward pass: `num_seqs` sequences compute `new_tokens` each after `cached_tokens`, and logits for
    `logit_rows` of them. The rows of a draft tree count as a chain."""

    new_tokens: int
    cached_tokens: int = 0
    num_seqs: int = 1
    logit_rows: int = 1


@dataclass(frozen=True)
class Cost:
    num_bytes: int
    #: Two for a multiply-add.
    projection_ops: int
    attention_ops: int


def layer_weights(spec: ModelSpec) -> Iterator[int]:
    """Numbers in the projections of each sublayer of a dense model."""
    for mixer in (branch.mixer for sublayer in spec.sublayers for branch in sublayer.branches):
        if isinstance(mixer, Attention):
            per_kv_head = mixer.k_dim + mixer.v_dim
            rows = mixer.heads * per_kv_head + mixer.kv_heads * per_kv_head
            yield spec.hidden_size * rows
        if isinstance(mixer, Mlp):
            yield (3 if mixer.gated else 2) * spec.hidden_size * mixer.inner


def cost(spec: ModelSpec, weights: Weights, one: Pass) -> Cost:
    """What a pass has to read and compute."""
    in_layers = one.new_tokens * sum(layer_weights(spec))
    in_head = one.logit_rows * spec.hidden_size * spec.vocab_size
    last = one.cached_tokens + one.new_tokens
    read = computed = 0
    for a in spec.attentions:
        most = last if a.window is None else a.window
        read += a.kv_heads * (a.k_dim + a.v_dim) * min(one.cached_tokens, most)
        visible = sum(min(position, most) for position in range(one.cached_tokens + 1, last + 1))
        # Scores, and the weighted sum of the values.
        computed += a.heads * (a.k_dim + a.v_dim) * visible
    return Cost(
        weights.num_bytes + one.num_seqs * weights.kv_dtype.itemsize * read,
        2 * one.num_seqs * (in_layers + in_head),
        2 * one.num_seqs * computed,
    )


def floor_s(spec: ModelSpec, weights: Weights, peaks: Peaks, one: Pass) -> float:
    """The least time of a pass, in seconds."""
    needed = cost(spec, weights, one)
    computing = needed.projection_ops / peaks.fastest(weights.dtype)
    computing += needed.attention_ops / peaks.fastest(weights.kv_dtype)
    return max(needed.num_bytes / peaks.read_bytes_per_s, computing)
