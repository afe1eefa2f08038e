"""The tensors of one step, which the decoder reads; the model runner makes them from a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tandem_kernels import AttentionMetadata
from torch import Tensor


@dataclass(frozen=True)
class ModelInputs:
    """B sequences with T new tokens in total, sequence after sequence."""

    #: [T] int64.
    input_ids: Tensor
    #: [T] int64: each token's position in the text, below max_model_len.
    positions: Tensor
    #: [T] int64: block_id * block_size + offset that receives each token's key and value.
    slot_mapping: Tensor
    attention: AttentionMetadata

    def to(self, device: torch.device) -> ModelInputs:
        """The same with every tensor on the device."""
        if device.type == "cpu":
            return self
        metadata = self.attention
        bits = metadata.ancestor_bits
        return ModelInputs(
            self.input_ids.to(device),
            self.positions.to(device),
            self.slot_mapping.to(device),
            AttentionMetadata(
                metadata.block_table.to(device),
                metadata.seq_lens.to(device),
                metadata.query_start_loc.to(device),
                None if bits is None else bits.to(device),
            ),
        )
