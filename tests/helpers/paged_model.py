"""A decoder with its cache, without an engine."""

from __future__ import annotations

from dataclasses import replace

import torch
from tandem_core.model.spec import ModelSpec
from tandem_engine.models import Decoder, ModelInputs
from tandem_engine.models.mixers import StateInputs
from tandem_engine.state_pool import StatePool, state_group
from tandem_kernels import AttentionMetadata, StateMetadata
from torch import Tensor

BLOCK_SIZE = 16


def kv_caches(
    spec: ModelSpec, num_blocks: int, dtype: torch.dtype, *, block_size: int = BLOCK_SIZE, fill: float = 0.0
) -> list[Tensor]:
    """A cache per layer, each number `fill`."""
    return [
        torch.full((num_blocks, 2, a.kv_heads, block_size, a.k_dim), fill, dtype=dtype)
        for a in spec.attentions
    ]


class PagedModel:
    """A decoder with its cache; sequence b owns every third block, in falling order."""

    def __init__(self, decoder: Decoder, num_sequences: int, max_blocks: int = 8) -> None:
        self.decoder = decoder
        num_blocks = num_sequences * max_blocks
        self.kv = kv_caches(decoder.spec, num_blocks, decoder.dtype, fill=float("nan"))
        ids = torch.arange(num_blocks, dtype=torch.int32).flip(0)
        self.block_table = ids.view(max_blocks, num_sequences).t().contiguous()
        self.lengths = [0] * num_sequences
        group = state_group(decoder.spec)
        self.states = group and StatePool(group, num_sequences, decoder.dtype, torch.device("cpu"))

    def step(self, chunks: list[list[int]], on_layer_done=None) -> list[Tensor]:
        """Feed one chunk to each sequence; logits [n, vocab] of each."""
        positions, slots = [], []
        initial = [b if length else -1 for b, length in enumerate(self.lengths)]
        for b, chunk in enumerate(chunks):
            p = torch.arange(self.lengths[b], self.lengths[b] + len(chunk))
            positions.append(p)
            slots.append(self.block_table[b][p // BLOCK_SIZE].long() * BLOCK_SIZE + p % BLOCK_SIZE)
            self.lengths[b] += len(chunk)
        sizes = [len(c) for c in chunks]
        inputs = ModelInputs(
            input_ids=torch.tensor([t for c in chunks for t in c]),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            attention=AttentionMetadata(
                block_table=self.block_table,
                seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
                query_start_loc=torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32),
            ),
        )
        if self.states is not None:
            own, none = torch.arange(len(chunks), dtype=torch.int32), torch.full((len(chunks),), -1).int()
            metadata = StateMetadata(
                inputs.attention.query_start_loc, torch.tensor(initial).int(), own, none, none
            )
            inputs = replace(inputs, states=StateInputs(metadata, self.states.layers))
        hidden = self.decoder.forward(inputs, self.kv, on_layer_done)
        return list(self.decoder.logits(hidden).split(sizes))
