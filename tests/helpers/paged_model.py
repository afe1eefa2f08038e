"""A decoder with its cache, without an engine."""

from __future__ import annotations

import torch
from tandem_engine.models import Decoder, ModelInputs
from tandem_kernels import AttentionMetadata
from torch import Tensor

BLOCK_SIZE = 16


class PagedModel:
    """A decoder with its cache; sequence b owns every third block, in falling order."""

    def __init__(self, decoder: Decoder, num_sequences: int, max_blocks: int = 8) -> None:
        self.decoder = decoder
        config = decoder.config
        num_blocks = num_sequences * max_blocks
        shape = (num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.kv = [torch.full(shape, float("nan"), dtype=decoder.dtype) for _ in range(config.num_layers)]
        ids = torch.arange(num_blocks, dtype=torch.int32).flip(0)
        self.block_table = ids.view(max_blocks, num_sequences).t().contiguous()
        self.lengths = [0] * num_sequences

    def step(self, chunks: list[list[int]], on_layer_done=None) -> list[Tensor]:
        """Feed one chunk to each sequence; logits [n, vocab] of each."""
        positions, slots = [], []
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
        hidden = self.decoder.forward(inputs, self.kv, on_layer_done)
        return list(self.decoder.logits(hidden).split(sizes))
